"""Scores of sentence classification: precision, recall, F1 and support of every label, and their means.

Counting is scikit-learn's, with 0 where a ratio has no denominator. Everything here is numpy: the caller
gathers predictions from all processes first (`accelerator.gather_for_metrics`), so each sample counts once.
"""

import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, Literal
from unicodedata import category

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fratrie.data.annotation import excerpt
from fratrie.data.tables import parsed_json
from fratrie.wording import counted, did_you_mean

ProblemType = Literal["multi_label_classification", "single_label_classification", "regression"]
MULTI_LABEL: Final = "multi_label_classification"
SINGLE_LABEL: Final = "single_label_classification"
REGRESSION: Final = "regression"
PROBLEM_TYPES = (MULTI_LABEL, SINGLE_LABEL, REGRESSION)
Scores = dict[str, Any]
FEW_GROUPS = 10  # a bootstrap of fewer tells little
TOO_FEW = f"of fewer than {FEW_GROUPS}, intervals are too narrow, and a difference that excludes zero may be chance"


def multilabel_scores(predictions: ArrayLike, references: ArrayLike, labels: Sequence[str] | None = None) -> Scores:
    """Score indicator predictions against indicator references.

    Args:
        predictions: 0 or 1 for every sample and label. Shape: (N, L)
        references: the same for the truth. Shape: (N, L)
        labels: the L label names; their positions when not given.

    Returns:
        `{"precision": {label: …}, "recall": {label: …}, "f1": {label: …}, "support": {label: …}}` with the
        means `macro_*` (over all labels: one without an example counts 0), `present_macro_*` (over the labels that
        have an example) and `micro_*` (over all decisions) of the first three, and `samples`.

    Raises:
        ValueError: shapes that differ, a value other than 0 and 1, no sample, or a wrong number of names.
    """
    predicted, truth = _indicators(predictions, "predictions"), _indicators(references, "references")
    if predicted.shape != truth.shape:
        raise ValueError(f"predictions have the shape {predicted.shape}, references {truth.shape}; give equal shapes")
    names = _names(labels, truth.shape[1])
    if len(names) == 1:  # scikit-learn takes a single column for a binary problem, whose class 1 is the label
        return _label_scores(predicted.ravel(), truth.ravel(), [1], names)
    return _label_scores(predicted, truth, list(range(len(names))), names)


def single_label_scores(predictions: ArrayLike, references: ArrayLike, labels: Sequence[str] | None = None) -> Scores:
    """Score class indices against class indices: the fields of `multilabel_scores`, and `accuracy`.

    Args:
        predictions: the predicted class of every sample. Shape: (N,)
        references: the true class of every sample. Shape: (N,)
        labels: the class names, by index; as many as the largest index needs when not given.

    Raises:
        ValueError: lengths that differ, no sample, or an index without a name.
    """
    predicted, truth = np.asarray(predictions, dtype=int), np.asarray(references, dtype=int)
    if predicted.shape != truth.shape or predicted.ndim != 1 or not len(truth):
        raise ValueError(f"expected two equal lists of classes, got the shapes {predicted.shape} and {truth.shape}")
    highest = int(max(predicted.max(), truth.max()))
    names = _names(labels, highest + 1 if labels is None else len(labels))
    if highest >= len(names) or min(predicted.min(), truth.min()) < 0:
        raise ValueError(f"class indices must lie in 0…{len(names) - 1} (labels: {', '.join(names)})")
    scores = _label_scores(predicted, truth, list(range(len(names))), names)
    return scores | {"accuracy": float(np.mean(predicted == truth))}


def regression_scores(predictions: ArrayLike, references: ArrayLike) -> Scores:
    """Mean squared error, mean absolute error and R² of real values. Shapes: (N,) or (N, L)

    Raises:
        ValueError: shapes that differ, or no sample.
    """
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    predicted, truth = np.asarray(predictions, dtype=float), np.asarray(references, dtype=float)
    if predicted.shape != truth.shape or not len(truth):
        raise ValueError(f"predictions have the shape {predicted.shape}, references {truth.shape}; give equal shapes")
    return {
        "mse": float(mean_squared_error(truth, predicted)),
        "mae": float(mean_absolute_error(truth, predicted)),
        "r2": float(r2_score(truth, predicted)) if len(truth) > 1 else float("nan"),
        "samples": len(truth),
    }


