"""Which texts a classifier is least sure of: those most worth labelling next (active learning)."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fratrie.data.labels import plain_name

from .metrics import MULTI_LABEL, ProblemType

_ALIKE = 0.6  # from this share of common trigrams on, the second of two texts teaches little that is new


def doubts(
    probabilities: NDArray[np.float64], problem_type: ProblemType
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How unsure a classifier is of each text, and the label that it is least sure of.

    Several labels: the entropy (nats) of the set of labels, taken as independent, so the sum over labels of
    -p ln p - (1-p) ln(1-p); the label with the greatest of these. One label: 1 - the margin between the two most
    probable ones; the second of them. (Settles, Active Learning Literature Survey, 2009, section 3.1.)

    Args:
        probabilities: Shape: (N, L)
        problem_type: several labels or one.

    Returns:
        Doubts and positions of labels. Shapes: (N,) and (N,)
    """
    from scipy.special import entr

    if problem_type == MULTI_LABEL:
        entropies = entr(probabilities) + entr(1 - probabilities)
        return entropies.sum(-1), entropies.argmax(-1)
    order = np.argsort(-probabilities, axis=-1, kind="stable")[:, :2]
    best = np.take_along_axis(probabilities, order, axis=-1)
    return 1 - (best[:, 0] - best[:, -1]), order[:, -1]


def most_unlike(texts: Sequence[str], order: Iterable[int], number: int) -> list[int]:
    """The first texts of an order, without those that resemble an earlier one of them in most of their letters.

    Two texts do whose sets of trigrams share 60 % of their union (Jaccard); case and spaces are no matter.
    """
    chosen: list[int] = []
    met: list[set[str]] = []
    for place in order:
        if len(chosen) == number:
            break
        trigrams = _trigrams(texts[place])
        if all(len(trigrams & other) < _ALIKE * len(trigrams | other) for other in met):
            chosen.append(place)
            met.append(trigrams)
    return chosen


def _trigrams(text: str) -> set[str]:
    letters = f" {plain_name(text).casefold()} "
    return {letters[place : place + 3] for place in range(max(1, len(letters) - 2))}
