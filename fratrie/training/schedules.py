"""The optimizer (AdamW, Loshchilov & Hutter 2019) and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, get_scheduler

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
# With fewer steps pretrained layers and their new head have not learnt a few labels (benchmarks/few_labels.md).
LEAST_STEPS = 800


def build_optimizer(
    model: PreTrainedModel,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.98),
    epsilon: float = 1e-8,
    device: torch.device | None = None,
    rates: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW over the trainable weights; only those of two dimensions or more decay (no norms, no biases).

    Args:
        model: whose weights are trained.
        learning_rate: peak rate of every weight that `rates` does not name.
        weight_decay: of matrices.
        betas, epsilon: of AdamW.
        device: where the weights will be.
        rates: peak rates by the name of a weight.

    Raises:
        ValueError: no weight is trainable.
    """
    rates = rates or {}
    trainable = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not trainable:
        raise ValueError("no weight of the model is trainable; unfreeze at least one layer")
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, weight in trainable:
        groups.setdefault((rates.get(name, learning_rate), weight.ndim >= 2), []).append(weight)
    # The highest rate comes first, since the loop logs that of the first group.
    described = [
        {"params": weights, "lr": rate, "weight_decay": weight_decay if matrices else 0.0}
        for (rate, matrices), weights in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]
    fused = (device or trainable[0][1].device).type in FUSED_DEVICES
    return torch.optim.AdamW(described, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


def enough_epochs(epochs: int, steps_per_epoch: int, least_steps: int = LEAST_STEPS) -> int:
    """So many epochs, or as many more as give `least_steps` optimizer steps: few rows are seen more often."""
    return max(epochs, math.ceil(least_steps / steps_per_epoch))


def warmup_length(warmup_steps: float, total_steps: int) -> int:
    """Steps of warm-up: `warmup_steps` itself, or from 0 to below 1 that share of `total_steps`, rounded up.

    Raises:
        ValueError: a negative number, or more than `total_steps`.
    """
    length = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    if warmup_steps < 0 or length > total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} does not fit in a run of {total_steps} steps")
    return length


def build_scheduler(
    optimizer: torch.optim.Optimizer, shape: str, warmup_steps: float, total_steps: int
) -> LRScheduler:
    """Linear warm-up from zero, then `shape` (`linear` or `cosine` decay to zero, or `constant`).

    To be stepped once per optimizer step, also with several processes (so not to be prepared by Accelerate).
    """
    name = "constant_with_warmup" if shape == "constant" else shape
    return get_scheduler(name, optimizer, warmup_length(warmup_steps, total_steps), total_steps)
