"""The block that all siblings are made of: a mixer and a feed-forward, each in a residual branch with two norm slots.

Pre-norm, post-norm and sandwich norm differ only in which slots the configuration fills.

Shapes: B batch, T queries, S keys, D hidden, H heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import CrossAttention
from .configuration import FratrieConfig
from .experts import MixtureOfExperts
from .feed_forward import FeedForward
from .layout import Layout
from .mixers import mixers_of
from .normalization import build_norm

Branch = Callable[[torch.Tensor], torch.Tensor]


class Block(GradientCheckpointingLayer):
    """`x + out_norm(f(in_norm(x)))`, or `out_norm(x + f(in_norm(x)))`, for the mixer, then for the feed-forward.

    Between them, where the configuration asks for it, an attention over an encoder's states in the same form.
    """

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_after_residual = config.norm_after_residual
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.mixer = mixers_of(config)[layer_idx](config, layer_idx)
        normed = config.first_input_norm or layer_idx > 0
        self.mixer_input_norm = self._norm(config, config.mixer_input_norm if normed else None)
        self.mixer_output_norm = self._norm(config, config.mixer_output_norm)
        self.cross_attention = None
        if getattr(config, "add_cross_attention", False):
            self.cross_attention = CrossAttention(config, layer_idx)
            self.cross_attention_input_norm = self._norm(config, config.mixer_input_norm)
            self.cross_attention_output_norm = self._norm(config, config.mixer_output_norm)
        sparse = (config.mlp_layer_types or [])[layer_idx] == "sparse"
        self.feed_forward = MixtureOfExperts(config) if sparse else FeedForward(config)
        self.feed_forward_input_norm = self._norm(config, config.feed_forward_input_norm)
        self.feed_forward_output_norm = self._norm(config, config.feed_forward_output_norm)

    @staticmethod
    def _norm(config: FratrieConfig, kind: str | None) -> nn.Module:
        return build_norm(kind, config.hidden_size, config.norm_eps, config.norm_bias)

    def join(self, residual: torch.Tensor, branch: torch.Tensor, output_norm: nn.Module) -> torch.Tensor:
        """Add a branch to the residual stream; the only place that knows where the output norm acts."""
        if self.training:
            branch = self.dropout(branch)
        if self.norm_after_residual:
            return output_norm(residual + branch)
        return residual + output_norm(branch)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        *,
        layout: Layout,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`.

        What needs a gradient is positional, since re-entrant checkpointing sees nothing else.

        Args:
            hidden_states: in the form of the layout.
            encoder_hidden_states: `(B, S, D_encoder)`, in a block with cross-attention.
            position_bias: `(1, H, T, S)` to add to the mixer's scores.
            layout: how the documents lie.
            cache: the past, extended in place.
            **kwargs: for the attention implementation.
        """
        for branch, output_norm in self.branches(encoder_hidden_states, position_bias, layout, cache, **kwargs):
            hidden_states = self.join(hidden_states, branch(hidden_states), output_norm)
        return hidden_states

    def branches(
        self,
        encoder_hidden_states: torch.Tensor | None,
        position_bias: torch.Tensor | None,
        layout: Layout,
        cache: Cache | None,
        **kwargs: Any,
    ) -> list[tuple[Branch, nn.Module]]:
        """The branches in their order, as functions of the residual stream, each with its output norm."""

        def mix(hidden_states: torch.Tensor) -> torch.Tensor:
            own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
            states = self.mixer_input_norm(hidden_states)
            return self.mixer(states, layout=layout, position_bias=position_bias, cache=own_cache, **kwargs)[0]

        def attend_encoder(hidden_states: torch.Tensor) -> torch.Tensor:
            assert self.cross_attention is not None
            states = self.cross_attention_input_norm(hidden_states)
            return self.cross_attention(states, encoder_hidden_states, layout=layout, cache=cache, **kwargs)[0]

        def feed_forward(hidden_states: torch.Tensor) -> torch.Tensor:
            return self.feed_forward(self.feed_forward_input_norm(hidden_states))

        branches: list[tuple[Branch, nn.Module]] = [(mix, self.mixer_output_norm)]
        if self.cross_attention is not None and encoder_hidden_states is not None:
            branches.append((attend_encoder, self.cross_attention_output_norm))
        return [*branches, (feed_forward, self.feed_forward_output_norm)]
