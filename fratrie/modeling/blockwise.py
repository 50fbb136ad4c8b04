"""Exact attention a block at a time (Rabe & Staats 2021; Dao et al. 2022), as `attn_implementation="blockwise"`.

No matrix of all scores is ever held: the softmax of a query runs along as blocks of keys come (Milakov & Gimelshein
2018), and the backward pass computes each block's scores anew. Memory grows with the length, not with its square.

Shapes: B batch, T queries, S keys, H query heads, K key-value heads, G query heads of a key-value head, C head size
(that of values may be another), R queries of a block, L keys of a block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.generic import maybe_autocast

NAME = "blockwise"
# Queries and keys of a block: the products of smaller ones are slower, larger ones only take memory.
BLOCK_SIZE = 256

# True where a query sees a key, by the indices of batch row, head, query and key, which broadcast.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PairMask:
    """Which keys each query sees, told for a block of pairs at a time; without fields, all of them.

    Attributes:
        rule: of the tokens in the indices of a block.
        shape: `(B, 1, T, S)` of a mask that Hugging Face may read; the rule asks for B.
        table: `(B or 1, H or 1, T, S)`, true where a query sees a key.
        is_causal: whether no query sees a key behind it. Blocks of such pairs are left out.
        query_offset, key_offset: place of the first query and key.
        device: of what the rule reads.
    """

    rule: Rule | None = None
    shape: tuple[int, int, int, int] = (1, 1, 1, 1)
    table: torch.Tensor | None = None
    is_causal: bool = False
    query_offset: int = 0
    key_offset: int = 0
    device: torch.device | str = "cpu"
    ndim = 4  # where it is handed in as ready

    def block(self, queries: range, keys: range, device: torch.device) -> torch.Tensor | None:
        """The mask of a block, `(B or 1, H or 1, R, L)`, on this device; `None` where all is seen."""
        parts = []
        if self.table is not None:
            parts.append(self.table[..., queries.start : queries.stop, keys.start : keys.stop])
        places_R, places_L = (
            torch.arange(places.start + offset, places.stop + offset, device=self.device)
            for places, offset in ((queries, self.query_offset), (keys, self.key_offset))
        )
        pairs = places_R[None, None, :, None], places_L[None, None, None]
        if self.is_causal and keys.stop - 1 + self.key_offset > queries.start + self.query_offset:
            parts.append(pairs[1] <= pairs[0])
        if self.rule is not None:
            rows_B = torch.arange(self.shape[0], device=self.device)[:, None, None, None]
            parts.append(self.rule(rows_B, torch.zeros_like(rows_B[:1]), *pairs))
        if not parts:
            return None
        seen = parts[0].to(device)
        for part in parts[1:]:
            seen = seen & part.to(device)
        return seen

    def hides(self, queries: range, keys: range) -> bool:
        """Whether causality hides a whole block."""
        return self.is_causal and keys.start + self.key_offset > queries.stop - 1 + self.query_offset

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        added: torch.Tensor | None,
        call: "Call",
    ) -> torch.Tensor:
        """Mix the values of what is seen, `(B, H, T, C)` (see `blockwise_attention`)."""
        return _Blockwise.apply(query_BHTC, key_BKSC, value_BKSC, added, replace(call, mask=self))


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a call of the kernel is asked for.

    Attributes:
        scale: factor of the scores.
        mask: of the pairs.
        block_size: queries and keys of a block.
        dropout: share of the weights to drop.
        seed: of the dropout, which both passes draw from it.
    """

    scale: float
    mask: PairMask = PairMask()
    block_size: int = BLOCK_SIZE
    dropout: float = 0.0
    seed: int = 0

    def blocks(self, queries: int, keys: int, device: torch.device) -> Iterator[tuple[range, range, Any]]:
        """The blocks that some query sees, with their masks.

        Causality tells it everywhere. Masks are looked through on a CPU alone, as other devices would have to wait.
        """
        for rows in split(queries, self.block_size):
            for columns in split(keys, self.block_size):
                if self.mask.hides(rows, columns):
                    break
                seen = self.mask.block(rows, columns, device)
                if seen is None or seen.device.type != "cpu" or bool(seen.any()):
                    yield rows, columns, seen

    def kept(self, rows: range, columns: range, weights: torch.Tensor) -> torch.Tensor | float:
        """Factor of the weights of a block after dropout, the same whenever it is asked for."""
        if self.dropout == 0.0:
            return 1.0
        generator = torch.Generator(weights.device)
        generator.manual_seed(hash((self.seed, rows.start, columns.start)) % 2**63)
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
        return (drawn >= self.dropout).to(weights.dtype) / (1 - self.dropout)


