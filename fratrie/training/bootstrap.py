"""Bootstrap intervals of F1 (Efron 1979): how far the scores would move with other respondents.

Sentences of one respondent resemble each other, so whole respondents are drawn, with replacement. Draws depend on
the seed and the respondents alone: two methods scored on the same sentences are compared draw by draw.

Shapes: S runs (seeds) of a method, N samples, L labels, G groups, R draws.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def bootstrap_f1(
    predictions: ArrayLike, references: ArrayLike, groups: Sequence[Hashable], draws: int = 2000, seed: int = 0
) -> NDArray[np.float64]:
    """F1 of every label in every draw of the groups, and the macro mean behind them.

    A draw without an example of a label says nothing about it: its F1 is NaN there, and the macro mean is that of the
    labels which the draw holds.

    Args:
        predictions: indicators of one run (N, L), or of several (S, N, L), whose F1 is then averaged in each draw.
        references: indicators of the truth. Shape: (N, L)
        groups: who speaks in each sample (N); all samples of a group are drawn together.
        draws: R, each of as many groups as there are.
        seed: of the draws.

    Returns:
        Shape: (R, L + 1)

    Raises:
        ValueError: shapes that do not fit together, no sample, or values other than 0 and 1.
    """
    truth = np.asarray(references, dtype=np.int64)
    runs = np.asarray(predictions, dtype=np.int64)
    runs = runs[None] if runs.ndim == 2 else runs
    if truth.ndim != 2 or runs.shape[1:] != truth.shape or len(groups) != len(truth):
        raise ValueError(
            f"predictions {runs.shape[1:]}, references {truth.shape} and {len(groups)} groups do not belong together: "
            "give (samples, labels), the same, and one group per sample"
        )
    if not len(truth) or not np.isin(truth, (0, 1)).all() or not np.isin(np.asarray(predictions), (0, 1)).all():
        raise ValueError("predictions and references must be indicators, 0 or 1, of one sample or more")
    place, drawn = draw_groups(groups, draws, seed)

    def in_draws(values: NDArray[np.int64]) -> NDArray[np.int64]:
        by_group = np.zeros((drawn.shape[1], values.shape[1]), dtype=np.int64)
        np.add.at(by_group, place, values)
        return drawn @ by_group

    scores = [_f1(in_draws(run * truth), in_draws(run + truth)) for run in runs]
    return _with_macro(np.mean(scores, axis=0), in_draws(truth))


def draw_groups(
    groups: Sequence[Hashable], draws: int = 2000, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw as many groups as there are, with replacement, R times.

    Returns:
        The place of each sample's group among the G groups, shape (N,), and how often each draw holds each group,
        shape (R, G).
    """
    places = {name: place for place, name in enumerate(sorted(set(groups), key=str))}
    drawn = np.random.default_rng(seed).multinomial(len(places), np.full(len(places), 1 / len(places)), size=draws)
    return np.array([places[name] for name in groups]), drawn


def f1_intervals(
    predictions: ArrayLike, references: ArrayLike, groups: Sequence[Hashable], labels: Sequence[str]
) -> tuple[dict[str, list[float] | None], list[float] | None]:
    """The 95 % percentile interval `[low, high]` of each label's F1, and of the macro mean of the labels present.

    A label has the interval of the draws that hold it, `None` where none does (see `bootstrap_f1`).
    """
    *by_label, macro = map(percentile_interval, bootstrap_f1(predictions, references, groups).T)
    return dict(zip(labels, by_label, strict=True)), macro


def percentile_interval(draws: NDArray[np.float64]) -> list[float] | None:
    """The 95 % percentile interval `[low, high]` of the draws that are not NaN, `None` where all are."""
    counted = draws[~np.isnan(draws)]
    return np.quantile(counted, [0.025, 0.975]).tolist() if len(counted) else None


