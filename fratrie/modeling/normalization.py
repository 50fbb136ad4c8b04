"""The norms a slot of a block can hold."""

from torch import nn


def build_norm(kind: str | None, size: int, eps: float, bias: bool = True) -> nn.Module:
    """Build a norm over the last dimension.

    Args:
        kind: `"layer_norm"` (Ba et al. 2016), `"rms_norm"` (Zhang and Sennrich 2019) or `None`.
        size: size of the last dimension.
        eps: added to the variance.
        bias: whether LayerNorm has a bias (RMSNorm never has).

    Returns:
        The norm, an identity for `None`.
    """
    if kind is None:
        return nn.Identity()
    if kind == "layer_norm":
        return nn.LayerNorm(size, eps=eps, bias=bias)
    assert kind == "rms_norm", kind
    return nn.RMSNorm(size, eps=eps)
