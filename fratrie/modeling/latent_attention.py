"""Multi-head latent attention: keys and values are kept as one small vector per token (DeepSeek-AI 2024, section 2.1).

Shapes: B batch, T queries, S keys, D hidden, H heads, L latent size, R turned part of a head, P rest of a query or
key head, V value head.
"""

import torch
from torch import nn

from .attention import SoftmaxAttention
from .configuration import FratrieConfig
from .linear_maps import apply_jointly
from .normalization import build_norm
from .plans import Plan

# The latent norms have an epsilon of their own.
_LATENT_EPS = 1e-6


class LatentAttention(SoftmaxAttention):
    """Softmax attention whose cache holds a latent vector and a turned key per token, which all heads share."""

    layer_types = ("full_attention",)
    own_fields = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")
    enabled_by = "kv_lora_rank"
    fits_paged_cache = False
    joint_maps = (("q_proj", "kv_down_proj"), ("q_down_proj", "kv_down_proj"))
    gate_proj = None

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Give the parts of a head that are not turned the size of the part that is."""
        config.qk_nope_head_dim = config.head_dim if config.qk_nope_head_dim is None else config.qk_nope_head_dim
        config.v_head_dim = config.head_dim if config.v_head_dim is None else config.v_head_dim

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse empty latents, and heads that do not come from them (see `Mixer.check`)."""
        for name in cls.own_fields:
            if (value := getattr(config, name)) is not None and value <= 0:
                raise ValueError(f"{name}={value} must be at least 1.")
        if config.kv_lora_rank is None:
            raise ValueError("mixer_types has latent layers, but kv_lora_rank=None: set it to the size of a latent.")
        if config.num_key_value_heads != config.num_attention_heads or config.query_key_norm is not None:
            raise ValueError(
                f"kv_lora_rank={config.kv_lora_rank} makes keys of every head from one latent vector: leave out "
                f"num_key_value_heads={config.num_key_value_heads} and query_key_norm={config.query_key_norm}."
            )

    def build_projections(self, config: FratrieConfig) -> None:
        """Add the maps into and out of the latents; queries may have a latent of their own (`q_lora_rank`)."""
        heads, rest, turned = config.num_attention_heads, config.qk_nope_head_dim, config.head_dim
        assert config.kv_lora_rank is not None and config.v_head_dim is not None
        assert rest is not None and turned is not None
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

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """What leads into the latents is whole on every device, what leads out of them is split by heads."""
        queries = "q_proj" if config.q_lora_rank is None else "q_up_proj"
        return {queries: "colwise", "kv_down_proj": "mla_kv_a_proj", "kv_up_proj": "colwise", "o_proj": "rowwise"}

    def project(
        self, x_BTD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries `(B, H, T, P + R)`, their last part turned, and what the cache keeps, as of one head:
        the latents `(B, 1, T, L)` and turned keys `(B, 1, T, R)`."""
        query_map = self.q_proj if self.config.q_lora_rank is None else self.q_down_proj
        query_BTX, down_BTX = apply_jointly((query_map, self.kv_down_proj), x_BTD)
        latent_B1TL, turned_B1TR = down_BTX.unsqueeze(1).split((self.latent_size, self.sizes[1]), dim=-1)
        key_value = self.kv_latent_norm(latent_B1TL), self.turn(turned_B1TR, turns)
        return self.form_query(query_BTX, turns), *key_value

    def form_query(self, query_BTX: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Make the queries of projected ones, or of their latents."""
        if self.config.q_lora_rank is not None:
            query_BTX = self.q_up_proj(self.q_latent_norm(query_BTX))
        heads = query_BTX.unflatten(-1, (-1, sum(self.sizes))).transpose(1, 2)
        rest_BHTP, turned_BHTR = heads.split(self.sizes, dim=-1)
        return torch.cat((rest_BHTP, self.turn(turned_BHTR, turns)), dim=-1)

    def expand_key_value(self, key_B1SL: torch.Tensor, value_B1SR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `(B, H, S, P + R)` and values `(B, H, S, V)` of all heads from the latents and the turned keys."""
        expanded_BSHX = self.kv_up_proj(key_B1SL.squeeze(1)).unflatten(-1, (-1, self.sizes[0] + self.value_size))
        rest_BHSP, value_BHSV = expanded_BSHX.transpose(1, 2).split((self.sizes[0], self.value_size), dim=-1)
        return torch.cat((rest_BHSP, value_B1SR.expand(-1, rest_BHSP.shape[1], -1, -1)), dim=-1), value_BHSV

    def score_flops(self, queries: int, keys: int) -> int:
        """FLOPs of scores, and of values mixed by them, which are of another size."""
        return 2 * queries * keys * self.config.num_attention_heads * (sum(self.sizes) + self.value_size)

    @classmethod
    def numbers_kept(cls, config: FratrieConfig) -> int:
        """A latent and a turned key per token."""
        assert config.kv_lora_rank is not None and config.head_dim is not None
        return config.kv_lora_rank + config.head_dim

    @classmethod
    def projection_numbers(cls, config: FratrieConfig, keys_per_query: float = 1.0) -> float:
        """Latents before and behind their norms, queries, expanded keys and values, and the mixed values.

        Of values of another size than the keys, a CPU keeps padded ones (see `SoftmaxAttention.attend`).
        """
        assert config.kv_lora_rank is not None and config.head_dim is not None
        assert config.qk_nope_head_dim is not None and config.v_head_dim is not None
        query = config.num_attention_heads * (config.qk_nope_head_dim + config.head_dim)
        value = config.num_attention_heads * config.v_head_dim
        latents = 2 * (config.kv_lora_rank + (config.q_lora_rank or 0))
        kernel = 2 * query + 2 * value if query == value else 4 * max(query, value) + value
        return config.hidden_size + latents + kernel
