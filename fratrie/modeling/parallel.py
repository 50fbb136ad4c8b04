"""What tensor parallelism needs beyond Hugging Face's styles, and what is refused before a model is split.

Shapes: B batch, H heads, T queries, S keys.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ParallelInterface
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.distributed.tensor_parallel import TensorParallelLayer

from .configuration import FratrieConfig


class OwnHeads(TensorParallelLayer):
    """Every device computes a position bias `(1, H, T, S)` of all heads, and keeps those of its own heads.

    In the backward pass the heads come together again, so that each device holds the whole gradient.
    """

    def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Cut `(1, H, T, S)` to `(1, H / devices, T, S)`."""
        bias = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return bias.redistribute(placements=[Shard(1)]).to_local()


class SharedByHeads(TensorParallelLayer):
    """Weights that every device has whole and uses for its own heads only: their gradients are summed."""

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        """Run the module on weights whose gradient comes from all devices."""
        # Hugging Face's own style sums in a hook after accumulation, and would sum earlier gradients once more.
        weights: dict[str, Any] = dict(module._parameters)
        shared = {
            name: DTensor.from_local(weight, mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
            for name, weight in weights.items()
            if weight is not None and weight.requires_grad and torch.is_grad_enabled()
        }
        module._parameters.update(shared)  # type: ignore[arg-type]
        try:
            yield
        finally:
            module._parameters.update(weights)


# The registry holds instances, whatever its annotation says.
ParallelInterface.register("own_heads", OwnHeads())  # type: ignore[arg-type]
ParallelInterface.register("shared_by_heads", SharedByHeads())  # type: ignore[arg-type]


def check_parallelism(model: Any, distributed: DistributedConfig, configs: tuple[FratrieConfig, ...]) -> None:
    """Refuse what cannot be split as asked.

    Raises:
        ValueError: with the field and its value.
    """
    size = distributed.tp_size or 1
    for config in configs if size > 1 else ():
        sizes = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
        if config.num_experts and (distributed.ep_size or 1) == 1:
            name = "intermediate_size" if config.moe_intermediate_size is None else "moe_intermediate_size"
            sizes[name] = getattr(config, name)
        for name, value in sizes.items():
            if value % size:
                raise ValueError(f"tp_size={size} does not divide {name}={value}: use a tp_size that does.")
    head_dims = [config.head_dim for config in configs]
    has_latents = any("mla_kv_a_proj" in config.base_model_tp_plan.values() for config in configs)
    if size > 1 and len(set(head_dims)) > 1 and has_latents:
        raise ValueError(
            f"tp_size={size}: Hugging Face splits latent attention by one head_dim, but encoder and decoder have "
            f"head_dim={head_dims}: make them equal."
        )
    if (distributed.pp_size or 1) > 1 and any(config.reversible for config in configs):
        raise ValueError(
            f"pp_size={distributed.pp_size}: the stages of a pipeline hand on one stream, but reversible=True has "
            "two: use tp_size."
        )
    if (distributed.pp_size or 1) > 1 and "lm_head" not in model.pp_plan:
        raise ValueError(
            f"pp_size={distributed.pp_size}: Hugging Face's pipeline runs language models that decode, not "
            f"{type(model).__name__}: use tp_size or fsdp_size."
        )


def make_encoder_callable(model: Any) -> Any:
    """Let `generate` of a model sharded by FSDP call the encoder alone: the whole model's weights are gathered first.

    Without it the encoder misses the weights that belong to no layer (Hugging Face's T5 fails so).
    """
    sharded = isinstance(model, FSDPModule)
    if sharded and model.config.is_encoder_decoder and model.can_generate():
        register_fsdp_forward_method(model, "_prepare_text_encoder_decoder_kwargs_for_generation")
    return model


def held_layers(layers: Iterable[nn.Module]) -> list[int]:
    """Which layers this device holds: all, but under pipeline parallelism those of its stage."""
    return [index for index, layer in enumerate(layers) if not isinstance(layer, PipelineIdentityLayer)]


def cache_of_layers(cache: Cache, held: list[int]) -> Cache:
    """The cache as the layers of this stage see it: the others' is empty, and tells a wrong length."""
    layers = getattr(cache, "layers", [])
    if len(held) >= len(layers):
        return cache
    view = copy.copy(cache)
    view.layers = [layers[index] for index in held]
    return view
