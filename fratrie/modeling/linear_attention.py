"""Linear attention: the softmax replaced by a feature map, so that the cost grows with the length, not its square.

With a feature map φ, the output of a query is φ(q)ᵀ Σ φ(k) vᵀ ÷ φ(q)ᵀ Σ φ(k) (Katharopoulos et al. 2020, whose map
is elu(x) + 1). The two sums, over all keys or over the past ones, are all that a decoder has to remember. A column of
ones beside the values keeps both in one state.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, C head size, F features of a head, J chunks, M tokens
of a chunk; W = C + 1, values and their ones.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.utils.generic import maybe_autocast

from .configuration import FratrieConfig
from .layout import Layout
from .mixer import AttentionMixer
from .states import keep_state

# Exponents of keys are cut to its either side: a sum of e^30 over one of e^-30, which a gradient may form, times a
# million large values still is a float32.
_LARGEST_EXPONENT = 30.0

# Tokens of a part of long rows: much longer ones leave the caches of a processor.
_PART = 1024


def feature_map(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, which is positive; below zero exp(x) itself, since the sum of -1 and 1 would round it away."""
    return x.clamp_max(0).exp_() + x.relu()


def exponentials(x: torch.Tensor) -> torch.Tensor:
    """exp(x) over the largest of the last dimension, a factor that cancels for queries but would not for keys."""
    return (x - x.detach().amax(-1, keepdim=True)).exp_()


