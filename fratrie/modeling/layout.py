"""How the documents of a pass lie. Padding is an input form: a padded batch and a packed one write the same documents.

`Rows` leaves a batch as it is, one document per row, padding included. `Groups` holds one row of real tokens; only the
mixers, which look across tokens, see documents, as the rows of small padded groups of documents of like length.
`find_layout` chooses between them, `find_groups` reads the documents out of either form. A stack adds what its mixers
need (`FratrieStack.complete`): masks, position biases, rotary turns.

Shapes: B batch, T positions of the caller's form, S keys, H heads, D hidden, N real tokens, U documents, G documents
of a group, L length of a group, P places in the rows of all groups.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache, EncoderDecoderCache

from .configuration import FratrieConfig
from .masks import GivenMask, MaskForm, build_mask
from .outputs import FratrieModelOutput

# A group takes documents down to this share of its longest one: little padding, few kernel calls.
_SHORTEST_IN_GROUP = 2 / 3

# What `DataCollatorWithFlattening` may add to a packed batch. The layout says the same.
PACKED_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

# What a pass records only when it is asked to.
RECORDS = ("output_attentions", "output_hidden_states")

# A mask's form and the layer type that it follows.
MaskKind = tuple[MaskForm, str]
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(kw_only=True)
class Layout:
    """How documents lie in the states of a stack, with what its mixers need.

    Attributes:
        shape: the caller's `(B, T)`.
        positions: of each token in its document, in the form of the states; `None` where nothing reads them.
        position_bound: what all positions are below; `None` where the host would have to wait for the device for it.
        masks: by kind; one mask, or one per group.
        biases: position bias `(1, H, T, S)` by layer type, of the longest documents; empty where there is none.
        rotations: rotary cosines and sines by layer type; empty where there are none.
        shared: what the layers of a mixer share, by the name of its class.
        encoder_mask: mask of the states of an encoder, for cross-attention.
        global_tokens: in the caller's form, nonzero at tokens that see all others (`(B, up to S)` after a past).
        has_packed_rows: whether some row of the caller holds several documents.
    """

    shape: tuple[int, int]
    positions: torch.Tensor | None = None
    position_bound: int | None = None
    masks: dict[MaskKind, Any] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    shared: dict[str, nn.Module] = field(default_factory=dict)
    encoder_mask: Any = None
    global_tokens: torch.Tensor | None = None
    has_packed_rows: bool = False

    @property
    def longest(self) -> int:
        """Length of the longest rows that a kernel sees."""
        raise NotImplementedError

    def pack(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Bring `(B, T, …)` from the caller's form into that of the states."""
        raise NotImplementedError

    def place(self, device: torch.device, cache: Cache | None) -> None:
        """Count the positions after the past in `cache`, where nobody gave them."""

    def set_global_tokens(self, mask: torch.Tensor | None, past: Cache | None, is_causal: bool) -> None:
        """Take in a `global_attention_mask` `(B, past + T)`; in a causal stack the last tokens may be left out.

        These are local: `generate` hands on the mask of the prompt.

        Raises:
            ValueError: for another shape.
        """
        self.global_tokens = mask
        if mask is None or torch.compiler.is_compiling():
            return
        seen = 0 if past is None else past_length(past)
        given = tuple(mask.shape)
        length = self.shape[1] + seen if isinstance(seen, int) else given[-1]  # a static cache counts on the device
        least = 1 if is_causal else length
        if len(given) != 2 or given[0] != self.shape[0] or not least <= given[1] <= length:
            raise ValueError(
                f"A global_attention_mask of shape {given} does not fit inputs of shape {self.shape} after a past of "
                f"{seen}: give one number per token."
            )
        if not (isinstance(seen, int) and given[1] <= seen):  # else it says nothing of the new tokens
            self.global_tokens = nn.functional.pad(mask, (0, length - given[1]))

    def build_mask(
        self, config: FratrieConfig, kind: MaskKind, states: torch.Tensor, cache: Cache | None = None
    ) -> Any:
        """What `masks` holds under a kind, for embedded `states` (see `masks.build_mask`)."""
        raise NotImplementedError

    def add_masks(
        self, config: FratrieConfig, kinds: Sequence[MaskKind], states: torch.Tensor, past: Cache | None
    ) -> None:
        """Build the masks of these kinds, for embedded `states` after a past."""
        for kind in kinds:
            if kind not in self.masks:
                self.masks[kind] = self.build_mask(config, kind, states, past)

    def add_biases(
        self, position_bias: nn.Module | None, layer_types: Sequence[str], states: torch.Tensor, past: Cache | None
    ) -> None:
        """Compute the position bias of each layer type, if the model has one.

        Positions are places in the row, of which only the distance counts. The device is that of the states: weights
        that are kept elsewhere, or on disk, do not tell it.

        Args:
            position_bias: makes a bias from the places of queries and keys.
            layer_types: of the layers in the order of the past.
            states: embedded tokens.
            past: cache of these layers.
        """
        for layer, layer_type in enumerate(layer_types):
            if position_bias is None or layer_type in self.biases:
                continue
            offset, (keys, key_offset) = 0, (self.longest, 0)
            if past is not None:
                offset, (keys, key_offset) = past.get_query_offset(layer), past.get_mask_sizes(self.longest, layer)
            queries_T = torch.arange(self.longest, device=states.device) + offset
            keys_S = torch.arange(keys, device=states.device) + key_offset
            self.biases[layer_type] = position_bias(queries_T, keys_S)

    def add_rotations(self, rotary: nn.Module | None, layer_types: Sequence[str], states: torch.Tensor) -> None:
        """Compute the rotary cosines and sines, which may differ by layer type, if the model has them."""
        if isinstance(rotary, nn.ModuleDict):
            for layer_type, own in rotary.items():
                self.rotations[layer_type] = own(states, position_ids=self.positions)
        elif rotary is not None:
            self.rotations = dict.fromkeys(layer_types, rotary(states, position_ids=self.positions))

    def run(
        self,
        kernel: Kernel,
        tensors: Sequence[torch.Tensor],
        mask_kind: MaskKind,
        position_bias: torch.Tensor | None = None,
        token_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the kernel of a mixer over the documents.

        Args:
            kernel: takes the tensors as rows of documents, a mask and a position bias; returns `(rows, length, …)`,
                and weights or `None`.
            tensors: in the form of the states, with the tokens in dimension `token_dim`.
            mask_kind: of the mask that the kernel takes.
            position_bias: as in `biases`.
            token_dim: where the tokens are in `tensors`.

        Returns:
            The result with the tokens in dimension 1, and the weights of a kernel that ran once.
        """
        raise NotImplementedError

    def restore(self, outputs: FratrieModelOutput) -> None:
        """Bring the outputs of a pass without cache into the caller's form, in place, with zeros at padding."""
        raise NotImplementedError

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same on another device; accelerate asks for it before a layer that lies elsewhere."""

        def move(value: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), value)

        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return type(self)(**{name: move(value) for name, value in values.items()})


@dataclass(kw_only=True)
class Rows(Layout):
    """Each row of the states is a document, padding included, which masks hide.

    Attributes:
        given: the caller's mask.
        position_ids: `(B or 1, T)`, if the caller gave them.
    """

    given: GivenMask
    position_ids: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        """Length of the rows."""
        return self.shape[1]

    def pack(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are."""
        return x_BT

    def place(self, device: torch.device, cache: Cache | None) -> None:
        """Count the positions of each row, padding left out, after the past in `cache`."""
        if self.position_ids is not None:
            self.positions = self.position_ids
        elif self.given.padding is not None:
            self.positions = (self.given.padding.long().cumsum(-1) - 1).clamp_min(0)[:, -self.longest :]
            self.position_bound = self.given.padding.shape[1]
        else:
            past = 0 if cache is None else past_length(cache)
            self.position_bound = past + self.longest if isinstance(past, int) else None
            self.positions = (torch.arange(self.longest, device=device) + past).unsqueeze(0)

    def build_mask(
        self, config: FratrieConfig, kind: MaskKind, states: torch.Tensor, cache: Cache | None = None
    ) -> Any:
        """One mask for all rows."""
        given = self.given._replace(global_tokens=self.global_tokens)
        return build_mask(config, kind, states, given, cache, self.position_ids)

    def run(
        self,
        kernel: Kernel,
        tensors: Sequence[torch.Tensor],
        mask_kind: MaskKind,
        position_bias: torch.Tensor | None = None,
        token_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the kernel once, over all rows."""
        return kernel(*tensors, self.masks[mask_kind], position_bias)

    def restore(self, outputs: FratrieModelOutput) -> None:
        """Set the states at padding to zero, as they come out of a pass of real tokens alone.

        With gradients the recorded states stay what they are in the graph, all but the last.
        """
        if self.given.padding is None:
            return
        assert outputs.last_hidden_state is not None
        padding = self.given.padding.to(outputs.last_hidden_state.device)[:, -self.longest :, None] == 0
        outputs.last_hidden_state = outputs.last_hidden_state.masked_fill(padding, 0.0)
        if not outputs.hidden_states:
            return
        states = list(outputs.hidden_states)
        if not torch.is_grad_enabled():
            states = [None if state is None else state.masked_fill(padding, 0.0) for state in states]
        if states[-1] is not None:
            states[-1] = outputs.last_hidden_state
        outputs.hidden_states = tuple(states)


class DocumentGroup(NamedTuple):
    """Documents of like length as rows: `index_GL` names the token in a place, `mask_GL` the places that hold one.

    Places beyond a document's end repeat its last token.
    """

    index_GL: torch.Tensor
    mask_GL: torch.Tensor


@dataclass(kw_only=True)
class Groups(Layout):
    """The real tokens of a batch in one row `(1, N)`, and their documents in groups of like length.

    Attributes:
        cells_N: place of each real token in the caller's form, counted along its rows.
        groups: the documents.
        order_N: place of each token in the rows of all groups, one after another.
        has_holes: whether padding lies between the tokens of a row.
    """

    cells_N: torch.Tensor
    groups: tuple[DocumentGroup, ...]
    order_N: torch.Tensor
    has_holes: bool = False

    @cached_property
    def tokens_P(self) -> torch.Tensor:
        """The token in each place of the rows of all groups, one after another."""
        return torch.cat([group.index_GL.flatten() for group in self.groups])

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max(group.mask_GL.shape[1] for group in self.groups)

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
        return torch.cat([row.flatten(0, 1) for row in rows]).index_select(0, self.order_N).unsqueeze(0)

    def build_mask(
        self, config: FratrieConfig, kind: MaskKind, states: torch.Tensor, cache: Cache | None = None
    ) -> list[Any]:
        """A mask per group; a causal kernel never looks at what fills the room after a document."""
        assert cache is None, "groups have no past"
        needs_none = config.is_causal_stack and kind[0] != "lengths"
        global_N = None if self.global_tokens is None else self.pack(self.global_tokens.bool())[0]
        masks = []
        for group in self.groups:
            given = GivenMask(
                padding=None if needs_none else group.mask_GL,
                global_tokens=None if global_N is None else global_N[group.index_GL] & group.mask_GL,
            )
            rows = states.new_empty(()).expand(*group.mask_GL.shape, 1)
            masks.append(build_mask(config, kind, rows, given))
        return masks

    def run(
        self,
        kernel: Kernel,
        tensors: Sequence[torch.Tensor],
        mask_kind: MaskKind,
        position_bias: torch.Tensor | None = None,
        token_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the kernel on each group."""
        # All groups are laid out at once: an index costs more than what it copies.
        places = [x.transpose(1, token_dim)[0].index_select(0, self.tokens_P) for x in tensors]
        sizes = [group.mask_GL.numel() for group in self.groups]
        by_group = zip(*(x.split(sizes) for x in places), strict=True)
        results = []
        for group, mask, parts in zip(self.groups, self.masks[mask_kind], by_group, strict=True):
            length = group.mask_GL.shape[1]
            # Places in documents count from zero, so the bias of a shorter one is a part of that of the longest.
            bias = None if position_bias is None else position_bias[..., :length, :length]
            rows = (part.unflatten(0, (-1, length)).transpose(1, token_dim) for part in parts)
            results.append(kernel(*rows, mask, bias))
        return self.gather([rows for rows, _ in results]), results[0][1] if len(results) == 1 else None

    def restore(self, outputs: FratrieModelOutput) -> None:
        """Bring every output into the caller's form, in place."""
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


def find_layout(
    config: FratrieConfig,
    shape: tuple[int, int],
    attention_mask: Any,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    options: dict[str, Any],
) -> Layout:
    """How the documents of an input without cache lie.

    Args:
        config: of the stack.
        shape: `(B, T)` of the input.
        attention_mask, position_ids: as the model was given them.
        cu_seq_lens: boundaries of the documents of a single row.
        options: what the pass is asked to record.

    Returns:
        `Groups` for packed rows, and for padded ones where `config.unpad_inputs`; else `Rows`.

    Raises:
        ValueError: for a mask that does not fit the inputs, and for packed rows in a compiled graph.
    """
    given = GivenMask.read(attention_mask)
    rows = Rows(shape=shape, given=given, position_ids=position_ids)
    if given.by_layer_type is not None:
        return rows
    if torch.compiler.is_compiling():
        masks_tell = config.is_causal_stack and all(mixer.mask_form == "scores" for mixer in config.mixers)
        if cu_seq_lens is not None or (position_ids is not None and not masks_tell):
            raise ValueError(
                "A compiled graph cannot look for the documents of packed rows, of which position_ids and "
                "cu_seq_lens_q tell: leave them out, or compile without fullgraph."
            )
        return rows
    if given.padding is not None and given.padding.shape != shape:
        raise ValueError(
            f"An attention_mask of shape {tuple(given.padding.shape)} does not fit inputs of shape {shape}: give "
            "one number per token."
        )
    # `output_hidden_states` may be the number of a layer, such as 0.
    recorded = {name: options.get(name, getattr(config, name)) not in (None, False) for name in RECORDS}
    groups = None
    if given.ready is None:
        one_group = recorded["output_attentions"]
        groups = find_groups(shape, given.padding, position_ids, cu_seq_lens, one_group)
    if groups is None or groups.has_packed_rows:
        return groups or rows
    if any(recorded.values()) and torch.is_grad_enabled():
        return rows  # what is recorded shall be part of the graph, so that it gets its gradient
    # Over a hole, a window or a position bias counts a distance that unpadding would close.
    return groups if config.unpad_inputs and not groups.has_holes else rows


def find_groups(
    shape: tuple[int, int],
    padding: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None = None,
    one_group: bool = False,
) -> Groups | None:
    """Read the documents of a batch from its padding mask, its positions or its cumulative lengths.

    A document ends with its row, at a cumulative length, and before a position that is not above the last one.

    Args:
        shape: `(B, T)` of the batch.
        padding: `(B, T)`, zero at padding.
        position_ids: `(B or 1, T)`, starting anew with each document of a packed row.
        cu_seq_lens: `(U + 1,)` boundaries in a batch of one row.
        one_group: keep all documents in one group, in order.

    Returns:
        The groups, or `None` where each row is one document without padding, or no token is real.
    """
    batch, length = shape
    device = next((x.device for x in (padding, position_ids, cu_seq_lens) if x is not None), None)
    if device is None:
        return None
    # Read once and laid out on the host, which would else wait for the device at every step of this.
    padding, position_ids, cu_seq_lens = (None if x is None else x.cpu() for x in (padding, position_ids, cu_seq_lens))
    cells_N = torch.arange(batch * length)
    if padding is not None:
        cells_N = cells_N[padding.flatten().bool()]
    if len(cells_N) == 0:
        return None
    rows_N = cells_N // length
    starts_N = rows_N.diff(prepend=rows_N.new_full((1,), -1)) != 0
    positions_N = None
    if position_ids is not None:
        positions_N = position_ids.expand(shape).flatten()[cells_N]
        starts_N = starts_N | (positions_N.diff(prepend=positions_N[:1] - 1) <= 0)
    if cu_seq_lens is not None:
        starts_N = starts_N | torch.isin(cells_N, cu_seq_lens)
    first_U = starts_N.nonzero().flatten()
    has_packed_rows = len(first_U) > len(rows_N.unique_consecutive())
    if not has_packed_rows and len(cells_N) == batch * length:
        return None
    lengths_U = first_U.diff(append=first_U.new_full((1,), len(cells_N)))
    if positions_N is None or cu_seq_lens is not None:
        positions_N = torch.arange(len(cells_N)) - first_U.repeat_interleave(lengths_U)
    groups, order_N = _group(first_U, lengths_U, one_group)
    on_host = Groups(
        shape=shape,
        positions=positions_N.unsqueeze(0),
        position_bound=int(positions_N.max()) + 1,
        cells_N=cells_N,
        groups=groups,
        order_N=order_N,
        has_holes=bool(((cells_N.diff() > 1) & (rows_N.diff() == 0)).any()),
        has_packed_rows=has_packed_rows,
    )
    return on_host if device.type == "cpu" else on_host.to(device, non_blocking=True)


def _group(
    first_U: torch.Tensor, lengths_U: torch.Tensor, one_group: bool
) -> tuple[tuple[DocumentGroup, ...], torch.Tensor]:
    """Group documents of like length; return the groups and each token's place in their rows."""
    order_U = torch.arange(len(lengths_U)) if one_group else lengths_U.argsort(descending=True, stable=True)
    sorted_lengths = lengths_U[order_U].tolist()
    groups, order_N, start, places = [], torch.empty(sum(sorted_lengths), dtype=torch.long), 0, 0
    while start < len(sorted_lengths):
        longest = max(sorted_lengths) if one_group else sorted_lengths[start]
        end = start + 1
        while end < len(sorted_lengths) and (one_group or sorted_lengths[end] >= longest * _SHORTEST_IN_GROUP):
            end += 1
        offsets_L = torch.arange(longest)
        lengths_G = torch.tensor(sorted_lengths[start:end])
        mask_GL = offsets_L < lengths_G[:, None]
        index_GL = first_U[order_U[start:end]][:, None] + offsets_L.clamp_max(lengths_G[:, None] - 1)
        order_N[index_GL[mask_GL]] = places + mask_GL.flatten().nonzero().flatten()
        groups.append(DocumentGroup(index_GL, mask_GL))
        start, places = end, places + mask_GL.numel()
    return tuple(groups), order_N


def past_length(cache: Cache) -> int | torch.Tensor:
    """Number of tokens a cache has seen.

    Raises:
        ValueError: when no layer keeps tokens: a state of constant size has no length.
    """
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    try:
        return cache.get_seq_length()
    except ValueError as error:
        if not cache.has_previous_state():
            return 0
        raise ValueError(
            "States of a constant size do not know how many tokens they have seen: pass position_ids, or the "
            "attention_mask of all tokens."
        ) from error
