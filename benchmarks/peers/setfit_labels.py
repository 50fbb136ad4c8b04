"""Several labels a sentence by setfit: pairs of sentences tune the encoder, then a logistic regression for each label.

python setfit_labels.py MODEL TRAIN.jsonl TEST.jsonl PROBABILITIES.csv [--num_iterations 1, or another of setfit]
"""

import json
import sys

import pandas as pd
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.preprocessing import MultiLabelBinarizer

folder, train_file, test_file, probabilities_file, *words = sys.argv[1:]
settings = {name.lstrip("-"): json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}
train, test = (pd.read_json(file, lines=True, dtype=False) for file in (train_file, test_file))
binarizer = MultiLabelBinarizer()
labels = binarizer.fit_transform(train["labels"])
model = SetFitModel.from_pretrained(folder, multi_target_strategy="one-vs-rest")
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{probabilities_file}.checkpoints", save_strategy="no", report_to="none", **settings
    ),
    train_dataset=Dataset.from_dict({"text": list(train["text"]), "label": labels.tolist()}),
)
trainer.train()
probabilities = model.predict_proba(list(test["text"]), as_numpy=True)
pd.DataFrame(probabilities, columns=binarizer.classes_).to_csv(probabilities_file, index=False)
