"""A short causal convolution over the tokens of documents, each channel by itself, whose past lies in the cache.

It stands before or within many recurrent mixers (Fu et al. 2023; Gu and Dao 2023): each token sees itself and the
few before it.

Shapes: B batch, T tokens, S tokens kept and new, X channels, K taps.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache


class CausalConvolution(nn.Module):
    """Convolution over a token and the `taps - 1` real ones before it, with an optional activation.

    Weights are those of a depthwise `nn.Conv1d`: `weight` `(X, 1, taps)`, the last for the token itself, and `bias`
    `(X,)`. Padding is as if it were not there, wherever it stands. To be called within a kernel, to which `Layout.run`
    gives rows of documents. A layer has one; what several would convolve goes through it side by side.
    """

    def __init__(self, channels: int, taps: int, bias: bool = False, activation: str | None = None) -> None:
        super().__init__()
        self.channels, self.taps = channels, taps
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.activation = None if activation is None else ACT2FN[activation]
        self.initialise()

    def initialise(self, std: float = 0.0) -> None:
        """Draw the weights as torch draws those of a convolution, whose sums keep about the size of what they add."""
        bound = self.taps**-0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x_BTX: torch.Tensor,
        mask_BT: torch.Tensor | None = None,
        cache: Cache | None = None,
        layer_idx: int = 0,
    ) -> torch.Tensor:
        """Convolve `(B, T, X)` over the tokens.

        Args:
            x_BTX: what is convolved; read at real tokens alone.
            mask_BT: zero at padding; `None` where all tokens are real, or what is none stands behind them.
            cache: holds the last inputs of each row, which go before these; extended in place.
            layer_idx: of the layer in the cache.

        Returns:
            `(B, T, X)`, zeros at padding.
        """
        if mask_BT is None:
            return self._convolve_all(x_BTX, cache, layer_idx)
        real_BT = mask_BT.bool()
        padding_BT1 = ~real_BT.unsqueeze(-1)
        if cache is not None and cache.is_recording_past(layer_idx):
            # Hugging Face will take columns back, which therefore stay where they came.
            mixed_BTX = self._convolve_all(x_BTX.masked_fill(padding_BT1, 0.0), cache, layer_idx)
        else:
            mixed_BTX = self._convolve_real(x_BTX, real_BT, cache, layer_idx)
        return mixed_BTX.masked_fill(padding_BT1, 0.0)

    def _convolve_all(self, x_BTX: torch.Tensor, cache: Cache | None, layer_idx: int) -> torch.Tensor:
        x_BXS = x_BTX.transpose(1, 2)
        if cache is not None:
            x_BXS = cache.update_conv_state(x_BXS, layer_idx, conv_kernel_size=self.taps)
        return self._last_outputs(x_BXS, x_BTX.shape[1]).transpose(1, 2)

    def _convolve_real(
        self, x_BTX: torch.Tensor, real_BT: torch.Tensor, cache: Cache | None, layer_idx: int
    ) -> torch.Tensor:
        """Convolve with all padding moved before the past, so that each row ends with the last of its real tokens."""
        past_BXS = None if cache is None else cache.get_conv_state(layer_idx)
        if past_BXS is None:
            past_BXS = x_BTX.new_zeros(x_BTX.shape[0], self.channels, self.taps)
        joined_BSX = torch.cat((past_BXS.transpose(1, 2).to(x_BTX.dtype), x_BTX), dim=1)
        # Sorting stably by what is real keeps the order of the real tokens.
        real_BS = torch.cat((real_BT.new_ones(x_BTX.shape[0], self.taps), real_BT), dim=1)
        order_BS = real_BS.to(torch.uint8).argsort(dim=1, stable=True)
        joined_BXS = joined_BSX.gather(1, order_BS.unsqueeze(-1).expand_as(joined_BSX)).transpose(1, 2)
        if cache is not None:
            cache.update_conv_state(joined_BXS[..., -self.taps :], layer_idx, conv_kernel_size=self.taps)
        mixed_BSX = self._last_outputs(joined_BXS, joined_BXS.shape[-1]).transpose(1, 2)
        places_BT = order_BS.argsort(dim=1)[:, self.taps :]
        return mixed_BSX.gather(1, places_BT.unsqueeze(-1).expand_as(x_BTX))

    def _last_outputs(self, x_BXS: torch.Tensor, number: int) -> torch.Tensor:
        """The last so many outputs `(B, X, T)`; zeros stand before the inputs where these are too few.

        The channels of a token lie side by side in memory: so a CPU is three times as fast, and no mixer has to copy.
        """
        x_BSX = nn.functional.pad(x_BXS.transpose(1, 2), (0, 0, number + self.taps - 1 - x_BXS.shape[-1], 0))
        x_BX1S, weight_X11K = x_BSX.transpose(1, 2).unsqueeze(2), self.weight.unsqueeze(2)
        mixed_BX1T = nn.functional.conv2d(x_BX1S, weight_X11K, self.bias, groups=self.channels)
        mixed_BXT = mixed_BX1T.squeeze(2)
        return mixed_BXT if self.activation is None else self.activation(mixed_BXT)

    def flops(self, length: int) -> int:
        """FLOPs of one row of so many tokens."""
        return 2 * length * self.taps * self.channels
