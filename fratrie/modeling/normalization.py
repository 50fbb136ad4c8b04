"""The norms a slot of a block can hold."""

import torch
from torch import nn

_HALF = (torch.float16, torch.bfloat16)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm (Zhang and Sennrich 2019), which in half precision rounds where published models do.

    Llama, DeepSeek and T5 round the normed states and then weigh them; torch weighs them in float32 and rounds after
    that. Both are the same in float32 and float64, where nothing is rounded in between.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to `(…, D)`, in the dtype of the weights or that of the inputs if it is finer."""
        if x.dtype == self.weight.dtype not in _HALF:
            return super().forward(x)
        normed = nn.functional.rms_norm(x, self.normalized_shape, eps=self.eps)
        # The residual stream of T5 in float16 is float32, and its norms lead back to float16.
        return (normed.to(self.weight.dtype) if self.weight.dtype in _HALF else normed) * self.weight


class NoNorm(nn.Identity):
    """An empty slot, without the cost of a module's call, which is that of a small operation on a CPU."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


def build_norm(kind: str | None, size: int, eps: float, bias: bool = True) -> nn.Module:
    """Build a norm over the last dimension.

    Args:
        kind: `"layer_norm"` (Ba et al. 2016), `"rms_norm"` (Zhang and Sennrich 2019) or `None`.
        size: size of the last dimension.
        eps: added to the variance.
        bias: whether LayerNorm has a bias (RMSNorm never has).

    Returns:
        The norm, a `NoNorm` for `None`.
    """
    if kind is None:
        return NoNorm()
    if kind == "layer_norm":
        return nn.LayerNorm(size, eps=eps, bias=bias)
    assert kind == "rms_norm", kind
    return RMSNorm(size, eps=eps)