def probabilities(logits: ArrayLike, problem_type: str) -> NDArray[np.float64]:
    """Sigmoid of the logits for several labels, softmax for one, the values as they are for regression.

    Shape: (N, L) → (N, L)

    Raises:
        ValueError: an unknown problem type.
    """
    from scipy.special import expit, softmax

    values = np.asarray(logits, dtype=np.float64)
    if problem_type == MULTI_LABEL:
        return expit(values)
    if problem_type == SINGLE_LABEL:
        return softmax(values, axis=-1)
    if problem_type == REGRESSION:
        return values
    raise ValueError(f"problem type {problem_type!r} is not one of {', '.join(PROBLEM_TYPES)}")


def classification_scores(
    logits: ArrayLike,
    references: ArrayLike,
    problem_type: str,
    labels: Sequence[str] | None = None,
    thresholds: Sequence[float] | None = None,
) -> Scores:
    """Decide from logits as the problem type says, then score the decisions.

    Args:
        logits: what the model returns. Shape: (N, L)
        references: indicators (N, L), class indices (N,), or real values, by problem type.
        problem_type: one of `PROBLEM_TYPES`.
        labels: the L label names.
        thresholds: for several labels, the probability that each label must exceed; 0.5 when not given.

    Raises:
        ValueError: an unknown problem type, or values that do not fit together.
    """
    values = probabilities(logits, problem_type)
    if problem_type == MULTI_LABEL:
        return multilabel_scores(decide(values, thresholds), references, labels)
    if problem_type == SINGLE_LABEL:
        return single_label_scores(values.argmax(-1), references, labels)
    truth = np.asarray(references, dtype=float)
    return regression_scores(values.reshape(truth.shape), truth)


def decide(probabilities: ArrayLike, thresholds: Sequence[float] | None = None) -> NDArray[np.int64]:
    """1 where a label's probability exceeds its threshold (0.5 when not given). Shape: (N, L) → (N, L)

    Raises:
        ValueError: a number of thresholds other than L.
    """
    values = np.asarray(probabilities)
    limits = np.asarray(0.5 if thresholds is None else thresholds, dtype=float)
    if limits.ndim and limits.shape != values.shape[-1:]:
        raise ValueError(f"{limits.size} thresholds for {values.shape[-1]} labels; give one per label")
    return (values > limits).astype(np.int64)


def thresholds_by_name(
    given: str | float | Mapping[str, float], labels: Sequence[str], current: Sequence[float] | None = None
) -> list[float]:
    """Thresholds in the order of the labels, from one for all of them, or from a mapping of names.

    Args:
        given: a number or a mapping, or either of them as JSON: `0.4`, `{"joie": 0.3, "peur": 0.6}`.
        labels: the L label names.
        current: those of the labels that a mapping leaves out; 0.5 when not given.

    Raises:
        ValueError: no such form, an unknown or repeated label, or a threshold outside [0, 1].
    """
    form = 'give a number from 0 to 1, or such numbers by label, as in \'{"joie": 0.3, "peur": 0.6}\''
    values: Any = given
    if isinstance(given, str):
        try:
            values = parsed_json(given)
        except ValueError as error:
            raise ValueError(f"label_thresholds={excerpt(given)} cannot be read ({error}): {form}") from error
    by_name = dict(values) if isinstance(values, Mapping) else dict.fromkeys(labels, values)
    for label, value in by_name.items():
        if label not in labels:
            meant = did_you_mean(label, labels)
            raise ValueError(f"threshold for the unknown label {label!r}{meant}: the labels are {' '.join(labels)}")
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise ValueError(f"the threshold {value!r} of the label {label!r} is none: {form}")
    own = dict(zip(labels, current or [0.5] * len(labels), strict=True)) | by_name
    return [float(own[label]) for label in labels]


def decided_labels(
    probabilities: ArrayLike,
    problem_type: ProblemType,
    labels: Sequence[str],
    thresholds: Sequence[float] | None = None,
) -> list[list[str]]:
    """Names of the labels that each sample gets: those above their thresholds, or the most probable one.

    Args:
        probabilities: Shape: (N, L)
        problem_type: several labels or one; real values have no labels.
        labels: the L label names.
        thresholds: for several labels; 0.5 when not given.
    """
    values = np.asarray(probabilities)
    if problem_type == MULTI_LABEL:
        chosen = decide(values, thresholds)
        return [[label for label, on in zip(labels, row, strict=True) if on] for row in chosen]
    return [[labels[i]] if problem_type == SINGLE_LABEL else [] for i in values.argmax(-1)]