class RunningSoftmax(NamedTuple):
    """Sums over the keys that have come so far, changed in place.

    Attributes:
        highest_BKGT: highest score.
        total_BKGT: sum of the exponentials of the scores beneath it.
        mixed_BKGTC: sum of the values that they weigh.
    """

    highest_BKGT: torch.Tensor
    total_BKGT: torch.Tensor
    mixed_BKGTC: torch.Tensor

    @classmethod
    def start(cls, query_BKGTC: torch.Tensor, value_BKSC: torch.Tensor) -> "RunningSoftmax":
        """Before the first key."""
        dtype, shape = fine_dtype(query_BKGTC), query_BKGTC.shape[:-1]
        return cls(
            query_BKGTC.new_full(shape, -torch.inf, dtype=dtype),
            query_BKGTC.new_zeros(shape, dtype=dtype),
            query_BKGTC.new_zeros(*shape, value_BKSC.shape[-1], dtype=dtype),
        )

    def at(self, queries: range) -> "RunningSoftmax":
        """A view of some of the queries."""
        here = slice(queries.start, queries.stop)
        return RunningSoftmax(self.highest_BKGT[..., here], self.total_BKGT[..., here], self.mixed_BKGTC[..., here, :])

    def add(
        self, scores_BKGRL: torch.Tensor, value_BKLC: torch.Tensor, call: Call, place: tuple[range, range]
    ) -> None:
        """Take in a block of keys; `place` names it to the dropout."""
        highest_BKGR = torch.maximum(self.highest_BKGT, scores_BKGRL.amax(-1))
        base_BKGR = finite(highest_BKGR)
        shrink_BKGR = torch.exp(self.highest_BKGT - base_BKGR)
        weights_BKGRL = torch.exp(scores_BKGRL - base_BKGR[..., None])
        self.highest_BKGT.copy_(highest_BKGR)
        self.total_BKGT.mul_(shrink_BKGR).add_(weights_BKGRL.sum(-1))
        dropped_BKGRL = weights_BKGRL * call.kept(*place, weights_BKGRL)
        self.mixed_BKGTC.mul_(shrink_BKGR[..., None])
        self.mixed_BKGTC.add_(torch.einsum("bkgrl,bklc->bkgrc", dropped_BKGRL, value_BKLC))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixed values `(B, K, G, T, C)`, zero without keys, and the logarithms of the totals `(B, K, G, T)`."""
        total_BKGT1 = self.total_BKGT[..., None]
        mixed_BKGTC = self.mixed_BKGTC / total_BKGT1.masked_fill(total_BKGT1 == 0, 1.0)
        return mixed_BKGTC, self.highest_BKGT + self.total_BKGT.log()


class Operands(NamedTuple):
    """Queries, keys and values, and what is added to the scores, `(B or 1, H or 1, T, S)`; or their gradients."""

    query_BKGTC: torch.Tensor
    key_BKSC: torch.Tensor
    value_BKSC: torch.Tensor
    added: torch.Tensor | None = None

    def fine_zeros(self) -> "Operands":
        """Sums to begin with."""
        query, key, value, added = (None if x is None else torch.zeros_like(x, dtype=fine_dtype(x)) for x in self)
        assert query is not None and key is not None and value is not None
        return Operands(query, key, value, added)


class Kept(NamedTuple):
    """What the backward pass knows of the queries besides: gradients of mixed values, and two numbers of each.

    Attributes:
        grad_BKGTC: gradient of the mixed values.
        slope_BKGT: its product with the mixed values.
        log_total_BKGT: logarithm of the sum of the exponentials of all scores.
    """

    grad_BKGTC: torch.Tensor
    slope_BKGT: torch.Tensor
    log_total_BKGT: torch.Tensor

    @classmethod
    def make(cls, grad_BKGTC: torch.Tensor, mixed_BKGTC: torch.Tensor, log_total_BKGT: torch.Tensor) -> "Kept":
        """From what the forward pass gave."""
        grad_BKGTC = grad_BKGTC.to(log_total_BKGT.dtype)
        return cls(grad_BKGTC, (grad_BKGTC * mixed_BKGTC).sum(-1), log_total_BKGT)

    def at(self, queries: range) -> "Kept":
        """A view of some of the queries."""
        here = slice(queries.start, queries.stop)
        return Kept(cut(self.grad_BKGTC, queries), self.slope_BKGT[..., here], self.log_total_BKGT[..., here])


def add_keys(state: RunningSoftmax, operands: Operands, call: Call) -> None:
    """Take keys and values into the sums of the queries."""
    query_BKGTC, key_BKSC, value_BKSC, _ = operands
    for rows, columns, seen in call.blocks(query_BKGTC.shape[3], key_BKSC.shape[2], query_BKGTC.device):
        scores_BKGRL = _block_scores(operands, rows, columns, seen, call.scale)
        state.at(rows).add(scores_BKGRL, cut(value_BKSC, columns).to(scores_BKGRL.dtype), call, (rows, columns))


def add_gradients(gradients: Operands, operands: Operands, kept: Kept, call: Call) -> None:
    """Add the gradients of the operands, from scores that are computed anew."""
    query_BKGTC, key_BKSC, value_BKSC, _ = operands
    fine = kept.log_total_BKGT.dtype
    for rows, columns, seen in call.blocks(query_BKGTC.shape[3], key_BKSC.shape[2], query_BKGTC.device):
        grad_BKGRC, slope_BKGR, log_total_BKGR = kept.at(rows)
        scores_BKGRL = _block_scores(operands, rows, columns, seen, call.scale)
        weights_BKGRL = torch.exp(scores_BKGRL - finite(log_total_BKGR)[..., None])
        factor = call.kept(rows, columns, weights_BKGRL)
        query_BKGRC, key_BKLC, value_BKLC = (
            cut(x, places).to(fine) for x, places in ((query_BKGTC, rows), (key_BKSC, columns), (value_BKSC, columns))
        )
        mixing_BKGRL = torch.einsum("bkgrc,bklc->bkgrl", grad_BKGRC, value_BKLC) * factor
        grad_scores_BKGRL = weights_BKGRL * (mixing_BKGRL - slope_BKGR[..., None])
        grad_value_BKLC = torch.einsum("bkgrl,bkgrc->bklc", weights_BKGRL * factor, grad_BKGRC)
        grad_query_BKGRC = torch.einsum("bkgrl,bklc->bkgrc", grad_scores_BKGRL, key_BKLC)
        grad_key_BKLC = torch.einsum("bkgrl,bkgrc->bklc", grad_scores_BKGRL, query_BKGRC)
        cut(gradients.value_BKSC, columns).add_(grad_value_BKLC)
        cut(gradients.query_BKGTC, rows).add_(grad_query_BKGRC, alpha=call.scale)
        cut(gradients.key_BKSC, columns).add_(grad_key_BKLC, alpha=call.scale)
        if gradients.added is not None:
            block = gradients.added[..., rows.start : rows.stop, columns.start : columns.stop]
            block.add_(grad_scores_BKGRL.flatten(1, 2).sum_to_size(block.shape))


def _block_scores(
    operands: Operands, rows: range, columns: range, seen: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The scores `(B, K, G, R, L)` of a block, -inf where a query does not see a key."""
    query_BKGTC, key_BKSC, _, added = operands
    fine, heads = fine_dtype(query_BKGTC), query_BKGTC.shape[1:3]
    query_BKGRC, key_BKLC = cut(query_BKGTC, rows).to(fine), cut(key_BKSC, columns).to(fine)
    scores_BKGRL = torch.einsum("bkgrc,bklc->bkgrl", query_BKGRC, key_BKLC) * scale
    if added is not None:
        scores_BKGRL += _by_group(added[..., rows.start : rows.stop, columns.start : columns.stop], heads).to(fine)
    if seen is not None:
        scores_BKGRL.masked_fill_(~_by_group(seen, heads), -torch.inf)
    return scores_BKGRL


