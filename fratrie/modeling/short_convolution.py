"""The gated short convolution of LFM2 (Liquid AI 2025): a convolution over a few tokens between two gates.

The hidden state gives three vectors a token: b, c and x. The output is a linear map of c ⊙ conv(b ⊙ x), and all that a
decoder has to remember are the last b ⊙ x.

Shapes: B batch, T tokens, D hidden.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .configuration import FratrieConfig
from .convolution import CausalConvolution
from .layout import Layout
from .mixer import Mixer

_TAPS = 3


class ShortConvolution(Mixer):
    """Mixes each token with the few before it; causal alone, with a cache of constant size."""

    layer_types = ("conv",)
    own_fields = ("short_conv_kernel_size", "short_conv_bias")
    runs_bidirectional = False
    fits_onnx = False

    def __init__(self, config: FratrieConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.short_conv_kernel_size is not None and config.short_conv_bias is not None
        size, bias = config.hidden_size, config.short_conv_bias
        self.in_proj = nn.Linear(size, 3 * size, bias=bias)
        self.conv = CausalConvolution(size, config.short_conv_kernel_size, bias)
        self.out_proj = nn.Linear(size, size, bias=bias)

    @classmethod
    def fill_defaults(cls, config: FratrieConfig) -> None:
        """Three tokens and no biases, as LFM2 has them."""
        if config.short_conv_kernel_size is None:
            config.short_conv_kernel_size = _TAPS
        config.short_conv_bias = bool(config.short_conv_bias)

    @classmethod
    def check(cls, config: FratrieConfig, layer_type: str) -> None:
        """Refuse a convolution over less than the token itself (see `Mixer.check`)."""
        if (taps := config.short_conv_kernel_size) is None or taps < 1:
            raise ValueError(f"short_conv_kernel_size={taps} must be at least 1.")

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix (see `Mixer.forward`); there are no scores to add a position bias to, and no weights."""

        def kernel(x_BTD: torch.Tensor, mask_BT: torch.Tensor | None, _: None) -> tuple[torch.Tensor, None]:
            return self.conv(x_BTD, mask_BT, cache, self.layer_idx), None

        into_BTD, out_of_BTD, x_BTD = self.in_proj(hidden_states).chunk(3, dim=-1)
        mixed_BTD, _ = layout.run(kernel, [into_BTD * x_BTD], (self.mask_form, self.layer_type))
        return self.out_proj(out_of_BTD * mixed_BTD), None

    def flops(self, length: int) -> int:
        """Those of the convolution (see `Mixer.flops`)."""
        return self.conv.flops(length)

    @classmethod
    def cache_bytes(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> int:
        """As many inputs of the convolution as it reads, at any length (see `Mixer.cache_bytes`)."""
        assert config.short_conv_kernel_size is not None
        return config.short_conv_kernel_size * config.hidden_size * dtype.itemsize

    @classmethod
    def activation_numbers(cls, config: FratrieConfig, layer_type: str, length: int, dtype: torch.dtype) -> float:
        """Hidden state, its three vectors, what goes into and comes out of the convolution, and the gated outcome."""
        return 7 * config.hidden_size
