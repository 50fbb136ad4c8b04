"""Multi-head latent attention: keys and values are kept as one small vector a token (DeepSeek-AI 2024, section 2.1).

Shapes: B batch, T queries, S keys, D hidden, H heads, L latent size, R turned part of a head, P rest of a query or
key head, V value head.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from .attention import SoftmaxAttention
from .normalization import build_norm

# The latent norms have an epsilon of their own.
_LATENT_EPS = 1e-6


class LatentAttention(SoftmaxAttention):
    """Softmax attention whose cache holds a latent vector and a turned key a token, which all heads share."""

    def build_projections(self, config: PreTrainedConfig, key_value_size: int) -> None:
        """The maps into and out of the latents; queries may have a latent of their own (`q_lora_rank`)."""
        heads, rest, turned = config.num_attention_heads, config.qk_nope_head_dim, config.head_dim
        self.sizes = (rest, turned)
        self.value_size = config.v_head_dim
        self.latent_size = config.kv_lora_rank
        self.scaling = config.attention_scale if config.attention_scale is not None else (rest + turned) ** -0.5
        query_size, bias = heads * (rest + turned), config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        else:
            self.q_down_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=bias)
            self.q_latent_norm = build_norm("rms_norm", config.q_lora_rank, _LATENT_EPS)
            self.q_up_proj = nn.Linear(config.q_lora_rank, query_size, bias=False)
        self.kv_down_proj = nn.Linear(config.hidden_size, self.latent_size + turned, bias=bias)
        self.kv_latent_norm = build_norm("rms_norm", self.latent_size, _LATENT_EPS)
        self.kv_up_proj = nn.Linear(self.latent_size, heads * (rest + self.value_size), bias=False)
        self.o_proj = nn.Linear(heads * self.value_size, config.hidden_size, bias=config.attention_output_bias)

    def project_query(
        self, x_BTD: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the queries `(B, H, T, P + R)`, their last part turned."""
        if hasattr(self, "q_proj"):
            query = self.q_proj(x_BTD)
        else:
            query = self.q_up_proj(self.q_latent_norm(self.q_down_proj(x_BTD)))
        rest, turned = query.unflatten(-1, (-1, sum(self.sizes))).transpose(1, 2).split(self.sizes, dim=-1)
        return torch.cat((rest, self.turn(turned, position_embeddings)), dim=-1)

    def project_key_value(
        self, x_BSD: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the cache keeps, as of one head: the latents `(B, 1, S, L)` and turned keys `(B, 1, S, R)`."""
        latent, turned = self.kv_down_proj(x_BSD).unsqueeze(1).split((self.latent_size, self.sizes[1]), dim=-1)
        return self.kv_latent_norm(latent), self.turn(turned, position_embeddings)

    def expand_key_value(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `(B, H, S, P + R)` and values `(B, H, S, V)` of all heads from the latents and the turned keys."""
        latent, turned = key, value
        expanded = self.kv_up_proj(latent.squeeze(1)).unflatten(-1, (-1, self.sizes[0] + self.value_size))
        rest, value = expanded.transpose(1, 2).split((self.sizes[0], self.value_size), dim=-1)
        return torch.cat((rest, turned.expand(-1, rest.shape[1], -1, -1)), dim=-1), value