def _by_group(x_BHTS: torch.Tensor, heads: torch.Size) -> torch.Tensor:
    return x_BHTS.unsqueeze(2) if x_BHTS.shape[1] == 1 else x_BHTS.unflatten(1, heads)


def split(length: int, size: int) -> list[range]:
    """The places of a length in blocks."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def cut(x_BKSC: torch.Tensor, places: range) -> torch.Tensor:
    """A view of some places."""
    return x_BKSC[..., places.start : places.stop, :]


def finite(scores: torch.Tensor) -> torch.Tensor:
    """Zero in place of -inf, of which differences would be NaN."""
    return scores.masked_fill(scores == -torch.inf, 0.0)


def fine_dtype(x: torch.Tensor) -> torch.dtype:
    """That of scores and sums."""
    return torch.promote_types(torch.float32, x.dtype)


class _Blockwise(torch.autograd.Function):
    """Keeps the mixed values and one number of each query; scores are computed anew in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        operands = grouped(query, key, value, added)
        with maybe_autocast(query.device.type, enabled=False):
            state = RunningSoftmax.start(operands.query_BKGTC, value)
            add_keys(state, operands, call)
            mixed_BKGTC, log_total_BKGT = state.result()
        mixed = mixed_BKGTC.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, added, mixed, log_total_BKGT)
        ctx.call = call
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        query, key, value, added, mixed, log_total_BKGT = ctx.saved_tensors
        operands = grouped(query, key, value, added)
        heads = operands.query_BKGTC.shape[1:3]
        with maybe_autocast(query.device.type, enabled=False):
            kept = Kept.make(grad.unflatten(1, heads), mixed.unflatten(1, heads), log_total_BKGT)
            learned = operands if ctx.needs_input_grad[3] else operands._replace(added=None)
            gradients = learned.fine_zeros()
            add_gradients(gradients, operands, kept, ctx.call)
        return *as_given(gradients, operands), None


