"""Linear maps that read the same input, which a model packed for inference computes as one product."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

# What a packed layer carries under the name `joined`: the results of all maps of its input, in their order.
Joined = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def apply_jointly(layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """What each of these layers makes of the same input.

    Args:
        layers: as a tuple of the owner's `joint_maps` names them, in its order.
        x: `(…, I)`.
    """
    joined: Joined | None = vars(layers[0]).get("joined")
    if joined is None or any(map(has_more_to_its_call, layers)):
        return [layer(x) for layer in layers]
    return joined(x)


def has_more_to_its_call(module: nn.Module) -> bool:
    """Whether hooks, or a `forward` in the place of its own, would be passed over by who takes the weights alone."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)
