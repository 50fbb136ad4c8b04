"""The family-relations corpus as a `datasets.DatasetDict`, and splits that keep a respondent on one side."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from sklearn.model_selection import GroupShuffleSplit

from fratrie.data.annotation import LABELS, Segment, read_annotations

FEATURES = Features(
    {
        "text": Value("string"),
        "row": Value("int64"),
        "respondent": Value("int64"),
        "code": Value("string"),
        "labels": List(ClassLabel(names=list(LABELS))),
    }
)


def load_family_relations(extended: bool = False) -> DatasetDict:
    """The shipped corpus in memory: `train` (1,318 segments, 240 respondents) and `test` (330, 58).

    Features are `FEATURES`; `row` is a line of the file, `labels` holds positions in `LABELS`. Respondents are
    numbered through all files (train 0 to 239, test 240 to 297), so that a number is one person everywhere.

    Args:
        extended: let `train` go on with the segments of `more.txt`, of other writers (respondents from 298 on, lines
            counted on from the last of `train.txt`).
    """
    splits: dict[str, list[Segment]] = {}
    respondents = 0
    for name in ("train", "test", *["more"] * extended):
        with shipped_file(name) as path:
            segments = read_annotations(path)
        splits[name] = [replace(segment, respondent=segment.respondent + respondents) for segment in segments]
        respondents = splits[name][-1].respondent + 1
    if extended:
        last = splits["train"][-1].line
        splits["train"] += [replace(segment, line=segment.line + last) for segment in splits.pop("more")]
    return DatasetDict({name: to_dataset(segments) for name, segments in splits.items()})


def shipped_file(part: str) -> AbstractContextManager[Path]:
    """The annotation file of a part of the shipped corpus: `train`, `test` or `more`."""
    return as_file(files("fratrie.data") / "family_relations" / f"{part}.txt")


def to_dataset(segments: Iterable[Segment]) -> Dataset:
    """Segments as an in-memory dataset with the columns of `FEATURES`, in the same order."""
    segments = list(segments)
    columns = {
        "text": [segment.text for segment in segments],
        "row": [segment.line for segment in segments],
        "respondent": [segment.respondent for segment in segments],
        "code": [segment.code for segment in segments],
        "labels": [[LABELS.index(label) for label in segment.labels] for segment in segments],
    }
    return Dataset.from_dict(columns, features=FEATURES)


def split_by_respondent(dataset: Dataset, validation_size: float = 0.1, seed: int = 0) -> DatasetDict:
    """Split into `train` and `validation` so that no respondent stands on both sides; rows keep their order.

    Args:
        dataset: has a column `respondent` (numbers or names).
        validation_size: share of the respondents, strictly between 0 and 1; each side gets at least one.
        seed: of the draw.

    Raises:
        ValueError: the column is missing, the share is out of range, or there are too few respondents.
    """
    if "respondent" not in dataset.column_names:
        raise ValueError(
            f"no column 'respondent' to split by; the columns are {', '.join(dataset.column_names)}: "
            "rename the one that names the speaker to 'respondent'"
        )
    if not 0 < validation_size < 1:
        raise ValueError(f"validation_size={validation_size} must lie strictly between 0 and 1")
    groups = dataset["respondent"][:]
    respondents = len(set(groups))
    if respondents < 2:
        raise ValueError(
            f"a split by respondent needs two respondents or more, found {respondents}: "
            "separate respondents by blank lines, or give a validation file"
        )
    drawn = min(max(round(validation_size * respondents), 1), respondents - 1)
    splitter = GroupShuffleSplit(n_splits=1, test_size=drawn, random_state=seed)
    train, validation = next(splitter.split(groups, groups=groups))
    return DatasetDict(train=dataset.select(train), validation=dataset.select(validation))
