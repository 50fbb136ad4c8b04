"""How long a text the positions of a model allow; a file of its own, which travels with the code of the pipelines."""

from typing import Literal

from torch import nn
from transformers import PreTrainedModel


def longest_text(model: PreTrainedModel, side: Literal["encoder", "decoder"] = "encoder") -> int | None:
    """The most tokens for which a model has positions, `None` for any number.

    RoBERTa and its kin number tokens from `padding_idx + 1`, so the rows of their table up to that index serve no
    token: `max_position_embeddings - padding_idx - 1` are left.

    Args:
        model: of any family.
        side: which stack of an encoder-decoder; the only stack of any other model.
    """
    stack, part = model.config, model
    if hasattr(stack, side):
        stack, part = getattr(stack, side), getattr(model, side, model)
    positions = getattr(stack, "max_position_embeddings", None)
    return positions and positions - _unused_positions(part, positions)


def _unused_positions(part: nn.Module, positions: int) -> int:
    for name, table in part.named_modules():
        padding_idx, weight = getattr(table, "padding_idx", None), getattr(table, "weight", None)
        # A table with more rows than positions keeps the unused ones beside them.
        if "position" in name and padding_idx is not None and weight is not None and len(weight) == positions:
            return padding_idx + 1
    return 0
