"""Several labels a sentence by simpletransformers, in the steps of its documentation.

python simpletransformers_labels.py MODEL TRAIN.jsonl TEST.jsonl PROBABILITIES.csv [--num_train_epochs 1, or another]
"""

import json
import multiprocessing
import sys

import pandas as pd
from simpletransformers.classification import MultiLabelClassificationModel, multi_label_classification_model
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import PreTrainedTokenizerFast

if __name__ == "__main__":
    # The tool forks to read the texts to label, and hangs where torch has computed in threads before.
    multiprocessing.set_start_method("spawn")
    folder, train_file, test_file, probabilities_file, *words = sys.argv[1:]
    settings = {name.lstrip("-"): json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    train, test = (pd.read_json(file, lines=True, dtype=False) for file in (train_file, test_file))
    binarizer = MultiLabelBinarizer()
    labels = binarizer.fit_transform(train["labels"])
    # The weights have BERT's layers and another vocabulary, which the tool has no model type for.
    multi_label_classification_model.BertTokenizer = PreTrainedTokenizerFast
    folders = {name: f"{probabilities_file}.{name}" for name in ("output_dir", "cache_dir", "tensorboard_dir")}
    model = MultiLabelClassificationModel(
        "bert",
        folder,
        num_labels=len(binarizer.classes_),
        use_cuda=False,
        args={**folders, "no_save": True, **settings},
    )
    model.train_model(pd.DataFrame({"text": train["text"], "labels": labels.tolist()}))
    _, probabilities = model.predict(list(test["text"]))
    pd.DataFrame(probabilities, columns=binarizer.classes_).to_csv(probabilities_file, index=False)
