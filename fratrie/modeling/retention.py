"""Retention: linear attention whose heads forget, each at a constant rate of its own (Sun et al. 2023).

Shapes: B batch, T tokens, H heads, K key-value heads, S keys, C head size, X all heads of a token.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .configuration import FratrieConfig
from .layout import Layout
from .mixer import AttentionMixer
from .plans import Plan
from .recurrence import Tokens, cached_recurrence, chunk_shape, recurrence_flops


class HeadDecays(nn.Module):
    """The decay of each head; a module, so that each device of a split model takes those of its own heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logarithms of 1 - 2^(-5-h) for head h, `(1, H, 1, 1)`, on the device of `x`, in float32 or better."""
        dtype = torch.promote_types(torch.float32, x.dtype)
        powers_H = torch.arange(-5, -5 - self.heads, -1, device=x.device).to(dtype)
        return torch.log1p(-powers_H.exp2()).view(1, -1, 1, 1)


class Retention(AttentionMixer):
    """Retention in chunks: `o(silu(g) · norm(Σ decay^(t-s) (q_t · k_s) v_s))` over the tokens s up to t.

    The group norm is over each head of a token, without weights. The cache is a state of constant size.
    """

    layer_types = ("linear_attention",)
    runs_bidirectional = False

    def build_projections(self, config: FratrieConfig) -> None:
        """Add the gate and the decays to the projections of an attention."""
        super().build_projections(config)
        self.gate_proj = nn.Linear(config.hidden_size, self.q_proj.out_features, bias=config.attention_bias)
        self.decays = HeadDecays(config.num_attention_heads)

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """Each device holds some of the heads, with their gates and decays."""
        return super().tensor_parallel_plan(config) | {"gate_proj": "colwise", "decays": "own_heads"}

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Retain (see `Mixer.forward`); there are no scores to add a position bias to, and no weights."""
        turns = layout.rotations.get(self.layer_type)
        states = self.project(hidden_states, turns)
        kernel = partial(self.attend, cache=cache)
        mixed_BTHC, _ = layout.run(kernel, states, (self.mask_form, self.layer_type), token_dim=2)
        gate_BTX = nn.functional.silu(self.gate_proj(hidden_states))
        return self.o_proj(gate_BTX * mixed_BTHC.flatten(-2)), None

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
        """Mix and norm the values of each head (see `AttentionMixer.attend`), in float32 or better."""
        given, dtype = query_BHTC.dtype, torch.promote_types(torch.float32, query_BHTC.dtype)
        decay_BHT1 = self.decays(query_BHTC).expand(query_BHTC.shape[0], -1, query_BHTC.shape[2], -1)
        key_BKSC = key_BKSC.to(dtype)
        if attention_mask is not None:
            real_B1T1 = attention_mask[:, None, :, None].to(dtype)
            decay_BHT1, key_BKSC = decay_BHT1 * real_B1T1, key_BKSC * real_B1T1
        key_BHTC, value_BHTC = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (key_BKSC, value_BKSC))
        tokens = Tokens(query_BHTC.to(dtype) * self.scaling, key_BHTC, value_BHTC, decay_BHT1)
        mixed_BHTC = cached_recurrence(tokens, self.config.linear_chunk_size, cache, self.layer_idx)
        normed_BHTC = nn.functional.layer_norm(mixed_BHTC, mixed_BHTC.shape[-1:], eps=self.config.norm_eps)
        return normed_BHTC.to(given).transpose(1, 2), None

    def flops(self, length: int) -> int:
        """Those of the recurrence of each head."""
        heads = self.q_proj.out_features // self.head_dim
        chunk = self.config.linear_chunk_size
        return heads * recurrence_flops(length, chunk, self.head_dim, self.head_dim, by_channel=False, delta=False)

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """A state `(H, C, C)` in float32 or better, at any length (see `Mixer.cache_bytes`)."""
        assert config.head_dim is not None
        numbers = config.num_attention_heads * config.head_dim**2
        return numbers * torch.promote_types(torch.float32, dtype).itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """In float32 queries, keys, values and outputs, and the states and scores of a chunk; the gate besides."""
        assert config.head_dim is not None
        heads, head = config.num_attention_heads, config.head_dim
        _, size = chunk_shape(length, config.linear_chunk_size, by_channel=False)
        states = 2 * head * head / size + 3 * size
        return config.hidden_size + heads * (3 * head + (9 * head + states) * max(1.0, 4 / dtype.itemsize))