def chunks(length: int, longest: int) -> tuple[int, int]:
    """Number and size of the chunks that a row of so many tokens is cut into, the last one perhaps with room left.

    In a compiled graph there are always two or more, and some room: torch makes other graphs for sizes of one and for
    none. In an exported one there is one chunk: export cannot tell that several are enough.
    """
    if torch.compiler.is_exporting():
        return 1, length
    if torch.compiler.is_compiling():
        number = length // longest + 2
        return number, length // number + 1
    number = -(-length // longest)
    return number, -(-length // number)


def parts_of_rows(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Cut tensors `(B, H, T, …)` along their tokens, so that what is made of a part stays near the processor.

    In a compiled graph they are one part, since it serves every length.
    """
    if torch.compiler.is_compiling() or tensors[0].shape[2] <= _PART:
        return [tensors]
    return list(zip(*(x.split(_PART, dim=2) for x in tensors), strict=True))


class LinearAttention(AttentionMixer):
    """Linear attention, bidirectional or causal in chunks; its cache is a state of constant size.

    Class attributes:
        smallest_normaliser: rows whose weights sum up to no more are zero.
    """

    layer_types = ("linear_attention",)
    smallest_normaliser: ClassVar[float] = 0.0

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
        return self.run_kernel(layout, self.project(hidden_states, turns), None, cache=cache)

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        cache: Cache | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """The formula above (see `AttentionMixer.attend`), computed in float32 or better."""
        given, dtype = query_BHTC.dtype, torch.promote_types(torch.float32, query_BHTC.dtype)
        tensors = [query_BHTC, key_BKSC, value_BKSC]
        if attention_mask is not None:
            tensors.append(attention_mask[:, None, :, None])
        parts = [[x.to(dtype) for x in part] for part in parts_of_rows(tensors)]
        # Autocast would round the products, and a sum in half precision soon takes in no more tokens.
        with maybe_autocast(query_BHTC.device.type, enabled=False):
            mixed = self._causal(parts, cache) if self.is_causal else self._bidirectional(parts)
        return torch.cat([x.transpose(1, 2) for x in mixed], dim=1).to(given), None

    def _causal(self, parts: list[list[torch.Tensor]], cache: Cache | None) -> list[torch.Tensor]:
        """Mixed values `(B, H, T, C)` of each part of the rows, one after another."""
        state_BHFW, mixed = self._past_state(cache), []
        for query_BHTC, *others in parts:
            key_BHSF, value_BHSW = (repeat_kv(x, self.num_key_value_groups) for x in self._summands(*others))
            sums_BHTW, state_BHFW = self._in_chunks(self.map_queries(query_BHTC), key_BHSF, value_BHSW, state_BHFW)
            mixed.append(self._normalise(sums_BHTW))
        assert state_BHFW is not None
        keep_state(cache, self.layer_idx, state_BHFW)
        return mixed

    def _bidirectional(self, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Mixed values `(B, H, T, C)` of each part of the rows, of the sums over all."""
        sums = []
        for _, *others in parts:
            key_BKSF, value_BKSW = self._summands(*others)
            sums.append(key_BKSF.transpose(-1, -2) @ value_BKSW)
        state_BHFW = repeat_kv(sum(sums[1:], sums[0]), self.num_key_value_groups)
        return [self._normalise(self.map_queries(part[0]) @ state_BHFW) for part in parts]

    def _summands(
        self, key_BKSC: torch.Tensor, value_BKSC: torch.Tensor, real_B1S1: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """φ of keys, zero at padding, and values with their ones."""
        key_BKSF = self.map_keys(key_BKSC)
        return key_BKSF if real_B1S1 is None else key_BKSF * real_B1S1, nn.functional.pad(
            value_BKSC, (0, 1), value=1.0
        )

    def _normalise(self, sums_BHTW: torch.Tensor) -> torch.Tensor:
        """Values over their normaliser, which is zero in a row without any key: 0 / 0, which shall be zero."""
        normaliser_BHT1 = sums_BHTW[..., -1:]
        normaliser_BHT1 = normaliser_BHT1.masked_fill(normaliser_BHT1 <= self.smallest_normaliser, 1.0)
        return sums_BHTW[..., :-1] / normaliser_BHT1

    def map_queries(self, query_BHTC: torch.Tensor) -> torch.Tensor:
        """φ of queries, `(B, H, T, F)`, up to a factor of each row, which cancels."""
        match self.config.linear_feature_map:
            case "relu":
                return query_BHTC.relu()
            case "exp":
                return exponentials(query_BHTC)
        return feature_map(query_BHTC)

    def map_keys(self, key_BKSC: torch.Tensor) -> torch.Tensor:
        """φ of keys, `(B, K, S, F)`, up to one factor of all keys of a head, whatever the text."""
        match self.config.linear_feature_map:
            case "relu":
                return key_BKSC.relu()
            case "exp":
                return key_BKSC.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()
        return feature_map(key_BKSC)

    @classmethod
    def features_of_head(cls, config: FratrieConfig) -> int:
        """Number F of features of a head."""
        assert config.head_dim is not None
        return config.head_dim

    def _in_chunks(
        self,
        query_BHTF: torch.Tensor,
        key_BHTF: torch.Tensor,
        value_BHTW: torch.Tensor,
        past_BHFW: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over the past: within a chunk by masked scores, of earlier chunks by the state before it.

        All chunks are computed at once, so that one compiled graph serves every length. Returned with the last state.
        """
        length = key_BHTF.shape[2]
        number, size = chunks(length, self.config.linear_chunk_size)
        room = number * size - length
        query_BHJMF, key_BHJMF, value_BHJMW = (
            (nn.functional.pad(x, (0, 0, 0, room)) if room else x).unflatten(2, (number, size))
            for x in (query_BHTF, key_BHTF, value_BHTW)
        )
        if past_BHFW is None:
            past_BHFW = key_BHTF.new_zeros(*key_BHTF.shape[:2], key_BHTF.shape[-1], value_BHTW.shape[-1])
        sums_BHJFW = key_BHJMF.transpose(-1, -2) @ value_BHJMW
        if number == 1:  # a token or a short text, for which a cumulative sum is slow on a CPU
            states_BHJFW = torch.stack((past_BHFW, past_BHFW + sums_BHJFW[:, :, 0]), dim=2)
        else:
            states_BHJFW = torch.cat((past_BHFW.unsqueeze(2), sums_BHJFW), dim=2).cumsum(2)
        before_BHJMW = query_BHJMF @ states_BHJFW[:, :, :-1]
        scores_BHJMM = (query_BHJMF @ key_BHJMF.transpose(-1, -2)).tril_()
        sums_BHJMW = torch.baddbmm(*(x.flatten(0, 2) for x in (before_BHJMW, scores_BHJMM, value_BHJMW)))
        return sums_BHJMW.view_as(value_BHJMW).flatten(2, 3)[:, :, :length], states_BHJFW[:, :, -1]

    def _past_state(self, cache: Cache | None) -> torch.Tensor | None:
        return None if cache is None else cache.get_recurrent_state(self.layer_idx)

    def flops(self, length: int) -> int:
        """Two products with the state per token, and where causal two within its chunk, room included."""
        heads, width, features = self.config.num_attention_heads, self.head_dim + 1, self.features_of_head(self.config)
        if not self.is_causal:  # the heads of a group share its state
            return 2 * length * (heads + heads // self.num_key_value_groups) * features * width
        number, size = chunks(length, self.config.linear_chunk_size)
        return number * size * heads * (4 * features * width + 2 * size * (features + width))

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """A state `(H, F, C + 1)` in float32 or better, at any length (see `Mixer.cache_bytes`)."""
        assert config.head_dim is not None
        numbers = config.num_attention_heads * cls.features_of_head(config) * (config.head_dim + 1)
        return numbers * torch.promote_types(torch.float32, dtype).itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """In float32: feature maps, what they are made from, and where causal the states and scores of a chunk."""
        assert config.head_dim is not None
        heads, head, features = config.num_attention_heads, config.head_dim, cls.features_of_head(config)
        _, size = chunks(length, config.linear_chunk_size)
        states = features * head / size + size if config.is_causal_stack else 0
        numbers = 6 * features + 5 * head + states
        return config.hidden_size + heads * numbers * max(1.0, 4 / dtype.itemsize)
