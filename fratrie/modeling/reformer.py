"""Attention by locality-sensitive hashing: a query looks among the keys that a hash puts into its bucket.

Queries and keys are one projection, the key being the query at unit length, and their hash is the nearest of some
random directions (Kitaev et al. 2020, section 2). Vectors at a small angle share a bucket more often than others;
several rounds of hashing, each with directions of its own, miss fewer.

Where the paper lays a grid of chunks over the sorted tokens, a query here sees the nearest tokens of its own bucket,
counted from itself. A grid shifts with the sizes of the buckets, by which later tokens and padding move outputs.

Shapes: B batch, T queries, S keys, H heads, C head size, R rounds of hashing, X buckets' directions or numbers of a
cached key (C + R), J blocks, M tokens of a block, N tokens of a block and its neighbours.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .configuration import FratrieConfig
from .layout import Layout
from .mixer import AttentionMixer
from .plans import Plan
from .seeds import layer_generator, require_seed

_DEFAULTS = {"reformer_num_buckets": 32, "reformer_num_hashes": 4, "reformer_window": 64, "reformer_seed": 0}

# The cache keeps the number of a bucket beside its key, and bfloat16 counts no further.
_MOST_BUCKETS = 256

# Tokens whose blocks are computed at once.
_PART = 256

# Keeps the length of a key away from zero.
_KEY_EPS = 1e-6


class ReformerAttention(AttentionMixer):
    """Attention to the `reformer_window` nearest tokens of the same bucket: before a token, or on either side of it.

    A token that some rounds find together counts once. A query sees itself only where it sees nothing else, since
    its own key is always the nearest. Scores are not divided by the root of the head size, as keys have unit length.

    The cache holds keys, values, and the buckets of a key as R further numbers of it: from 1, and 0 for padding.
    """

    layer_types = ("full_attention",)
    own_fields = tuple(_DEFAULTS)
    joint_maps = ()
    mask_form = "lengths"
    keeps_tokens = True

    rotations: torch.Tensor

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.reformer_num_buckets and config.reformer_num_hashes and config.reformer_window
        self.scaling = 1.0 if config.attention_scale is None else config.attention_scale
        self.num_buckets, self.num_hashes = config.reformer_num_buckets, config.reformer_num_hashes
        self.window = config.reformer_window
        self.register_buffer("rotations", self.draw_rotations().to(torch.empty(0).device))  # perhaps meta

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Set what was left out: 4 rounds of 32 buckets, 64 tokens of each."""
        for name, value in _DEFAULTS.items():
            if getattr(config, name) is None:
                setattr(config, name, value)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse keys that are no queries, and numbers of buckets that no hash gives (see `Mixer.check`)."""
        require_seed("reformer_seed", config.reformer_seed)
        for name in ("reformer_num_hashes", "reformer_window"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name}={getattr(config, name)} must be at least 1.")
        buckets = config.reformer_num_buckets or 0
        if buckets != 1 and not (2 <= buckets <= _MOST_BUCKETS and buckets % 2 == 0):
            raise ValueError(
                f"reformer_num_buckets={buckets} must be 1, or an even number up to {_MOST_BUCKETS}: a direction and "
                "its opposite have a bucket each."
            )
        if config.num_key_value_heads != config.num_attention_heads or config.query_key_norm is not None:
            raise ValueError(
                "The keys of a reformer layer are its queries at unit length: leave out num_key_value_heads="
                f"{config.num_key_value_heads} and query_key_norm={config.query_key_norm}."
            )

    def build_projections(self, config: FratrieConfig) -> None:
        """Add the linear maps; one makes queries and keys."""
        size = config.num_attention_heads * self.head_dim
        self.qk_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=config.attention_output_bias)

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some of the heads; all heads share the directions of the hash."""
        return {"qk_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}

    def draw_rotations(self) -> torch.Tensor:
        """Draw the directions `(C, R, X)` of the buckets, of which each has its opposite for another bucket."""
        assert self.config.reformer_seed is not None
        generator = layer_generator(self.config.reformer_seed, self.layer_idx)
        sizes = (self.head_dim, self.num_hashes, self.num_buckets // 2)
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")

    def initialise(self, std: float) -> None:
        """Fill in the directions (see `FratriePreTrainedModel`)."""
        init.copy_(self.rotations, self.draw_rotations())

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend (see `Mixer.forward`); there are no scores to add a position bias to, and no weights."""
        turns = layout.rotations.get(self.layer_type)
        query_BHTC = self.turn(self.split_heads(self.qk_proj(hidden_states)).transpose(1, 2), turns)
        value_BHSC = self.split_heads(self.v_proj(hidden_states)).transpose(1, 2)
        key_BHSX = self.hashed_keys(query_BHTC)
        if cache is None:
            return self.run_kernel(layout, (query_BHTC, key_BHSX, value_BHSC), None)
        offset = cache.get_query_offset(self.layer_idx)
        mask = layout.masks[self.mask_form, self.layer_type]
        key_BHSX = self.without_padding(key_BHSX, real_tokens(mask, query_BHTC.shape[2], offset))
        if isinstance(offset, torch.Tensor):
            offset = offset.clone()  # a static cache counts in place
        key_BHSX, value_BHSC = cache.update(key_BHSX, value_BHSC, self.layer_idx)
        return self.run_kernel(layout, (query_BHTC, key_BHSX, value_BHSC), None, offset=offset)

    def hashed_keys(self, query_BHTC: torch.Tensor) -> torch.Tensor:
        """Keys of unit length, and behind them the numbers of their buckets, `(B, H, T, C + R)`."""
        dtype = torch.promote_types(torch.float32, query_BHTC.dtype)
        wide_BHTC = query_BHTC.to(dtype)
        length_BHT1 = (wide_BHTC.square().mean(-1, keepdim=True) + _KEY_EPS).sqrt() * self.head_dim**0.5
        key_BHTC = (wide_BHTC / length_BHT1).to(query_BHTC.dtype)
        bucket_BHTR = self.hash(key_BHTC.detach())  # of the rounded key, which is what a cache keeps
        return torch.cat((key_BHTC, bucket_BHTR.to(key_BHTC.dtype)), dim=-1)

    def hash(self, key_BHSC: torch.Tensor) -> torch.Tensor:
        """The bucket of each key in each round, `(B, H, S, R)`, counted from 1: the nearest of the directions."""
        if self.num_buckets == 1:
            return key_BHSC.new_ones(*key_BHSC.shape[:-1], self.num_hashes, dtype=torch.long)
        dtype = torch.promote_types(torch.float32, key_BHSC.dtype)
        with maybe_autocast(key_BHSC.device.type, enabled=False):
            near_BHSX = key_BHSC.to(dtype) @ self.rotations.to(dtype).flatten(1)
        near_BHSRX = near_BHSX.unflatten(-1, (self.num_hashes, -1))
        return torch.cat((near_BHSRX, -near_BHSRX), dim=-1).argmax(-1) + 1

    def without_padding(self, key_BHSX: torch.Tensor, real_BS: torch.Tensor | None) -> torch.Tensor:
        """Put padding into the bucket 0, which nothing sees."""
        if real_BS is None:
            return key_BHSX
        key_BHSC, bucket_BHSR = key_BHSX.split((self.head_dim, self.num_hashes), dim=-1)
        bucket_BHSR = bucket_BHSR.masked_fill(real_BS[:, None, :, None] == 0, 0.0)
        return torch.cat((key_BHSC, bucket_BHSR), dim=-1)

    def attend(  # type: ignore[override]
        self,
        query_BHTC: torch.Tensor,
        key_BHSX: torch.Tensor,
        value_BHSC: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        offset: int | torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix values (see `AttentionMixer.attend`), computed in float32 or better.

        Args:
            key_BHSX: keys and their buckets.
            offset: place of the first query among the keys of a cache, which knows its padding; `None` without one.
            query_BHTC, value_BHSC, attention_mask, position_bias: as in `AttentionMixer.attend`.
        """
        given, dtype = query_BHTC.dtype, torch.promote_types(torch.float32, query_BHTC.dtype)
        if offset is None:
            key_BHSX = self.without_padding(key_BHSX, attention_mask)
        key_BHSC, bucket_BHSR = key_BHSX.split((self.head_dim, self.num_hashes), dim=-1)
        query_BHTC, key_BHSC, value_BHSC = (x.to(dtype) for x in (query_BHTC, key_BHSC, value_BHSC))
        query_BHTC = query_BHTC * self.scaling
        bucket_BHSR, length = bucket_BHSR.long(), query_BHTC.shape[2]
        place_T = torch.arange(length, device=query_BHTC.device) + (0 if offset is None else offset)
        # One graph serves all lengths without a cache, and compiled steps with one are single tokens.
        few = offset is not None if torch.compiler.is_compiling() else length <= self.window
        mix = self._mix_few if few else self._mix_sorted
        with maybe_autocast(query_BHTC.device.type, enabled=False):
            mixed_BHTC, sees_BHT1 = mix(query_BHTC, key_BHSC, value_BHSC, bucket_BHSR, place_T)
        if offset is not None:
            value_BHSC, bucket_BHSR = (x.index_select(2, place_T) for x in (value_BHSC, bucket_BHSR))
        mixed_BHTC = torch.where(sees_BHT1, mixed_BHTC, value_BHSC)
        mixed_BHTC = mixed_BHTC.masked_fill(bucket_BHSR[..., :1] == 0, 0.0)
        return mixed_BHTC.to(given).transpose(1, 2), None

    def within(self, distance: torch.Tensor) -> torch.Tensor:
        """Whether a query sees a key so many places before it in its bucket."""
        if self.is_causal:
            return (distance > 0) & (distance <= self.window)
        return (distance != 0) & (distance.abs() <= self.window)

    def drop(self, weights: torch.Tensor) -> torch.Tensor:
        """Drop some of the weights in training."""
        return nn.functional.dropout(weights, self.config.attention_dropout, self.training)

    def _mix_few(
        self,
        query_BHTC: torch.Tensor,
        key_BHSC: torch.Tensor,
        value_BHSC: torch.Tensor,
        bucket_BHSR: torch.Tensor,
        place_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix values for few queries, by all scores: the next tokens after a past, or a short text.

        Returns:
            Mixed values `(B, H, T, C)`, and whether a query sees another token, `(B, H, T, 1)`.
        """
        bucket_BHRS = bucket_BHSR.transpose(2, 3)
        own_BHRT1 = bucket_BHRS.index_select(3, place_T).unsqueeze(-1)
        same_BHRTS = (own_BHRT1 == bucket_BHRS.unsqueeze(3)) & (own_BHRT1 > 0)
        rank_BHRTS = same_BHRTS.cumsum(-1, dtype=torch.int32)
        own_rank_BHRT1 = rank_BHRTS.gather(-1, place_T.view(-1, 1).expand(own_BHRT1.shape))
        seen_BHTS = (same_BHRTS & self.within(own_rank_BHRT1 - rank_BHRTS)).any(2)
        scores_BHTS = query_BHTC @ key_BHSC.transpose(2, 3)
        scores_BHTS = scores_BHTS.masked_fill(~seen_BHTS, torch.finfo(scores_BHTS.dtype).min)
        return self.drop(scores_BHTS.softmax(-1)) @ value_BHSC, seen_BHTS.any(-1, keepdim=True)

    def _mix_sorted(
        self,
        query_BHTC: torch.Tensor,
        key_BHSC: torch.Tensor,
        value_BHSC: torch.Tensor,
        bucket_BHSR: torch.Tensor,
        place_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix values as `_mix_few` does, each round in blocks of tokens sorted by their bucket.

        A block, as long as the window, sees itself and its neighbours.
        """
        length, keys = query_BHTC.shape[2], key_BHSC.shape[2]
        if length != keys:  # after a past, which asks for nothing
            query_BHTC = torch.zeros_like(key_BHSC).index_copy(2, place_T, query_BHTC)
        bucket_BHRS = bucket_BHSR.transpose(2, 3)
        order_BHRS = bucket_BHRS.argsort(dim=-1, stable=True)
        sorted_place_BHRS = order_BHRS.argsort(dim=-1)
        # Buckets lie further apart than the window, and padding beyond all of them.
        spot_BHRS = sorted_place_BHRS + bucket_BHRS * (self.window + 1)
        spot_BHRS = spot_BHRS.masked_fill(bucket_BHRS == 0, -self.window - 1)

        spots_BHRJMR = self._blocks(spot_BHRS.transpose(2, 3).to(torch.int32), order_BHRS, -self.window - 1)
        tensors = (
            self._blocks(query_BHTC, order_BHRS),
            *(self._around(self._blocks(x, order_BHRS)) for x in (key_BHSC, value_BHSC)),
            *(spots_BHRJMR, self._around(spots_BHRJMR, -self.window - 1)),
        )
        # Part by part, since every two rounds have a number per query and key.
        step = spots_BHRJMR.shape[3] if torch.compiler.is_compiling() else max(1, _PART // self.window)
        parts = [self._mix_blocks(*part) for part in zip(*(x.split(step, dim=3) for x in tensors), strict=True)]
        mixed_BHRJMC, total_BHRJM1, sees_BHRJM1 = (torch.cat(x, dim=3) for x in zip(*parts, strict=True))

        back_BXS = sorted_place_BHRS.flatten(1, 2).unsqueeze(2)
        mixed_BHRSC, total_BHRS1, sees_BHRS1 = (
            take(x.flatten(3, 4).flatten(1, 2), back_BXS).view(*order_BHRS.shape, -1)
            for x in (mixed_BHRJMC, total_BHRJM1, sees_BHRJM1)
        )
        mixed_BHSC = (total_BHRS1.softmax(2) * mixed_BHRSC).sum(2)
        sees_BHS1 = sees_BHRS1.any(2)
        if length != keys:
            mixed_BHSC, sees_BHS1 = (x.index_select(2, place_T) for x in (mixed_BHSC, sees_BHS1))
        return mixed_BHSC, sees_BHS1

    def _mix_blocks(
        self,
        query_BHRJMC: torch.Tensor,
        key_BHRJNC: torch.Tensor,
        value_BHRJNC: torch.Tensor,
        spots_BHRJMR: torch.Tensor,
        spots_BHRJNR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mix values around some blocks; also the logarithms of the sums of weights, and whether there is anything."""
        seen_BHRJMN, rounds_BHRJMN = self._seen(spots_BHRJMR, spots_BHRJNR)
        scores_BHRJMN = query_BHRJMC @ key_BHRJNC.transpose(-1, -2)
        # What several rounds find has its share in each of them.
        scores_BHRJMN = scores_BHRJMN - rounds_BHRJMN.clamp_min(1).to(scores_BHRJMN.dtype).log()
        scores_BHRJMN = scores_BHRJMN.masked_fill(~seen_BHRJMN, torch.finfo(scores_BHRJMN.dtype).min)
        total_BHRJM1 = scores_BHRJMN.logsumexp(-1, keepdim=True)
        weights_BHRJMN = self.drop((scores_BHRJMN - total_BHRJM1).exp())
        return weights_BHRJMN @ value_BHRJNC, total_BHRJM1, seen_BHRJMN.any(-1, keepdim=True)

    def _blocks(self, x_BHSX: torch.Tensor, order_BHRS: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Sort tokens by each round, `(B, H, R, J, M, X)`, and fill up the last block."""
        sorted_BHRSX = take(x_BHSX, order_BHRS)
        number = blocks(x_BHSX.shape[2], self.window)
        room = number * self.window - x_BHSX.shape[2]
        return nn.functional.pad(sorted_BHRSX, (0, 0, 0, room), value=fill).unflatten(3, (number, self.window))

    def _around(self, x_BHRJMX: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Each block with the one before it, and where bidirectional with the one behind it, `(B, H, R, J, N, X)`."""
        sides = 2 if self.is_causal else 3
        padded = nn.functional.pad(x_BHRJMX, (0, 0, 0, 0, 1, sides - 2), value=fill)
        return padded.flatten(3, 4).unfold(3, sides * self.window, self.window).transpose(-1, -2)

    def _seen(self, spots_BHRJMR: torch.Tensor, spots_BHRJNR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which keys around its block a query sees in a round, and in how many rounds, `(B, H, R, J, M, N)`."""
        rounds, seen = torch.zeros((), dtype=torch.uint8, device=spots_BHRJMR.device), []
        for index in range(self.num_hashes):
            found = self.within(spots_BHRJMR[..., index, None] - spots_BHRJNR[..., None, :, index])
            rounds = rounds + found
            seen.append(found[:, :, index])
        return torch.stack(seen, dim=2), rounds

    def flops(self, length: int) -> int:
        """The hash, and scores and mixed values of each round, or of all at once where there are few tokens."""
        width = self.o_proj.in_features
        hashing = length * width * self.num_hashes * (self.num_buckets // 2) * 2
        if length <= self.window:
            return hashing + 4 * length * length * width
        keys = self.window * (2 if self.is_causal else 3)
        return hashing + 4 * blocks(length, self.window) * self.window * keys * width * self.num_hashes

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """Keys, values and buckets of all tokens (see `Mixer.cache_bytes`)."""
        assert config.head_dim is not None and config.reformer_num_hashes is not None
        numbers = 2 * config.head_dim + config.reformer_num_hashes
        return length * config.num_attention_heads * numbers * dtype.itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """Those of the projections; in float32 the sorted states and the scores of each round."""
        assert config.head_dim is not None and config.reformer_num_hashes is not None
        assert config.reformer_window is not None
        rounds, heads, head = config.reformer_num_hashes, config.num_attention_heads, config.head_dim
        wide = max(1.0, 4 / dtype.itemsize)
        if length <= config.reformer_window:
            kernel = heads * (4 * head + 1.25 * length)
        else:
            sides = 2 if config.is_causal_stack else 3
            kernel = heads * rounds * ((3 + 2 * sides) * head + 2.9 * sides * config.reformer_window)
        return config.hidden_size + 1.5 * heads * head + wide * kernel


def real_tokens(mask: torch.Tensor | None, length: int, offset: int | torch.Tensor) -> torch.Tensor | None:
    """Which of the new tokens after a past are real, `(B, T)`, from padding or from a mask of the scores.

    Hugging Face's `generate` makes the latter for a static cache; a token is real that sees itself.

    Args:
        mask: `(B, T)`, or `(B, 1, T, S)` of booleans or of numbers to add; `None` where all are real.
        length: number of new tokens T.
        offset: place of the first of them.
    """
    if mask is None or mask.ndim == 2:
        return mask
    place_T = torch.arange(length, device=mask.device) + offset
    itself_BT = mask[:, 0].gather(-1, place_T.view(-1, 1).expand(len(mask), -1, 1)).squeeze(-1)
    return itself_BT if mask.dtype == torch.bool else itself_BT == 0


def take(x_BHSX: torch.Tensor, index_BHRT: torch.Tensor) -> torch.Tensor:
    """Rows of X numbers by their places among the S of their head, `(B, H, R, T, X)`.

    As an index of rows, which takes little to keep for the backward pass; `gather` keeps one for each number.
    """
    batch, heads, length = x_BHSX.shape[:3]
    first_BH11 = torch.arange(batch * heads, device=x_BHSX.device).view(batch, heads, 1, 1) * length
    rows = x_BHSX.flatten(0, 2).index_select(0, (index_BHRT + first_BH11).flatten())
    return rows.view(*index_BHRT.shape, -1)


def blocks(length: int, size: int) -> int:
    """Number of blocks that hold so many tokens; in a compiled graph with room left, so that sizes of one and none,
    of which torch makes other graphs, do not occur."""
    return length // size + 2 if torch.compiler.is_compiling() else -(-length // size)
