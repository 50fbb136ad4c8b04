"""The state equation that the gated linear recurrences share, computed in chunks.

A state of constant size takes in one token after another and is read by each: S ← D S + k uᵀ, o = Sᵀ q. The decay D
is diagonal, one number for the whole state or one per key channel; it may differ from token to token. What a token
writes is its value, u = v, or by the delta rule the part of it that the decayed state does not hold yet,
u = β (v - (D S)ᵀ k). Within a chunk the writes of the delta rule solve a triangular system, so that all chunks are
computed at once and only their states one after another (Yang et al. 2024, 2025; Kimi Team 2025).

Shapes: B batch, H heads, G heads of queries and keys, E heads that each of these serves (H / G), T tokens, C size of a
key, V size of a value, X decays of a token (1 or C), J chunks, M tokens of a chunk, W = V + C.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .linear_attention import chunks, parts_of_rows
from .states import keep_state


class Tokens(NamedTuple):
    """What comes in with rows of tokens (see `recurrence`)."""

    query_BGTC: torch.Tensor
    key_BGTC: torch.Tensor
    value_BHTV: torch.Tensor
    log_decay_BHTX: torch.Tensor
    rate_BHT1: torch.Tensor | None = None


def recurrence(
    query_BGTC: torch.Tensor,
    key_BGTC: torch.Tensor,
    value_BHTV: torch.Tensor,
    log_decay_BHTX: torch.Tensor,
    rate_BHT1: torch.Tensor | None = None,
    state_BHCV: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the state equation over rows of tokens, in float32 or better, under autocast too.

    A token with a log decay of 0, and a rate or a key of 0, leaves the state as it is: so padding has to come in.

    Args:
        query_BGTC: what reads the state after its token is in.
        key_BGTC, value_BHTV: what is written. Under the delta rule keys have a length of one at most. Without it, and
            with one decay a head, each head of queries and keys may serve several of values in a row.
        log_decay_BHTX: log of the decay, zero or less.
        rate_BHT1: β of the delta rule, without which values are written as they are.
        state_BHCV: the state to start from; zeros by default.
        chunk_size: longest chunk, in tokens; changes speed and memory only.

    Returns:
        Outputs `(B, H, T, V)` and the last state `(B, H, C, V)`, in the dtype of the computation.
    """
    dtype = torch.promote_types(torch.float32, query_BGTC.dtype)
    rate_BHT1 = None if rate_BHT1 is None else rate_BHT1.to(dtype)
    query_BGTC, key_BGTC, value_BHTV = query_BGTC.to(dtype), key_BGTC.to(dtype), value_BHTV.to(dtype)
    if state_BHCV is None:
        state_BHCV = value_BHTV.new_zeros(*value_BHTV.shape[:2], key_BGTC.shape[-1], value_BHTV.shape[-1])
    tokens = Tokens(query_BGTC, key_BGTC, value_BHTV, log_decay_BHTX.to(dtype), rate_BHT1)
    with maybe_autocast(query_BGTC.device.type, enabled=False):
        if query_BGTC.shape[2] == 1:
            return _one_token(tokens, state_BHCV.to(dtype))
        by_head = rate_BHT1 is None and log_decay_BHTX.shape[-1] == 1
        kernel, state_BHCV, outputs = _in_chunks_by_head if by_head else _in_chunks, state_BHCV.to(dtype), []
        for part in parts_of_rows([x for x in tokens if x is not None]):
            output_BHTV, state_BHCV = kernel(Tokens(*part), state_BHCV, chunk_size)
            outputs.append(output_BHTV)
    return torch.cat(outputs, dim=2), state_BHCV


def cached_recurrence(tokens: Tokens, chunk_size: int, cache: Cache | None, layer_idx: int) -> torch.Tensor:
    """Outputs `(B, H, T, V)` of `recurrence`, from the state of a layer in the cache on, which is brought forward."""
    past_BHCV = None if cache is None else cache.get_recurrent_state(layer_idx)
    output_BHTV, state_BHCV = recurrence(*tokens, past_BHCV, chunk_size)
    keep_state(cache, layer_idx, state_BHCV)
    return output_BHTV


