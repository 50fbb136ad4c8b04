"""Calibration of a classifier's logits: one broken line for each label, from its logit to a calibrated one.

A line through two points is temperature scaling (Guo et al. 2017, "On Calibration of Modern Neural Networks"); more
points are any isotonic map (Zadrozny and Elkan 2002).

Shapes: B batch, N texts of a corpus, M labels, K points.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

_BATCH = 256
Points = Sequence[Sequence[Sequence[float]]]


def calibrate(logits_BM: torch.Tensor, points: Points) -> torch.Tensor:
    """Map each label's logits along its line, which goes on beyond its ends as straight as its ends are.

    Args:
        logits_BM: of all labels.
        points: for each label two or more pairs (logit, calibrated logit), in the order of `check_points`.
    """
    most = max(map(len, points))
    padded = [[*line, *[line[-1]] * (most - len(line))] for line in points]
    x_MK, y_MK = torch.tensor(padded, dtype=torch.float32, device=logits_BM.device).unbind(-1)
    width_MK = x_MK.diff(dim=-1)
    slope_MK = y_MK.diff(dim=-1) / width_MK.where(width_MK > 0, 1)  # no width: the padding, which adds nothing
    last_M = slope_MK[torch.arange(len(points)), [len(line) - 2 for line in points]]
    from_first_BM = logits_BM.float() - x_MK[:, 0]
    along_BMK = (logits_BM.float()[..., None] - x_MK[:, :-1]).clamp(min=0).minimum(width_MK)
    below_BM, above_BM = from_first_BM.clamp(max=0), (logits_BM.float() - x_MK[:, -1]).clamp(min=0)
    inside_BM = (along_BMK * slope_MK).sum(-1)
    return (y_MK[:, 0] + below_BM * slope_MK[:, 0] + inside_BM + above_BM * last_M).to(logits_BM.dtype)


def calibrate_all(logits_NM: torch.Tensor, points: Points) -> torch.Tensor:
    """`calibrate` for the logits of a corpus, batch by batch: it takes memory for every point of every logit."""
    return torch.cat([calibrate(logits_BM, points) for logits_BM in logits_NM.split(_BATCH)])


def check_points(points: Points, labels: int) -> None:
    """Refuse what is no calibration.

    Raises:
        ValueError: not one line per label, a line of fewer than two points, a number that is not finite, logits that
            do not grow, or calibrated ones that fall.
    """
    if len(points) != labels:
        raise ValueError(f"label_calibration has {len(points)} lines for {labels} labels: give one per label.")
    for line in points:
        if (
            len(line) < 2
            or not all(len(point) == 2 and all(map(math.isfinite, point)) for point in line)
            or any(right[0] <= left[0] or right[1] < left[1] for left, right in pairwise(line))
        ):
            raise ValueError(
                f"label_calibration has the line {line}: give two points [logit, calibrated logit] or more, whose "
                "logits grow and whose calibrated logits do not fall."
            )
