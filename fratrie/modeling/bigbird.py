"""BigBird: each block of tokens attends a few blocks (Zaheer et al. 2020), at a cost that grows with the length.

A block sees its neighbours, the first and the last block, and some that are drawn; the first and the last block see
all. Where causal, it sees itself, the one before it, the first, and some drawn from those between. Blocks are counted
within the text.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, C head size, I blocks of queries, J blocks of keys,
R blocks that are drawn, M blocks that a block sees, L tokens of a block, Y tokens of M blocks, Z those of two.
"""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .configuration import FratrieConfig
from .layout import Layout
from .masks import real_tokens_first
from .mixer import AttentionMixer
from .plans import Plan
from .seeds import layer_generator, require_seed

# Rows up to so many times the tokens that a block sees are computed under a mask: all at once is faster there.
_DENSE_UP_TO = 1
# A query sees its own block and its two neighbours, and the first and the last block.
_FIXED_BLOCKS = 5
_DRAWN_BITS = 31
# Tokens whose blocks are computed at once.
_PART = 1024


class Draws(nn.Module):
    """What the random blocks of each head and block are drawn with: whole numbers, drawn once and saved.

    Which blocks they stand for follows from the number of blocks of a text, and from nothing else.
    """

    numbers: torch.Tensor

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.bigbird_block_size and config.bigbird_random_blocks and config.bigbird_seed is not None
        blocks = math.ceil(config.max_position_embeddings / config.bigbird_block_size)
        self.size = (1, config.num_attention_heads, blocks, config.bigbird_random_blocks)
        self.seed, self.layer_idx = config.bigbird_seed, layer_idx
        self.register_buffer("numbers", self.draw().to(torch.empty(0).device))

    def draw(self) -> torch.Tensor:
        """The numbers, in [0, 2^31), whatever the state of torch's own generators."""
        generator = layer_generator(self.seed, self.layer_idx)
        return torch.randint(2**_DRAWN_BITS, self.size, generator=generator, device="cpu")

    def initialise(self, std: float) -> None:
        """Draw them (see `FratriePreTrainedModel`)."""
        init.copy_(self.numbers, self.draw())

    def forward(self, blocks: int) -> torch.Tensor:
        """Return those of a text of so many blocks, `(1, H, I, R)`; a longer one than was planned uses them again."""
        index_I = torch.arange(blocks, device=self.numbers.device) % self.numbers.shape[2]
        return self.numbers.index_select(2, index_I)


