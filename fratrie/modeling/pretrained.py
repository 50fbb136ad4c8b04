"""What Hugging Face asks of a model class: loading, initialisation, resizing, splitting, checkpointing, dispatch."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.output_capturing import OutputRecorder

from .attention import CrossAttention
from .base_configuration import require_tokens_in_vocabulary
from .block import Block
from .configuration import FratrieConfig
from .experts import Router
from .losses import has_mixer_losses
from .mixer import Mixer, MixerLoss
from .parallel import check_parallelism, make_encoder_callable
from .reversible import ReversibleBlock

logger = logging.get_logger(__name__)


class _HasExperts:
    """Whether an implementation of experts can be set: Hugging Face asks models and classes, only a model knows."""

    def __get__(self, model: "FratriePreTrainedModel | None", owner: type) -> Callable[[], bool]:
        return partial(bool, model is not None and any(config.num_experts for config in model.stack_configs()))


class FratriePreTrainedModel(PreTrainedModel):
    """Base class of all Fratrie models: initialisation, and what they support of Hugging Face's machinery."""

    config: Any
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (Hugging Face's form)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Hugging Face would look for the experts in the source of the model's own file, where they are not.
    _can_set_experts_implementation = _HasExperts()
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Block,
        "attentions": OutputRecorder(Mixer, index=1, layer_name="mixer"),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
        "router_logits": OutputRecorder(Router, index=0),
        "mixer_losses": OutputRecorder(MixerLoss, index=0),
    }

    # How to load checkpoints of foreign model types, filled by `fratrie.conversion`.
    foreign_loaders: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        _require_own_config(type(self), config)
        super().__init__(config, *args, **kwargs)
        # FSDP looks for each of these classes in the model.
        kinds = {"ReversibleBlock" if stack.reversible else "Block" for stack in self.stack_configs()}
        self._no_split_modules = sorted(kinds)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load one of our checkpoints, or one of a Hugging Face family that our block can be.

        Args:
            pretrained_model_name_or_path: folder or hub id.
            config: configuration instead of the checkpoint's.
            *args, **kwargs: as for Hugging Face's method.

        Raises:
            ValueError: for a checkpoint of another kind.
        """
        name = pretrained_model_name_or_path
        fields = _read_fields(name, kwargs) if name and cls.foreign_loaders else {}
        model_type = str(fields.get("model_type") or "")
        if model_type in cls.foreign_loaders:
            return cls.foreign_loaders[model_type](cls, name, *args, config=config, their_fields=fields, **kwargs)
        own = cls.config_class.model_type if cls.config_class else ""
        if model_type and config is None and model_type != own:
            raise ValueError(
                f"{name} holds a {model_type!r} model, which {cls.__name__} cannot load: it loads {own!r} and the "
                f"families {', '.join(cls.foreign_loaders)}."
            )
        return super().from_pretrained(name, *args, config=config, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Modules with weights that Hugging Face does not know of draw them themselves.
        if (initialise := getattr(module, "initialise", None)) is not None:
            initialise(self.config.initializer_range)
        super()._init_weights(module)

    def stack_configs(self) -> tuple[FratrieConfig, ...]:
        """The configuration of each stack of blocks."""
        return (self.config,)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the vocabulary (see Hugging Face's method).

        Raises:
            ValueError: for a vocabulary that lacks a special token of the configuration.
        """
        if new_num_tokens is not None:
            multiple = pad_to_multiple_of or 1
            for config in (self.config, *self.stack_configs()):
                require_tokens_in_vocabulary(config, math.ceil(new_num_tokens / multiple) * multiple)
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Split a model over devices (see Hugging Face's method, which `from_pretrained` calls).

        Raises:
            ValueError: for a field that cannot be split as asked.
        """
        if mesh_manager is not None:
            check_parallelism(model, distributed_config, model.stack_configs())
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        return make_encoder_callable(model)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Recompute activations in the backward pass (see Hugging Face's method).

        Layers with losses of their own, of a router or a mixer, are never checkpointed in the re-entrant way: these
        losses would lose the gradient.
        """
        options = dict(activation_checkpointing_kwargs or {})
        if options.get("use_reentrant") and any(
            config.num_experts or has_mixer_losses(config) for config in self.stack_configs()
        ):
            logger.warning_once("use_reentrant=True would hide layers from their own losses: set to False.")
            options["use_reentrant"] = False
        super().activation_checkpointing_enable(options or None, *args, **kwargs)
        for block in [module for module in self.modules() if isinstance(module, ReversibleBlock)]:
            logger.warning_once("The layers of a reversible stack are computed anew in any case: not checkpointed.")
            block.gradient_checkpointing = False

    def _flash_attn_can_dispatch(self, *args: Any, **kwargs: Any) -> bool:
        for config in self.stack_configs():
            if config.position_type in ("relative", "alibi"):
                raise ValueError(
                    f"position_type={config.position_type!r} adds a bias to the attention scores, which "
                    "flash attention cannot: use attn_implementation='sdpa', or rotary positions."
                )
            if any(mixer.adds_to_scores for mixer in config.mixers):
                raise ValueError(
                    f"mixer_types={config.mixer_types} add to the attention scores, which flash attention cannot: use "
                    "attn_implementation='sdpa'."
                )
        self._require_no_global_tokens("flash attention")
        return super()._flash_attn_can_dispatch(*args, **kwargs)

    def _flex_attn_can_dispatch(self, *args: Any, **kwargs: Any) -> bool:
        self._require_no_global_tokens("flex attention")
        return super()._flex_attn_can_dispatch(*args, **kwargs)

    def _require_no_global_tokens(self, implementation: str) -> None:
        for config in self.stack_configs():
            if any(mixer.mask_form == "globals" for mixer in config.mixers):
                raise ValueError(
                    f"mixer_types={config.mixer_types} need a mask of single scores, which {implementation} does not "
                    "take: use attn_implementation='sdpa'."
                )

    def _grouped_mm_can_dispatch(self) -> bool:
        sparse = [config for config in self.stack_configs() if config.num_experts]
        sizes = [size for c in sparse for size in (c.hidden_size, c.moe_intermediate_size or c.intermediate_size)]
        if any(size % 8 for size in sizes):
            raise ValueError(
                f"experts_implementation='grouped_mm' needs sizes that are multiples of 8, not {sizes}: "
                "use 'eager' or 'batched_mm'."
            )
        return not sparse or super()._grouped_mm_can_dispatch()  # one of two stacks may have no experts


def _require_own_config(model_class: type[FratriePreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse the configuration of another kind of model, by its name.

    The classes tell nothing: code that a checkpoint carries defines both anew, in a module for each.
    """
    own = getattr(model_class.config_class, "model_type", "")
    names = [vars(base).get("model_type") for base in type(config).__mro__]
    if own and isinstance(config, PreTrainedConfig) and own not in names:
        raise ValueError(
            f"{model_class.__name__} is built from a {own!r} configuration, not from a {config.model_type!r} one: use "
            f"a {getattr(model_class.config_class, '__name__', own)}, or the model class of that configuration."
        )


def _read_fields(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Read the config.json of a checkpoint; nothing without one, which loading will complain about."""
    place = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, **{key: kwargs[key] for key in place if key in kwargs})
    except OSError:
        return {}
    return fields
