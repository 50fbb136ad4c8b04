"""What a sentence classifier answers, read off a config or the data, and the targets of the data's rows."""

import logging
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from .metrics import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What a classifier answers: its problem type and the names of its outputs, in order."""

    problem_type: ProblemType
    labels: list[str]

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "Task":
        """Read the task off a config; no problem type means regression for one output, else one label.

        Raises:
            ValueError: two outputs have one name.
        """
        names = cast(dict[int, str], config.id2label)
        labels = [names[i] for i in range(len(names))]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"config.json: id2label has the label {twice!r} several times: give each output its own")
        return cls(config.problem_type or (REGRESSION if len(labels) == 1 else SINGLE_LABEL), labels)


def task_of(features: Features) -> Task:
    """Read the task off the feature of the column `labels`.

    `List(ClassLabel)` means several labels, `ClassLabel` one of several, a float a real value.

    Raises:
        ValueError: no such column, or a feature that says none of this.
    """
    target = features.get("labels")
    if isinstance(target, List) and isinstance(target.feature, ClassLabel):
        return Task(MULTI_LABEL, list(target.feature.names))
    if isinstance(target, ClassLabel):
        return Task(SINGLE_LABEL, list(target.names))
    if isinstance(target, Value) and target.dtype.startswith("float"):
        return Task(REGRESSION, ["value"])
    raise ValueError(f"the column 'labels' has the feature {target}; expected List(ClassLabel), ClassLabel or a float")


def targets_of(dataset: Dataset) -> NDArray[Any]:
    """Targets as models take them: indicators (N, L) float, classes (N,) int or values (N,) float."""
    task = task_of(dataset.features)
    labels = dataset["labels"][:]  # at once: row by row takes many times as long
    if task.problem_type != MULTI_LABEL:
        return np.asarray(labels, dtype=np.int64 if task.problem_type == SINGLE_LABEL else np.float32)
    targets = np.zeros((len(dataset), len(task.labels)), dtype=np.float32)
    for row, indices in enumerate(labels):
        targets[row, indices] = 1
    return targets


def aligned_targets(dataset: Dataset, task: Task) -> NDArray[Any]:
    """Targets of `targets_of`, with the labels in the order of a model's outputs.

    Raises:
        ValueError: data and model differ in problem type or labels.
    """
    data = task_of(dataset.features)
    if data.problem_type != task.problem_type:
        raise ValueError(f"the data are for {data.problem_type}, the model for {task.problem_type}")
    targets = targets_of(dataset)
    if task.problem_type == REGRESSION or data.labels == task.labels:
        return targets
    if set(data.labels) != set(task.labels):
        raise ValueError(f"the data have the labels {' '.join(data.labels)}, the model {' '.join(task.labels)}")
    order = [data.labels.index(label) for label in task.labels]
    return targets[:, order] if task.problem_type == MULTI_LABEL else np.argsort(order)[targets]


def labels_without_text(dataset: Dataset) -> list[str]:
    """The labels that no row carries."""
    task = task_of(dataset.features)
    return [label for label, count in zip(task.labels, _counts(dataset, task), strict=True) if not count]


def _counts(dataset: Dataset, task: Task) -> NDArray[Any]:
    targets = targets_of(dataset)
    return targets.sum(0) if task.problem_type == MULTI_LABEL else np.bincount(targets, minlength=len(task.labels))


def check_every_label_occurs(dataset: Dataset, allow_missing: bool = False) -> None:
    """Check that at least one row carries each label; a label that all rows carry teaches nothing, and is logged.

    Args:
        dataset: labelled texts.
        allow_missing: only log labels that no row carries.

    Raises:
        ValueError: names the labels that no row carries.
    """
    task = task_of(dataset.features)
    if task.problem_type == REGRESSION:
        return
    counts, missing = _counts(dataset, task), labels_without_text(dataset)
    if missing and not allow_missing:
        raise ValueError(
            f"no training text carries the label {', '.join(map(repr, missing))}: it cannot be learnt. Add "
            "such texts, leave the label out, take a smaller validation part, or pass --allow_missing_labels"
        )
    if always := [label for label, count in zip(task.labels, counts, strict=True) if count == len(dataset)]:
        logger.warning("every training text carries the label %s: any text will get it", ", ".join(map(repr, always)))
    if missing:
        logger.warning("no training text carries the label %s: it will never be predicted", ", ".join(missing))


def balanced_weights(dataset: Dataset) -> list[float]:
    """Weights that give rare labels the same pull as frequent ones.

    Several labels: negatives / positives of each, for the positive term of the loss. One label: the weight
    N / (L · count) of each class. A label that all or no rows carry weighs 1.

    Raises:
        ValueError: for regression, which has no classes.
    """
    task = task_of(dataset.features)
    if task.problem_type == REGRESSION:
        raise ValueError("class weights balance classes, but the targets are real values: use class_weights=none")
    targets = targets_of(dataset)
    if task.problem_type == MULTI_LABEL:
        positives = targets.sum(0)
        ratios = (len(targets) - positives) / np.maximum(positives, 1)
        return [float(r) if 0 < p < len(targets) else 1.0 for r, p in zip(ratios, positives, strict=True)]
    counts = np.bincount(targets, minlength=len(task.labels))
    return [float(len(targets) / (len(counts) * count)) if count else 1.0 for count in counts]
