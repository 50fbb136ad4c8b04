"""Label texts with a fine-tuned sentence classifier: a file of texts in, a csv with labels and probabilities out.

Each row of the output holds a text, its labels, the probability of every label, and what the input says of it in
other columns, in the order of the input; a row of a table without a text stays, without labels.
Example: fratrie predict --model runs/family --input_file answers.txt --output_file labelled.csv
"""

import csv
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

import fratrie  # noqa: F401 (registers its models)
from fratrie.data.loading import load_texts_and_others, places_of_texts
from fratrie.data.text_files import open_text
from fratrie.files import new_file
from fratrie.inference import place
from fratrie.training.classifiers import load_classifier
from fratrie.training.encoding import encode
from fratrie.training.launch import open_inference
from fratrie.training.metrics import REGRESSION, decided_labels, probabilities
from fratrie.training.options import InferenceOptions
from fratrie.training.output_files import prepare_output
from fratrie.training.scoring import predict_logits
from fratrie.training.tasks import Task

from .options import read_options
from .running import run

# What a spreadsheet would calculate, or take for a command.
FORMULA = re.compile(r"[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?")


@dataclass(kw_only=True)
class PredictionOptions(InferenceOptions):
    """Which texts to label, and where to write."""

    input_file: str = field(metadata={"help": "Texts: .txt (one a line), .csv, .tsv, .xlsx, .ods, .jsonl, .parquet."})
    output_file: str = field(metadata={"help": "The csv file to write."})
    overwrite: bool = field(
        default=False, metadata={"help": "Replace an output file that is not an earlier output for the same labels."}
    )
    annotated: bool = field(
        default=False, metadata={"help": "The file holds annotated lines 'CODE SENTENCE': label the sentences."}
    )
    excel: bool = field(
        default=False,
        metadata={
            "help": "A csv that a French Excel opens with a double click: byte order mark, semicolons, decimal commas."
        },
    )
    escape_formulas: bool = field(
        default=False,
        metadata={"help": "Put ' before cells that begin with = + - @, which a spreadsheet takes for formulas."},
    )
    disable_progress: bool = field(default=False, metadata={"help": "Show no progress bar."})


def main() -> None:
    """Load, predict, write the csv."""
    (options,) = read_options(__doc__, PredictionOptions)
    if Path(options.output_file).suffix.lower() != ".csv":
        raise ValueError(f"{options.output_file} will be a csv file: give it a name that ends with .csv")
    with open_inference() as accelerator:
        _predict(options, accelerator)


def _predict(options: PredictionOptions, accelerator: Accelerator) -> None:
    texts, others = load_texts_and_others(
        options.input_file, options.text_column, options.annotated, options.text_format()
    )
    places = places_of_texts(options.input_file, texts)
    model, tokenizer, task = load_classifier(options.model, options.label_thresholds)
    is_ours = partial(_is_earlier_output, task=task)
    output = prepare_output(options.output_file, options.input_file, options.model, is_ours, options.overwrite)
    rows = encode([texts[place] for place in places], model, tokenizer, options.max_length)
    model = place(model, accelerator.device, options.precision)
    logits = predict_logits(model, accelerator, rows, tokenizer, options.batch_size, not options.disable_progress)
    if not accelerator.is_main_process:
        return
    values = np.full((len(texts), logits.shape[1]), np.nan)
    values[places] = probabilities(logits, task.problem_type)
    columns = _labelled(values, task, getattr(model.config, "label_thresholds", None), "," if options.excel else ".")
    taken = {"text", *(name for name, _ in columns)}
    columns = [("text", [_readable(text) for text in texts]), *columns, *_renamed(others, taken)]
    _write(output, columns, options)
    print(f"{len(places)} texts labelled in {output}")


def _labelled(
    values: NDArray[np.float64], task: Task, thresholds: list[float] | None, decimal: str
) -> list[tuple[str, list[str]]]:
    """Columns of the labels and of the probabilities `(N, L)`, NaN where a row has no text.

    A list, since a label may be called as another column is.
    """
    cells = [["" if np.isnan(value) else f"{value:.6g}".replace(".", decimal) for value in row] for row in values.T]
    columns = list(zip(task.labels, cells, strict=True))
    if task.problem_type == REGRESSION:
        return columns
    decided: list[str] = [""] * len(values)
    known = np.flatnonzero(~np.isnan(values[:, 0]))
    for row, labels in zip(
        known, decided_labels(values[known], task.problem_type, task.labels, thresholds), strict=True
    ):
        decided[row] = ",".join(labels)
    return [("labels", decided), *columns]


def _renamed(others: dict[str, list[Any]], taken: set[str]) -> Iterator[tuple[str, list[str]]]:
    """The other columns of the input under names that are free, their cells as text."""
    for name, cells in others.items():
        while name in taken:
            name = f"input_{name}"
        taken.add(name)
        yield name, [_readable(cell) for cell in cells]


def _readable(cell: Any) -> str:
    """A cell as text: dates as ISO 8601 has them, bytes as UTF-8 or else hexadecimal, lists and the like as json."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat()
    if isinstance(cell, bytes):
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return f"0x{cell.hex()}"
    if isinstance(cell, bool | int | float | list | tuple | dict):
        return json.dumps(cell, ensure_ascii=False, default=_readable)
    return str(cell)


def _write(output: Path, columns: Sequence[tuple[str, Sequence[str]]], options: PredictionOptions) -> None:
    names, cells = zip(*columns, strict=True)
    with new_file(output) as file:
        if options.excel:
            file.write("\ufeff")
        writer = csv.writer(file, delimiter=";" if options.excel else ",")
        for row in (names, *zip(*cells, strict=True)):
            writer.writerow([_writable(cell, options.escape_formulas) for cell in row])


def _writable(cell: str, escape: bool) -> str:
    """The cell, half characters as `\\udc80`, and a formula after an apostrophe where asked for."""
    cell = cell.encode(errors="backslashreplace").decode()
    return f"'{cell}" if escape and FORMULA.match(cell) and not NUMBER.fullmatch(cell) else cell


def _is_earlier_output(path: Path, task: Task) -> bool:
    """Whether a csv begins as those that this script writes for these labels."""
    if task.problem_type == REGRESSION:  # «text,value» may be anybody's
        return False
    expected = ["text", "labels", *task.labels]
    try:
        with open_text(path) as file:
            line = file.readline().removeprefix("\ufeff")
        headers = [next(csv.reader([line], delimiter=mark), []) for mark in ",;"]
    except (ValueError, csv.Error):
        return False
    return any([name.removeprefix("'") for name in header[: len(expected)]] == expected for header in headers)


if __name__ == "__main__":
    run(main)
