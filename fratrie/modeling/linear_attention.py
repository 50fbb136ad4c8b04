"""Linear attention: the softmax replaced by a feature map, so that the cost grows with the length, not its square.

With φ(x) = elu(x) + 1, the output of a query is φ(q)ᵀ Σ φ(k) vᵀ ÷ φ(q)ᵀ Σ φ(k) (Katharopoulos et al. 2020). The two
sums, over all keys or over the past ones, are all that a decoder has to remember. A column of ones beside the values
keeps both in one state.

Shapes: B batch, T positions, H heads, K key-value heads, C head size; W = C + 1, values and their ones.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .attention import Mixer
from .packing import Packing


def feature_map(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, which is positive; below zero exp(x) itself, since the sum of -1 and 1 would round it away."""
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


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


class LinearAttention(Mixer):
    """Linear attention, bidirectional or causal in chunks; its cache is a state of constant size."""

    supports_position_bias = False
    supports_cross_attention = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: Any = None,
        position_bias: Any = None,
        cache: Cache | None = None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            hidden_states: `(B, T, D)`, or the packed `(1, N, D)`.
            position_embeddings: rotary cosines and sines.
            attention_mask: `(B, T)`, zero at padding, or `None`; with `packing` a list, one a group.
            position_bias: always `None`: there are no scores to add it to.
            cache: the state of the past, updated in place.
            packing: the documents of a packed pass.

        Returns:
            `(B, T, D)`, and `None`: there are no weights.
        """
        query = self.project_query(hidden_states, position_embeddings)
        key, value = self.project_key_value(hidden_states, position_embeddings)
        if packing is not None:
            no_bias = [None] * len(packing.groups)
            mixed, _ = self.attend_documents((query, key, value), attention_mask, no_bias, packing)
        else:
            mixed, _ = self.attend(query, key, value, attention_mask, None, cache=cache)
        return self.output(mixed), None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The formula above (see `Mixer.attend`), computed in float32 or better."""
        dtype = torch.promote_types(torch.float32, query.dtype)
        query_BHTC = feature_map(query.to(dtype))
        key_BHTC = feature_map(key.to(dtype))
        value_BHTW = nn.functional.pad(value.to(dtype), (0, 1), value=1.0)
        if attention_mask is not None:
            key_BHTC = key_BHTC * attention_mask[:, None, :, None].to(dtype)
        key_BHTC, value_BHTW = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key_BHTC, value_BHTW))
        # Autocast would round the products, and a sum in half precision soon takes in no more tokens.
        with maybe_autocast(query.device.type, enabled=False):
            if self.is_causal:
                sums_BHTW = self._causal(query_BHTC, key_BHTC, value_BHTW, kwargs.get("cache"))
            else:
                sums_BHTW = query_BHTC @ (key_BHTC.transpose(-1, -2) @ value_BHTW)
        # A row without any key is 0 / 0; it shall be zero.
        normaliser = sums_BHTW[..., -1:]
        normaliser = normaliser.masked_fill(normaliser == 0, 1.0)
        return (sums_BHTW[..., :-1] / normaliser).to(query.dtype).transpose(1, 2), None

    def _causal(
        self, query_BHTC: torch.Tensor, key_BHTC: torch.Tensor, value_BHTW: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor:
        """Sums over the past: within a chunk by masked scores, of earlier chunks by the state before it.

        All chunks are computed at once, so that one compiled graph serves every length.
        """
        length = key_BHTC.shape[2]
        number, size = chunks(length, self.config.linear_chunk_size)
        room = number * size - length
        query, key, value = (
            (nn.functional.pad(x, (0, 0, 0, room)) if room else x).unflatten(2, (number, size))
            for x in (query_BHTC, key_BHTC, value_BHTW)
        )
        past_BHCW = self._past_state(cache)
        if past_BHCW is None:
            past_BHCW = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
        sums_BHNCW = key.transpose(-1, -2) @ value
        if number == 1:  # a token or a short text, for which a cumulative sum is slow on a CPU
            states_BHNCW = torch.stack((past_BHCW, past_BHCW + sums_BHNCW[:, :, 0]), dim=2)
        else:
            states_BHNCW = torch.cat((past_BHCW.unsqueeze(2), sums_BHNCW), dim=2).cumsum(2)
        if cache is not None:
            cache.update_recurrent_state(states_BHNCW[:, :, -1], self.layer_idx)
            # Hugging Face marks a state as present when it stores a convolution, which this mixer has not.
            layer: Any = cache.layers[self.layer_idx]
            layer.has_previous_state[0] = True
        within = (query @ key.transpose(-1, -2)).tril() @ value
        return (within + query @ states_BHNCW[:, :, :-1]).flatten(2, 3)[:, :, :length]

    def _past_state(self, cache: Cache | None) -> torch.Tensor | None:
        return None if cache is None else cache.get_recurrent_state(self.layer_idx)
