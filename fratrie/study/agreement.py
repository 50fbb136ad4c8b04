"""Agreement of two annotators who gave each sentence a set of labels, beyond what chance would give.

Shapes: N sentences, L labels, G respondents, V different sets of labels. Totals have a first row of the sample itself
and R more, one of each bootstrap draw of respondents (see `fratrie.training.bootstrap`).
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fratrie.training.bootstrap import draw_groups, percentile_interval

Floats = NDArray[np.float64]


def agreement(
    first: Sequence[ArrayLike | None],
    second: Sequence[ArrayLike | None],
    labels: Sequence[str],
    groups: Sequence[Hashable] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare the labels of two annotators on the sentences that both of them labelled.

    Args:
        first: indicators of one annotator, a row per sentence `(L,)`, `None` where the sentence was not labelled.
        second: those of the other, in the same order.
        labels: the L label names.
        groups: who speaks in each sentence (N); without them each sentence counts for itself.
        draws: of the bootstrap.
        seed: of the draws.

    Returns:
        `sentences` labelled by both and `left_out`, the number of others; Cohen's (1960) `kappa` and its
        `kappa_interval` by label, and `mean_kappa` of the labels that have one; Krippendorff's `alpha` of the label
        sets, with Passonneau's (2006) MASI distance, which for one label per sentence is the nominal one; `exact`, the
        share of equal sets. `mean_kappa_interval` and `alpha_interval` are `[low, high]`, 95 % by respondent, of
        whom there are `interval_groups`. `None`
        stands for what is not defined: of a label that both give always or never, or of intervals of one respondent.

    Raises:
        ValueError: no sentence was labelled by both.
    """
    rows = [i for i, pair in enumerate(zip(first, second, strict=True)) if all(row is not None for row in pair)]
    if not rows:
        raise ValueError("no sentence has labels of both annotators: agreement needs some that both have labelled")
    first_NL, second_NL = (np.array([given[i] for i in rows], dtype=np.float64) for given in (first, second))
    place_N, drawn_RG = draw_groups(rows if groups is None else [groups[i] for i in rows], draws, seed)
    respondents = drawn_RG.shape[1]
    if respondents == 1:
        drawn_RG = drawn_RG[:0]
    times_RG = np.vstack([np.ones(drawn_RG.shape[1]), drawn_RG])
    kappa_RL = _kappa(first_NL, second_NL, place_N, times_RG)
    mean_R = _mean_of_defined(kappa_RL)
    alpha_R = _alpha(first_NL, second_NL, place_N, times_RG)
    return {
        "sentences": len(rows),
        "left_out": len(first) - len(rows),
        "kappa": {label: _or_none(values[0]) for label, values in zip(labels, kappa_RL.T, strict=True)},
        "kappa_interval": {
            label: percentile_interval(values[1:]) for label, values in zip(labels, kappa_RL.T, strict=True)
        },
        "mean_kappa": _or_none(mean_R[0]),
        "mean_kappa_interval": percentile_interval(mean_R[1:]),
        "alpha": _or_none(alpha_R[0]),
        "alpha_interval": percentile_interval(alpha_R[1:]),
        "interval_groups": respondents,
        "exact": float((first_NL == second_NL).all(1).mean()),
    }


def _kappa(first_NL: Floats, second_NL: Floats, place_N: NDArray[np.int64], times_RG: Floats) -> Floats:
    """Kappa of each label in each draw, NaN where both give it always or never. Shape: (R + 1, L)

    scikit-learn's `cohen_kappa_score`, for all draws at once.
    """
    size, first, second, both = (
        times_RG @ _sums(values_NL, place_N, times_RG.shape[1])
        for values_NL in (np.ones((len(place_N), 1)), first_NL, second_NL, first_NL * second_NL)
    )
    agreed = size * (size - first - second + 2 * both)
    by_chance = first * second + (size - first) * (size - second)
    return _ratio(agreed - by_chance, size**2 - by_chance)


def _alpha(first_NL: Floats, second_NL: Floats, place_N: NDArray[np.int64], times_RG: Floats) -> Floats:
    """Krippendorff's (2011) alpha of the label sets in each draw, NaN where all sets are equal. Shape: (R + 1,)

    For two annotators the observed disagreement is the mean distance of their sets, and that by chance the mean
    distance of any two of the 2N sets. The package `krippendorff` builds N V² coincidences for it, in every draw.
    """
    sets_VL, codes = np.unique(np.concatenate([first_NL, second_NL]), axis=0, return_inverse=True)
    first_N, second_N = np.split(codes.ravel(), 2)
    distance_VV = masi_distances(sets_VL)
    used_NV = np.zeros((len(place_N), len(sets_VL)))
    for code_N in (first_N, second_N):
        used_NV[np.arange(len(code_N)), code_N] += 1
    apart_R, used_RV = (
        times_RG @ _sums(values, place_N, times_RG.shape[1]) for values in (distance_VV[first_N, second_N], used_NV)
    )
    size_R = used_RV.sum(1)
    by_chance_R = (used_RV @ distance_VV * used_RV).sum(1)
    return 1 - _ratio(2 * apart_R * (size_R - 1), by_chance_R)


def masi_distances(sets_VL: Floats) -> Floats:
    """Passonneau's (2006) distance of measuring agreement on set-valued items, for every two of V sets.

    1 minus the Jaccard index times 1 for equal sets, 2/3 where one holds the other, 1/3 where they overlap.

    Args:
        sets_VL: indicators; no two rows are equal.

    Returns:
        Shape: (V, V)
    """
    size_V = sets_VL.sum(1)
    shared_VV = sets_VL @ sets_VL.T
    all_VV = size_V[:, None] + size_V - shared_VV
    monotonicity_VV = np.where(shared_VV == np.minimum(size_V[:, None], size_V), 2 / 3, 1 / 3)
    distance_VV = 1 - shared_VV / np.maximum(all_VV, 1) * monotonicity_VV
    np.fill_diagonal(distance_VV, 0)
    return distance_VV


def _sums(values: Floats, place_N: NDArray[np.int64], groups: int) -> Floats:
    """Sum the rows of each respondent. Shape: (N, …) → (G, …)"""
    sums = np.zeros((groups, *values.shape[1:]))
    np.add.at(sums, place_N, values)
    return sums


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full(below.shape, np.nan), where=below > 0)


def _mean_of_defined(values_RL: Floats) -> Floats:
    defined_RL = ~np.isnan(values_RL)
    return _ratio(np.where(defined_RL, values_RL, 0).sum(1), defined_RL.sum(1).astype(np.float64))


def _or_none(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)
