"""What a cache keeps of a layer whose past is a state of constant size, in Hugging Face's linear attention layers."""

from typing import Any

import torch
from transformers.cache_utils import Cache


def refuse_cropping(cache: Cache | None, layer_idx: int) -> None:
    """Let the cache of a layer refuse to be cropped, since a state cannot forget tokens.

    Hugging Face's refuses where it records no past; where it does, it would crop a convolution and leave the state.
    To be called before a convolution is kept, of which it would else keep more.
    """
    if cache is not None:
        layer: Any = cache.layers[layer_idx]
        layer.record_past = False


def keep_state(cache: Cache | None, layer_idx: int, state: torch.Tensor) -> None:
    """Keep the state of a layer, of any shape, in place of the one before it."""
    if cache is None:
        return
    refuse_cropping(cache, layer_idx)
    cache.update_recurrent_state(state, layer_idx)
    # Hugging Face marks a state as present when it stores a convolution, which a layer may not have.
    layer: Any = cache.layers[layer_idx]
    layer.has_previous_state[0] = True
