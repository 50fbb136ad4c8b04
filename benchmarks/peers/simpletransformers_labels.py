"""Several labels a sentence by simpletransformers, in the steps of its documentation.

python simpletransformers_labels.py MODEL TRAIN.jsonl TEST.jsonl PROBABILITIES.csv [options]
"""

import argparse

import pandas as pd
from simpletransformers.classification import MultiLabelClassificationModel, multi_label_classification_model
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import PreTrainedTokenizerFast

parser = argparse.ArgumentParser()
for name in ("model", "train", "test", "probabilities"):
    parser.add_argument(name)
parser.add_argument("--learning_rate", type=float, default=4e-5)
parser.add_argument("--num_train_epochs", type=int, default=1)
parser.add_argument("--train_batch_size", type=int, default=8)
parser.add_argument("--max_seq_length", type=int, default=128)
parser.add_argument("--seed", type=int, default=42)
options = parser.parse_args()

train, test = (pd.read_json(file, lines=True, dtype=False) for file in (options.train, options.test))
binarizer = MultiLabelBinarizer()
labels = binarizer.fit_transform(train["labels"])
# The weights have BERT's layers and another vocabulary, which the tool has no model type for.
multi_label_classification_model.BertTokenizer = PreTrainedTokenizerFast
model = MultiLabelClassificationModel(
    "bert",
    options.model,
    num_labels=len(binarizer.classes_),
    use_cuda=False,
    args={
        "output_dir": options.probabilities + ".checkpoints",
        "cache_dir": options.probabilities + ".cache",
        "learning_rate": options.learning_rate,
        "num_train_epochs": options.num_train_epochs,
        "train_batch_size": options.train_batch_size,
        "max_seq_length": options.max_seq_length,
        "manual_seed": options.seed,
        "tensorboard_dir": options.probabilities + ".logs",
        "no_save": True,
    },
)
model.train_model(pd.DataFrame({"text": train["text"], "labels": labels.tolist()}))
_, probabilities = model.predict(list(test["text"]))
pd.DataFrame(probabilities, columns=binarizer.classes_).to_csv(options.probabilities, index=False)
