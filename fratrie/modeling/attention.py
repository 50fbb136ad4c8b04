"""Softmax attention: self, causal and cross; multi-head, grouped and multi-query; with cache.

`Mixer` holds what every mixer of tokens shares: projections, head norms, rotary positions, caller's form. A mixer
adds its kernel, `attend`. The softmax kernels come from Hugging Face's `AttentionInterface`.

Shapes: B batch, T queries, S keys, D hidden, H query heads, K key-value heads, C head size.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .normalization import build_norm
from .packing import Packing, map_groups
from .positions import rotate


class Mixer(nn.Module):
    """What moves information between tokens: the projections, around a kernel that the subclass gives.

    Class attributes say what a mixer can do; the configuration refuses what it cannot.
    """

    supports_position_bias: ClassVar[bool]
    supports_cross_attention: ClassVar[bool]

    def __init__(
        self, config: PreTrainedConfig, layer_idx: int, is_causal: bool, key_value_size: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.head_dim = config.head_dim
        self.rope_interleaved = config.rope_interleaved
        self.has_fine_rotations = "rotations" in (config.float32_parts or ())
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.attention_scale if config.attention_scale is not None else self.head_dim**-0.5
        self.build_projections(config, key_value_size or config.hidden_size)

    def build_projections(self, config: PreTrainedConfig, key_value_size: int) -> None:
        """The linear maps and head norms, reading keys and values from states of `key_value_size`."""
        query_size, group_size = (
            heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(key_value_size, group_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(key_value_size, group_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        self.query_norm, self.key_norm = (
            build_norm(config.query_key_norm, self.head_dim, config.norm_eps, config.norm_bias) for _ in range(2)
        )

    def split_heads(self, x_BTX: torch.Tensor) -> torch.Tensor:
        """`(B, T, H·C)` to `(B, T, H, C)`."""
        return x_BTX.unflatten(-1, (-1, self.head_dim))

    def project_query(
        self, x_BTD: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the queries `(B, H, T, C)`, normed and turned."""
        query = self.query_norm(self.split_heads(self.q_proj(x_BTD))).transpose(1, 2)
        return self.turn(query, position_embeddings)

    def project_key_value(
        self, x_BSD: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `(B, K, S, C)`, the keys normed and turned."""
        key = self.key_norm(self.split_heads(self.k_proj(x_BSD))).transpose(1, 2)
        value = self.split_heads(self.v_proj(x_BSD)).transpose(1, 2)
        return self.turn(key, position_embeddings), value

    def turn(
        self, x_BHTC: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Turn heads by the rotary positions, where the model has them."""
        if position_embeddings is None:
            return x_BHTC
        dtype = torch.promote_types(x_BHTC.dtype, torch.float32) if self.has_fine_rotations else x_BHTC.dtype
        return rotate(x_BHTC.to(dtype), position_embeddings, self.rope_interleaved).to(x_BHTC.dtype)

    def output(self, mixed_BTHC: torch.Tensor) -> torch.Tensor:
        """Join the heads and project: `(B, T, D)`."""
        return self.o_proj(mixed_BTHC.flatten(-2))

    def attend_documents(
        self,
        states: tuple[torch.Tensor, ...],
        masks: list[Any],
        biases: list[Any],
        packing: Packing,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the kernel on each group of documents; `states` are query, key and value `(1, heads, N, C)`."""

        def attend(*rows_and_group: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            query, key, value, mask, bias = rows_and_group
            query, key, value = (rows_GLHC.transpose(1, 2) for rows_GLHC in (query, key, value))
            return self.attend(query, key, value, mask, bias, **kwargs)

        return map_groups(attend, packing, [x.transpose(1, 2) for x in states], (masks, biases))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix values: query `(B, H, T, C)`, key and value `(B, K, S, C)` to `(B, T, H, C)` and weights or `None`."""
        raise NotImplementedError


class SoftmaxAttention(Mixer):
    """Softmax attention of a sequence to itself (Vaswani et al. 2017), full or within a sliding window."""

    supports_position_bias = True
    supports_cross_attention = True

    def __init__(
        self, config: PreTrainedConfig, layer_idx: int, is_causal: bool, key_value_size: int | None = None
    ) -> None:
        super().__init__(config, layer_idx, is_causal, key_value_size)
        sliding = key_value_size is None and config.layer_types[layer_idx] == "sliding_attention"
        # Hugging Face's masks reach `sliding_window` to each side of a bidirectional layer, its flash call one less.
        self.sliding_window = config.sliding_window + (0 if is_causal else 1) if sliding else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: Any = None,
        position_bias: Any = None,
        cache: Cache | None = None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: `(B, T, D)`, or the packed `(1, N, D)`.
            position_embeddings: rotary cosines and sines.
            attention_mask: as the attention implementation takes it; with `packing` a list, one a group.
            position_bias: `(1, H, T, S)`, added to the scores; with `packing` a list.
            cache: keys and values of the past, extended in place.
            packing: the documents of a packed pass.

        Returns:
            `(B, T, D)`, and the weights `(B, H, T, S)` where the implementation gives them.
        """
        query = self.project_query(hidden_states, position_embeddings)
        key, value = self.project_key_value(hidden_states, position_embeddings)
        if cache is not None:
            # Continuous batching reads this very dictionary, and hands it on to its paged kernels.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        key, value = self.expand_key_value(key, value)
        if packing is not None:
            mixed, weights = self.attend_documents(
                (query, key, value), attention_mask, position_bias, packing, **kwargs
            )
        else:
            mixed, weights = self.attend(query, key, value, attention_mask, position_bias, **kwargs)
        return self.output(mixed), weights

    def expand_key_value(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for the kernel from what the cache keeps, which here is the same."""
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Softmax of the scores times the values, by the configured implementation (see `Mixer.attend`)."""
        if position_bias is not None:
            position_bias = position_bias.to(query.dtype).expand(query.shape[0], -1, -1, -1)
            if isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool:
                # One additive mask; -inf, not the smallest number, lets fully masked rows be zero. The softmax of an
                # exported kernel may be a plain one, which makes such rows NaN.
                lowest = torch.finfo(query.dtype).min if torch.compiler.is_exporting() else -torch.inf
                attention_mask = torch.where(attention_mask, position_bias, lowest)
                position_bias = None
        implementation = self.config._attn_implementation
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        return kernel(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **({} if position_bias is None else {"position_bias": position_bias}),
            **kwargs,
        )


class CrossAttention(SoftmaxAttention):
    """Softmax attention of the decoder's tokens to the states of an encoder."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, False, config.cross_attention_hidden_size or config.hidden_size)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` `(B, T, D)` to `encoder_hidden_states` `(B, S, D_encoder)`.

        The first call with an `EncoderDecoderCache` fills it, later calls read it.

        Returns:
            `(B, T, D)`, and the weights `(B, H, T, S)` where the implementation gives them.
        """
        query = self.project_query(hidden_states)
        if isinstance(cache, EncoderDecoderCache):
            key, value = self._cached_key_value(encoder_hidden_states, cache)
        else:
            key, value = self.project_key_value(encoder_hidden_states)
        mixed, weights = self.attend(query, key, value, attention_mask, None, **kwargs)
        return self.output(mixed), weights

    def _cached_key_value(
        self, encoder_hidden_states: torch.Tensor, cache: EncoderDecoderCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layers: list[Any] = cache.cross_attention_cache.layers
        if not cache.is_updated.get(self.layer_idx):
            # Caches are laid out by the decoder's layer types, but an encoder's states never slide or recur.
            if self.layer_idx < len(layers) and type(layers[self.layer_idx]) not in (
                DynamicLayer,
                StaticLayer,
            ):
                layers[self.layer_idx] = DynamicLayer()
            key, value = self.project_key_value(encoder_hidden_states)
            cache.is_updated[self.layer_idx] = True
            return cache.cross_attention_cache.update(key, value, self.layer_idx)
        layer = layers[self.layer_idx]
        return layer.keys, layer.values


def eager_attention_forward(
    module: Mixer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention written out, which returns its weights; fully masked rows give zeros.

    Args:
        query: `(B, H, T, C)`.
        key, value: `(B, K, S, C)`.
        attention_mask: additive `(B, 1, T, S)`.
        scaling: factor of the scores.
        dropout: share of the weights to drop.
        position_bias: `(1, H, T, S)`.

    Returns:
        `(B, T, H, C)` and the weights `(B, H, T, S)`.
    """
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(query.dtype)
    if attention_mask is not None:
        empty = (attention_mask <= torch.finfo(attention_mask.dtype).min).all(-1, keepdim=True)
        weights = weights.masked_fill(empty, 0.0)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