def tune_thresholds(probabilities: ArrayLike, references: ArrayLike) -> list[float]:
    """The threshold of every label that gives it the best F1 on these samples.

    Candidates lie half-way between neighbouring probabilities and below the lowest; the one nearest to 0.5
    wins a tie. A label that has no positive or no negative sample here keeps 0.5. Use samples apart from
    train and test: the thresholds fit the samples they are tuned on.

    Args:
        probabilities: Shape: (N, L)
        references: indicators. Shape: (N, L)
    """
    values, truth = np.asarray(probabilities, dtype=float), _indicators(references, "references")
    if values.shape != truth.shape:
        raise ValueError(f"probabilities have the shape {values.shape}, references {truth.shape}; give equal shapes")
    return [_best_threshold(values[:, i], truth[:, i]) for i in range(values.shape[1])]


def _best_threshold(values: NDArray[np.float64], truth: NDArray[np.int64]) -> float:
    if truth.min() == truth.max():
        return 0.5
    distinct = np.unique(values)
    candidates = np.append((distinct[1:] + distinct[:-1]) / 2, (distinct[0] / 2, 0.5))
    order = np.argsort(values)
    below = np.searchsorted(values[order], candidates, side="right")
    true_positives = truth.sum() - np.append(0, truth[order].cumsum())[below]
    f1 = 2 * true_positives / (len(values) - below + truth.sum())
    best = candidates[np.isclose(f1, f1.max())]
    return float(best[np.abs(best - 0.5).argmin()])


def scores_table(methods: Mapping[str, Scores]) -> str:
    """The scores of one or more methods as text: labels in columns, one block per measure, one row per method.

    Methods scored on other samples than the first have their own row of support. Where a label has no example,
    the column `present` holds the macro means without it, and a line below says which labels these are. Intervals of
    F1, where a method has them, stand below (not for the micro mean). Regression scores, which have no labels, give
    one row per method, with their values in columns.
    """
    first = next(iter(methods.values()))
    if "f1" not in first:
        columns = [name for name in first if name != "samples"]
        rows = [[method, *(_figure(scores[name]) for name in columns)] for method, scores in methods.items()]
        return _aligned([["Method", *columns], *rows])
    labels = list(first["f1"])
    absent = {method: missing for method, scores in methods.items() if (missing := absent_labels(scores))}
    means = ["macro", *["present_macro"] * bool(absent), "micro"]
    rows = [["Label", *map(one_line, labels), *(mean.removesuffix("_macro") for mean in means)]]
    supports = {
        method: [*map(str, scores["support"].values()), *[""] * len(means)] for method, scores in methods.items()
    }
    if all(scores["support"] == first["support"] for scores in methods.values()):
        rows.append(["Support", *next(iter(supports.values()))])
    else:
        rows += [["Support", *[""] * (len(rows[0]) - 1)], *([f"  {name}", *row] for name, row in supports.items())]
    for measure, title in (("precision", "Precision"), ("recall", "Recall"), ("f1", "F1")):
        rows.append([title, *[""] * (len(rows[0]) - 1)])
        for method, scores in methods.items():
            figures = [*scores[measure].values(), *(scores[f"{mean}_{measure}"] for mean in means)]
            rows.append([f"  {method}", *map(_figure, figures)])
    rows += _interval_rows(methods, means)
    notes = [f"Accuracy  {name}: {_figure(s['accuracy'])}" for name, s in methods.items() if "accuracy" in s]
    notes += [
        f"{method}: no example of {', '.join(map(one_line, missing))}; such a label counts 0 in macro, not in present"
        for method, missing in absent.items()
    ]
    notes += [f"{method}: {note}" for method, scores in methods.items() if (note := note_on_intervals(scores))]
    return "\n".join([_aligned(rows), *notes])


def _interval_rows(methods: Mapping[str, Scores], means: Sequence[str]) -> list[list[str]]:
    """Where F1 lies with other respondents, for the methods that know: one block for each end of the intervals."""
    known = {method: scores for method, scores in methods.items() if "f1_interval" in scores}
    rows = []
    for end, title in enumerate(("F1 from (95 %)", "F1 to (95 %)") if known else ()):
        rows.append([title, *[""] * (len(next(iter(known.values()))["f1"]) + len(means))])
        for method, scores in known.items():
            # The mean over the labels present is the macro mean where all are.
            of_means = [scores["present_macro_f1_interval"] if mean == means[-2] else None for mean in means]
            intervals = [*scores["f1_interval"].values(), *of_means]
            rows.append([f"  {method}", *("" if each is None else _figure(each[end]) for each in intervals)])
    return rows


