"""The feed-forward of a block: plain or gated.

Shapes: B batch, T positions, D hidden, F feed-forward.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration import FratrieConfig
from .linear_maps import apply_jointly


class FeedForward(nn.Module):
    """`down(act(up(x)))` (Vaswani et al. 2017), or gated `down(act(gate(x)) * up(x))` (Shazeer 2020)."""

    joint_maps: ClassVar[tuple[tuple[str, ...], ...]] = (("gate_proj", "up_proj"),)  # see `Mixer`

    def __init__(self, config: FratrieConfig, intermediate_size: int | None = None) -> None:
        super().__init__()
        size = intermediate_size or config.intermediate_size
        bias = config.feed_forward_bias
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=bias) if config.gated_feed_forward else None
        self.up_proj = nn.Linear(config.hidden_size, size, bias=bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.has_fine_output = "down_proj" in (config.float32_parts or ())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to `(…, D)`, each token by itself."""
        if self.gate_proj is None:
            inner = self.act_fn(self.up_proj(hidden_states))
        else:
            gate, up = apply_jointly((self.gate_proj, self.up_proj), hidden_states)
            inner = self.act_fn(gate) * up
        if self.training:
            inner = self.dropout(inner)
        return self.down_proj(inner.to(self.down_proj.weight.dtype) if self.has_fine_output else inner)
