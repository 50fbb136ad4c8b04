"""Random numbers of a mixer's own: drawn from a seed of the configuration, without a touch of torch's generators."""

import torch

# Layers that may have numbers of their own under one seed.
_LAYERS = 2**16


def layer_generator(seed: int, layer_idx: int) -> torch.Generator:
    """What a layer draws from on the host: under each seed, each layer has numbers of its own."""
    return torch.Generator("cpu").manual_seed(seed * _LAYERS + layer_idx)


def require_seed(name: str, seed: int | None) -> None:
    """Refuse seeds that torch does not take.

    Raises:
        ValueError: with the name of the field and its value.
    """
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"{name}={seed} must lie in [0, 2**32).")
