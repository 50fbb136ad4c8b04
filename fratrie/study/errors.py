"""Where a classifier errs: which labels it takes for each other, its most confident errors, likely mistakes of labels.

Shapes: N sentences, L labels.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fratrie.training.baselines import Sentences
from fratrie.training.metrics import MULTI_LABEL, SINGLE_LABEL, ProblemType

from .packages import check_package


def confusion(predictions_NL: NDArray[np.int64], truth_NL: NDArray[np.int64], labels: Sequence[str]) -> dict[str, Any]:
    """Count which label was wrongly given in the sentences in which another was missed.

    Several labels per sentence have no matrix of confusion in the usual sense; for one label per sentence this is that
    matrix without its diagonal.

    Args:
        predictions_NL: indicators.
        truth_NL: indicators.
        labels: the L label names.

    Returns:
        `labels`; `missed_given`, the sentences by missed label (row) and wrongly given label (column), shape (L, L);
        `missed` and `given`, the sentences by label, whether or not the other kind of error comes with it.
    """
    missed_NL, given_NL = truth_NL * (1 - predictions_NL), predictions_NL * (1 - truth_NL)
    return {
        "labels": list(labels),
        "missed_given": (missed_NL.T @ given_NL).tolist(),
        "missed": missed_NL.sum(0).tolist(),
        "given": given_NL.sum(0).tolist(),
    }


def confident_errors(
    probabilities_NL: NDArray[np.float64],
    predictions_NL: NDArray[np.int64],
    truth_NL: NDArray[np.int64],
    sentences: Sentences,
    labels: Sequence[str],
    most: int = 50,
) -> list[dict[str, Any]]:
    """Pick the errors in which the classifier was surest: those whose probability is farthest from the truth.

    A sentence is listed once, for its worst label, with all labels that it has and all that it was given.

    Args:
        probabilities_NL: of each label.
        predictions_NL: indicators of what was decided, by whichever thresholds.
        truth_NL: indicators.
        sentences: their texts, respondents and rows.
        labels: the L label names.
        most: errors to pick.

    Returns:
        The surest first: `text`, its `row` in the file, `respondent` (or `None`), `label`, its `truth` (0 or 1) and
        `probability`, the true `labels` and the `predicted` ones.
    """
    wrong_NL = predictions_NL != truth_NL
    distance_NL = np.where(wrong_NL, np.abs(probabilities_NL - truth_NL), -1)
    order = np.argsort(-distance_NL.max(1), kind="stable")
    chosen = [(int(row), int(distance_NL[row].argmax())) for row in order[:most] if wrong_NL[row].any()]
    return [
        {
            "text": sentences.texts[row],
            "row": sentences.row(row),
            "respondent": None if sentences.groups is None else sentences.groups[row],
            "label": labels[label],
            "truth": int(truth_NL[row, label]),
            "probability": float(probabilities_NL[row, label]),
            "labels": _names(truth_NL[row], labels),
            "predicted": _names(predictions_NL[row], labels),
        }
        for row, label in chosen
    ]


def label_issues(
    probabilities_NL: NDArray[np.float64],
    truth_NL: NDArray[np.int64],
    sentences: Sentences,
    labels: Sequence[str],
    most: int = 50,
    problem_type: ProblemType = MULTI_LABEL,
) -> list[dict[str, Any]]:
    """Pick the labels of the training part that are likeliest to be mistakes, by confident learning (cleanlab).

    Northcutt et al. (2021) estimate how many labels are wrong from the probabilities that a classifier gives to
    sentences which it has not learnt; this picks as many of the least probable ones.

    Args:
        probabilities_NL: of each label, out of fold.
        truth_NL: the labels to judge, as indicators; with one label per sentence a single 1 in each row.
        sentences: their texts and rows.
        labels: the L label names.
        most: labels to pick.
        problem_type: several labels per sentence, of which each is judged for itself, or one.

    Returns:
        The likeliest mistake first: `row` in the file, `text`, `label`, whether it was `given` (1: perhaps it
        should not have been, 0: perhaps it should) and its `quality`, the probability that this is right. With one
        label per sentence `instead` is the most probable label, else `None`.

    Raises:
        ValueError: cleanlab is not installed.
    """
    check_package("cleanlab", "the search for mistakes of labels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cleanlab warns of each label with few examples
        judge = _doubtful_classes if problem_type == SINGLE_LABEL else _doubtful_labels
        doubtful_NL = judge(probabilities_NL, truth_NL)
    quality_NL = np.where(truth_NL == 1, probabilities_NL, 1 - probabilities_NL)
    rows, columns = np.nonzero(doubtful_NL)
    order = np.argsort(quality_NL[rows, columns], kind="stable")[:most]
    return [
        {
            "row": sentences.row(row),
            "text": sentences.texts[row],
            "label": labels[label],
            "given": int(truth_NL[row, label]),
            "quality": float(quality_NL[row, label]),
            "instead": labels[probabilities_NL[row].argmax()] if problem_type == SINGLE_LABEL else None,
        }
        for row, label in zip(rows[order], columns[order], strict=True)
    ]


def _doubtful_labels(probabilities_NL: NDArray[np.float64], truth_NL: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which labels, given or not, are doubtful; none of a label that all or no sentences carry. Shape: (N, L)"""
    from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class

    doubtful_NL = np.zeros(truth_NL.shape, dtype=bool)
    varied_L = truth_NL.min(0) < truth_NL.max(0)  # cleanlab refuses others
    if varied_L.any():
        carried = [np.flatnonzero(row).tolist() for row in truth_NL[:, varied_L]]
        # One process: others would read the texts' labels anew and gain nothing at this size.
        doubtful_NL[:, varied_L] = find_multilabel_issues_per_class(carried, probabilities_NL[:, varied_L], n_jobs=1)
    return doubtful_NL


def _doubtful_classes(probabilities_NL: NDArray[np.float64], truth_NL: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which sentences' one label is doubtful, at that label. Shape: (N, L)"""
    from cleanlab.filter import find_label_issues

    if len(np.unique(truth_NL.argmax(1))) < 2:
        return np.zeros(truth_NL.shape, dtype=bool)
    doubtful_N = find_label_issues(truth_NL.argmax(1), probabilities_NL, n_jobs=1)
    return doubtful_N[:, None] & (truth_NL == 1)


def _names(indicators_L: NDArray[np.int64], labels: Sequence[str]) -> list[str]:
    return [label for label, on in zip(labels, indicators_L, strict=True) if on]