class BigBirdAttention(AttentionMixer):
    """Attention by blocks: window, global and random ones.

    Short rows are computed under a mask, long ones in blocks, with equal results. Its kernel is torch's own, whatever
    the attention implementation, except for `"eager"`, which is written out.
    """

    layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    own_fields: ClassVar[tuple[str, ...]] = (
        *("bigbird_block_size", "bigbird_random_blocks", "bigbird_random_plan", "bigbird_seed"),
    )
    mask_form = "history"
    keeps_tokens = True
    fits_onnx = False

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.bigbird_block_size is not None and config.bigbird_random_blocks is not None
        self.block_size, self.random_blocks = config.bigbird_block_size, config.bigbird_random_blocks
        self.repeats_first = config.bigbird_random_plan == "first"
        drawn = self.random_blocks > 0 and not self.repeats_first
        self.draws = Draws(config, layer_idx) if drawn else None

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Take the sizes of the paper's base model."""
        defaults = {"bigbird_block_size": 64, "bigbird_random_blocks": 3, "bigbird_random_plan": "drawn",
                    "bigbird_seed": 0}  # fmt: skip
        for name, value in defaults.items():
            if getattr(config, name) is None:
                setattr(config, name, value)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse blocks that cannot be (see `Mixer.check`)."""
        require_seed("bigbird_seed", config.bigbird_seed)
        for name, least in (("bigbird_block_size", 1), ("bigbird_random_blocks", 0)):
            if (value := getattr(config, name)) is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if config.bigbird_random_plan == "first" and config.is_causal_stack:
            raise ValueError(
                "bigbird_random_plan='first' is that of Hugging Face's encoder, but the stack is causal: use 'drawn'."
            )

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some heads, and the numbers of all."""
        drawn = config.bigbird_random_blocks and config.bigbird_random_plan != "first"
        return super().tensor_parallel_plan(config) | ({"draws": "own_heads"} if drawn else {})

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend (see `Mixer.forward`); no weights are returned."""
        turns = layout.rotations.get(self.layer_type)
        query_BHTC, key_BKSC, value_BKSC = self.project(hidden_states, turns)
        offset: int | torch.Tensor = 0
        if cache is not None:
            offset = cache.get_query_offset(self.layer_idx)
            if isinstance(offset, torch.Tensor):  # of a cache of fixed size, which counts on in place
                offset = offset.clone()
            key_BKSC, value_BKSC = cache.update(key_BKSC, value_BKSC, self.layer_idx)
        return self.run_kernel(layout, (query_BHTC, key_BKSC, value_BKSC), None, offset=offset)

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        offset: int | torch.Tensor = 0,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend by blocks (see `AttentionMixer.attend`); `offset` is the number of keys before the first query."""
        queries, keys = query_BHTC.shape[2], key_BKSC.shape[2]
        key_BHSC, value_BHSC = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key_BKSC, value_BKSC))
        states = (query_BHTC, key_BHSC, value_BHSC)
        real_BS = _real_keys(attention_mask, keys)
        has_past = not isinstance(offset, int) or offset > 0 or keys != queries
        if has_past or self.is_dense(queries):
            mixed_BHTC = self._under_mask(states, real_BS, offset)
        elif real_BS is None:
            mixed_BHTC = self._in_blocks(states, query_BHTC.new_full((1,), keys, dtype=torch.long))
        else:
            order_BT = real_tokens_first(real_BS)[:, None, :, None]
            query_BHTC, key_BHSC, value_BHSC = (x.gather(2, order_BT.expand_as(x)) for x in states)
            mixed_BHTC = self._in_blocks((query_BHTC, key_BHSC, value_BHSC), real_BS.sum(1), padded=True)
            place_BT = _positions(real_BS)[:, None, :, None]
            mixed_BHTC = mixed_BHTC.gather(2, place_BT.expand_as(mixed_BHTC)) * real_BS[:, None, :, None]
        return mixed_BHTC.transpose(1, 2), None

    def is_dense(self, length: int) -> bool:
        """Whether rows of so many tokens without a past are computed under a mask."""
        if torch.compiler.is_exporting() or (self.repeats_first and length <= self.full_up_to):
            return True
        return length <= _DENSE_UP_TO * self.blocks_seen * self.block_size

    @property
    def blocks_seen(self) -> int:
        """How many blocks a block sees at most."""
        drawn = 0 if self.repeats_first else self.random_blocks
        return drawn + (_FIXED_BLOCKS - 2 if self.is_causal else _FIXED_BLOCKS)

    @property
    def full_up_to(self) -> int:
        """Length up to which Hugging Face's BigBird lets every token see all."""
        return (5 + 2 * self.random_blocks) * self.block_size

    # --- which blocks ------------------------------------------------------------------------------------------------

    def _drawn(self, number_B: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The random blocks of each block `(B, H, I, R)`, of texts of so many blocks each, and whether there are such.

        Each is drawn from those that are neither seen anyway nor drawn yet.
        """
        index_1I = torch.arange(blocks, device=number_B.device).unsqueeze(0)
        if self.draws is None:
            none_BHIR = index_1I.new_empty(1, 1, blocks, 0)
            return none_BHIR, none_BHIR.bool()
        last_B1 = number_B[:, None] - 1
        if self.is_causal:
            gap_BI, skipped_BI = index_1I, torch.zeros_like(index_1I)
            choices_BI = (index_1I - 2).clamp_min(0)  # the blocks 1 to i - 2
        else:
            gap_BI = (index_1I - 1).clamp_min(1)  # the blocks 1 to n - 2, without those from here on
            skipped_BI = (torch.minimum(index_1I + 1, last_B1 - 1) - gap_BI + 1).clamp_min(0)
            choices_BI = (last_B1 - 1 - skipped_BI).clamp_min(0)
        drawn: list[torch.Tensor] = []
        for place, number_BHI in enumerate(self.draws(blocks).unbind(-1)):
            left_BHI = (choices_BI - place).clamp_min(0).unsqueeze(1)
            choice_BHI = (number_BHI * left_BHI) >> _DRAWN_BITS
            for taken_BHI in torch.stack(drawn, dim=-1).sort(-1).values.unbind(-1) if drawn else ():
                choice_BHI = choice_BHI + (choice_BHI >= taken_BHI)
            drawn.append(choice_BHI)
        block_BHIR = 1 + torch.stack(drawn, dim=-1)
        beyond_BHIR = block_BHIR >= gap_BI[:, None, :, None]
        block_BHIR = block_BHIR + (0 if self.is_causal else beyond_BHIR * skipped_BI[:, None, :, None])
        exists_R = torch.arange(len(drawn), device=number_B.device)
        exists_BHIR = (exists_R < choices_BI[..., None]).unsqueeze(1).expand_as(block_BHIR)
        return block_BHIR.clamp_max(blocks - 1), exists_BHIR

    def _seen(self, number_B: torch.Tensor, blocks: int) -> torch.Tensor:
        """Which blocks `(B, H, I, J)` each block sees."""
        index_J = torch.arange(blocks, device=number_B.device)
        distance_IJ = index_J[:, None] - index_J
        block_BHIR, exists_BHIR = self._drawn(number_B, blocks)
        drawn_BHIJ = ((block_BHIR[..., None] == index_J) & exists_BHIR[..., None]).any(-2)
        if self.is_causal:
            return drawn_BHIJ | (((distance_IJ <= 1) | (index_J == 0)) & (distance_IJ >= 0))
        is_global_BJ = (index_J == 0) | (index_J == number_B[:, None] - 1)
        seen_BIJ = (distance_IJ.abs() <= 1) | is_global_BJ[:, None] | is_global_BJ[:, :, None]
        return drawn_BHIJ | seen_BIJ.unsqueeze(1)

    def _list(self, number_B: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks `(B, H, I, M)` that each block sees, itself first, and which of these count, each once."""
        index_1I = torch.arange(blocks, device=number_B.device).unsqueeze(0).expand(number_B.shape[0], -1)
        last_BI = (number_B[:, None] - 1).expand_as(index_1I)
        fixed = [(index_1I, index_1I <= last_BI), (index_1I - 1, index_1I > 0)]
        fixed.append((torch.zeros_like(index_1I), index_1I > 1))
        if not self.is_causal:
            fixed += [(index_1I + 1, index_1I < last_BI), (last_BI, index_1I + 1 < last_BI)]
        lists = [torch.stack(parts, dim=-1).unsqueeze(1) for parts in zip(*fixed, strict=True)]
        both = []
        for fixed_BHIM, drawn_BHIR in zip(lists, self._drawn(number_B, blocks), strict=True):
            shape = (*torch.broadcast_shapes(fixed_BHIM.shape[:3], drawn_BHIR.shape[:3]), -1)
            both.append(torch.cat((fixed_BHIM.expand(shape), drawn_BHIR.expand(shape)), dim=-1))
        return both[0].clamp(0, blocks - 1), both[1]

    # --- the two ways of computing -----------------------------------------------------------------------------------

    def _under_mask(
        self, states: tuple[torch.Tensor, ...], real_BS: torch.Tensor | None, offset: int | torch.Tensor
    ) -> torch.Tensor:
        """Mix by scores of all keys, of which a mask leaves those that are seen."""
        queries, keys, device = states[0].shape[2], states[1].shape[2], states[0].device
        if real_BS is None:
            position_BS, length_B = torch.arange(keys, device=device)[None], torch.full((1,), keys, device=device)
        else:
            position_BS, length_B = _positions(real_BS), real_BS.sum(1)
        place_T = torch.arange(queries, device=device) + offset
        position_BT = position_BS.index_select(1, place_T)
        block_BT, block_BS = position_BT // self.block_size, position_BS // self.block_size
        number_B = -(-length_B // self.block_size)
        row_B = torch.arange(number_B.shape[0], device=device)[:, None, None]
        seen_BHIJ = self._seen(number_B, -(-keys // self.block_size)).expand(number_B.shape[0], -1, -1, -1)
        seen_BHTS = seen_BHIJ[row_B, :, block_BT[:, :, None], block_BS[:, None, :]].permute(0, 3, 1, 2)
        if self.is_causal:
            seen_BHTS = seen_BHTS & (position_BS[:, None, :] <= position_BT[:, :, None]).unsqueeze(1)
        is_full_B = length_B <= self.full_up_to
        if self.repeats_first:
            seen_BHTS = seen_BHTS | is_full_B[:, None, None, None]
        if real_BS is not None:
            real_BT = real_BS.index_select(1, place_T)
            seen_BHTS = seen_BHTS & real_BS[:, None, None, :] & real_BT[:, None, :, None]
        repeated_BHTS = None
        if self.repeats_first:
            is_inner_BT = (block_BT > 0) & (block_BT < number_B[:, None] - 1) & ~is_full_B[:, None]
            repeated_BHTS = is_inner_BT[:, None, :, None] & (block_BS == 0)[:, None, None, :]
        return self._mix(states, seen_BHTS, repeated_BHTS)

    def _in_blocks(
        self, states: tuple[torch.Tensor, ...], length_B: torch.Tensor, padded: bool = False
    ) -> torch.Tensor:
        """Mix by scores of the blocks that are seen, in rows whose padding stands behind the text."""
        length, head_dim = states[0].shape[2:]
        size, blocks = self.block_size, -(-length // self.block_size)
        room = blocks * size - length
        query_BHTC, key_BHSC, value_BHSC = (nn.functional.pad(x, (0, 0, 0, room)) for x in states)
        number_B = -(-length_B // size)
        block_BHIM, counts_BHIM = self._list(number_B, blocks)
        index_I = torch.arange(blocks, device=length_B.device)
        is_inner_BI = (index_I > 0) & (index_I < number_B[:, None] - 1)
        blocked = (key_BHSC.reshape(-1, size * head_dim), value_BHSC.reshape(-1, size * head_dim))
        query_BHILC = query_BHTC.unflatten(2, (blocks, size))
        # Part by part, since each block has copies of all blocks that it sees.
        step = blocks if torch.compiler.is_compiling() else max(1, _PART // size)
        tensors = (query_BHILC, block_BHIM, counts_BHIM, is_inner_BI[:, None])
        parts = zip(*(x.split(step, dim=2) for x in tensors), strict=True)
        mixed_BHILC = torch.cat([self._mix_blocks(part, blocked, length_B) for part in parts], dim=2)
        if not self.is_causal:
            mixed_BHILC = self._add_global_blocks(mixed_BHILC, (query_BHTC, key_BHSC, value_BHSC), length_B)
        mixed_BHTC = mixed_BHILC.flatten(2, 3)[:, :, :length]
        if padded and self.repeats_first:
            short = min(length, self.full_up_to)
            seen_BS = torch.arange(short, device=length_B.device) < length_B[:, None]
            full_BHTC = self._mix(tuple(x[:, :, :short] for x in states), seen_BS[:, None, None])
            full_BHTC = nn.functional.pad(full_BHTC, (0, 0, 0, length - short))
            mixed_BHTC = torch.where((length_B <= self.full_up_to)[:, None, None, None], full_BHTC, mixed_BHTC)
        return mixed_BHTC

    def _mix_blocks(
        self, part: tuple[torch.Tensor, ...], blocked: tuple[torch.Tensor, torch.Tensor], length_B: torch.Tensor
    ) -> torch.Tensor:
        """Mix what some blocks see, `(B, H, I, L, C)`.

        Args:
            part: of all blocks: their queries, the blocks that they see, which of these count, and which blocks lie
                between the first and the last one.
            blocked: keys and values, a row `(L · C,)` for each block of a text and head.
            length_B: of the texts.
        """
        query_BHILC, block_BHIM, counts_BHIM, is_inner_B1I = part
        batch, heads, blocks, size, head_dim = query_BHILC.shape
        place_BHIML = block_BHIM[..., None] * size + torch.arange(size, device=length_B.device)
        seen_BHIY = (counts_BHIM[..., None] & (place_BHIML < length_B[:, None, None, None, None])).flatten(-2)
        seen_BHILY = seen_BHIY.unsqueeze(-2)
        if self.is_causal:  # the block itself comes first
            own_LL = seen_BHIY.new_ones(size, size).tril()
            seen_BHILY = seen_BHILY & nn.functional.pad(own_LL, (0, seen_BHIY.shape[-1] - size), value=True)
        repeated_BXLY = None
        if self.repeats_first:
            repeated_BHIY = (place_BHIML < size).flatten(-2) & is_inner_B1I[..., None]
            repeated_BXLY = repeated_BHIY.unsqueeze(-2).expand(-1, heads, -1, -1, -1).flatten(1, 2)
        rows = blocked[0].shape[0] // (batch * heads)
        first_BH11 = torch.arange(batch * heads, device=length_B.device).view(batch, heads, 1, 1) * rows
        index_X = (block_BHIM + first_BH11).flatten()
        key_BXYC, value_BXYC = (x.index_select(0, index_X).view(batch, heads * blocks, -1, head_dim) for x in blocked)
        seen_BXLY = seen_BHILY.expand(-1, heads, -1, -1, -1).flatten(1, 2)
        mixed_BXLC = self._mix((query_BHILC.flatten(1, 2), key_BXYC, value_BXYC), seen_BXLY, repeated_BXLY)
        return mixed_BXLC.unflatten(1, (heads, blocks))

    def _add_global_blocks(
        self, mixed_BHILC: torch.Tensor, states: tuple[torch.Tensor, ...], length_B: torch.Tensor
    ) -> torch.Tensor:
        """Put in what the first and the last block of each text, which see all, make of it."""
        query_BHTC, key_BHSC, value_BHSC = states
        batch, heads, blocks, size, head_dim = mixed_BHILC.shape
        last_B = ((length_B - 1) // size).clamp_min(0).expand(batch)
        both_BHZ = torch.stack((torch.zeros_like(last_B), last_B), dim=1)[:, None, :, None, None]
        query_BHZC = query_BHTC.reshape(mixed_BHILC.shape).gather(2, both_BHZ.expand(-1, heads, -1, size, head_dim))
        seen_BS = torch.arange(key_BHSC.shape[2], device=length_B.device) < length_B[:, None]
        all_BHZC = self._mix((query_BHZC.flatten(2, 3), key_BHSC, value_BHSC), seen_BS[:, None, None])
        first_BH1LC, last_BH1LC = all_BHZC.reshape(batch, heads, 2, size, head_dim).split(1, dim=2)
        index_I = torch.arange(blocks, device=length_B.device)[:, None, None]
        mixed_BHILC = torch.where(index_I == last_B[:, None, None, None, None], last_BH1LC, mixed_BHILC)
        return torch.where(index_I == 0, first_BH1LC, mixed_BHILC)

    def _mix(
        self, states: tuple[torch.Tensor, ...], seen_BHTS: torch.Tensor, repeated_BHTS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Softmax attention to the keys that are seen; zeros without any.

        Those that are repeated stand in for random blocks, too, and count once more for each of these.
        """
        query_BHTC, key_BHSC, value_BHSC = states
        dropout = self.config.attention_dropout if self.training else 0.0
        if self.config._attn_implementation != "eager":
            mask = seen_BHTS
            if repeated_BHTS is not None:
                times_BHTS = 1 + self.random_blocks * repeated_BHTS.to(query_BHTC.dtype)
                mask = times_BHTS.log().masked_fill(~seen_BHTS, -torch.inf)
            kernel = nn.functional.scaled_dot_product_attention
            return kernel(query_BHTC, key_BHSC, value_BHSC, mask, dropout, scale=self.scaling)
        dtype = torch.promote_types(torch.float32, query_BHTC.dtype)
        scores_BHTS = (query_BHTC @ key_BHSC.transpose(-1, -2)).to(dtype) * self.scaling
        if repeated_BHTS is not None:
            scores_BHTS = scores_BHTS + (1 + self.random_blocks * repeated_BHTS.to(dtype)).log()
        weights_BHTS = scores_BHTS.masked_fill(~seen_BHTS, torch.finfo(dtype).min).softmax(-1)
        weights_BHTS = weights_BHTS.masked_fill(~seen_BHTS.any(-1, keepdim=True), 0.0).to(query_BHTC.dtype)
        return nn.functional.dropout(weights_BHTS, dropout, self.training) @ value_BHSC

    # --- what it costs -----------------------------------------------------------------------------------------------

    def flops(self, length: int) -> int:
        """Scores and mixed values (see `Mixer.flops`), room in the last block included."""
        if self.is_dense(length):
            return 4 * length * length * self.q_proj.out_features
        tokens = -(-length // self.block_size) * self.block_size
        keys = self.blocks_seen + (0 if self.is_causal else 2)  # the global blocks see all
        return 4 * tokens * keys * self.block_size * self.q_proj.out_features

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """Keys and values of all tokens: a random block may be any (see `Mixer.cache_bytes`)."""
        assert config.num_key_value_heads is not None and config.head_dim is not None
        return length * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """Those of the projections, and in long rows the keys and values of each block (see `Mixer`)."""
        assert config.head_dim is not None and config.bigbird_block_size and config.bigbird_random_blocks is not None
        width = config.num_attention_heads * config.head_dim
        projected = config.hidden_size + 5 * width
        blocks = _FIXED_BLOCKS + config.bigbird_random_blocks
        if length <= _DENSE_UP_TO * blocks * config.bigbird_block_size:
            return projected + config.num_attention_heads * length
        return projected + blocks * (2 * width + config.num_attention_heads * config.bigbird_block_size)


def _positions(real_BS: torch.Tensor) -> torch.Tensor:
    """The place of each token in its text, `(B, S)`."""
    return (real_BS.long().cumsum(1) - 1).clamp_min(0)


def _real_keys(mask: torch.Tensor | None, keys: int) -> torch.Tensor | None:
    """Which keys `(B, S)` are real, of a mask that is padding, or one of scores as `generate` hands it over."""
    if mask is None:
        return None
    if mask.ndim == 4:  # the last query sees all that is real
        mask = mask[:, 0, -1]
        return mask if mask.dtype == torch.bool else mask >= 0
    return nn.functional.pad(mask != 0, (0, keys - mask.shape[1]))  # a cache of fixed size has room behind
