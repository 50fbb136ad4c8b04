"""How the scores grow with the sentences learnt from.

Shapes: N sentences, L labels.
"""

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fratrie.training.baselines import Sentences, decide, rows_of
from fratrie.training.metrics import SINGLE_LABEL, multilabel_scores

from .classical import CLASSICAL_METHODS, open_fits
from .data import StudyData

Rows = NDArray[np.int64]


def subsets(train: Sentences, sizes: Sequence[int], draws: int, seed: int = 0) -> list[list[Rows]]:
    """Draw sentences to learn from, all of a respondent or none; of one draw, the smaller parts lie in the larger.

    Respondents come in an order drawn at random, each part as many of them as hold its size. Where the smallest part
    would lack a label, the first respondent of that order who has it comes first.

    Args:
        train: without groups, each sentence is a respondent of its own.
        sizes: sentences of each part, at least; the whole of train where it has no more.
        draws: parts of each size.
        seed: of the draws.

    Returns:
        For each size, the rows of each draw, ascending.
    """
    rows_by_group: dict[Hashable, list[int]] = {}
    for row, group in enumerate(train.respondents):
        rows_by_group.setdefault(group, []).append(row)
    members = [np.array(rows) for rows in rows_by_group.values()]
    drawn = [_order(members, train.labels, min(sizes), np.random.default_rng([seed, draw])) for draw in range(draws)]
    return [[np.sort(_first(order, members, size)) for order in drawn] for size in sizes]


def _order(
    members: Sequence[Rows], truth_NL: NDArray[np.int64], smallest: int, draw: np.random.Generator
) -> list[int]:
    """Respondents at random; those who bring the smallest part a label that it would lack come first."""
    drawn: list[int] = draw.permutation(len(members)).tolist()
    first: list[int] = []
    while True:
        order = first + [group for group in drawn if group not in first]
        there = truth_NL[_first(order, members, smallest)].any(0) | truth_NL[_all(first, members)].any(0)
        missing = truth_NL.any(0) & ~there
        if not missing.any():
            return order
        first.append(next(group for group in drawn if truth_NL[members[group]][:, missing].any()))


def _first(order: Sequence[int], members: Sequence[Rows], size: int) -> Rows:
    """The rows of as many respondents as hold `size` sentences."""
    number = 1 + int(np.searchsorted(np.cumsum([len(members[group]) for group in order]), size))
    return _all(order[:number], members)


def _all(chosen: Sequence[int], members: Sequence[Rows]) -> Rows:
    return np.concatenate([np.empty(0, dtype=np.int64), *(members[group] for group in chosen)])


def best_classical(classical: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[str, str]:
    """Method and features that did best in cross-validation, of what `score_classical` has found."""
    scores = {
        (method, name): one["cross_validated_macro_f1"] for method, by in classical.items() for name, one in by.items()
    }
    return max(scores, key=lambda pair: scores[pair])


def classical_curve(
    data: StudyData,
    method: str,
    features: str,
    parameters: Mapping[str, Any],
    parts: Sequence[Sequence[Rows]],
    encoder: str | os.PathLike[str],
    seed: int = 0,
    workers: int | None = None,
    max_length: int | None = None,
) -> list[list[float]]:
    """Macro-F1 on test of a classical method, its parameters kept, for each draw of each size.

    Args:
        data: train and test.
        method: a key of `CLASSICAL_METHODS`.
        features: that it reads.
        parameters: of its classifier.
        parts: what `subsets` gives.
        encoder: folder of the pretrained encoder, for a method on its pooled states.
        seed, workers, max_length: as `score_classical`.
    """
    asked = rows_of(data.train, data.test)[1]
    with open_fits(features, data, encoder, workers, max_length) as fit_all:
        decided = decide(
            CLASSICAL_METHODS[method],
            [parameters],
            [(rows, asked) for draws in parts for rows in draws],
            len(data.task.labels),
            fit_all,
            single_label=data.task.problem_type == SINGLE_LABEL,
            seed=seed,
        )
    scores = iter(multilabel_scores(predicted_NL, data.test.labels)["present_macro_f1"] for (predicted_NL,) in decided)
    return [[next(scores) for _ in draws] for draws in parts]
