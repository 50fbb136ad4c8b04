"""The two parts of a corpus that is studied, and what a second annotator says of them."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from datasets import DatasetDict
from numpy.typing import NDArray

from fratrie.data.labels import Problems, read_labels
from fratrie.data.tables import raise_row_problems, read_table
from fratrie.data.text_files import existing_file
from fratrie.training.labelled_data import CorpusOptions, read_labelled, read_parts, split_off, tell_overlaps
from fratrie.training.metrics import MULTI_LABEL, REGRESSION
from fratrie.training.options import check_ranges
from fratrie.training.tasks import Task, labels_without_text, task_of

SECOND = "second_labels"
MEAN = "macro"


@dataclass(kw_only=True)
class StudyDataOptions(CorpusOptions):
    """Which sentences to study, for `HfArgumentParser`; without files the shipped corpus."""

    test_size: float = field(
        default=0.2,
        metadata={"help": "Without a test file, the share of the respondents (or rows) that is kept for the test."},
    )
    second_label_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the labels of a second annotator, whose agreement with the first is measured; an empty "
            "cell is a sentence that was not annotated again, [] one without a label."
        },
    )

    second_annotator: str | None = field(
        default=None,
        metadata={"help": "Instead, the second annotator's name in the column `annotator`, beside --annotator."},
    )

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ValueError: names the option, its value and the way out.
        """
        check_ranges(self, {"test_size": (0.01, 0.9), "max_length": (1, 10**6)})
        column, name = self.second_label_column, self.second_annotator
        if (column or name) and not self.train_file:
            raise ValueError("the shipped corpus has no second annotator: give --train_file")
        if column and (name or self.annotator):
            raise ValueError(
                f"second_label_column={column!r} stands in the rows of the first labels; where annotators have rows "
                "of their own, say --annotator and --second_annotator"
            )
        if name and self.annotator in (None, name):
            raise ValueError(f"second_annotator={name!r} needs another --annotator as the first one")

    def second(self) -> str | None:
        """What names the second annotator, if there is one."""
        return self.second_label_column or self.second_annotator


def read_study(options: StudyDataOptions, seed: int) -> DatasetDict:
    """The parts `train` and `test`; without a test file whole respondents are kept for the test, drawn by the seed.

    Raises:
        ValueError: wrong rows, real values in the place of labels, too little to split, or a label without an example
            in train.
        OSError: a file is missing or cannot be read.
    """
    if options.problem_type == REGRESSION:
        raise ValueError("a study is about labels, and these are real values: use fratrie finetune")
    parts = read_parts(options)
    task = task_of(parts["train"].features)
    if MEAN in task.labels:
        raise ValueError(f"a label is called {MEAN!r}, as the mean of the labels is in every table: rename it")
    if options.second():
        for part, file in (("train", options.train_file), ("test", options.test_file)):
            if file is not None:
                found = _second_labels(file, parts[part]["text"][:], options, task)
                parts[part] = parts[part].add_column(SECOND, found)
    if "test" not in parts:
        parts = split_off(parts["train"], "test", options.test_size, seed)
    if missing := labels_without_text(parts["train"]):
        raise ValueError(
            f"no training text carries the label {', '.join(map(repr, missing))}: add such texts, leave it out, "
            "give a test file, or let another --seed draw the test part"
        )
    tell_overlaps(parts)
    return parts


def second_annotations(parts: DatasetDict, labels: int) -> list[NDArray[np.int64] | None]:
    """What the second annotator says of the rows of train and then of test, as indicators `(L,)`, `None` for nothing.

    Args:
        parts: from `read_study`, with a second annotator.
        labels: L.
    """
    found = [ids for part in ("train", "test") for ids in parts[part][SECOND][:]]
    return [None if ids is None else np.eye(labels, dtype=np.int64)[ids].sum(0) for ids in found]


def _second_labels(file: str, texts: list[str], options: StudyDataOptions, task: Task) -> list[list[int] | None]:
    """The second annotator's label ids of each text, `None` of those that were not annotated again."""
    if options.second_annotator:
        reading = options.reading() | {"annotator": options.second_annotator}
        rows = read_labelled(file, task.labels, task.problem_type, **reading)
        listed = [ids if isinstance(ids, list) else [ids] for ids in rows["labels"][:]]
        found = dict(zip(rows["text"][:], listed, strict=True))
        return [found.get(text) for text in texts]
    return _labels_in_column(file, options, task)


def _labels_in_column(file: str, options: StudyDataOptions, task: Task) -> list[list[int] | None]:
    assert options.second_label_column is not None
    table = read_table(existing_file(file), options.text_format())
    cells = table.column(options.second_label_column, "second_label_column")
    places = [place for place, cell in enumerate(cells) if cell is not None and str(cell).strip()]
    again = table.of_rows(places)
    problems: Problems = defaultdict(list)
    several = task.problem_type == MULTI_LABEL
    _, found, _ = read_labels(again, again.columns[options.second_label_column], task.labels, several, problems)
    raise_row_problems(again, problems, f"second_label_column: the labels are {', '.join(task.labels)}")
    labels: list[list[int] | None] = [None] * len(cells)
    for place, ids in zip(places, found, strict=True):
        labels[place] = ids if several else [ids]
    return labels
