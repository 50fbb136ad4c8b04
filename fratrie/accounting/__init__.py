"""What a model costs, from its configuration alone: parameters, floating-point operations, cache and activations.

Models are built on the meta device, without weights, so the largest takes a second. `fratrie account gpt3-175b`
prints the account of a preset.
"""

from .compute import flops_per_token, forward_flops, training_flops
from .memory import activation_bytes, cache_bytes
from .parameters import Parameters, count_parameters
from .traffic import Traffic, blockwise_traffic, standard_traffic

__all__ = [
    "Parameters",
    "Traffic",
    "activation_bytes",
    "blockwise_traffic",
    "cache_bytes",
    "count_parameters",
    "flops_per_token",
    "forward_flops",
    "standard_traffic",
    "training_flops",
]
