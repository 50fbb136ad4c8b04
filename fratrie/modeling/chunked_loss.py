"""Output layer and cross entropy in one, a chunk of rows at a time: the logits of a batch never exist together.

Shapes: N rows, R rows of a chunk, Q rows of a block of it, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .losses import IGNORED, count_targets, target_rows, token_cross_entropy

# Logits of a chunk: products of fewer rows are slower, and more of them only take memory.
CHUNK_BYTES = 2**25
# Sums of a block, which are to stay in a processor's cache between two passes over them.
BLOCK_BYTES = 2**22


def chunked_cross_entropy(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """`token_cross_entropy` of the logits `states @ weight.T + bias`, which are forgotten chunk by chunk.

    A chunk's gradients are computed along with its loss (Hsu et al. 2024), so that nothing is computed twice. Under
    autocast the products run in its dtype; softmax, loss and the sums over chunks are in float32.

    Args:
        states: `(…, D)`.
        weight: `(V, D)`.
        bias: `(V,)`, or none.
        labels: `(…)`, token ids, -100 where a row is no target.
        num_items_in_batch: number of targets to divide by.

    Raises:
        ValueError: when states and labels differ in number.
    """
    states_ND, labels_N = states.flatten(0, -2), labels.to(states.device).flatten()
    if len(states_ND) != len(labels_N):
        raise ValueError(f"{len(labels_N)} labels do not fit states of shape {tuple(states.shape)}: give each one.")
    if states.device.type == "cpu":  # elsewhere the host would have to wait for their number
        targets = target_rows(labels_N)
        states_ND, labels_N = states_ND.index_select(0, targets), labels_N[targets]
    dtype = _dtype_of_products(states)
    size = torch.promote_types(torch.float32, dtype).itemsize
    # In one chunk the plain form is as small, and faster; in float16 sums of unscaled gradients would overflow.
    if size * len(states_ND) * len(weight) <= CHUNK_BYTES or dtype == torch.float16:
        return token_cross_entropy(nn.functional.linear(states_ND, weight, bias), labels_N, num_items_in_batch)
    total = _ChunkedCrossEntropy.apply(states_ND.to(dtype), weight, bias, labels_N)
    return total / count_targets(labels_N, num_items_in_batch)


def _dtype_of_products(states: torch.Tensor) -> torch.dtype:
    device = states.device.type
    if torch.is_autocast_enabled(device) and states.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return states.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses; its gradients wait for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        total, ctx.gradients = _sum_over_chunks(ctx.needs_input_grad, *inputs)
        return total

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: a loss over chunks has no second derivatives: set chunked_loss=False."
            )
        inputs = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # handed out and scaled in place by an earlier pass through the same graph
            _, gradients = _sum_over_chunks(ctx.needs_input_grad, *inputs)
        scaled = (None if each is None else each.mul_(factor) for each in gradients)
        return *(each if each is None else each.to(of.dtype) for each, of in zip(scaled, inputs, strict=False)), None


def _sum_over_chunks(
    needs_grad: Sequence[bool],
    states_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The sum of the losses, and its gradients by states, weight and bias, as far as they are needed."""
    vocabulary, sums = len(weight_VD), torch.promote_types(torch.float32, states_ND.dtype)
    rows = min(max(1, CHUNK_BYTES // (states_ND.itemsize * vocabulary)), max(1, len(states_ND)))
    weight_VD = weight_VD.to(states_ND.dtype)
    logits = states_ND.new_empty(rows, vocabulary)
    grad_states = torch.empty_like(states_ND) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight_VD, dtype=sums) if needs_grad[1] else None
    grad_bias = torch.zeros_like(bias_V, dtype=sums) if bias_V is not None and needs_grad[2] else None
    total = states_ND.new_zeros((), dtype=sums)
    for start in range(0, len(states_ND), rows):
        chunk = slice(start, start + rows)
        states_RD = states_ND[chunk]
        logits_RV = torch.mm(states_RD, weight_VD.T, out=logits[: len(states_RD)])
        if bias_V is not None:
            logits_RV += bias_V
        total += _turn_into_gradient(logits_RV, labels_N[chunk, None], sums)
        grad_RV = logits_RV
        if grad_states is not None:
            torch.mm(grad_RV, weight_VD, out=grad_states[chunk])
        if grad_weight is not None:
            _add_product(grad_weight, grad_RV.T, states_RD)
        if grad_bias is not None:
            grad_bias += grad_RV.sum(0, dtype=sums)
    return total, (grad_states, grad_weight, grad_bias)


def _turn_into_gradient(logits_RV: torch.Tensor, labels_R1: torch.Tensor, sums: torch.dtype) -> torch.Tensor:
    """Put the gradient of the summed loss in the place of the logits, and return that sum."""
    losses, rows = [], _rows_of_block(logits_RV, sums)
    for logits_QV, labels_Q1 in zip(logits_RV.split(rows), labels_R1.split(rows), strict=True):
        ignored_Q1 = labels_Q1 == IGNORED
        places_Q1 = labels_Q1.masked_fill(ignored_Q1, 0)
        log_shares_QV = torch.log_softmax(logits_QV, -1, dtype=sums)
        log_share_Q1 = log_shares_QV.gather(1, places_Q1)
        losses.append(-log_share_Q1.masked_fill(ignored_Q1, 0))
        grad_QV = log_shares_QV.exp_().scatter_(1, places_Q1, log_share_Q1.expm1()).masked_fill_(ignored_Q1, 0)
        logits_QV.copy_(grad_QV)
    return torch.cat(losses).sum()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    rows = _rows_of_block(total, total.dtype)
    for part, factors in zip(total.split(rows), left.split(rows), strict=True):
        part += factors @ right


def _rows_of_block(x: torch.Tensor, sums: torch.dtype) -> int:
    """How many rows of `x` to work through at once; other devices than a CPU lose more by calls than by passes."""
    return max(1, BLOCK_BYTES // (sums.itemsize * x.shape[1]) if x.device.type == "cpu" else len(x))
