"""The norms a slot of a block can hold."""

import torch
from torch import nn
from transformers import initialization as init

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


class PlusOneNorm(nn.Module):
    """RMSNorm that multiplies by `1 + w`, so that decaying weights lead back to a plain norm (Gemma Team 2024).

    Computed in float32 or better and rounded once. Its name is none by which Hugging Face would set weights to one.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def initialise(self, std: float) -> None:
        """Start as a plain norm (see `FratriePreTrainedModel`)."""
        init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to `(…, D)`, in the dtype of `x`, or that of the weights where they are in half precision."""
        fine = torch.promote_types(torch.float32, x.dtype)
        normed = nn.functional.rms_norm(x.to(fine), self.weight.shape, 1 + self.weight.to(fine), self.eps)
        return normed.to(self.weight.dtype if self.weight.dtype in _HALF else x.dtype)

    def extra_repr(self) -> str:
        """Size and epsilon, as `print(model)` shows them."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class NoNorm(nn.Identity):
    """An empty slot, without the cost of a module's call, which is that of a small operation on a CPU."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


def build_norm(kind: str | None, size: int, eps: float, bias: bool = True) -> nn.Module:
    """Build a norm over the last dimension.

    Args:
        kind: `"layer_norm"` (Ba et al. 2016), `"rms_norm"` (Zhang and Sennrich 2019), `"rms_norm_plus_one"` (the same
            with `1 + w` for weights) or `None`.
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
    if kind == "rms_norm_plus_one":
        return PlusOneNorm(size, eps)
    assert kind == "rms_norm", kind
    return RMSNorm(size, eps=eps)
