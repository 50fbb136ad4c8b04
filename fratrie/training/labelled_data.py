"""Labelled texts to learn from or to score on: which files, how they are read, and how they are split."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from datasets import Dataset, DatasetDict

from fratrie.data.corpus import load_family_relations, split_by_respondent
from fratrie.data.description import describe
from fratrie.data.loading import load_labelled, load_values
from fratrie.data.repeats import tell_overlap
from fratrie.data.tables import row_noun
from fratrie.data.text_files import UTF8, TextFormat

from .metrics import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from .options import TABLES, LabelOptions
from .tasks import Task, task_of

logger = logging.getLogger(__name__)

ShippedCorpus = Literal["family_relations", "family_relations_extended"]
AnyProblemType = Literal["auto", "multi_label_classification", "single_label_classification", "regression"]


@dataclass(kw_only=True)
class CorpusOptions(LabelOptions):
    """Which labelled texts to read, for `HfArgumentParser`; without files the shipped corpus."""

    dataset: ShippedCorpus = field(
        default="family_relations",
        metadata={
            "help": "The shipped corpus, learnt where no file is given: 1,318 sentences, or 5,327 with those of "
            "further writers, as the demonstration learns them."
        },
    )
    train_file: str | None = field(default=None, metadata={"help": f"Labelled texts: .txt (annotated), {TABLES}."})
    test_file: str | None = field(default=None, metadata={"help": "Scored once, at the end."})
    problem_type: AnyProblemType = field(
        default="auto",
        metadata={"help": "Several labels per text, one, or a real value; `auto` tells the first two from the data."},
    )
    label_names: list[str] | None = field(
        default=None, metadata={"help": "All labels, in the order of the outputs; by default as the data say."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens at most, longer texts are cut; by default what the model takes."}
    )

    def extended(self) -> bool:
        """Whether the shipped corpus is learnt with its further writers."""
        return self.dataset == "family_relations_extended"


@dataclass(kw_only=True)
class LabelledDataOptions(CorpusOptions):
    """Which texts to learn from and to watch meanwhile."""

    validation_file: str | None = field(
        default=None, metadata={"help": "Watched while training; by default a part of the train file."}
    )
    validation_size: float = field(
        default=0.1,
        metadata={"help": "Share of train to watch: of its respondents, or of its rows if it names none; 0: no part."},
    )


def read_labelled(
    path: str | os.PathLike[str],
    labels: Sequence[str] | None = None,
    problem_type: AnyProblemType = "auto",
    text_column: str = "text",
    label_column: str | Sequence[str] | None = None,
    group_column: str | None = None,
    annotator: str | None = None,
    form: TextFormat = UTF8,
) -> Dataset:
    """Read a labelled file of any format that `load_labelled` reads, and log what was understood.

    Args:
        path: the file.
        labels: all label names in order; by default as the file says.
        problem_type: `auto` tells several labels from one by the data; real values must be asked for.
        text_column, label_column, group_column, annotator: of `load_labelled`.
        form: encoding and delimiter of the file, sheet of a spreadsheet.

    Raises:
        ValueError: wrong rows, each named; a missing column.
        OSError: the file is missing or cannot be read.
    """
    if problem_type == REGRESSION:
        dataset = load_values(path, text_column, label_column, group_column, annotator, form)
    else:
        several = None if problem_type == "auto" else problem_type == MULTI_LABEL
        columns = (text_column, label_column, group_column)
        dataset = load_labelled(path, labels, *columns, multi_label=several, annotator=annotator, form=form)
    logger.info("%s: %s", path, describe(dataset, row_noun(path)))
    return dataset


def load_parts(options: LabelledDataOptions, seed: int = 0) -> DatasetDict:
    """Labelled parts `train`, `validation` and `test`, those of them that exist.

    Without a validation file a part of train becomes `validation`: whole respondents where the data name them,
    single rows elsewhere, drawn by the seed; none of it with `validation_size=0`. Texts that stand in train and in
    another part are logged.

    Args:
        options: say where the texts are and how to read them.
        seed: of the split.

    Raises:
        ValueError: wrong rows, a test or validation file without a train file, too little to split or to tell apart.
        OSError: a file is missing or cannot be read.
    """
    parts = read_parts(options)
    if "validation" not in parts and options.validation_size:
        parts |= split_off(parts["train"], "validation", options.validation_size, seed)
    tell_overlaps(parts)
    return parts


def read_parts(options: CorpusOptions) -> DatasetDict:
    """The labelled parts of which there are files, or those of the shipped corpus (see `load_parts`)."""
    names = ("train", "validation", "test")
    paths = {part: getattr(options, f"{part}_file", None) for part in names}
    files = {part: path for part, path in paths.items() if path is not None}
    if files and options.extended():
        raise ValueError(
            f"dataset={options.dataset!r} is the shipped corpus, but there are files to learn from: omit one of both"
        )
    if not files:
        refuse_options_of_files(options, "problem_type", "label_names")
        parts = load_family_relations(options.extended())
        logger.info("%s, train: %s", shipped_name(options), describe(parts["train"], "line"))
    elif "train" not in files:
        raise ValueError(f"a {' and '.join(files)} file without a train file: give --train_file too")
    elif options.problem_type == REGRESSION and options.label_names:
        raise ValueError(f"label_names={options.label_names!r}: real values have no labels, leave the names out")
    else:
        train = read_labelled(files.pop("train"), options.label_names, options.problem_type, **options.reading())
        task = task_of(train.features)
        _check_two_classes(task)
        others = {
            part: read_labelled(path, task.labels, task.problem_type, **options.reading())
            for part, path in files.items()
        }
        parts = DatasetDict(train=train, **others)
    return parts


def shipped_name(options: CorpusOptions) -> str:
    """What the shipped corpus is called, with or without its further writers."""
    return "the shipped corpus, extended by more.txt" if options.extended() else "the shipped corpus"


def tell_overlaps(parts: DatasetDict) -> None:
    """Log how large the parts are, and which texts of train stand in another part, too."""
    for part in (part for part in parts if part != "train"):
        tell_overlap(part, parts[part]["text"][:], parts["train"]["text"][:])
    logger.info("%s", ", ".join(f"{len(dataset):,} texts of {part}" for part, dataset in parts.items()))


def refuse_options_of_files(options: LabelOptions, *more: str) -> None:
    """Check that no option says how to read a file where no file is given.

    Args:
        options: of the script.
        *more: names of further options that only make sense with a file.

    Raises:
        ValueError: names the first such option that was set.
    """
    for name in (*(each.name for each in fields(LabelOptions)), *more):
        if (value := getattr(options, name)) != getattr(type(options), name):
            raise ValueError(f"{name}={value!r} says how a file is read, and the shipped corpus is none: omit it")


def _check_two_classes(task: Task) -> None:
    if task.problem_type == SINGLE_LABEL and len(task.labels) < 2:
        raise ValueError(
            f"all training texts have the label {task.labels[0]!r}, so there is nothing to tell apart: add texts of "
            "other labels; if texts without it are the others, leave their cells empty and say --problem_type "
            "multi_label_classification"
        )


def split_off(train: Dataset, part: str, size: float, seed: int) -> DatasetDict:
    """`train` without a share of its respondents, or of its rows if it names none, which become `part`.

    Raises:
        ValueError: too little to split.
    """
    option = f"{part}_size"
    if "respondent" in train.column_names:
        halves = split_by_respondent(train, size, seed)
        return DatasetDict({"train": halves["train"], part: halves["validation"]})
    if len(train) < 2:
        raise ValueError(f"one row cannot be split into train and {part}; give more, or {option}=0")
    try:
        halves = train.train_test_split(size, seed=seed)
    except ValueError as error:
        raise ValueError(f"{option}={size} of {len(train)} rows: {error}") from error
    return DatasetDict({"train": halves["train"], part: halves["test"]})
