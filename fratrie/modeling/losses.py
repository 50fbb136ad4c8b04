"""The training losses: each is a sum over real targets divided by their number.

The number is that of the batch, or `num_items_in_batch`, that of a global batch of which this one is a part: so
neither micro-batches, nor packing, nor the number of processes change the loss. The balancing loss of experts is the
exception: a product of means over each micro-batch, of which the mean is taken (see `share_of_batch`); it and the
other losses of routers are in `experts.py`. What mixers add is taken so as well.

Shapes: B batch, T positions, N targets, V vocabulary, M labels.
"""

from typing import Literal

import torch
from torch import nn

from .configuration import FratrieConfig

IGNORED = -100


def has_mixer_losses(config: FratrieConfig) -> bool:
    """Whether some layer's mixer has a part in the training loss."""
    return any(mixer.has_loss for mixer in config.mixers)


def add_mixer_losses(
    loss: torch.Tensor | None, mixer_losses: tuple[torch.Tensor, ...] | None, share: torch.Tensor | float
) -> torch.Tensor | None:
    """Add what mixers passed through a `MixerLoss` to the loss of a head, `share` of it (see `share_of_batch`)."""
    if loss is None or not mixer_losses:
        return loss
    return loss + sum((share * extra).to(loss.device) for extra in mixer_losses)


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Cross entropy of the tokens whose label is not -100; zero where there is none.

    Args:
        logits: `(…, V)`.
        labels: `(…)`, token ids.
        num_items_in_batch: number of targets to divide by.
    """
    logits_NV = logits.flatten(0, -2).to(torch.promote_types(torch.float32, logits.dtype))
    labels_N = labels.to(logits.device).flatten()
    total = nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    return total / count_targets(labels_N, num_items_in_batch)


def shift_labels(
    labels: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put under each position the label of the next one, -100 where a document ends.

    Args:
        labels: `(B, T)`, not shifted.
        position_ids: `(B or 1, T)`; a position that is not above the last one begins a document.
        attention_mask: `(B, past + T)`, zero at padding, which predicts nothing.
        cu_seq_lens: `(documents + 1,)` boundaries in a batch of one row.

    Returns:
        `(B, T)`.
    """
    next_BT, device = labels[:, 1:], labels.device  # one shorter than the rows until it is padded
    if position_ids is not None:
        next_BT = next_BT.masked_fill(position_ids.to(device).diff(dim=-1) <= 0, IGNORED)
    if attention_mask is not None and attention_mask.ndim == 2:
        next_BT = next_BT.masked_fill(attention_mask[:, -labels.shape[1] : -1].to(device) == 0, IGNORED)
    if cu_seq_lens is not None:
        next_BT = next_BT.index_fill(1, cu_seq_lens[1:-1].to(device).long() - 1, IGNORED)
    return nn.functional.pad(next_BT, (0, 1), value=IGNORED)


def share_of_batch(labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | float:
    """Part of the global batch's targets that `labels` holds: the weight of a loss that is a mean of its own."""
    if labels is None or num_items_in_batch is None:
        return 1.0
    return (labels != IGNORED).sum() / count_targets(labels, num_items_in_batch)


def target_rows(labels: torch.Tensor) -> torch.Tensor:
    """Places `(N,)` of the labels that are targets, counted along the rows; their number must be read by the host."""
    return (labels.flatten() != IGNORED).nonzero().flatten()


def count_targets(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """What a sum over targets is divided by: that of the global batch, or of these labels; at least 1."""
    if num_items_in_batch is None:
        return (labels != IGNORED).sum().clamp_min(1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(labels.device).clamp_min(1)
    return max(num_items_in_batch, 1)


def sequence_classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    config: FratrieConfig,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Loss of a sentence's labels, by `config.problem_type`.

    Where that is `None` it is guessed from the shapes (see `guess_problem_type`).

    Args:
        logits: `(B, M)`.
        labels: `(B,)` for one label, `(B, M)` for several (numbers of any type) and for regression.
        config: its `problem_type` and `pos_weight`.
        num_items_in_batch: number of targets to divide by: sentences for one label, else sentences times M.

    Raises:
        ValueError: when the labels do not fit the logits, by their values on a CPU alone: elsewhere the loss is NaN
            where several labels hold other values, and torch stops at a label that is not there.
    """
    labels = labels.to(logits.device)
    logits_BM = logits.to(torch.promote_types(torch.float32, logits.dtype))
    problem_type = config.problem_type or guess_problem_type(logits_BM, labels)
    if problem_type == "single_label_classification":
        if labels.numel() != len(logits_BM):
            raise ValueError(
                f"Labels of shape {tuple(labels.shape)} do not fit one label for each of {len(logits_BM)} sentences: "
                "for several labels at once set config.problem_type='multi_label_classification'."
            )
        outside = (labels != IGNORED) & ((labels < 0) | (labels >= logits_BM.shape[-1]))
        if _any(outside):
            raise ValueError(
                f"Label {int(labels[outside][0])} lies outside the {logits_BM.shape[-1]} labels of the model: set "
                "num_labels."
            )
        return token_cross_entropy(logits_BM, labels.long().view(-1), num_items_in_batch)
    if labels.numel() != logits_BM.numel():
        raise ValueError(
            f"Labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits_BM.shape)} for "
            f"problem_type={problem_type!r}: give each sentence {logits_BM.shape[-1]} numbers."
        )
    targets_BM = labels.view_as(logits_BM).to(logits_BM.dtype)
    wrong_BM = (targets_BM < 0) | (targets_BM > 1)
    if problem_type == "multi_label_classification" and _any(wrong_BM):
        raise ValueError(f"Labels of problem_type={problem_type!r} must lie between 0 and 1, one number per label.")
    if problem_type == "regression":
        losses_BM = (logits_BM - targets_BM).square()
    else:
        weight_M = None if config.pos_weight is None else logits_BM.new_tensor(config.pos_weight)
        losses_BM = nn.functional.binary_cross_entropy_with_logits(
            logits_BM, targets_BM, pos_weight=weight_M, reduction="none"
        ).masked_fill(wrong_BM, torch.nan)
    return losses_BM.sum() / (losses_BM.numel() if num_items_in_batch is None else num_items_in_batch)


def _any(mistakes: torch.Tensor) -> bool:
    """Whether some label is wrong. A compiled graph cannot look for it, and the host would wait for another device."""
    return not torch.compiler.is_compiling() and mistakes.device.type == "cpu" and bool(mistakes.any())


def guess_problem_type(
    logits: torch.Tensor, labels: torch.Tensor
) -> Literal["regression", "single_label_classification", "multi_label_classification"]:
    """What labels mean by their shape: one output is a regression, labels like the logits are several, others one."""
    if logits.shape[-1] == 1:
        return "regression"
    return "multi_label_classification" if labels.shape == logits.shape else "single_label_classification"