def grouped(
    query_BHTC: torch.Tensor, key_BKSC: torch.Tensor, value_BKSC: torch.Tensor, added: torch.Tensor | None = None
) -> Operands:
    """The operands, with the query heads of each key-value head together."""
    return Operands(query_BHTC.unflatten(1, (key_BKSC.shape[1], -1)), key_BKSC, value_BKSC, added)


def as_given(gradients: Operands, operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """The gradients in the shapes and dtypes of what the kernel was given."""
    query, *others = (
        None if x is None or of is None else x.to(of.dtype) for x, of in zip(gradients, operands, strict=True)
    )
    assert query is not None
    return query.flatten(1, 2), *others


def refuse_second_derivatives() -> None:
    """Refuse a backward pass that is itself recorded.

    Raises:
        ValueError: if it is.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "create_graph=True: blockwise attention has no second derivatives: use attn_implementation='eager'."
        )


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: "PairMask | torch.Tensor | None" = None,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    block_size: int = BLOCK_SIZE,
) -> torch.Tensor:
    """Softmax attention; a query that sees no key gets zeros.

    Args:
        query: `(B, H, T, C)`.
        key, value: `(B, K, S, C)`, K a divisor of H.
        mask: true where a query sees a key, or numbers to add to the scores, that broadcast to `(B, H, T, S)`; the
            lowest number of their dtype hides, as -inf does. A `PairMask` needs no memory.
        scale: factor of the scores, by default one over the root of C.
        bias: numbers to add as well.
        dropout: share of the weights to drop. Its seed is drawn from torch's generator of the CPU.
        block_size: queries and keys of a block.

    Returns:
        `(B, H, T, C)`.

    Raises:
        ValueError: for a block size below 1, and for a second derivative.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: give 1 or more, such as {BLOCK_SIZE}.")
    shape = (query.shape[2], key.shape[2])
    pairs = mask if mask is not None and not isinstance(mask, torch.Tensor) else PairMask()
    added = bias
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        pairs = PairMask(table=mask.expand(-1, -1, *shape))
    elif isinstance(mask, torch.Tensor):
        added = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
        added = added if bias is None else added + bias
    if added is not None:
        added = added.expand(-1, -1, *shape)
    call = Call(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        block_size=block_size,
        dropout=dropout,
        seed=int(torch.randint(2**62, (), device="cpu")) if dropout else 0,
    )
    return pairs.attend(query, key, value, added, call)


def blockwise_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    block_size: int = BLOCK_SIZE,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`blockwise_attention` in the form of Hugging Face's `AttentionInterface`.

    In a graph that is compiled or exported SDPA takes its place, as the number of blocks would be part of the graph.
    For blocks of another size register `functools.partial(blockwise_attention_forward, block_size=…)`.

    Raises:
        ValueError: for what changes the scores in a way that is not known here.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"Blockwise attention does not know {name}: use attn_implementation='eager'.")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if torch.compiler.is_compiling():
        if isinstance(attention_mask, PairMask):  # made outside of the graph
            causal, pairs = False, attention_mask
            attention_mask = pairs.block(range(query.shape[2]), range(key.shape[2]), query.device)
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": causal, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is None:
        attention_mask = PairMask(is_causal=causal and query.shape[2] > 1)
    options = {"scale": scaling, "bias": position_bias, "dropout": dropout, "block_size": block_size}
    mixed_BHTC = blockwise_attention(query, key, value, attention_mask, **options)  # type: ignore[arg-type]
    return mixed_BHTC.transpose(1, 2).contiguous(), None