def note_on_intervals(scores: Scores) -> str:
    """Of whom the intervals of F1 were drawn, with a warning where these are few; empty where there are none."""
    if not (number := scores.get("interval_groups")):
        return ""
    who = counted(number, "text" if number == scores["samples"] else "respondent")
    drawn = f"the intervals of F1 are drawn from {who}"
    return f"{drawn}; {TOO_FEW}" if number < FEW_GROUPS else drawn


def absent_labels(scores: Scores) -> list[str]:
    """The labels of which the scored samples held no example: they count 0 in the macro means."""
    return [label for label, count in scores["support"].items() if not count]


def markdown_table(scores: Scores) -> str:
    """The scores of one method as a Markdown table: one row per label, then the means."""
    if "f1" not in scores:
        rows = [f"| {name} | {_figure(value)} |" for name, value in scores.items() if name != "samples"]
        return "\n".join(["| measure | value |", "|---|---|", *rows])
    support, intervals = scores["support"], scores.get("f1_interval", {})
    table = [["label", "precision", "recall", "F1", "F1, 95 %", "support"], ["---"] * 6]

    def add(title: str, figures: list[float], interval: list[float] | None, count: int) -> None:
        table.append([title, *map(_figure, figures), " to ".join(map(_figure, interval or [])), str(count)])

    measures = ("precision", "recall", "f1")
    for label, count in support.items():
        add(
            markdown_code(label).replace("|", "\\|"),
            [scores[measure][label] for measure in measures],
            intervals.get(label),
            count,
        )
    means: dict[str, str] = {
        "macro": "macro mean",
        "present_macro": "macro mean, labels present",
        "micro": "micro mean",
    }
    if absent_labels(scores):
        shown = {"present_macro": scores.get("present_macro_f1_interval")}
    else:
        del means["present_macro"]
        shown = {"macro": scores.get("present_macro_f1_interval")}
    for mean, title in means.items():
        add(title, [scores[f"{mean}_{measure}"] for measure in measures], shown.get(mean), sum(support.values()))
    if not intervals:
        table = [row[:4] + row[5:] for row in table]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def markdown_code(name: str) -> str:
    """A name of any characters as Markdown's code, on one line; in a table each `|` also needs a backslash."""
    text = one_line(name) or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    padding = " " if text[0] == "`" or text[-1] == "`" else ""  # which Markdown takes off again
    return f"{fence}{padding}{text}{padding}{fence}"


def one_line(text: str) -> str:
    """The text on one line; what would steer a terminal, or no file can hold, is written as its escape."""
    words = " ".join(text.split())
    return "".join(c.encode("unicode_escape").decode() if category(c) in ("Cc", "Cs") else c for c in words)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _figure(value: float) -> str:
    return f"{value:.3f}"


def _indicators(values: ArrayLike, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} have the shape {array.shape}; expected (samples, labels), at least one of each")
    if not np.isin(array, (0, 1)).all():
        wrong = array[~np.isin(array, (0, 1))].flat[0]
        raise ValueError(f"{name} hold {wrong}; only 0 and 1 are indicators (pass decisions, not probabilities)")
    return array.astype(np.int64)


def _names(labels: Sequence[str] | None, count: int) -> list[str]:
    names = [str(i) for i in range(count)] if labels is None else list(labels)
    if len(names) != count:
        raise ValueError(f"{len(names)} label names for {count} labels: {', '.join(names)}")
    if len(set(names)) != count:
        raise ValueError(f"label names repeat: {', '.join(names)}")
    return names


def _label_scores(
    predicted: NDArray[np.int64], truth: NDArray[np.int64], indices: list[int], names: list[str]
) -> Scores:
    from sklearn.metrics import precision_recall_fscore_support

    measures = ("precision", "recall", "f1")
    *by_label, support = precision_recall_fscore_support(
        truth, predicted, labels=indices, average=None, zero_division=0
    )
    scores: Scores = {
        measure: dict(zip(names, map(float, values), strict=True))
        for measure, values in zip(measures, by_label, strict=True)
    }
    scores["support"] = dict(zip(names, map(int, support), strict=True))
    present = np.asarray(support) > 0
    for measure, values in zip(measures, by_label, strict=True):
        scores[f"macro_{measure}"] = float(np.mean(values))
        scores[f"present_macro_{measure}"] = float(np.mean(values[present])) if present.any() else 0.0
    micro = precision_recall_fscore_support(truth, predicted, labels=indices, average="micro", zero_division=0)
    scores |= {f"micro_{measure}": float(value) for measure, value in zip(measures, micro[:3], strict=True)}
    return scores | {"samples": len(truth)}
