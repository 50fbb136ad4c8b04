"""Several labels a sentence by setfit: pairs of sentences tune the encoder, then a logistic regression for each label.

python setfit_labels.py MODEL TRAIN.jsonl TEST.jsonl PROBABILITIES.csv [options]
"""

import argparse

import pandas as pd
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.preprocessing import MultiLabelBinarizer

parser = argparse.ArgumentParser()
for name in ("model", "train", "test", "probabilities"):
    parser.add_argument(name)
parser.add_argument("--num_iterations", type=int)
parser.add_argument("--max_steps", type=int, default=-1)
parser.add_argument("--num_epochs", type=int, default=1)
parser.add_argument("--body_learning_rate", type=float, default=2e-5)
parser.add_argument("--seed", type=int, default=42)
options = parser.parse_args()

train, test = (pd.read_json(file, lines=True, dtype=False) for file in (options.train, options.test))
binarizer = MultiLabelBinarizer()
labels = binarizer.fit_transform(train["labels"])
model = SetFitModel.from_pretrained(options.model, multi_target_strategy="one-vs-rest")
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.probabilities + ".checkpoints",
        batch_size=16,
        num_iterations=options.num_iterations,
        max_steps=options.max_steps,
        num_epochs=options.num_epochs,
        body_learning_rate=options.body_learning_rate,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"text": list(train["text"]), "label": labels.tolist()}),
)
trainer.train()
probabilities = model.predict_proba(list(test["text"]), as_numpy=True)
pd.DataFrame(probabilities, columns=binarizer.classes_).to_csv(options.probabilities, index=False)
