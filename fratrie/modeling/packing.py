"""Padding is an input form: a padded batch and a packed one are two ways to write the same documents.

`find_packing` reads the documents out of either form. The stack then holds one row of real tokens; only the mixers,
which look across tokens, see documents: each document is a row of a small padded group of documents of like length.

Shapes: B batch, T positions of the caller's form, N real tokens, G documents of a group, L length of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput

# A group takes documents down to this share of its longest one: little padding, few kernel calls.
_SHORTEST_IN_GROUP = 2 / 3

# What `DataCollatorWithFlattening` may add to a packed batch. The packing replaces it.
PACKED_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class DocumentGroup:
    """Documents of like length as rows: `index_GL` names the token in a place, `mask_GL` the places that hold one."""

    index_GL: torch.Tensor
    mask_GL: torch.Tensor

    def rows(self, x_1N: torch.Tensor) -> torch.Tensor:
        """Lay out tokens `(1, N, …)` as documents `(G, L, …)`; places beyond a document's end repeat some token."""
        return x_1N[0][self.index_GL]


@dataclass(frozen=True)
class Packing:
    """The documents of a batch and where their tokens stand.

    Attributes:
        shape: the caller's `(B, T)`.
        cells_N: place of each real token in the caller's form, counted along its rows.
        positions_N: position of each token in its document.
        groups: the documents.
        order_N: place of each token in the rows of all groups, one after another.
        has_packed_rows: whether some row holds several documents.
    """

    shape: tuple[int, int]
    cells_N: torch.Tensor
    positions_N: torch.Tensor
    groups: tuple[DocumentGroup, ...]
    order_N: torch.Tensor
    has_packed_rows: bool

    @property
    def has_holes(self) -> bool:
        """Whether padding lies between the tokens of a row."""
        same_row = (self.cells_N // self.shape[1]).diff() == 0
        return bool(((self.cells_N.diff() > 1) & same_row).any())

    def pack(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Take the real tokens `(1, N, …)` out of the caller's form `(B, T, …)`."""
        return x_BT.expand(*self.shape, *x_BT.shape[2:]).flatten(0, 1)[self.cells_N].unsqueeze(0)

    def unpack(self, x_1N: torch.Tensor) -> torch.Tensor:
        """Put `(1, N, …)` back into the caller's form `(B, T, …)`, zeros where there is no token."""
        batch, length = self.shape
        cells = x_1N.new_zeros(batch * length, *x_1N.shape[2:])
        return cells.index_copy(0, self.cells_N, x_1N[0]).unflatten(0, self.shape)

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Bring the rows `(G, L, …)` of all groups back to tokens `(1, N, …)`."""
        return torch.cat([row.flatten(0, 1) for row in rows])[self.order_N].unsqueeze(0)

    def restore(self, outputs: ModelOutput) -> None:
        """Bring every output of a packed pass into the caller's form, in place."""
        for name, value in outputs.items():
            if name == "last_hidden_state":
                outputs[name] = self.unpack(value)
            elif name == "hidden_states":
                outputs[name] = tuple(None if state is None else self.unpack(state) for state in value)
            elif name == "router_logits":
                outputs[name] = tuple(self.unpack(logits.unsqueeze(0)).flatten(0, 1) for logits in value)
            elif name == "attentions":
                outputs[name] = tuple(self._unpack_weights(weights) for weights in value)

    def _unpack_weights(self, weights_GHLL: torch.Tensor) -> torch.Tensor:
        (group,) = self.groups  # attention weights are asked for with one group
        batch, length = self.shape
        unpacked = weights_GHLL.new_zeros(batch, weights_GHLL.shape[1], length, length)
        for index_L, mask_L, weights_HLL in zip(group.index_GL, group.mask_GL, weights_GHLL, strict=True):
            cells = self.cells_N[index_L[mask_L]]
            row, columns = cells[0] // length, cells % length
            size = len(columns)
            unpacked[row, :, columns[:, None], columns[None, :]] = weights_HLL[:, :size, :size]
        return unpacked


def find_packing(
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None = None,
    one_group: bool = False,
) -> Packing | None:
    """Read the documents of a batch from its padding mask, its positions or its cumulative lengths.

    A document ends with its row, at a cumulative length, and before a position that is not above the last one.

    Args:
        shape: `(B, T)` of the batch.
        attention_mask: `(B, T)`, zero at padding.
        position_ids: `(B or 1, T)`, starting anew with each document of a packed row.
        cu_seq_lens: `(documents + 1,)` boundaries in a batch of one row.
        one_group: keep all documents in one group, in order.

    Returns:
        The packing, or `None` where each row is one document without padding, or no token is real.
    """
    batch, length = shape
    device = next((x.device for x in (attention_mask, position_ids, cu_seq_lens) if x is not None), None)
    if device is None or (attention_mask is not None and attention_mask.ndim != 2):
        return None
    cells_N = torch.arange(batch * length, device=device)
    if attention_mask is not None:
        cells_N = cells_N[attention_mask.flatten().bool()]
    if len(cells_N) == 0:
        return None
    starts_N = (cells_N // length).diff(prepend=cells_N.new_full((1,), -1)) != 0
    positions_N = None
    if position_ids is not None:
        positions_N = position_ids.expand(shape).flatten()[cells_N]
        starts_N = starts_N | (positions_N.diff(prepend=positions_N[:1] - 1) <= 0)
    if cu_seq_lens is not None:
        starts_N = starts_N | torch.isin(cells_N, cu_seq_lens)
    first_D = starts_N.nonzero().flatten()
    rows_in_use = int((cells_N // length).unique_consecutive().numel())
    has_packed_rows = len(first_D) > rows_in_use
    if not has_packed_rows and len(cells_N) == batch * length:
        return None
    lengths_D = first_D.diff(append=first_D.new_full((1,), len(cells_N)))
    if positions_N is None or cu_seq_lens is not None:
        positions_N = torch.arange(len(cells_N), device=device) - first_D.repeat_interleave(lengths_D)
    groups, order_N = _group(first_D, lengths_D, one_group)
    return Packing(shape, cells_N, positions_N, groups, order_N, has_packed_rows)


def _group(
    first_D: torch.Tensor, lengths_D: torch.Tensor, one_group: bool
) -> tuple[tuple[DocumentGroup, ...], torch.Tensor]:
    """Group documents of like length; return the groups and each token's place in their rows."""
    order_D = torch.arange(len(lengths_D)) if one_group else lengths_D.argsort(descending=True, stable=True).cpu()
    sorted_lengths = lengths_D.cpu()[order_D].tolist()
    groups, order_N, start, places = [], torch.empty(sum(sorted_lengths), dtype=torch.long), 0, 0
    while start < len(sorted_lengths):
        longest = max(sorted_lengths) if one_group else sorted_lengths[start]
        end = start + 1
        while end < len(sorted_lengths) and (one_group or sorted_lengths[end] >= longest * _SHORTEST_IN_GROUP):
            end += 1
        offsets_L = torch.arange(longest)
        lengths_G = torch.tensor(sorted_lengths[start:end])
        mask_GL = offsets_L < lengths_G[:, None]
        index_GL = first_D.cpu()[order_D[start:end]][:, None] + offsets_L.clamp_max(lengths_G[:, None] - 1)
        order_N[index_GL[mask_GL]] = places + mask_GL.flatten().nonzero().flatten()
        groups.append(DocumentGroup(index_GL.to(first_D.device), mask_GL.to(first_D.device)))
        start, places = end, places + mask_GL.numel()
    return tuple(groups), order_N.to(first_D.device)


def map_groups(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    packing: Packing,
    tensors_1N: Sequence[torch.Tensor],
    per_group: Sequence[Sequence[Any]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply a mixer's kernel to each group of documents.

    Args:
        function: takes the tensors as `(G, L, …)` and one value of each of `per_group`; returns `(G, L, …)` and
            weights or `None`.
        packing: the documents.
        tensors_1N: what is laid out as documents, each `(1, N, …)`.
        per_group: sequences with one value a group, such as masks.

    Returns:
        The result `(1, N, …)`, and the weights of the only group, where there is one.
    """
    results = [
        function(*(group.rows(x) for x in tensors_1N), *values)
        for group, *values in zip(packing.groups, *per_group, strict=True)
    ]
    return packing.gather([rows for rows, _ in results]), results[0][1] if len(results) == 1 else None
