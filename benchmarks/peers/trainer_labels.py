"""Several labels a sentence by transformers' Trainer, in the steps of its guide to text classification.

python trainer_labels.py MODEL TRAIN.jsonl TEST.jsonl PROBABILITIES.csv [options]
"""

import argparse

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

parser = argparse.ArgumentParser()
for name in ("model", "train", "test", "probabilities"):
    parser.add_argument(name)
parser.add_argument("--learning_rate", type=float, default=2e-5)
parser.add_argument("--num_train_epochs", type=float, default=2)
parser.add_argument("--warmup_steps", type=float, default=0)
parser.add_argument("--train_sampling_strategy", default="random")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--seed", type=int, default=42)
options = parser.parse_args()

set_seed(options.seed)  # of the new head
train, test = (pd.read_json(file, lines=True, dtype=False) for file in (options.train, options.test))
binarizer = MultiLabelBinarizer()
labels = binarizer.fit_transform(train["labels"]).astype("float32")
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForSequenceClassification.from_pretrained(
    options.model,
    problem_type="multi_label_classification",
    id2label=dict(enumerate(binarizer.classes_)),
    label2id={label: number for number, label in enumerate(binarizer.classes_)},
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.probabilities + ".checkpoints",
        learning_rate=options.learning_rate,
        num_train_epochs=options.num_train_epochs,
        warmup_steps=options.warmup_steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        weight_decay=0.01,
        train_sampling_strategy=options.train_sampling_strategy,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),  # else bf16 is refused
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    ),
    train_dataset=Dataset.from_dict({**tokenizer(list(train["text"]), truncation=True), "labels": labels.tolist()}),
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
logits = trainer.predict(Dataset.from_dict(tokenizer(list(test["text"]), truncation=True))).predictions
pd.DataFrame(torch.tensor(logits).sigmoid(), columns=binarizer.classes_).to_csv(options.probabilities, index=False)
