"""What encoder and decoder share: the pre-trained base class and the stack of blocks.

Shapes: B batch, T positions, S keys, N real tokens, D hidden, E experts.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.utils import logging
from transformers.utils.generic import ModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import CrossAttention, SoftmaxAttention
from .base_configuration import require_tokens_in_vocabulary
from .block import Block
from .configuration import FratrieConfig
from .experts import Router, _Experts, load_balancing_loss, router_z_loss
from .normalization import build_norm
from .outputs import FratrieModelOutput
from .packing import PACKED_KWARGS, Packing, find_packing
from .parallel import cache_of_layers, check_parallelism, held_layers, make_encoder_callable
from .patches import PatchEmbedding
from .positions import (
    AlibiPositionBias,
    FratrieRotaryEmbedding,
    LearnedPositions,
    RelativePositionBias,
    SinusoidalPositions,
)

logger = logging.get_logger(__name__)


def _padding_mask(
    config: FratrieConfig, states: torch.Tensor, attention_mask: torch.Tensor | None, **_: Any
) -> torch.Tensor | None:
    # Hugging Face's own function takes a single token for real, which lets padding into the state of linear attention.
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"Linear attention has no scores to mask: give the padding as attention_mask (batch, length), not "
            f"{tuple(attention_mask.shape)}."
        )
    return attention_mask[:, -states.shape[1] :]


_MASKS = {
    ("full_attention", True): create_causal_mask,
    ("full_attention", False): create_bidirectional_mask,
    ("sliding_attention", True): create_sliding_window_causal_mask,
    ("sliding_attention", False): create_bidirectional_sliding_window_mask,
    ("linear_attention", True): _padding_mask,
    ("linear_attention", False): _padding_mask,
}


# What a pass records only when it is asked to.
RECORDS = ("output_attentions", "output_hidden_states")

Output = TypeVar("Output", bound=ModelOutput)


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
        "attentions": OutputRecorder(SoftmaxAttention, index=1, layer_name="mixer"),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
        "router_logits": OutputRecorder(Router, index=0),
    }

    # How to load checkpoints of foreign model types, filled by `fratrie.conversion`.
    foreign_loaders: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        _require_own_config(type(self), config)
        super().__init__(config, *args, **kwargs)

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
            config: configuration in the place of the checkpoint's.
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
        super()._init_weights(module)
        if isinstance(module, (Router, _Experts)):
            for weight in module.parameters(recurse=False):
                init.normal_(weight, mean=0.0, std=self.config.initializer_range)
            if isinstance(module, Router) and module.selection_bias is not None:
                init.zeros_(module.selection_bias)
        elif isinstance(module, PatchEmbedding):
            init.trunc_normal_(module.image_token, std=self.config.initializer_range)
        elif isinstance(module, AlibiPositionBias):
            init.copy_(module.slopes_H, module.compute_slopes())

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

        Sparse layers are never checkpointed in the re-entrant way: their balancing losses would lose the gradient.
        """
        options = dict(activation_checkpointing_kwargs or {})
        if options.get("use_reentrant") and any(config.num_experts for config in self.stack_configs()):
            logger.warning_once("use_reentrant=True would hide the router from its balancing losses: set to False.")
            options["use_reentrant"] = False
        super().activation_checkpointing_enable(options or None, *args, **kwargs)

    def _flash_attn_can_dispatch(self, *args: Any, **kwargs: Any) -> bool:
        for config in self.stack_configs():
            if config.position_type in ("relative", "alibi"):
                raise ValueError(
                    f"position_type={config.position_type!r} adds a bias to the attention scores, which "
                    "flash attention cannot: use attn_implementation='sdpa', or rotary positions."
                )
        return super()._flash_attn_can_dispatch(*args, **kwargs)

    def _grouped_mm_can_dispatch(self) -> bool:
        sparse = [config for config in self.stack_configs() if config.num_experts]
        sizes = [size for c in sparse for size in (c.hidden_size, c.moe_intermediate_size or c.intermediate_size)]
        if any(size % 8 for size in sizes):
            raise ValueError(
                f"experts_implementation='grouped_mm' needs sizes that are multiples of 8, not {sizes}: "
                "use 'eager' or 'batched_mm'."
            )
        return not sparse or super()._grouped_mm_can_dispatch()  # one of two stacks may have no experts

    def router_losses(
        self, router_logits: tuple[torch.Tensor, ...] | None, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the load-balancing and the z loss over real tokens, `None` without sparse layers."""
        if not router_logits:
            return None, None
        mask = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            mask = attention_mask[:, -(router_logits[0].shape[0] // attention_mask.shape[0]) :]  # without the past
        balance = load_balancing_loss(
            router_logits, self.config.num_experts_per_tok, mask, self.config.router_aux_loss_scope
        )
        return balance, router_z_loss(router_logits, mask)

    def needs_router_logits(self, labels: torch.Tensor | None, requested: bool | None) -> bool:
        """Whether a pass has to record the router: asked for, or part of the training loss."""
        requested = self.config.output_router_logits if requested is None else requested
        return "sparse" in self.config.mlp_layer_types and (requested or (self.training and labels is not None))

    def add_router_losses(
        self,
        loss: torch.Tensor | None,
        losses: tuple[torch.Tensor | None, torch.Tensor | None],
        share: torch.Tensor | float,
    ) -> torch.Tensor | None:
        """Add the weighted router losses to a loss, `share` of them (see `losses.share_of_batch`)."""
        balance, z_loss = losses
        if loss is None or balance is None or z_loss is None:
            return loss
        extra = self.config.router_aux_loss_coef * balance + self.config.router_z_loss_coef * z_loss
        return loss + (share * extra).to(loss.device)

    def head_output(
        self,
        output_class: type[Output],
        outputs: FratrieModelOutput,
        logits: torch.Tensor,
        loss: torch.Tensor | None,
        share: torch.Tensor | float,
        attention_mask: Any,
        **extra: Any,
    ) -> Output:
        """What a head returns: its logits and loss, the router's losses, and what the stack was asked for."""
        router = self.router_losses(outputs.router_logits, attention_mask)
        return output_class(
            loss=self.add_router_losses(loss, router, share),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=router[0],
            z_loss=router[1],
            router_logits=outputs.router_logits,
            **extra,
        )


class FratrieStack(FratriePreTrainedModel):
    """Embeddings, blocks and final norm. Encoder and decoder say which inputs they take."""

    config: FratrieConfig

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__(config)
        config.validate_architecture()  # fields may have been set since
        config.check_model_sizes()
        if "sparse" in (config.mlp_layer_types or []) and config.router_selection_bias:
            # Rounded to half precision, they would choose other experts.
            self._keep_in_fp32_modules_strict = ["router"]
        if "down_proj" in (config.float32_parts or ()):
            # In float16 alone, whose numbers end at 65504, and not of the experts.
            self._keep_in_fp32_modules = ["feed_forward.down_proj"]
        norm = partial(build_norm, size=config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        types = getattr(config, "type_vocab_size", 0)
        self.embed_tokens: nn.Embedding | PatchEmbedding
        if getattr(config, "patch_size", None):
            self.embed_tokens = PatchEmbedding(config)
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_token_types = nn.Embedding(types, config.hidden_size) if types else None
        self.embed_positions: nn.Module | None = None
        self.rotary_emb: nn.Module | None = None
        self.position_bias: nn.Module | None = None
        match config.position_type:
            case "learned":
                self.embed_positions = LearnedPositions(
                    config.max_position_embeddings, config.hidden_size, config.position_offset
                )
            case "sinusoidal":
                self.embed_positions = SinusoidalPositions(config.hidden_size, config.sinusoid_layout)
            case "rotary":
                rope: dict[Any, Any] = dict(config.rope_parameters or {})
                self.rotary_emb = (
                    FratrieRotaryEmbedding(config)
                    if "rope_type" in rope
                    else nn.ModuleDict({kind: FratrieRotaryEmbedding(config, kind) for kind in rope})
                )
            case "relative":
                self.position_bias = RelativePositionBias(config)
            case "alibi":
                self.position_bias = AlibiPositionBias(config)
        self.embedding_norm = norm(config.embedding_norm)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = norm(config.final_norm)
        self.layer_types = tuple(config.layer_types or ())
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def held_types(self) -> list[str]:
        """The types of the layers that this device holds."""
        return [self.layer_types[index] for index in held_layers(self.layers)]

    def embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Token embeddings (scaled) + token types + positions, in BERT's order, normed: `(B, T, D)`.

        A later stage of a pipeline receives what the layers before it made in the place of the embeddings.
        """
        if 0 not in held_layers(self.layers):
            assert inputs_embeds is not None
            return inputs_embeds
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.scale_embeddings:
            hidden_states = hidden_states * math.sqrt(self.config.hidden_size)
        if self.embed_token_types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(hidden_states.shape[:2], dtype=torch.long, device=hidden_states.device)
            hidden_states = hidden_states + self.embed_token_types(token_type_ids)
        elif token_type_ids is not None and not torch.compiler.is_compiling() and bool(token_type_ids.any()):
            raise ValueError(
                "token_type_ids given, but the model has none: leave them out, or set type_vocab_size of an encoder."
            )
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids).to(hidden_states.dtype)
        return self.embedding_dropout(self.embedding_norm(hidden_states))

    def find_documents(
        self,
        shape: tuple[int, int],
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> Packing | None:
        """Read the documents of an input without cache, and drop the packing hints from `kwargs`.

        Returns:
            The packing of packed rows, and of padded ones where `config.unpad_inputs`; else `None`.
        """
        hints = {name: kwargs.pop(name, None) for name in PACKED_KWARGS}
        if isinstance(attention_mask, dict):
            return None
        if torch.compiler.is_compiling():
            masks_tell = self.config.is_causal_stack and "linear_attention" not in self.layer_types
            if hints["cu_seq_lens_q"] is not None or (position_ids is not None and not masks_tell):
                raise ValueError(
                    "A compiled graph cannot look for the documents of packed rows, of which position_ids and "
                    "cu_seq_lens_q tell: leave them out, or compile without fullgraph."
                )
            return None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and attention_mask.shape != shape:
            raise ValueError(
                f"An attention_mask of shape {tuple(attention_mask.shape)} does not fit inputs of shape {shape}: give "
                "a number a token."
            )
        # `output_hidden_states` may be the number of a layer, such as 0.
        recorded = {name: kwargs.get(name, getattr(self.config, name)) not in (None, False) for name in RECORDS}
        packing = find_packing(
            shape, attention_mask, position_ids, hints["cu_seq_lens_q"], one_group=recorded["output_attentions"]
        )
        if packing is None or packing.has_packed_rows:
            return packing
        if any(recorded.values()) and torch.is_grad_enabled():
            return None  # what is recorded shall be part of the graph, so that it gets its gradient
        # Over a hole, a window or a position bias counts a distance that unpadding would close.
        return packing if self.config.unpad_inputs and not packing.has_holes else None

    def default_positions(
        self, inputs: torch.Tensor, attention_mask: Any, cache: Cache | None = None
    ) -> torch.Tensor | None:
        """Positions `(B or 1, T)` of the inputs in their row, padding not counted; `None` where nothing needs them."""
        if self.embed_positions is None and self.rotary_emb is None:
            return None
        length = inputs.shape[1]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
        past = 0 if cache is None else past_length(cache)
        return (torch.arange(length, device=inputs.device) + past).unsqueeze(0)

    def build_mask(
        self,
        layer_type: str,
        states: torch.Tensor,
        attention_mask: Any,
        cache: Cache | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """The mask of a layer type in the form that the attention implementation takes."""
        if isinstance(attention_mask, dict):
            if layer_type not in attention_mask:
                raise ValueError(
                    f"attention_mask has {sorted(attention_mask)}, but no mask of {layer_type!r}: add it."
                )
            return attention_mask[layer_type]
        require_known_mask(self.config, attention_mask)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            attention_mask = ready_mask(attention_mask, states.dtype, self.config._attn_implementation)
        return _MASKS[layer_type, self.config.is_causal_stack](
            self.config, states, attention_mask, cache=cache, position_ids=position_ids
        )

    def build_bias(
        self, layer_type: str, length: int, device: torch.device, cache: Cache | None = None
    ) -> torch.Tensor | None:
        """Position bias `(1, H, T, S)` of a layer type; positions are places in the row, of which only the distance
        counts."""
        if self.position_bias is None:
            return None
        layer_idx = self.held_types.index(layer_type)
        offset, (keys, key_offset) = 0, (length, 0)
        if cache is not None:
            offset, (keys, key_offset) = (
                cache.get_query_offset(layer_idx),
                cache.get_mask_sizes(length, layer_idx),
            )
        queries = torch.arange(length, device=device) + offset
        return self.position_bias(queries, torch.arange(keys, device=device) + key_offset)

    def build_biases(
        self, layer_type: str, lengths: list[int], device: torch.device, cache: Cache | None = None
    ) -> list[torch.Tensor]:
        """Position bias for rows of each of these lengths; an empty list where the model has none.

        The device is that of the states: weights that are kept elsewhere, or on disk, do not tell it.
        """
        biases = [self.build_bias(layer_type, length, device, cache) for length in lengths]
        return [bias for bias in biases if bias is not None]

    def rotations(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor | None
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor] | None]:
        """The rotary cosines and sines of each layer type, `None` without rotary positions."""
        if isinstance(self.rotary_emb, nn.ModuleDict):
            return {kind: rope(hidden_states, position_ids=position_ids) for kind, rope in self.rotary_emb.items()}
        turn = None if self.rotary_emb is None else self.rotary_emb(hidden_states, position_ids=position_ids)
        return dict.fromkeys(self.layer_types, turn)

    @capture_outputs
    def run(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None,
        masks: dict[str, Any],
        biases: dict[str, list[torch.Tensor]],
        encoder_hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> FratrieModelOutput:
        """Pass embedded tokens `(B, T, D)` through the blocks; `masks` and `biases` by layer type."""
        if encoder_hidden_states is not None and not getattr(self.config, "add_cross_attention", False):
            raise ValueError(
                f"encoder_hidden_states given, but this {type(self).__name__} has no cross-attention: build a decoder "
                "with add_cross_attention=True."
            )
        turns = self.rotations(hidden_states, position_ids)
        # Early exit (Elhoushi et al. 2024) lowers the number of layers for a while.
        for index in held_layers(self.layers[: self.config.num_hidden_layers]):
            layer_type = self.layer_types[index]
            hidden_states = self.layers[index](
                hidden_states,
                encoder_hidden_states,
                *biases[layer_type],
                position_embeddings=turns[layer_type],
                attention_mask=masks[layer_type],
                **kwargs,
            )
        return FratrieModelOutput(last_hidden_state=self.norm(hidden_states))

    def run_packed(
        self,
        packing: Packing,
        inputs: dict[str, torch.Tensor | None],
        **kwargs: Any,
    ) -> FratrieModelOutput:
        """Embed and run the real tokens of a batch alone; the outputs come back in the caller's form."""
        if inputs["input_ids"] is not None:
            # Looked up in the caller's form, which tools that hook the embedding expect of its output.
            inputs = {**inputs, "input_ids": None, "inputs_embeds": self.embed_tokens(inputs["input_ids"])}
        packed = {name: None if x is None else packing.pack(x) for name, x in inputs.items()}
        position_ids = packing.positions_N.unsqueeze(0)
        hidden_states = self.embed(**packed, position_ids=position_ids)
        masks, biases = {}, {}
        for layer_type in set(self.held_types):
            # A causal kernel never looks at the padding after a document; others need the mask.
            causal = self.config.is_causal_stack
            masks[layer_type] = [
                self.build_mask(
                    layer_type,
                    hidden_states.new_empty(*group.mask_GL.shape, 1),
                    None if causal else group.mask_GL,
                )
                for group in packing.groups
            ]
            lengths = [group.mask_GL.shape[1] for group in packing.groups]
            biases[layer_type] = self.build_biases(layer_type, lengths, hidden_states.device)
        outputs = self.run(hidden_states, position_ids, masks, biases, packing=packing, **kwargs)
        packing.restore(outputs)
        return outputs

    def run_rows(
        self,
        inputs: dict[str, torch.Tensor | None],
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> FratrieModelOutput:
        """Embed and run the rows of a batch as they are, padding included, after the past in `cache`."""
        states = next(x for x in (inputs["input_ids"], inputs["inputs_embeds"]) if x is not None)
        past = None if cache is None else cache_of_layers(cache, held_layers(self.layers))
        positions = self.default_positions(states, attention_mask, past) if position_ids is None else position_ids
        hidden_states = self.embed(**inputs, position_ids=positions)
        types = set(self.held_types)
        masks = {kind: self.build_mask(kind, hidden_states, attention_mask, past, position_ids) for kind in types}
        device, lengths = hidden_states.device, [hidden_states.shape[1]]
        biases = {kind: self.build_biases(kind, lengths, device, past) for kind in types}
        outputs = self.run(hidden_states, positions, masks, biases, cache=cache, **kwargs)
        if cache is None and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            blank_padding(outputs, attention_mask)
        return outputs


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


def blank_padding(outputs: FratrieModelOutput, attention_mask: torch.Tensor) -> None:
    """Set the states at padding to zero, in place, as they come out of a pass of real tokens alone.

    With gradients the recorded states stay what they are in the graph, all but the last.
    """
    assert outputs.last_hidden_state is not None
    length = outputs.last_hidden_state.shape[1]
    padding = attention_mask.to(outputs.last_hidden_state.device)[:, -length:, None] == 0
    outputs.last_hidden_state = outputs.last_hidden_state.masked_fill(padding, 0.0)
    if outputs.hidden_states is None:
        return
    states = list(outputs.hidden_states)
    if not torch.is_grad_enabled():
        states = [None if state is None else state.masked_fill(padding, 0.0) for state in states]
    if states[-1] is not None:
        states[-1] = outputs.last_hidden_state
    outputs.hidden_states = tuple(states)


def ready_mask(mask: torch.Tensor, dtype: torch.dtype, implementation: str | None) -> torch.Tensor:
    """A mask `(B, 1, T, S)` of the caller's own, true or 0 where a query sees a key, as the implementation takes it.

    Raises:
        ValueError: for numbers that may mean either.
    """
    if mask.dtype == torch.bool:
        seen = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, seen, torch.finfo(dtype).min) if implementation == "eager" else mask
    if not mask.is_floating_point():
        raise ValueError(
            f"A 4D attention_mask of {mask.dtype} may mean either: give booleans (true where a query sees a key) or "
            "floating-point numbers to add to the scores."
        )
    return mask


def require_known_mask(config: FratrieConfig, attention_mask: Any, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a mask that would silently be read as another one, or not at all.

    Args:
        config: of the stack.
        attention_mask: what is looked at if it is a tensor.
        shape: what padding must have, where that is known.

    Raises:
        ValueError: for other forms than padding `(B, T)` and a ready `(B, 1, T, S)`, and for padding that an attention
            implementation would not see, since it is not registered with `AttentionMaskInterface`.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 4:
        return
    given, name = tuple(attention_mask.shape), config._attn_implementation
    if len(given) != 2:
        raise ValueError(
            f"An attention_mask of shape {given} is neither padding (batch, length) nor a mask that is ready, "
            "(batch, 1, queries, keys)."
        )
    if shape is not None and given != shape and not torch.compiler.is_compiling():
        raise ValueError(f"An attention_mask of shape {given} does not fit states of shape {shape}.")
    if name not in AttentionMaskInterface():
        raise ValueError(
            f"attn_implementation={name!r} has no mask function, so it would attend padding: register one, for "
            f"example AttentionMaskInterface.register({name!r}, sdpa_mask)."
        )


def past_length(cache: Cache) -> int | torch.Tensor:
    """Number of tokens a cache has seen.

    Raises:
        ValueError: when all layers are linear: their states have no length.
    """
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    try:
        return cache.get_seq_length()
    except ValueError as error:
        if not cache.has_previous_state():
            return 0
        raise ValueError(
            "The states of linear attention do not know how many tokens they have seen: pass position_ids, or the "
            "attention_mask of all tokens."
        ) from error


def input_shape(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> tuple[int, int]:
    """`(B, T)` of whichever of the two is given.

    Raises:
        ValueError: when none or both are, and when it is empty.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    batch, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]  # type: ignore[union-attr]
    if batch == 0 or length == 0:
        raise ValueError(f"Inputs of (batch, length) = {(batch, length)} hold no token: leave out what is empty.")
    return batch, length


def prefill_at_once(generation_config: GenerationConfig, model: str) -> None:
    """Have `generate` read a prompt in one pass, where Hugging Face's passes over its chunks do not suit the model."""
    if generation_config.prefill_chunk_size is not None:
        logger.warning_once(f"prefill_chunk_size is not used: {model} reads its prompt in one pass.")
        generation_config.prefill_chunk_size = None  # generate's own copy
