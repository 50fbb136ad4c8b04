"""Scores of a study's methods on test, with intervals over its respondents.

Shapes: S runs (seeds), N sentences, L labels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fratrie.training.baselines import Sentences
from fratrie.training.bootstrap import compare, f1_intervals
from fratrie.training.metrics import SINGLE_LABEL, Scores, decide, multilabel_scores, probabilities
from fratrie.training.tasks import Task


def decisions(logits: NDArray[Any], task: Task, thresholds: Sequence[float] | None = None) -> NDArray[np.int64]:
    """The labels that logits give, as indicators: those above their thresholds, or the most probable one.

    Shape: (…, L) → (…, L)
    """
    values = probabilities(logits, task.problem_type)
    if task.problem_type == SINGLE_LABEL:
        return np.eye(len(task.labels), dtype=np.int64)[values.argmax(-1)]
    return decide(values, thresholds)


def score(predictions_SNL: NDArray[np.int64], test: Sentences, labels: Sequence[str]) -> Scores:
    """Scores of several runs, averaged, with 95 % intervals over respondents.

    `f1_interval` is by label, `present_macro_f1_interval` that of the mean of the labels that test holds: a label
    without an example has no F1, and the mean of a study leaves it out. `interval_groups` counts the respondents.
    """
    scores = _mean([multilabel_scores(run, test.labels, labels) for run in predictions_SNL])
    by_label, macro = f1_intervals(predictions_SNL, test.labels, test.respondents, labels)
    groups = len(set(test.respondents))
    return scores | {"f1_interval": by_label, "present_macro_f1_interval": macro, "interval_groups": groups}


def compare_with_classical(
    predictions_SNL: NDArray[np.int64],
    classical: Mapping[str, NDArray[np.int64]],
    test: Sentences,
    labels: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """`fratrie.training.bootstrap.compare` over the labels of which test holds an example."""
    there = test.labels.sum(0) > 0
    return compare(
        predictions_SNL[..., there],
        {name: predictions_NL[:, there] for name, predictions_NL in classical.items()},
        test.labels[:, there],
        test.respondents,
        [label for label, on in zip(labels, there, strict=True) if on],
    )


def _mean(values: Sequence[Any]) -> Any:
    """The mean of equal trees of numbers."""
    if isinstance(values[0], Mapping):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return values[0] if all(value == values[0] for value in values) else float(np.mean(values))
