"""Ring attention (Liu et al. 2023): blockwise attention of rows whose tokens are split over processes.

Each process keeps its queries, while keys and values travel round, with the documents that they belong to; the softmax
of `blockwise` goes on as they come. Rows are cut into two chunks for each process, of which rank r takes r and, from
the end, r again (zigzag): so all have the same to do in a causal model.

Shapes: B batch, T queries and S keys of this process, H query heads, K key-value heads, G query heads of a key-value
head, C head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.utils.generic import maybe_autocast

from .blockwise import (
    Call,
    Kept,
    Operands,
    PairMask,
    RunningSoftmax,
    add_gradients,
    add_keys,
    as_given,
    cut,
    grouped,
    refuse_second_derivatives,
)


def chunks_of(rank: int, processes: int) -> tuple[int, int]:
    """The two of 2·P chunks of a row that a process holds."""
    return rank, 2 * processes - 1 - rank


def places_of(length: int, rank: int, processes: int) -> torch.Tensor:
    """Places in a row of the tokens that a process holds, in their order.

    Raises:
        ValueError: for a length that is no multiple of two chunks for each process.
    """
    if length % (2 * processes):
        raise ValueError(
            f"Rows of {length} tokens cannot be split over {processes} processes: pad them to a multiple of "
            f"{2 * processes}."
        )
    chunks = torch.arange(length).chunk(2 * processes)
    return torch.cat([chunks[number] for number in chunks_of(rank, processes)])


@dataclass(frozen=True, kw_only=True)
class RingMask(PairMask):
    """Which keys the queries of this process see, wherever the keys are.

    Models take it as `attention_mask`, for each of their layer types: `{"full_attention": RingMask(…)}`.

    Attributes:
        group: the processes that hold the row, by default all.
        documents: `(B, T)`, the number of the document of each token of this process, -1 at padding; `None` where
            each row is one document, on every process.
        window: a query sees less than so many tokens back in a causal model, else so many to each side.
        is_causal, device: as in `PairMask`.
    """

    group: Any = None
    documents: torch.Tensor | None = None
    window: int | None = None

    def to(self, device: torch.device | str, **kwargs: Any) -> "RingMask":
        """The same on another device."""
        documents = None if self.documents is None else self.documents.to(device, **kwargs)
        return replace(self, documents=documents, device=device)

    def block(self, queries: range, keys: range, device: torch.device) -> torch.Tensor | None:
        """Refuse to tell of the keys of other processes, as a compiled graph would ask.

        Raises:
            ValueError: always.
        """
        raise ValueError("Ring attention cannot be part of a compiled graph: leave out torch.compile.")

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        added: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        """Mix the values of all processes, `(B, H, T, C)`; they must all call it.

        Raises:
            ValueError: for numbers to add to the scores, which would be those of this process alone; and for queries
                that are not those of the keys, or an odd number of them.
        """
        if added is not None:
            raise ValueError("Ring attention adds nothing to the scores: use position_type='rotary' or 'learned'.")
        queries, keys = query_BHTC.shape[2], key_BKSC.shape[2]
        if queries != keys or queries % 2:
            raise ValueError(
                f"{queries} queries and {keys} keys: ring attention takes two chunks of one row from each process, "
                "without a cache (use_cache=False)."
            )
        return _Ring.apply(query_BHTC, key_BKSC, value_BKSC, self, call)

    def between(self, ours: "_Chunk", theirs: "_Chunk", documents: torch.Tensor | None) -> PairMask:
        """The mask of two chunks, by the documents of the keys."""

        def rule(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            seen = torch.ones((), dtype=torch.bool, device=self.device)
            if self.window is not None:
                distance = query - key
                seen = distance < self.window if self.is_causal else distance.abs() <= self.window
            if self.documents is not None and documents is not None:
                of_query = self.documents[row, query - ours.first + ours.here.start]
                of_key = documents[row, key - theirs.first + theirs.here.start]
                seen = seen & (of_query == of_key) & (of_key >= 0)
            return seen

        has_rule = self.window is not None or documents is not None
        return PairMask(
            rule=rule if has_rule else None,
            shape=(1 if documents is None else len(documents), 1, len(ours.here), len(theirs.here)),
            is_causal=self.is_causal,
            query_offset=ours.first,
            key_offset=theirs.first,
            device=self.device,
        )


class _Chunk(NamedTuple):
    """A chunk of a row: where it lies in its process, and its first place in the row."""

    here: range
    first: int


class _Ring(torch.autograd.Function):
    """Both passes send keys and values once round; the backward pass sends their gradients along, back home."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: RingMask, call: Call
    ) -> torch.Tensor:
        own = grouped(query, key, value)
        with maybe_autocast(query.device.type, enabled=False):
            state = RunningSoftmax.start(own.query_BKGTC, value)
            for rank, held in _travel(own, mask):
                for ours, theirs, between in _pairs(mask, call, own, rank, held):
                    add_keys(state.at(ours), _part(own, held, ours, theirs), between)
            mixed_BKGTC, log_total_BKGT = state.result()
        mixed = mixed_BKGTC.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, log_total_BKGT)
        ctx.mask, ctx.call = mask, call
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        query, key, value, mixed, log_total_BKGT = ctx.saved_tensors
        mask, own = ctx.mask, grouped(query, key, value)
        heads = own.query_BKGTC.shape[1:3]
        with maybe_autocast(query.device.type, enabled=False):
            kept = Kept.make(grad.unflatten(1, heads), mixed.unflatten(1, heads), log_total_BKGT)
            gradients = own.fine_zeros()
            for rank, held in _travel(own, mask):
                for ours, theirs, between in _pairs(mask, ctx.call, own, rank, held):
                    part = _part(gradients, gradients[1:], ours, theirs)
                    add_gradients(part, _part(own, held, ours, theirs), kept.at(ours), between)
                travelled = _send_on([gradients.key_BKSC, gradients.value_BKSC], mask.group, first_tag=3).wait()
                gradients = gradients._replace(key_BKSC=travelled[0], value_BKSC=travelled[1])
        return *as_given(gradients, own)[:3], None, None


