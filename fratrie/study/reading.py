"""The two parts of a corpus that is studied, and what a second annotator says of them."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from datasets import DatasetDict
from numpy.typing import NDArray

from fratrie.data.labels import Problems, read_labels
from fratrie.data.tables import raise_row_problems, read_table
from fratrie.data.text_files import existing_file
from fratrie.training.labelled_data import CorpusOptions, read_parts, split_off, tell_overlaps
from fratrie.training.metrics import MULTI_LABEL, REGRESSION
from fratrie.training.options import check_ranges
from fratrie.training.tasks import Task, check_every_label_occurs, task_of

SECOND = "second_labels"


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

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_ranges(self, {"test_size": (0.01, 0.9), "max_length": (1, 10**6)})
        if self.second_label_column and not self.train_file:
            raise ValueError(f"second_label_column={self.second_label_column!r}: the shipped corpus has none")


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
    if options.second_label_column:
        task = task_of(parts["train"].features)
        for part, file in (("train", options.train_file), ("test", options.test_file)):
            if file is not None:
                parts[part] = parts[part].add_column(SECOND, _second_labels(file, options, task))
    if "test" not in parts:
        parts = split_off(parts["train"], "test", options.test_size, seed)
    check_every_label_occurs(parts["train"])
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


def _second_labels(file: str, options: StudyDataOptions, task: Task) -> list[list[int] | None]:
    assert options.second_label_column is not None
    table = read_table(existing_file(file), options.text_format())
    cells = table.column(options.second_label_column, "second_label_column")
    rows = [row for row, cell in enumerate(cells) if cell is not None and str(cell).strip()]
    problems: Problems = defaultdict(list)
    several = task.problem_type == MULTI_LABEL
    _, found, _ = read_labels([cells[row] for row in rows], task.labels, several, problems)
    in_file = {problem: [rows[number - 1] + 1 for number in numbers] for problem, numbers in problems.items()}
    raise_row_problems(table.path, in_file, f"second_label_column: the labels are {', '.join(task.labels)}")
    labels: list[list[int] | None] = [None] * len(cells)
    for row, ids in zip(rows, found, strict=True):
        labels[row] = ids if several else [ids]
    return labels
