"""Label texts with a fine-tuned sentence classifier: a file of texts in, a csv with labels and probabilities out.

Each row of the output holds a text, its labels and the probability of every label, in the order of the input.
Example: python scripts/predict.py --model runs/family --input_file answers.txt --output_file labelled.csv
"""

import csv
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import HfArgumentParser

import fratrie  # noqa: F401 (registers its models)
from fratrie.data.loading import load_texts
from fratrie.training.classifiers import load_classifier
from fratrie.training.cli import run
from fratrie.training.finetuning import encode, open_inference, predict_logits, prepare_output
from fratrie.training.metrics import REGRESSION, decided_labels, probabilities


@dataclass
class PredictionOptions:
    """What to label with what."""

    model: str = field(metadata={"help": "Folder of the fine-tuned classifier."})
    input_file: str = field(metadata={"help": "Texts: .txt (one a line), .csv, .tsv, .jsonl or .parquet."})
    output_file: str = field(metadata={"help": "The csv file to write."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts (csv, jsonl, parquet)."})
    batch_size: int = field(default=64, metadata={"help": "Texts of one batch on one process."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens at most, longer texts are cut; by default what the model takes."}
    )


def main() -> None:
    """Load, predict, write the csv."""
    (options,) = cast(
        Any, HfArgumentParser(PredictionOptions, description=__doc__, allow_abbrev=False).parse_args_into_dataclasses()
    )
    accelerator = open_inference()
    output = prepare_output(options.output_file, options.input_file)
    texts = load_texts(options.input_file, options.text_column)
    model, tokenizer, task = load_classifier(options.model)
    rows = encode(texts, model, tokenizer, options.max_length)
    logits = predict_logits(model.to(accelerator.device), accelerator, rows, tokenizer, options.batch_size)
    values = probabilities(logits, task.problem_type)
    if not accelerator.is_main_process:
        return
    thresholds = getattr(model.config, "label_thresholds", None)
    decided = decided_labels(values, task.problem_type, task.labels, thresholds)
    named = [] if task.problem_type == REGRESSION else ["labels"]
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", *named, *task.labels])
        for text, labels, row in zip(texts, decided, values, strict=True):
            writer.writerow([text, *([",".join(labels)] if named else []), *(f"{value:.6g}" for value in row)])
    print(f"{len(texts)} texts labelled in {output}")


if __name__ == "__main__":
    run(main)
