"""Calibration and thresholds of a classifier, learnt on logits of sentences that it has not seen, and their quality.

Shapes: N sentences, L labels.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logit
from sklearn.isotonic import IsotonicRegression

from fratrie.modeling.calibration import Points, calibrate_all
from fratrie.training.baselines import Fold
from fratrie.training.metrics import (
    MULTI_LABEL,
    ProblemType,
    decide,
    multilabel_scores,
    probabilities,
    tune_thresholds,
)

Method = Literal["temperature", "isotonic", "none"]
Logits = NDArray[np.floating[Any]]
Indicators = NDArray[np.int64]


def learn_points(logits_NL: Logits, truth_NL: Indicators, method: Method, problem_type: ProblemType) -> Points | None:
    """The lines that make logits fit the frequencies of the labels, as `config.label_calibration` holds them.

    Temperatures divide the logits (Guo et al. 2017): for several labels each label has its own, for one label all have
    one. Isotonic lines rise in any shape (Zadrozny and Elkan 2002); they want hundreds of examples per label.

    Args:
        logits_NL: of sentences that the model has not learnt.
        truth_NL: their labels, as indicators.
        method: "none" gives `None`.
        problem_type: several labels per sentence, or one.

    Raises:
        ValueError: isotonic lines for one label per sentence, whose probabilities hang together.
    """
    if method == "none":
        return None
    if problem_type == MULTI_LABEL:
        learn = _temperature_line if method == "temperature" else _isotonic_line
        return [learn(logits_NL[:, i], truth_NL[:, i]) for i in range(truth_NL.shape[1])]
    check_method(method, problem_type)

    def loss(log_temperature: float) -> float:
        return -float((log_softmax(logits_NL / np.exp(log_temperature), axis=-1) * truth_NL).sum())

    return [_line_of(_least(loss))] * truth_NL.shape[1]


def check_method(method: Method, problem_type: ProblemType) -> None:
    """Check that a method calibrates such labels.

    Raises:
        ValueError: isotonic lines for one label per sentence, whose probabilities hang together.
    """
    if method == "isotonic" and problem_type != MULTI_LABEL:
        raise ValueError("isotonic calibration is for several labels per text: for one label take the temperature")


def temperatures(points: Points) -> list[float]:
    """The temperatures that lines of two points stand for."""
    return [(line[1][0] - line[0][0]) / (line[1][1] - line[0][1]) for line in points]


def calibrated(logits_NL: Logits, points: Points | None) -> NDArray[np.float64]:
    """The logits after calibration, as the model gives them."""
    values = torch.as_tensor(np.asarray(logits_NL, dtype=np.float32))
    return (values if points is None else calibrate_all(values, points)).double().numpy()


def learn_thresholds(probabilities_NL: Logits, truth_NL: Indicators, folds: Sequence[Fold]) -> list[float]:
    """Thresholds of the best F1 on all sentences, if such thresholds win on respondents that they were not tuned on.

    For each fold thresholds are tuned on the others; unless the macro-F1 of all these decisions is above that at 0.5,
    all thresholds are 0.5.

    Args:
        probabilities_NL: calibrated, of sentences that the model has not learnt.
        truth_NL: their labels, as indicators.
        folds: (other rows, held-out rows).
    """
    tuned = np.zeros_like(truth_NL)
    for others, held_out in folds:
        limits = tune_thresholds(probabilities_NL[others], truth_NL[others])
        tuned[held_out] = decide(probabilities_NL[held_out], limits)
    if _macro_f1(tuned, truth_NL) > _macro_f1(decide(probabilities_NL), truth_NL):
        return tune_thresholds(probabilities_NL, truth_NL)
    return [0.5] * truth_NL.shape[1]


def calibration_errors(probabilities_NL: Logits, truth_NL: Indicators, bins: int = 10) -> NDArray[np.float64]:
    """Expected calibration error of each label (Naeini et al. 2015). Shape: (L,)

    The mean distance between the probabilities of a bin and the frequency of the label there, each bin counting as
    often as it has sentences.
    """
    columns = zip(np.asarray(probabilities_NL).T, truth_NL.T, strict=True)
    return np.array([_distance(reliability(values, truth, bins)) / len(truth) for values, truth in columns])


def reliability(probabilities: Logits, truth: Indicators, bins: int = 10) -> list[dict[str, float]]:
    """What happens at which probability: one entry for each bin of equal width that holds any of the decisions."""
    values, happened = np.ravel(probabilities), np.ravel(truth)
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.digitize(values, edges[1:-1]), 0, bins - 1)
    return [
        {
            "low": float(edges[i]),
            "high": float(edges[i + 1]),
            "confidence": float(values[place == i].mean()),
            "frequency": float(happened[place == i].mean()),
            "count": int((place == i).sum()),
        }
        for i in np.unique(place)
    ]


def compare_calibration(
    before_NL: Logits, after_NL: Logits, truth_NL: Indicators, labels: Sequence[str], problem_type: ProblemType
) -> dict[str, Any]:
    """Calibration errors by label and reliability of all decisions, from logits before and after calibration."""
    found: dict[str, Any] = {"ece": {}, "reliability": {}}
    for name, logits_NL in (("before", before_NL), ("after", after_NL)):
        values = probabilities(logits_NL, problem_type)
        errors = calibration_errors(values, truth_NL)
        found["ece"] |= {name: dict(zip(labels, errors.tolist(), strict=True)), f"mean_{name}": float(errors.mean())}
        found["reliability"][name] = reliability(values, truth_NL)
    return found


def _temperature_line(logits_N: Logits, truth_N: Indicators) -> list[list[float]]:
    signs = np.where(truth_N == 1, -1.0, 1.0)
    return _line_of(_least(lambda log_t: float(np.logaddexp(0, signs * logits_N / np.exp(log_t)).sum())))


def _least(loss: Any) -> float:
    """The temperature of the smallest loss; bounded, since labels told apart without a fault would want none."""
    return float(np.exp(minimize_scalar(loss, bounds=(np.log(0.05), np.log(20)), method="bounded").x))


def _line_of(temperature: float) -> list[list[float]]:
    return [[-temperature, -1.0], [temperature, 1.0]]


def _isotonic_line(logits_N: Logits, truth_N: Indicators) -> list[list[float]]:
    """Flat beyond its ends, and never nearer to 0 and 1 than one more sentence could tell."""
    margin = 1 / (len(truth_N) + 2)
    fitted = IsotonicRegression(y_min=margin, y_max=1 - margin).fit(logits_N, truth_N)
    x, y = fitted.X_thresholds_, logit(fitted.y_thresholds_)
    points = [[x[0] - 1, y[0]], *zip(x, y, strict=True), [x[-1] + 1, y[-1]]]
    return [[float(place), float(value)] for place, value in points]


def _distance(bins: Sequence[dict[str, float]]) -> float:
    return sum(each["count"] * abs(each["confidence"] - each["frequency"]) for each in bins)


def _macro_f1(predictions_NL: Indicators, truth_NL: Indicators) -> float:
    return multilabel_scores(predictions_NL, truth_NL)["macro_f1"]