def _travel(own: Operands, mask: RingMask) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Keys, values and documents of each process, with its rank, our own first; the next ones come meanwhile."""
    processes, rank = dist.get_world_size(mask.group), dist.get_rank(mask.group)
    held = [own.key_BKSC, own.value_BKSC, *([] if mask.documents is None else [mask.documents])]
    for step in range(processes):
        coming = _send_on(held, mask.group) if step < processes - 1 else None
        yield (rank - step) % processes, held
        held = [] if coming is None else coming.wait()


def _pairs(
    mask: RingMask, call: Call, own: Operands, rank: int, held: list[torch.Tensor]
) -> Iterator[tuple[range, range, Call]]:
    """Where each chunk of queries meets each chunk of keys, with what is asked for there."""
    processes, our_rank = dist.get_world_size(mask.group), dist.get_rank(mask.group)
    size = own.key_BKSC.shape[2] // 2
    ours, theirs = (
        [_Chunk(range(half * size, (half + 1) * size), number * size) for half, number in enumerate(numbers)]
        for numbers in (chunks_of(our_rank, processes), chunks_of(rank, processes))
    )
    documents = held[2] if len(held) > 2 else None
    for queries in ours:
        for keys in theirs:
            seed = hash((call.seed, queries.first, keys.first))
            between = mask.between(queries, keys, documents)
            yield queries.here, keys.here, replace(call, mask=between, seed=seed)


def _part(own: Operands, keys: Sequence[Any], ours: range, theirs: range) -> Operands:
    """Views of a chunk of queries, and of one of keys and values."""
    key, value, *_ = keys
    return Operands(cut(own.query_BKGTC, ours), cut(key, theirs), cut(value, theirs))


class _Coming(NamedTuple):
    """Tensors on their way, and those that leave for them."""

    tensors: list[torch.Tensor]
    leaving: list[torch.Tensor]
    works: list[dist.Work]

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are here and ours are gone."""
        for work in self.works:
            work.wait()
        return self.tensors


def _send_on(tensors: list[torch.Tensor], group: Any, first_tag: int = 0) -> _Coming:
    """Send tensors to the next process of the ring, and take those of the one before, which have the same shapes."""
    processes, rank = dist.get_world_size(group), dist.get_rank(group)
    if processes == 1:
        return _Coming(tensors, tensors, [])
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    operations = []
    for tag, (ours, theirs) in enumerate(zip(sent, received, strict=True), start=first_tag):
        to_next = {"group": group, "tag": tag, "group_peer": (rank + 1) % processes}
        from_last = {"group": group, "tag": tag, "group_peer": (rank - 1) % processes}
        operations.append(dist.P2POp(dist.isend, ours, **to_next))
        operations.append(dist.P2POp(dist.irecv, theirs, **from_last))
    return _Coming(received, sent, dist.batch_isend_irecv(operations))
