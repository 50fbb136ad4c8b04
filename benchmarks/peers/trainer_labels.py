"""Several labels a sentence by transformers' Trainer, in the steps of its guide to text classification.

python trainer_labels.py MODEL TRAIN.jsonl TEST.jsonl PROBABILITIES.csv [--num_train_epochs 2, or another of Trainer's]
"""

import json
import sys

import pandas as pd
import torch
from datasets import Dataset
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

folder, train_file, test_file, probabilities_file, *words = sys.argv[1:]
settings = {name.lstrip("-"): json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}
arguments = TrainingArguments(
    output_dir=f"{probabilities_file}.checkpoints", save_strategy="no", report_to="none", **settings
)
set_seed(arguments.seed)  # of the new head
train, test = (pd.read_json(file, lines=True, dtype=False) for file in (train_file, test_file))
binarizer = MultiLabelBinarizer()
labels = binarizer.fit_transform(train["labels"]).astype("float32")
tokenizer = AutoTokenizer.from_pretrained(folder)
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(
        folder,
        problem_type="multi_label_classification",
        id2label=dict(enumerate(binarizer.classes_)),
        label2id={label: number for number, label in enumerate(binarizer.classes_)},
    ),
    args=arguments,
    train_dataset=Dataset.from_dict({**tokenizer(list(train["text"]), truncation=True), "labels": labels.tolist()}),
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
trainer.args.train_sampling_strategy = "random"  # by length, it would order the texts to label too
logits = trainer.predict(Dataset.from_dict(tokenizer(list(test["text"]), truncation=True))).predictions
pd.DataFrame(torch.tensor(logits).sigmoid(), columns=binarizer.classes_).to_csv(probabilities_file, index=False)