def _with_macro(by_label: NDArray[np.float64], support: NDArray[np.int64]) -> NDArray[np.float64]:
    """F1 of labels without support as NaN, and behind them the mean of the others. Shape: (…, L) → (…, L + 1)"""
    present = support > 0
    total = np.where(present, by_label, 0).sum(-1, keepdims=True)
    count = present.sum(-1, keepdims=True)
    macro = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return np.concatenate([np.where(present, by_label, np.nan), macro], axis=-1)


def _f1(true_positives: NDArray[np.int64], predicted_and_true: NDArray[np.int64]) -> NDArray[np.float64]:
    """F1 = 2 TP / (predicted positives + true positives)."""
    return 2 * true_positives / np.maximum(predicted_and_true, 1)


def compare(
    predictions: ArrayLike,
    baselines: Mapping[str, ArrayLike],
    references: ArrayLike,
    groups: Sequence[Hashable],
    labels: Sequence[str],
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """F1 of a method beside that of the best baseline, with 95 % percentile intervals.

    The best baseline of a label, and of the macro mean, is the one with the best score on these very samples: the
    hardest to beat.

    Args:
        predictions: indicators of one run (N, L), or of several (S, N, L), whose F1 is averaged.
        baselines: indicators of each baseline, by name. Shape: (N, L)
        references: indicators of the truth. Shape: (N, L)
        groups: who speaks in each sample (N).
        labels: the L label names.
        draws, seed: of `bootstrap_f1`.

    Returns:
        For each label and for `macro`: `f1`, its `interval`, the name `baseline`, `baseline_f1`, the `difference` of
        the two and its `difference_interval`. Intervals are `[low, high]`.

    Raises:
        ValueError: no baseline, a label without an example, or shapes that do not fit together.
    """
    if not baselines:
        raise ValueError("there is no baseline to compare with; give one or more")
    truth = np.asarray(references, dtype=np.int64)
    methods = [predictions, *baselines.values()]
    missing = [label for label, count in zip(labels, truth.sum(0), strict=True) if not count]
    if missing:
        raise ValueError(f"no sample has the label {', '.join(map(repr, missing))}: leave it out, nothing compares it")
    points = np.array([_point_f1(method, truth) for method in methods])
    sampled = np.array([bootstrap_f1(method, truth, groups, draws, seed) for method in methods])
    best = 1 + points[1:].argmax(0)
    columns = range(len(best))
    differences = sampled[0] - sampled[best, :, columns].T
    ends, apart = ([percentile_interval(values) for values in table.T] for table in (sampled[0], differences))
    names = list(baselines)
    return {
        name: {
            "f1": float(points[0, i]),
            "interval": ends[i],
            "baseline": names[best[i] - 1],
            "baseline_f1": float(points[best[i], i]),
            "difference": float(points[0, i] - points[best[i], i]),
            "difference_interval": apart[i],
        }
        for i, name in zip(columns, [*labels, "macro"], strict=True)
    }


def _point_f1(predictions: ArrayLike, truth: NDArray[np.int64]) -> NDArray[np.float64]:
    """F1 of every label on the samples themselves, and the macro mean behind them. Shape: (L + 1,)"""
    runs = np.asarray(predictions, dtype=np.int64).reshape(-1, *truth.shape)
    by_label = np.mean([_f1((run * truth).sum(0), (run + truth).sum(0)) for run in runs], axis=0)
    return _with_macro(by_label, truth.sum(0))


def comparison_table(comparison: Mapping[str, Mapping[str, Any]]) -> str:
    """What `compare` gives as a Markdown table: one row per label."""
    lines = ["| | F1 | 95 % interval | best baseline | difference | 95 % interval |", "|---|---|---|---|---|---|"]
    for name, row in comparison.items():
        (low, high), (less, more) = row["interval"], row["difference_interval"]
        lines.append(
            f"| {name} | {row['f1']:.3f} | {low:.3f} to {high:.3f} | {row['baseline_f1']:.3f} ({row['baseline']}) | "
            f"{row['difference']:+.3f} | {less:+.3f} to {more:+.3f} |"
        )
    return "\n".join(lines)
