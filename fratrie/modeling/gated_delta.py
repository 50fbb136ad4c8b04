"""Gated DeltaNet: a linear attention that forgets, and that overwrites what it holds of a key (Yang et al. 2025).

Projections pass a short causal convolution; keys and queries have a length of one. A state is decayed, written by the
delta rule and read (see `recurrence`), and what is read of it leaves through a norm and a gate.

Shapes: B batch, T tokens, D hidden, H heads of values, K heads of keys, C size of a key, V size of a value, X channels
of the convolution, or of the gate.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .configuration import FratrieConfig
from .convolution import CausalConvolution
from .layout import Layout
from .mixer import Mixer
from .normalization import build_norm
from .plans import Plan
from .recurrence import Tokens, cached_recurrence, chunk_shape, recurrence_flops
from .states import refuse_cropping

_TAPS = 4
_LENGTH_EPS = 1e-6  # added to the squared length of a key or query
# What the decays start from (Gu and Dao 2023): rates, and the steps that they are times of.
_RATES, _STEPS = (1.0, 16.0), (1e-3, 1e-1)


class GatedDelta(Mixer):
    """Gated DeltaNet in chunks, causal alone; its cache is of constant size: a state, and what the convolution reads.

    The decay of a head at a token is exp(-exp(`log_rate`) · softplus(step + `step_bias`)). There may be more heads of
    values than of keys, of which each then serves several in a row. Positions are left to the other layers.
    """

    layer_types = ("linear_attention",)
    own_fields = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                  "linear_conv_kernel_dim")  # fmt: skip
    runs_bidirectional = False
    fits_onnx = False
    by_channel = False  # whether each channel of a key has a decay of its own

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = _sizes(config)
        assert config.linear_conv_kernel_dim is not None
        size, keys, values = config.hidden_size, self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = (keys, keys, values)
        self.qkv_proj = nn.Linear(size, sum(self.widths), bias=config.attention_bias)
        self.conv = CausalConvolution(sum(self.widths), config.linear_conv_kernel_dim, activation="silu")
        self.rate_proj = nn.Linear(size, self.value_heads, bias=False)
        self.build_gates(config)
        self.log_rate = nn.Parameter(torch.empty(self.value_heads))
        self.step_bias = nn.Parameter(torch.empty(self.value_heads * (self.key_dim if self.by_channel else 1)))
        self.output_norm = build_norm("rms_norm", self.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(values, size, bias=config.attention_output_bias)
        self.initialise()

    def build_gates(self, config: FratrieConfig) -> None:
        """Add the maps to the steps of the decays and to the output gate."""
        self.step_proj = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.output_gate_proj = nn.Linear(config.hidden_size, self.widths[2], bias=False)

    def steps(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The steps of the decays, before their bias: `(B, T, H)`, or by channel `(B, T, H · C)`."""
        return self.step_proj(x_BTD)

    def gate(self, x_BTD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The output gate `(B, T, H · V)`, computed in this dtype."""
        return nn.functional.silu(self.output_gate_proj(x_BTD).to(dtype))

    def initialise(self, std: float = 0.0) -> None:
        """Draw rates and steps as Mamba does (Gu and Dao 2023), so that a state holds tens to thousands of tokens."""
        init.uniform_(self.log_rate, *_RATES)
        init.copy_(self.log_rate, self.log_rate.log())
        init.uniform_(self.step_bias, math.log(_STEPS[0]), math.log(_STEPS[1]))
        step = self.step_bias.exp()
        init.copy_(self.step_bias, step + torch.log(-torch.expm1(-step)))  # softplus leads back to the step

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Give keys and values the heads of an attention, and the convolution four tokens."""
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            if getattr(config, name) is None:
                setattr(config, name, config.num_attention_heads)
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            if getattr(config, name) is None:
                setattr(config, name, config.head_dim)
        if config.linear_conv_kernel_dim is None:
            config.linear_conv_kernel_dim = _TAPS

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse empty sizes, and heads of values that no head of keys serves (see `Mixer.check`)."""
        for name in cls.own_fields:
            if (value := getattr(config, name)) is None or value <= 0:
                raise ValueError(f"{name}={value} must be at least 1.")
        keys, values, _, _ = _sizes(config)
        if values % keys:
            raise ValueError(
                f"linear_num_value_heads={values} is not a multiple of linear_num_key_heads={keys}: each head of keys "
                "serves the same number of heads of values."
            )

    @classmethod
    def tensor_parallel_plan(cls, config: FratrieConfig) -> Plan:
        """The large maps are split; the convolution and the states are whole on every device.

        No name is one of `AttentionMixer`: a plan names the modules of all layers at once.
        """
        into = dict.fromkeys(("qkv_proj", "output_gate_proj"), "colwise_gather_output")
        return into | {"rate_proj": "replicate", "step_proj": "replicate", "out_proj": "rowwise_split_input"}

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix (see `Mixer.forward`); there are no scores to add a position bias to, and no weights."""
        states = (self.qkv_proj(hidden_states), self.log_decays(hidden_states), self.rate_proj(hidden_states))
        kernel = partial(self.recur, cache=cache)
        read_BTHV, _ = layout.run(kernel, states, (self.mask_form, self.layer_type))
        fine = torch.promote_types(torch.float32, hidden_states.dtype)
        gated_BTX = self.output_norm(read_BTHV).flatten(-2) * self.gate(hidden_states, fine)
        return self.out_proj(gated_BTX.to(hidden_states.dtype)), None

    def log_decays(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logarithms of the decays `(B, T, H, 1)`, or `(B, T, H, C)` by channel, in float32 or better."""
        fine = torch.promote_types(torch.float32, x_BTD.dtype)
        step = nn.functional.softplus(self.steps(x_BTD).to(fine) + self.step_bias.to(fine))
        return -self.log_rate.to(fine).exp().unsqueeze(-1) * step.unflatten(-1, (self.value_heads, -1))

    def recur(
        self,
        mixed_BTX: torch.Tensor,
        decay_BTHC: torch.Tensor,
        rate_BTH: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_bias: None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, None]:
        """The kernel: what is read of the states, `(B, T, H, V)`.

        Args:
            mixed_BTX: queries, keys and values side by side, before the convolution.
            decay_BTHC: logarithms of the decays, one or one per channel.
            rate_BTH: the rates of writing, before their sigmoid.
            attention_mask: zero at padding, or `None`.
            position_bias: `None`.
            cache: the past, extended in place.
        """
        dtype = decay_BTHC.dtype
        refuse_cropping(cache, self.layer_idx)
        parts = self.conv(mixed_BTX, attention_mask, cache, self.layer_idx).split(self.widths, dim=-1)
        query_BTKC, key_BTKC = (self.unit(x.unflatten(-1, (self.key_heads, -1)).to(dtype)) for x in parts[:2])
        value_BTHV = parts[2].unflatten(-1, (self.value_heads, -1)).to(dtype)
        query_BTHC, key_BTHC = (
            x.repeat_interleave(self.value_heads // self.key_heads, dim=2)
            for x in (query_BTKC * self.key_dim**-0.5, key_BTKC)
        )
        rate_BTH1 = rate_BTH.sigmoid().to(dtype).unsqueeze(-1)
        if attention_mask is not None:  # nothing is written at padding, of which the convolution makes zeros
            decay_BTHC = decay_BTHC * attention_mask[:, :, None, None].to(dtype)
        tokens = Tokens(*(x.transpose(1, 2) for x in (query_BTHC, key_BTHC, value_BTHV, decay_BTHC, rate_BTH1)))
        read_BHTV = cached_recurrence(tokens, self.config.linear_chunk_size, cache, self.layer_idx)
        return read_BHTV.transpose(1, 2).to(mixed_BTX.dtype), None

    @staticmethod
    def unit(x: torch.Tensor) -> torch.Tensor:
        """Vectors brought to a length of one, or to almost none where they have almost none."""
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)

    def flops(self, length: int) -> int:
        """Those of the convolution, and of the recurrence of each head of values (see `Mixer.flops`)."""
        sizes = (self.config.linear_chunk_size, self.key_dim, self.value_dim)
        recurring = recurrence_flops(length, *sizes, by_channel=self.by_channel, delta=True)
        return self.conv.flops(length) + self.value_heads * recurring

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """A state `(H, C, V)` in float32 or better, and what the convolution reads (see `Mixer.cache_bytes`)."""
        assert config.linear_conv_kernel_dim is not None
        keys, values, key, value = _sizes(config)
        channels = config.linear_conv_kernel_dim * (2 * keys * key + values * value)
        state = values * key * value * torch.promote_types(torch.float32, dtype).itemsize
        return state + channels * dtype.itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """Projections, what the convolution makes of them, and in float32 all that the chunks keep."""
        keys, values, key, value = _sizes(config)
        _, size = chunk_shape(length, config.linear_chunk_size, cls.by_channel)
        coarse = config.hidden_size + 3 * (2 * keys * key + values * value) + 3 * values * value
        scores = 2 * key * size.bit_length() if cls.by_channel else 6 * size
        fine = values * (14 * key + 9 * value + scores + (2 * key * value + 2 * key * key) / size) + 4 * keys * key
        return coarse + fine * max(1.0, 4 / dtype.itemsize)


def _sizes(config: FratrieConfig) -> tuple[int, int, int, int]:
    """Heads of keys and of values, and their sizes."""
    heads = (config.linear_num_key_heads, config.linear_num_value_heads)
    sizes = (config.linear_key_head_dim, config.linear_value_head_dim)
    assert None not in (*heads, *sizes)
    return (*heads, *sizes)  # type: ignore[return-value]
