"""Which layers of a pretrained model learn, and how fast."""

import re

from torch import nn
from transformers import PreTrainedModel


def freeze_below(model: PreTrainedModel, trainable_layers: int, new: set[str]) -> list[str]:
    """Freeze the body of a classifier, except its top layers.

    The head, the pooler and the weights that no checkpoint gave stay trainable.

    Args:
        model: with a list of layers in its body, as long as `config.num_hidden_layers`.
        trainable_layers: number of layers from the top; -1 freezes nothing, 0 trains the head alone.
        new: names of weights without pretrained values, as `new_classifier` returns them.

    Returns:
        Names of the trainable weights.

    Raises:
        ValueError: a number out of range, or not one list of layers to count.
    """
    count = getattr(model.config, "num_hidden_layers", 0)
    if not -1 <= trainable_layers <= count:
        raise ValueError(f"trainable_layers={trainable_layers}: the model has {count} layers; give -1 to {count}")
    if trainable_layers >= 0:
        body, prefix = model.base_model, f"{model.base_model_prefix}."
        stack = _layer_list(body, count, "trainable_layers", "-1")
        top = tuple(f"{stack}.{i}." for i in range(count - trainable_layers, count))
        for name, weight in body.named_parameters():
            weight.requires_grad_(name.startswith(top) or "pooler" in name or prefix + name in new)
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def learning_rates(
    model: PreTrainedModel, rate: float, layer_decay: float = 1.0, head_rate: float | None = None
) -> dict[str, float]:
    """A learning rate for every weight: high in a new head, falling with the depth of pretrained layers.

    The top layer, and whatever follows it in the body, learns at `rate`; each layer below at `layer_decay` times the
    rate of the one above, and the embeddings at `layer_decay` times that of the lowest layer (Howard & Ruder 2018).

    Args:
        model: with a list of layers in its body, as long as `config.num_hidden_layers`, if rates fall.
        rate: of the top layer.
        layer_decay: above 0, at most 1.
        head_rate: of the head and the pooler; `rate` when not given.

    Raises:
        ValueError: a decay or rate out of range, or not one list of layers to count.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay={layer_decay} must lie above 0 and not above 1 (1: one rate for all layers)")
    if head_rate is not None and not head_rate >= 0:
        raise ValueError(f"head_learning_rate={head_rate} must not be negative")
    prefix = f"{model.base_model_prefix}."
    rates = {name: rate for name, _ in model.named_parameters()}
    if layer_decay < 1:
        count = model.config.num_hidden_layers
        stack = f"{prefix}{_layer_list(model.base_model, count, 'layer_decay', '1')}."
        depth = count  # a body's modules stand in the order of their use: embeddings, layers, what comes after them
        for name in (name for name in rates if name.startswith(prefix)):
            if name.startswith(stack):
                depth = count - 1 - int(name.removeprefix(stack).partition(".")[0])
            elif depth < count:
                depth = 0
            rates[name] = rate * layer_decay**depth
    if head_rate is not None:
        rates |= {name: head_rate for name in rates if not name.startswith(prefix) or "pooler" in name}
    return rates


def _layer_list(body: nn.Module, count: int, option: str, neutral: str) -> str:
    """The name of the one list of `count` modules that is not part of another list."""
    stacks = [
        name
        for name, part in body.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count and not re.search(r"\.\d+\.", name)
    ]
    if len(stacks) != 1:
        raise ValueError(
            f"{option}: {type(body).__name__} has {len(stacks)} lists of {count} layers "
            f"({', '.join(stacks)}), expected one; use {neutral}"
        )
    return stacks[0]
