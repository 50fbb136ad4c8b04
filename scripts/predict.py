"""Label texts with a fine-tuned sentence classifier: a file of texts in, a csv with labels and probabilities out.

Each row of the output holds a text, its labels, the probability of every label, and what the input says of it in
other columns, in the order of the input.
Example: python scripts/predict.py --model runs/family --input_file answers.txt --output_file labelled.csv
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from transformers import HfArgumentParser

import fratrie  # noqa: F401 (registers its models)
from fratrie.data.loading import load_texts_and_others
from fratrie.training.classifiers import Task, load_classifier
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
    annotated: bool = field(
        default=False, metadata={"help": "The file holds annotated lines 'CODE SENTENCE': label the sentences."}
    )
    label_thresholds: str | None = field(
        default=None,
        metadata={
            "help": "Probability that a label must exceed (several labels), for all or by name, as JSON: 0.4 or "
            "'{\"joie\": 0.3}'; by default what the model's config says, else 0.5."
        },
    )
    batch_size: int = field(default=64, metadata={"help": "Texts of one batch on one process."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens at most, longer texts are cut; by default what the model takes."}
    )


def main() -> None:
    """Load, predict, write the csv."""
    (options,) = cast(
        Any, HfArgumentParser(PredictionOptions, description=__doc__, allow_abbrev=False).parse_args_into_dataclasses()
    )
    if Path(options.output_file).suffix.lower() != ".csv":
        raise ValueError(f"{options.output_file} will be a csv file: give it a name that ends with .csv")
    accelerator = open_inference()
    output = prepare_output(options.output_file, options.input_file)
    texts, others = load_texts_and_others(options.input_file, options.text_column, options.annotated)
    model, tokenizer, task = load_classifier(options.model, options.label_thresholds)
    rows = encode(texts, model, tokenizer, options.max_length)
    logits = predict_logits(model.to(accelerator.device), accelerator, rows, tokenizer, options.batch_size)
    values = probabilities(logits, task.problem_type)
    if not accelerator.is_main_process:
        return
    columns = _labelled(values, task, getattr(model.config, "label_thresholds", None))
    names, cells = zip(("text", texts), *columns, *_renamed(others, {"text", *dict(columns)}), strict=True)
    with output.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *zip(*cells, strict=True)])
    print(f"{len(texts)} texts labelled in {output}")


def _labelled(
    values: NDArray[np.float64], task: Task, thresholds: list[float] | None
) -> list[tuple[str, Sequence[str]]]:
    """Columns of the labels and of the probabilities `(N, L)`; a list, since a label may be called as another is."""
    columns = [(name, [f"{value:.6g}" for value in row]) for name, row in zip(task.labels, values.T, strict=True)]
    if task.problem_type == REGRESSION:
        return columns
    decided = decided_labels(values, task.problem_type, task.labels, thresholds)
    return [("labels", [",".join(labels) for labels in decided]), *columns]


def _renamed(others: dict[str, list[Any]], taken: set[str]) -> Iterator[tuple[str, list[str]]]:
    """The other columns of the input under names that are free, their cells as text: lists and the like as json."""
    for name, cells in others.items():
        while name in taken:
            name = f"input_{name}"
        taken.add(name)
        yield name, [cell if isinstance(cell, str | None) else json.dumps(cell, ensure_ascii=False) for cell in cells]


if __name__ == "__main__":
    run(main)