def chunk_shape(length: int, longest: int, by_channel: bool) -> tuple[int, int]:
    """Number and size of the chunks of a row, the last one perhaps with room left.

    Decays by channel need a power of two. In a compiled graph chunks have one size, and are never one alone: torch
    would make another graph for that.
    """
    size = 1 << (longest.bit_length() - 1) if by_channel else longest
    if torch.compiler.is_compiling():
        return length // size + 2, size
    if not by_channel:
        return chunks(length, longest)
    while size // 2 >= length:
        size //= 2
    return -(-length // size), size


def recurrence_flops(length: int, longest: int, key: int, value: int, by_channel: bool, delta: bool) -> int:
    """FLOPs of the matrix products for one head of one row."""
    if length == 1:
        return (4 if delta else 2) * key * value
    number, size = chunk_shape(length, longest, by_channel)
    scores = (size - 1 if by_channel else 2 * size) * size * key
    flops = scores + 2 * size * (size * value + 2 * key * value)
    if delta:
        flops += scores + 2 * key * (size * (key + value) + key * value)
    return number * flops


def _one_token(tokens: Tokens, state_BHCV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The equation as it stands, for rows of one token."""
    query_BGTC, key_BGTC, value_BHTV, log_decay_BHTX, rate_BHT1 = tokens
    sharing = value_BHTV.shape[1] // key_BGTC.shape[1]
    query_BHTC, key_BHTC = (x.repeat_interleave(sharing, dim=1) for x in (query_BGTC, key_BGTC))
    state_BHCV = state_BHCV * log_decay_BHTX.exp().transpose(-1, -2)
    if rate_BHT1 is not None:
        value_BHTV = rate_BHT1 * (value_BHTV - key_BHTC @ state_BHCV)
    state_BHCV = state_BHCV + key_BHTC.transpose(-1, -2) * value_BHTV
    return query_BHTC @ state_BHCV, state_BHCV


def _in_chunks(tokens: Tokens, state_BHCV: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All chunks at once, each as a function of the state before it; these states in turn; then the outputs.

    Under the delta rule a chunk writes `written - known @ state`, and so its effect on the state is a matrix.
    """
    length, by_channel = tokens.query_BGTC.shape[2], tokens.log_decay_BHTX.shape[3] > 1
    number, size = chunk_shape(length, longest, by_channel)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return _cut(x, number, size)

    query_BHJMC, key_BHJMC, value_BHJMV, log_decay_BHJMX = (cut(x) for x in tokens[:4])
    age_BHJMX = log_decay_BHJMX.cumsum(3)  # log of the decay since the chunk began
    if by_channel:
        score = partial(_scores_by_channel, age_BHJMC=age_BHJMX)
    else:
        score = partial(_scores, decay_BHJMM=_decays(age_BHJMX))
    left_BHJMC = key_BHJMC * (age_BHJMX[..., -1:, :] - age_BHJMX).exp()  # what is left of a key at the chunk's end
    decay_BHJX1 = age_BHJMX[..., -1:, :].exp().transpose(-1, -2)
    known_BHJMC = None
    if tokens.rate_BHT1 is None:
        written_BHJMV, transition = value_BHJMV, decay_BHJX1
    else:
        rate_BHJM1 = cut(tokens.rate_BHT1)
        rated_BHJMC = key_BHJMC * rate_BHJM1
        system_BHJMM = score(rated_BHJMC, key_BHJMC)
        sides_BHJMW = torch.cat((value_BHJMV * rate_BHJM1, rated_BHJMC * age_BHJMX.exp()), dim=-1)
        solved_BHJMW = torch.linalg.solve_triangular(system_BHJMM, sides_BHJMW, upper=False, unitriangular=True)
        written_BHJMV, known_BHJMC = solved_BHJMW.split((value_BHJMV.shape[-1], key_BHJMC.shape[-1]), dim=-1)
        kept_BHJCC = torch.diag_embed(decay_BHJX1.squeeze(-1).expand(*key_BHJMC.shape[:3], key_BHJMC.shape[-1]))
        transition = kept_BHJCC - left_BHJMC.transpose(-1, -2) @ known_BHJMC
    states_BHJCV, state_BHCV = _states(transition, left_BHJMC.transpose(-1, -2) @ written_BHJMV, state_BHCV)
    if known_BHJMC is not None:
        written_BHJMV = written_BHJMV - known_BHJMC @ states_BHJCV
    output_BHJMV = (query_BHJMC * age_BHJMX.exp()) @ states_BHJCV
    output_BHJMV = output_BHJMV + score(query_BHJMC, key_BHJMC) @ written_BHJMV
    return output_BHJMV.flatten(2, 3)[:, :, :length], state_BHCV


def _in_chunks_by_head(tokens: Tokens, state_BHCV: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one decay a head and values that are written as they are.

    Such decays weigh values and outputs in the place of keys and queries, which all heads of a group then share: they
    are never repeated, and their products with the values and states of all its heads are one.
    """
    length, groups = tokens.query_BGTC.shape[2], tokens.query_BGTC.shape[1]
    number, size = chunk_shape(length, longest, by_channel=False)
    query_BGJMC, key_BGJMC = (_cut(x, number, size) for x in tokens[:2])
    value_BGJMEV, log_decay_BGJME1 = (
        _cut(x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3), number, size).unflatten(4, (-1, x.shape[-1]))
        for x in tokens[2:4]
    )
    age_BGJME1 = log_decay_BGJME1.cumsum(3)
    decay_BGJEMM = _decays(age_BGJME1.transpose(3, 4))
    scores_BGJEMM = _scores(query_BGJMC.unsqueeze(3), key_BGJMC.unsqueeze(3), decay_BGJEMM)
    within_BGJEMV = scores_BGJEMM @ value_BGJMEV.transpose(3, 4)
    left_BGJMEV = value_BGJMEV * (age_BGJME1[:, :, :, -1:] - age_BGJME1).exp()
    writes_BGJCEV = (key_BGJMC.transpose(-1, -2) @ left_BGJMEV.flatten(4)).unflatten(-1, left_BGJMEV.shape[4:])
    past_BGCEV = state_BHCV.unflatten(1, (groups, -1)).transpose(2, 3).contiguous()
    states_BGJCEV, past_BGCEV = _states(age_BGJME1[:, :, :, -1:].exp(), writes_BGJCEV, past_BGCEV)
    before_BGJMEV = (query_BGJMC @ states_BGJCEV.flatten(4)).unflatten(-1, left_BGJMEV.shape[4:])
    output_BGJMEV = torch.addcmul(within_BGJEMV.transpose(3, 4), before_BGJMEV, age_BGJME1.exp())
    output_BHTV = output_BGJMEV.flatten(2, 3)[:, :, :length].transpose(2, 3).flatten(1, 2)
    return output_BHTV, past_BGCEV.transpose(2, 3).flatten(1, 2)


def _cut(x_BHTC: torch.Tensor, number: int, size: int) -> torch.Tensor:
    """Chunks `(B, H, J, M, C)` of rows, zeros in the room of the last one."""
    room = number * size - x_BHTC.shape[2]
    return (nn.functional.pad(x_BHTC, (0, 0, 0, room)) if room else x_BHTC).unflatten(2, (number, size))


def _scores(query_BHJMC: torch.Tensor, key_BHJMC: torch.Tensor, decay_BHJMM: torch.Tensor) -> torch.Tensor:
    """`(B, H, J, M, M)`: query · key, times the decay between the two; zero for later keys."""
    return (query_BHJMC @ key_BHJMC.transpose(-1, -2)).tril_() * decay_BHJMM


def _decays(age_BHJM1: torch.Tensor) -> torch.Tensor:
    """`(B, H, J, M, M)`: the decay between key and query; of later keys, whose scores are zero, a finite number."""
    return (age_BHJM1 - age_BHJM1.transpose(-1, -2)).clamp_max(0.0).exp()


def _scores_by_channel(query_BHJMC: torch.Tensor, key_BHJMC: torch.Tensor, age_BHJMC: torch.Tensor) -> torch.Tensor:
    """The same where each channel decays by itself, for chunks of a power of two.

    The queries of a chunk's second half meet the keys of the first one at the border between them, to which both
    decay, so that no exponent is positive; the halves go on by themselves. Nothing holds a number per query, key and
    channel.
    """
    size = query_BHJMC.shape[-2]
    if size == 1:
        return (query_BHJMC * key_BHJMC).sum(-1, keepdim=True)
    first, second = (..., slice(None, size // 2), slice(None)), (..., slice(size // 2, None), slice(None))
    border = age_BHJMC[..., size // 2 - 1 : size // 2, :]
    queries = query_BHJMC[second] * (age_BHJMC[second] - border).exp()
    keys = key_BHJMC[first] * (border - age_BHJMC[first]).exp()
    across = queries @ keys.transpose(-1, -2)
    halves = (x.unflatten(-2, (2, size // 2)) for x in (query_BHJMC, key_BHJMC, age_BHJMC))
    early, late = _scores_by_channel(*halves).unbind(-3)
    return torch.cat((nn.functional.pad(early, (0, size // 2)), torch.cat((across, late), dim=-1)), dim=-2)


def _states(
    transition: torch.Tensor, writes_BHJCV: torch.Tensor, state_BHCV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before each chunk `(B, H, J, C, V)`, and the last one; `transition` is diagonal, or a matrix `(C, C)`."""
    step = _advance if transition.shape[-1] == 1 else _advance_by_matrix
    if torch.compiler.is_compiling():  # one graph for any number of chunks, run by torch

        def step_twice(state_BHCV: torch.Tensor, parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
            state_BHCV = step(state_BHCV, parts)
            return state_BHCV, state_BHCV.clone()

        last_BHCV, after_BHJCV = scan(step_twice, state_BHCV, (transition, writes_BHJCV), dim=2)
        return torch.cat((state_BHCV.unsqueeze(2), after_BHJCV[:, :, :-1]), dim=2), last_BHCV
    before = []
    for parts in zip(transition.unbind(2), writes_BHJCV.unbind(2), strict=True):
        before.append(state_BHCV)
        state_BHCV = step(state_BHCV, parts)
    return torch.stack(before, dim=2), state_BHCV


def _advance(state_BHCV: torch.Tensor, parts: Any) -> torch.Tensor:
    decay_BHX1, writes_BHCV = parts
    return torch.addcmul(writes_BHCV, decay_BHX1, state_BHCV)


def _advance_by_matrix(state_BHCV: torch.Tensor, parts: Any) -> torch.Tensor:
    transition_BHCC, writes_BHCV = parts
    return writes_BHCV + transition_BHCC @ state_BHCV
