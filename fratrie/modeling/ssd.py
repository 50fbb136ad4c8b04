"""The selective state space of Mamba-2 (Dao and Gu 2024): a state that each token lets decay, writes to and reads.

After a short convolution, a token has a step Δ a head, a value x a head, and a key B and a query C that the heads of a
group share: S ← exp(-exp(A) Δ) S + B (Δ x)ᵀ, y = Sᵀ C + D ⊙ x. A gate and a norm follow. All that a decoder has to
remember are S and the last inputs of the convolution.

Shapes: B batch, T tokens, D hidden, X channels of the convolution, H heads, P size of a head, G groups, N size of a
state's key, I = H P.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .configuration import FratrieConfig
from .convolution import CausalConvolution
from .layout import Layout
from .mixer import Mixer
from .recurrence import Tokens, cached_recurrence, chunk_shape, recurrence_flops
from .states import refuse_cropping

# Of Mamba-2: the inner width for each number of the hidden state, and where decays and steps start.
_EXPANSION = 2
_DECAY_RATES = (1.0, 16.0)
_STEPS = (1e-3, 1e-1)


class GatedRMSNorm(nn.Module):
    """RMSNorm of `x silu(gate)` (Zhang and Sennrich 2019), each group of the last dimension by itself."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def initialise(self, std: float) -> None:
        """Weigh all alike."""
        init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Map `(…, I)` to `(…, I)` in the dtype of `x`."""
        gated = (x * nn.functional.silu(gate.to(x.dtype))).unflatten(-1, (self.groups, -1))
        return nn.functional.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(x.dtype)


class StateSpace(Mixer):
    """Mamba-2's mixer, causal alone, in chunks; its cache is a state of constant size and a few inputs."""

    layer_types = ("linear_attention",)
    own_fields = (
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"),
        *("mamba_proj_bias", "mamba_time_step_limit"),
    )
    runs_bidirectional = False
    fits_onnx = False

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, head, groups, state = _sizes(config)
        assert config.mamba_d_conv is not None and config.mamba_conv_bias is not None
        self.num_heads, self.num_groups, self.inner = heads, groups, heads * head
        self.parts = (self.inner, groups * state, groups * state)
        self.limit = config.mamba_time_step_limit
        bias = bool(config.mamba_proj_bias)
        self.in_proj = nn.Linear(config.hidden_size, self.inner + sum(self.parts) + heads, bias=bias)
        self.conv1d = CausalConvolution(sum(self.parts), config.mamba_d_conv, config.mamba_conv_bias, "silu")
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(heads)) for _ in range(3))
        self.norm = GatedRMSNorm(self.inner, groups, config.norm_eps)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=bias)

    def initialise(self, std: float) -> None:
        """Draw rates of decay evenly, and steps, which softplus makes of the bias, evenly by their logs."""
        init.uniform_(self.A_log, *_DECAY_RATES)
        init.copy_(self.A_log, self.A_log.log())
        init.uniform_(self.dt_bias, math.log(_STEPS[0]), math.log(_STEPS[1]))
        step_H = self.dt_bias.exp()
        init.copy_(self.dt_bias, step_H + (-torch.expm1(-step_H)).log())
        init.ones_(self.D)

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Heads as large as those of attention, twice as wide together as the hidden state; else as Mamba-2."""
        if config.mamba_d_head is None:
            config.mamba_d_head = config.head_dim
        if config.mamba_n_heads is None:
            config.mamba_n_heads = max(1, _EXPANSION * config.hidden_size // (config.mamba_d_head or 1))
        defaults = {"mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}
        for name, value in (defaults | {"mamba_conv_bias": True, "mamba_proj_bias": False}).items():
            if getattr(config, name) is None:
                setattr(config, name, value)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse sizes that are none, groups of unlike size and steps without room (see `Mixer.check`)."""
        for name in ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"):
            if (value := getattr(config, name)) is None or value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        heads, _, groups, _ = _sizes(config)
        if heads % groups:
            raise ValueError(
                f"mamba_n_heads={heads} is not a multiple of mamba_n_groups={groups}: change one of them."
            )
        limit = config.mamba_time_step_limit
        if limit is not None and not (len(limit) == 2 and 0 <= limit[0] < limit[1]):
            raise ValueError(f"mamba_time_step_limit={limit} must be two numbers, 0 or more, the second the larger.")

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix (see `Mixer.forward`); there are no scores to add a position bias to, and no weights."""

        def kernel(
            x_BTX: torch.Tensor, step_BTH: torch.Tensor, mask_BT: torch.Tensor | None, _: None
        ) -> tuple[torch.Tensor, None]:
            return self.scan(x_BTX, step_BTH, mask_BT, cache), None

        projected = self.in_proj(hidden_states).split((self.inner, sum(self.parts), self.num_heads), dim=-1)
        gate_BTI, x_BTX, step_BTH = projected
        mixed_BTI, _ = layout.run(kernel, [x_BTX, step_BTH], (self.mask_form, self.layer_type))
        return self.out_proj(self.norm(mixed_BTI, gate_BTI).to(hidden_states.dtype)), None

    def scan(
        self, x_BTX: torch.Tensor, step_BTH: torch.Tensor, mask_BT: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """Convolve, and run the state equation over rows of tokens, in float32 or better: `(B, T, I)`.

        Padding takes a step of zero, by which the state neither decays nor is written to.
        """
        dtype = torch.promote_types(torch.float32, x_BTX.dtype)
        refuse_cropping(cache, self.layer_idx)
        x_BTX = self.conv1d(x_BTX, mask_BT, cache, self.layer_idx).to(dtype)
        step_BTH = nn.functional.softplus(step_BTH.to(dtype) + self.dt_bias.to(dtype))
        if self.limit is not None:
            step_BTH = step_BTH.clamp(*self.limit)
        if mask_BT is not None:
            step_BTH = step_BTH * mask_BT.unsqueeze(-1).to(dtype)
        value_BTI, *shared = x_BTX.split(self.parts, dim=-1)
        value_BHTP = value_BTI.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key_BGTN, query_BGTN = (x.unflatten(-1, (self.num_groups, -1)).transpose(1, 2) for x in shared)
        step_BHT1 = step_BTH.transpose(1, 2).unsqueeze(-1)
        log_decay_BHT1 = -self.A_log.to(dtype).exp()[:, None, None] * step_BHT1
        tokens = Tokens(query_BGTN, key_BGTN, value_BHTP * step_BHT1, log_decay_BHT1)
        mixed_BHTP = cached_recurrence(tokens, self.config.linear_chunk_size, cache, self.layer_idx)
        skipped_BHTP = value_BHTP * self.D.to(dtype)[:, None, None]
        return (mixed_BHTP + skipped_BHTP).transpose(1, 2).flatten(2)

    def flops(self, length: int) -> int:
        """Those of the convolution and of the state equation (see `Mixer.flops`)."""
        heads, head, groups, state = _sizes(self.config)
        longest = self.config.linear_chunk_size
        scan = heads * recurrence_flops(length, longest, state, head, by_channel=False, delta=False)
        if length > 1:  # the heads of a group share its scores
            number, size = chunk_shape(length, longest, by_channel=False)
            scan -= (heads - groups) * 2 * number * size * size * state
        return self.conv1d.flops(length) + scan

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """A state `(H, N, P)` in float32 or better, and inputs of the convolution, at any length."""
        heads, head, groups, state = _sizes(config)
        assert config.mamba_d_conv is not None
        kept = config.mamba_d_conv * (heads * head + 2 * groups * state) * dtype.itemsize
        return kept + heads * head * state * torch.promote_types(torch.float32, dtype).itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """What is projected and convolved, and in float32 queries, keys and values of all heads, and scores."""
        heads, head, groups, state = _sizes(config)
        channels = heads * head + 2 * groups * state
        scan = heads * (4 * state + 6 * head + 3 * min(length, config.linear_chunk_size))
        return config.hidden_size + 4 * channels + scan * max(1.0, 4 / dtype.itemsize)


def _sizes(config: FratrieConfig) -> tuple[int, int, int, int]:
    """Heads, numbers of a head, groups, and keys of a state."""
    heads, head, groups, state = (
        config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state
    )  # fmt: skip
    assert heads is not None and head is not None and groups is not None and state is not None
    return heads, head, groups, state
