"""Linear attention: the softmax replaced by a feature map, so that the cost grows with the length, not its square.

With φ(x) = elu(x) + 1, the output of a query is φ(q)ᵀ Σ φ(k) vᵀ ÷ φ(q)ᵀ Σ φ(k) (Katharopoulos et al. 2020). The two
sums, over all keys or over the past ones, are all that a decoder has to remember. A column of ones beside the values
keeps both in one state.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, C head size, J chunks, M tokens of a chunk; W = C + 1,
values and their ones.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .configuration import FratrieConfig
from .layout import Layout
from .mixer import AttentionMixer


def feature_map(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, which is positive; below zero exp(x) itself, since the sum of -1 and 1 would round it away."""
    return x.clamp_max(0).exp() + x.relu()


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


class LinearAttention(AttentionMixer):
    """Linear attention, bidirectional or causal in chunks; its cache is a state of constant size."""

    layer_types = ("linear_attention",)
    joint_maps = (("q_proj", "k_proj", "v_proj"),)

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
        query_BHTC = feature_map(query_BHTC.to(dtype))
        key_BKSC = feature_map(key_BKSC.to(dtype))
        value_BKSW = nn.functional.pad(value_BKSC.to(dtype), (0, 1), value=1.0)
        if attention_mask is not None:
            key_BKSC = key_BKSC * attention_mask[:, None, :, None].to(dtype)
        key_BHSC, value_BHSW = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key_BKSC, value_BKSW))
        # Autocast would round the products, and a sum in half precision soon takes in no more tokens.
        with maybe_autocast(query_BHTC.device.type, enabled=False):
            if self.is_causal:
                sums_BHTW = self._causal(query_BHTC, key_BHSC, value_BHSW, cache)
            else:
                sums_BHTW = query_BHTC @ (key_BHSC.transpose(-1, -2) @ value_BHSW)
        # A row without any key is 0 / 0; it shall be zero.
        normaliser_BHT1 = sums_BHTW[..., -1:]
        normaliser_BHT1 = normaliser_BHT1.masked_fill(normaliser_BHT1 == 0, 1.0)
        return (sums_BHTW[..., :-1] / normaliser_BHT1).to(given).transpose(1, 2), None

    def _causal(
        self, query_BHTC: torch.Tensor, key_BHTC: torch.Tensor, value_BHTW: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor:
        """Sums over the past: within a chunk by masked scores, of earlier chunks by the state before it.

        All chunks are computed at once, so that one compiled graph serves every length.
        """
        length = key_BHTC.shape[2]
        number, size = chunks(length, self.config.linear_chunk_size)
        room = number * size - length
        query_BHJMC, key_BHJMC, value_BHJMW = (
            (nn.functional.pad(x, (0, 0, 0, room)) if room else x).unflatten(2, (number, size))
            for x in (query_BHTC, key_BHTC, value_BHTW)
        )
        past_BHCW = self._past_state(cache)
        if past_BHCW is None:
            past_BHCW = key_BHTC.new_zeros(*key_BHTC.shape[:2], key_BHTC.shape[-1], value_BHTW.shape[-1])
        sums_BHJCW = key_BHJMC.transpose(-1, -2) @ value_BHJMW
        if number == 1:  # a token or a short text, for which a cumulative sum is slow on a CPU
            states_BHJCW = torch.stack((past_BHCW, past_BHCW + sums_BHJCW[:, :, 0]), dim=2)
        else:
            states_BHJCW = torch.cat((past_BHCW.unsqueeze(2), sums_BHJCW), dim=2).cumsum(2)
        if cache is not None:
            cache.update_recurrent_state(states_BHJCW[:, :, -1], self.layer_idx)
            # Hugging Face marks a state as present when it stores a convolution, which this mixer has not.
            layer: Any = cache.layers[self.layer_idx]
            layer.has_previous_state[0] = True
        before_BHJMW = query_BHJMC @ states_BHJCW[:, :, :-1]
        scores_BHJMM = (query_BHJMC @ key_BHJMC.transpose(-1, -2)).tril()
        sums_BHJMW = torch.baddbmm(*(x.flatten(0, 2) for x in (before_BHJMW, scores_BHJMM, value_BHJMW)))
        return sums_BHJMW.view_as(value_BHJMW).flatten(2, 3)[:, :, :length]

    def _past_state(self, cache: Cache | None) -> torch.Tensor | None:
        return None if cache is None else cache.get_recurrent_state(self.layer_idx)

    def flops(self, length: int) -> int:
        """Two products with the state per token, and where causal two within its chunk, room included."""
        width, head = self.q_proj.out_features, self.head_dim
        if not self.is_causal:
            return 4 * length * width * (head + 1)
        number, size = chunks(length, self.config.linear_chunk_size)
        within = 2 * size * (width + width // head * (head + 1))
        return number * size * (4 * width * (head + 1) + within)

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """A state `(H, C, C + 1)` in float32 or better, at any length (see `Mixer.cache_bytes`)."""
        assert config.head_dim is not None
        numbers = config.num_attention_heads * config.head_dim * (config.head_dim + 1)
        return numbers * torch.promote_types(torch.float32, dtype).itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """In float32: feature maps, what they are made from, and where causal the states and scores of a chunk."""
        assert config.head_dim is not None
        heads, head = config.num_attention_heads, config.head_dim
        _, size = chunks(length, config.linear_chunk_size)
        states = head * head / size + size if config.is_causal_stack else 0
        return config.hidden_size + heads * (11 * head + states) * max(1.0, 4 / dtype.itemsize)