def blockwise_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: "torch.Tensor | PairMask | None" = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PairMask | torch.Tensor | None:
    """The mask of a pass in the form of Hugging Face's `AttentionMaskInterface` (see `sdpa_mask` for the arguments).

    Returns:
        A `PairMask`, which holds no pairs, or `None` where all is seen. A table `(B, 1, T, S)` where graphs need one
        (a static cache, compilation), and for rules that know no blocks of indices.
    """
    if isinstance(attention_mask, PairMask):
        return attention_mask  # of a caller who has prepared it
    if use_vmap or isinstance(q_offset, torch.Tensor) or torch.compiler.is_compiling():
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]
            kv_offset,
            mask_function,
            attention_mask,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    rules: list[Any] = [] if padding is None or bool(padding.all()) else [padding_mask_function(padding)]
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        rules.append(mask_function)
    is_causal = mask_function is causal_mask_function
    if not rules and not is_causal:
        return None
    return PairMask(
        rule=and_masks(*rules) if rules else None,
        shape=(batch_size, 1, q_length, kv_length),
        is_causal=is_causal,
        query_offset=q_offset,
        key_offset=kv_offset,
        device=device,
    )


def register_blockwise() -> None:
    """Have Hugging Face know `attn_implementation="blockwise"`, unless it does already, perhaps with other blocks."""
    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, blockwise_attention_forward)
        AttentionMaskInterface.register(NAME, blockwise_mask)
