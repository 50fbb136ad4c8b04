"""Softmax attention: self, causal and cross; multi-head, grouped and multi-query; with cache.

The kernels come from Hugging Face's `AttentionInterface`, in which `blockwise` is ours.

Shapes: B batch, T queries, S keys, D hidden, H query heads, K key-value heads, C head size, N real tokens.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import maybe_autocast

from .blockwise import register_blockwise
from .configuration import FratrieConfig
from .layout import Layout
from .masks import MaskForm
from .mixer import AttentionMixer
from .plans import Plan
from .windows import Window, attend_in_blocks, block_shape, scores_in_blocks, window_in_blocks

# Up to so many keys, SDPA trains up to four times as slowly in half precision as in float32 on a CPU.
_SHORT_ON_CPU = 512

register_blockwise()


class SoftmaxAttention(AttentionMixer):
    """Softmax attention of a sequence to itself (Vaswani et al. 2017), full or within a sliding window."""

    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    own_fields: ClassVar[tuple[str, ...]] = ("attention_output_gate",)
    takes_position_bias = True
    mask_form: ClassVar[MaskForm] = "scores"
    keeps_tokens = True
    fits_paged_cache = True

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window: int | None = None
        if self.layer_type == "sliding_attention":
            assert config.sliding_window is not None
            # Hugging Face's masks reach `sliding_window` to each side of a bidirectional layer, its flash call one
            # less.
            self.sliding_window = config.sliding_window + (0 if self.is_causal else 1)

    @classmethod
    def has_gate(cls, config: FratrieConfig) -> bool:
        """Whether a gate stands before the output projection; what derives from this class has none."""
        return "attention_output_gate" in cls.own_fields and bool(config.attention_output_gate)

    def build_projections(self, config: FratrieConfig) -> None:
        """Add the linear maps and head norms, and a gate where there is one."""
        super().build_projections(config)
        self.gate_proj: nn.Linear | None = None
        if self.has_gate(config):
            self.gate_proj = nn.Linear(config.hidden_size, self.q_proj.out_features, bias=config.attention_bias)

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some of the heads, with their gates."""
        return super().tensor_parallel_plan(config) | ({"gate_proj": "colwise"} if cls.has_gate(config) else {})

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Have no gate where none was asked for."""
        config.attention_output_gate = bool(config.attention_output_gate)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse a window that lets nothing be seen, or that no cache is made for (see `Mixer.check`)."""
        if layer_type != "sliding_attention":
            return
        if (config.sliding_window or 0) <= 0:
            raise ValueError(
                f"layer_types has sliding layers, but sliding_window={config.sliding_window}: set it to a positive "
                "size."
            )
        # The cache holds what a window has before the newest token, and of nothing Hugging Face's keeps everything.
        if config.is_causal_stack and config.sliding_window == 1:
            raise ValueError(
                "sliding_window=1 would let a token see itself alone, for which no cache is made: set it to at least "
                "2."
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend (see `Mixer.forward`)."""
        turns = layout.rotations.get(self.layer_type)
        query_BHTC, key_BKSC, value_BKSC = self.project(hidden_states, turns)
        if cache is not None:
            # Continuous batching reads this very dictionary, and hands it on to its paged kernels.
            key_BKSC, value_BKSC = cache.update(key_BKSC, value_BKSC, self.layer_idx, kwargs=kwargs)
        states = (query_BHTC, *self.expand_key_value(key_BKSC, value_BKSC))
        gate_BTX = None if self.gate_proj is None else self.gate_proj(hidden_states)
        return self.run_kernel(layout, states, position_bias, gate_BTX, **kwargs)

    def expand_key_value(self, key_BKSC: torch.Tensor, value_BKSC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for the kernel from what the cache keeps, which here is the same."""
        return key_BKSC, value_BKSC

    def attend(
        self,
        query_BHTC: torch.Tensor,
        key_BKSC: torch.Tensor,
        value_BKSC: torch.Tensor,
        attention_mask: Any,
        position_bias: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Softmax of the scores times the values, by the configured implementation (see `AttentionMixer.attend`)."""
        if isinstance(attention_mask, Window):
            attend = partial(self.attend, position_bias=None, **kwargs)
            return attend_in_blocks(attend, (query_BHTC, key_BKSC, value_BKSC), attention_mask), None
        given = query_BHTC.dtype
        if self._trains_faster_in_float32(query_BHTC, key_BKSC):
            query_BHTC, key_BKSC, value_BKSC = query_BHTC.float(), key_BKSC.float(), value_BKSC.float()
            if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
                attention_mask = attention_mask.float()
        if position_bias is not None:
            position_bias = position_bias.to(query_BHTC.dtype).expand(query_BHTC.shape[0], -1, -1, -1)
            if isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool:
                # One additive mask; -inf, not the smallest number, lets fully masked rows be zero. The softmax of an
                # exported kernel may be a plain one, which makes such rows NaN.
                lowest = torch.finfo(query_BHTC.dtype).min if torch.compiler.is_exporting() else -torch.inf
                attention_mask = torch.where(attention_mask, position_bias, lowest)
                position_bias = None
        implementation = self.config._attn_implementation
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        value_size = value_BKSC.shape[-1]
        if implementation == "sdpa" and query_BHTC.device.type == "cpu" and value_size != query_BHTC.shape[-1]:
            # On a CPU, torch fuses heads of one size alone; of others it would hold all scores.
            query_BHTC, key_BKSC, value_BKSC = _pad_heads(query_BHTC, key_BKSC, value_BKSC)
        with maybe_autocast(query_BHTC.device.type, enabled=False) if query_BHTC.dtype != given else nullcontext():
            mixed_BTHC, weights_BHTS = kernel(
                self,
                query_BHTC,
                key_BKSC,
                value_BKSC,
                attention_mask,
                dropout=self.config.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=self.sliding_window,
                **({} if position_bias is None else {"position_bias": position_bias}),
                **kwargs,
            )
        return mixed_BTHC[..., :value_size].to(given), weights_BHTS

    def _trains_faster_in_float32(self, query_BHTC: torch.Tensor, key_BKSC: torch.Tensor) -> bool:
        if not self.training or key_BKSC.shape[2] > _SHORT_ON_CPU or self.config._attn_implementation != "sdpa":
            return False
        return query_BHTC.device.type == "cpu" and query_BHTC.dtype.itemsize == 2

    def flops(self, length: int) -> int:
        """Scores and mixed values of a row (see `Mixer.flops`)."""
        return self.score_flops(length, length) if self.sliding_window is None else self.window_flops(length)

    def window_flops(self, length: int) -> int:
        """Scores and mixed values of a row within a window, of its blocks or of all its pairs."""
        if window := window_in_blocks(self.config, length):
            return self.score_flops(1, scores_in_blocks(length, window.before, window.after))
        return self.score_flops(length, length)

    def score_flops(self, queries: int, keys: int) -> int:
        """FLOPs of scores, and of values mixed by them."""
        return 4 * queries * keys * self.q_proj.out_features

    @classmethod
    def numbers_kept(cls, config: FratrieConfig) -> int:
        """Numbers that the cache keeps per token."""
        assert config.num_key_value_heads is not None and config.head_dim is not None
        return 2 * config.num_key_value_heads * config.head_dim

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """Keys and values of all tokens, or of one less than the window (see `Mixer.cache_bytes`)."""
        kept = min(length, (config.sliding_window or 1) - 1) if layer_type == "sliding_attention" else length
        return kept * cls.numbers_kept(config) * dtype.itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """Those of the projections, and of what is added to the scores (see `Mixer.activation_numbers`)."""
        if layer_type == "sliding_attention" and (window := window_in_blocks(config, length)):
            return cls.numbers_in_blocks(config, window)
        return cls.projection_numbers(config) + cls.numbers_added_to_scores(config, layer_type, length)

    @classmethod
    def projection_numbers(cls, config: FratrieConfig, keys_per_query: float = 1.0) -> float:
        """Inputs, queries, keys, values and mixed values per query, normed and gated ones, gates."""
        assert config.num_key_value_heads is not None and config.head_dim is not None
        query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        normed = query + keys_per_query * key if config.query_key_norm else 0
        gated = 2 * query if cls.has_gate(config) else 0
        return config.hidden_size + 2 * query + 2 * keys_per_query * key + normed + gated

    @classmethod
    def numbers_in_blocks(cls, config: FratrieConfig, window: Window) -> float:
        """Those of the projections, a mask, and queries, keys and values as the blocks hold them."""
        assert config.num_key_value_heads is not None and config.head_dim is not None
        size, *around = block_shape(window.before, window.after)
        copies = 1 + sum(around)
        blocks = 2 * copies * config.num_key_value_heads + 2 * config.num_attention_heads
        return cls.projection_numbers(config) + blocks * config.head_dim + copies * size

    @staticmethod
    def numbers_added_to_scores(config: FratrieConfig, layer_type: str, length: int) -> int:
        """Per query those of its bias, else those of a mask, which a window within the row needs."""
        if config.position_type in ("relative", "alibi"):
            return config.num_attention_heads * length
        return length * (layer_type == "sliding_attention" and length >= (config.sliding_window or 0))


class CrossAttention(SoftmaxAttention):
    """Softmax attention of the decoder's tokens to the states of an encoder."""

    own_fields = ()
    joint_maps = ()

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False
        self.sliding_window = None

    def source_size(self, config: FratrieConfig) -> int:
        """Width of the encoder's states."""
        return getattr(config, "cross_attention_hidden_size", None) or config.hidden_size

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        layout: Layout,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` `(B, T, D)` to `encoder_hidden_states` `(B, S, D_encoder)`.

        The first call with an `EncoderDecoderCache` fills it, later calls read it.

        Returns:
            `(B, T, D)`, and the weights `(B, H, T, S)` where the implementation gives them.
        """
        query_BHTC = self.project_query(hidden_states)
        if isinstance(cache, EncoderDecoderCache):
            key_BKSC, value_BKSC = self._cached_key_value(encoder_hidden_states, cache)
        else:
            key_BKSC, value_BKSC = self.project_key_value(encoder_hidden_states)
        mixed_BTHC, weights_BHTS = self.attend(query_BHTC, key_BKSC, value_BKSC, layout.encoder_mask, None, **kwargs)
        return self.o_proj(mixed_BTHC.flatten(-2)), weights_BHTS

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


def _pad_heads(*states: torch.Tensor) -> list[torch.Tensor]:
    """Zeros behind smaller heads, which change neither scores nor mixed values."""
    largest = max(x.shape[-1] for x in states)
    return [nn.functional.pad(x, (0, largest - x.shape[-1])) for x in states]


def eager_attention_forward(
    module: AttentionMixer,
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
