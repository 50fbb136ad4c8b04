"""Label texts with a fine-tuned sentence classifier: a file of texts in, a table with labels and probabilities out.

Each row of the output holds a text, its labels, the probability of every label, and what the input says of it in
other columns, in the order of the input; a row of a table without a text stays, without labels.
Example: fratrie predict --model runs/family --input_file answers.txt --output_file labelled.xlsx
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

import fratrie  # noqa: F401 (registers its models)
from fratrie.data.loading import load_texts_and_others, places_of_texts
from fratrie.data.output_tables import LabelledTexts, Output, labelling_interface, output_format
from fratrie.inference import place
from fratrie.tokenization.fragments import tell_fragments
from fratrie.training.classifiers import load_classifier
from fratrie.training.encoding import encode
from fratrie.training.launch import open_inference
from fratrie.training.metrics import MULTI_LABEL, REGRESSION, decided_labels, probabilities
from fratrie.training.options import TABLES, InferenceOptions, check_ranges
from fratrie.training.output_files import prepare_output
from fratrie.training.scoring import predict_logits
from fratrie.training.tasks import Task
from fratrie.training.uncertainty import doubts, most_unlike
from fratrie.wording import counted

from .options import read_options
from .running import run

logger = logging.getLogger("fratrie.predict")


@dataclass(kw_only=True)
class PredictionOptions(InferenceOptions):
    """Which texts to label, and where to write."""

    input_file: str = field(metadata={"help": f"Texts: .txt (one per line), {TABLES}."})
    output_file: str = field(metadata={"help": "What to write: .csv, .xlsx, .jsonl or .parquet."})
    format: Literal["auto", "doccano", "label_studio"] = field(
        default="auto",
        metadata={"help": "As the output file is called, or what doccano (.jsonl) or Label Studio (.json) imports."},
    )
    uncertain: int | None = field(
        default=None,
        metadata={"help": "Write only so many texts, those that the model is least sure of, to be labelled next."},
    )
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


def main() -> None:
    """Load, predict, write."""
    (options,) = read_options(__doc__, PredictionOptions)
    check_ranges(options, {"uncertain": (1, 10**9)})
    output = Output(output_format(Path(options.output_file), options.format), options.excel, options.escape_formulas)
    with open_inference() as accelerator:
        _predict(options, output, accelerator)


def _predict(options: PredictionOptions, output: Output, accelerator: Accelerator) -> None:
    texts, others = load_texts_and_others(
        options.input_file, options.text_column, options.annotated, options.text_format()
    )
    places = places_of_texts(others, texts)
    output.check(replace(others, columns={**others.columns, "text": texts}))
    model, tokenizer, task = load_classifier(options.model, options.label_thresholds)
    if task.problem_type == REGRESSION and (options.uncertain or options.format != "auto"):
        raise ValueError(f"{options.model} gives each text a number: --uncertain and --format are for labels")
    # «text,value» may be anybody's.
    is_ours = None if task.problem_type == REGRESSION else partial(output.is_earlier, names=task.labels)
    path = prepare_output(options.output_file, options.input_file, options.model, is_ours, options.overwrite)
    read = [texts[place] for place in places]
    tell_fragments(tokenizer, read, options.input_file)
    rows = encode(read, model, tokenizer, options.max_length)
    model = place(model, accelerator.device, options.precision)
    logits = predict_logits(model, accelerator, rows, tokenizer, options.batch_size, not options.disable_progress)
    if not accelerator.is_main_process:
        return
    values = np.full((len(texts), logits.shape[1]), np.nan)
    values[places] = probabilities(logits, task.problem_type)
    kept: list[int] = list(range(len(texts)))
    notes: dict[str, list[Any]] = {}
    if options.uncertain:
        kept, notes = _least_sure(texts, places, values, task, options.uncertain)
    table = LabelledTexts(
        texts=[texts[row] for row in kept],
        names=task.labels,
        scores=values[kept],
        labels=_labels(kept, places, values, task, getattr(model.config, "label_thresholds", None)),
        several=task.problem_type == MULTI_LABEL,
        notes=notes,
        others={name: [cells[row] for row in kept] for name, cells in others.columns.items()},
    )
    output.write(path, table)
    what = f"the {len(kept)} that the model is least sure of" if options.uncertain else "all"
    print(f"{counted(len(places), 'text')} labelled, {what} in {path}")
    if output.format == "label_studio":
        print(f"labelling interface of the project: {labelling_interface(table.names, table.several)}")


def _labels(
    kept: Sequence[int], places: Sequence[int], values: NDArray[np.float64], task: Task, thresholds: list[float] | None
) -> list[list[str]] | None:
    """The labels of the rows that are kept, none where there is no text."""
    if task.problem_type == REGRESSION:
        return None
    decided = decided_labels(values[places], task.problem_type, task.labels, thresholds)
    by_row = dict(zip(places, decided, strict=True))
    return [by_row.get(row, []) for row in kept]


def _least_sure(
    texts: Sequence[Any], places: Sequence[int], values: NDArray[np.float64], task: Task, number: int
) -> tuple[list[int], dict[str, list[Any]]]:
    """Rows to label next, most uncertain first, and what is uncertain in them."""
    amounts, labels = doubts(values[places], task.problem_type)
    chosen = most_unlike([texts[place] for place in places], np.argsort(-amounts, kind="stable"), number)
    if len(chosen) < min(number, len(places)):
        logger.warning(
            "%d of %d texts are written: the others are nearly the same as one of these", len(chosen), len(places)
        )
    notes = {
        "uncertain_label": [task.labels[labels[each]] for each in chosen],
        "uncertainty": [float(f"{amounts[each]:.4g}") for each in chosen],
    }
    return [places[each] for each in chosen], notes


if __name__ == "__main__":
    run(main)
