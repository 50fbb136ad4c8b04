"""The decoder (GPT-like): every token sees the ones before it, and the model continues texts.

Shapes: B batch, T positions, S positions of an encoder, D hidden, V vocabulary, M labels.
"""

from typing import Any, Unpack

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from .configuration import FratrieDecoderConfig
from .heads import ClassificationHead, HeadCall, HeadModel, SequenceClassifier, predict_tokens
from .layout import PACKED_KWARGS, Layout, Rows, find_groups, find_layout, past_length
from .losses import shift_labels
from .masks import GivenMask, build_cross_mask
from .outputs import (
    FratrieCausalLMOutput,
    FratrieModelOutput,
    FratrieSequenceClassifierOutput,
    ModelKwargs,
)
from .parallel import cache_of_layers, held_layers
from .stack import FratrieStack, input_shape
from .window_cache import choose_layers, give_own_layers

logger = logging.get_logger(__name__)


class FratrieDecoderModel(FratrieStack):
    """The bare decoder, which gives one vector per token."""

    config: FratrieDecoderConfig

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        first_layer: int = 0,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieModelOutput:
        """Decode a padded batch, a packed one, or what follows a cached past.

        Args:
            input_ids: `(B, T)` token ids; or give `inputs_embeds`.
            attention_mask: `(B, past + T)`, zero at padding on any side; or a ready mask, or one per layer type.
            position_ids: `(B or 1, T)`; rows in which positions start anew hold several documents, which do not see
                each other.
            cache: the past, extended in place.
            inputs_embeds: `(B, T, D)` instead of the token embeddings.
            encoder_hidden_states: `(B, S, D_encoder)`, where the model has cross-attention.
            encoder_attention_mask: `(B, S)`, zero at padding.
            use_cache: return a cache; by default as configured, but neither in training nor for packed rows.
            global_attention_mask: `(B, up to past + T)`, nonzero at tokens that all later ones see, and that see all
                earlier ones, in models with such mixers (`"longformer"`); tokens beyond it are local. By default there
                are none. With a cache it is given from the first tokens on, or never, and the global ones are among
                the first tokens.
            first_layer, **kwargs: as for `FratrieEncoderModel`; states go without a cache.

        Returns:
            `last_hidden_state` `(B, T, D)` (at padding zeros without a cache, no meaning with one), `cache`, and what
            was asked for.

        Raises:
            ValueError: for a cache of packed rows, for states of an encoder without cross-attention, for a
                `first_layer` that is not there or without its states, and for arguments of other models.
        """
        self.refuse_foreign_arguments(kwargs, global_attention_mask)
        shape = input_shape(input_ids, inputs_embeds)
        options: dict[str, Any] = {**kwargs, "return_dict": True}
        if cache is None:
            for name in PACKED_KWARGS:  # the layout says the same
                options.pop(name, None)
            bounds = kwargs.get("cu_seq_lens_q")
            layout = find_layout(self.config, shape, attention_mask, position_ids, bounds, options)
        else:
            layout = self._layout_after_past(shape, attention_mask, position_ids, cache)
        use_cache = self._resolve_use_cache(True if cache is not None else use_cache, layout)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
            if encoder_hidden_states is not None:
                cache = EncoderDecoderCache(cache, DynamicCache())
        give_own_layers(cache, self.config, self.mixers)
        if encoder_hidden_states is not None and layout.has_packed_rows:
            raise ValueError("Rows that hold several documents cannot attend one encoder's states: pad them instead.")
        # Neither caches nor an encoder's states know groups.
        if not isinstance(layout, Rows) and (cache is not None or encoder_hidden_states is not None):
            layout = Rows(shape=shape, given=GivenMask.read(attention_mask), position_ids=position_ids)
        if encoder_hidden_states is not None:
            layout.encoder_mask = build_cross_mask(self.config, shape, encoder_hidden_states, encoder_attention_mask)
            options["encoder_hidden_states"] = encoder_hidden_states
        inputs = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "token_type_ids": None,
            "global_attention_mask": global_attention_mask,
        }
        outputs = self.run(inputs, layout, cache, first_layer, **options)
        outputs.cache = cache
        return outputs

    def _layout_after_past(
        self, shape: tuple[int, int], attention_mask: Any, position_ids: torch.Tensor | None, cache: Cache
    ) -> Layout:
        given = GivenMask.read(attention_mask)
        rows = Rows(shape=shape, given=given, position_ids=position_ids)
        # A paged cache is none of Hugging Face's kind: it holds many documents, and its kernels know where they lie.
        if not isinstance(cache, Cache) or torch.compiler.is_compiling():
            return rows
        if given.padding is not None:
            self._require_mask_of_all_tokens(shape, given.padding, cache)
        if position_ids is None or shape[1] == 1 or given.ready is not None or given.by_layer_type is not None:
            return rows
        padding = None if given.padding is None else given.padding[:, -shape[1] :]
        return find_groups(shape, padding, position_ids) or rows

    def _resolve_use_cache(self, use_cache: bool | None, layout: Layout) -> bool:
        if use_cache and layout.has_packed_rows:
            raise ValueError("Packed rows hold several documents, which no cache can continue: set use_cache=False.")
        if use_cache is None:
            return self.config.use_cache and not self.training and not layout.has_packed_rows
        return use_cache

    def _require_mask_of_all_tokens(self, shape: tuple[int, int], padding: torch.Tensor, cache: Cache) -> None:
        # States of a constant size have taken in the past with its padding, and need the mask of new tokens alone.
        needs_past = any(self.mixers[index].keeps_tokens for index in held_layers(self.layers))
        past = past_length(cache_of_layers(cache, held_layers(self.layers))) if needs_past else None
        least = shape[1] + (past if isinstance(past, int) else 0)  # a static cache counts on the device
        given = tuple(padding.shape)
        if given[0] != shape[0] or given[1] < least or (isinstance(past, int) and given[1] > least):
            raise ValueError(
                f"An attention_mask of shape {given} does not fit inputs of shape {shape} after a past of {past}: "
                "give one number per token, past and new."
            )


class FratrieDecoderForCausalLM(HeadModel, GenerationMixin):
    """The decoder with a head that predicts the next token (Radford et al. 2018)."""

    config: FratrieDecoderConfig
    output_class = FratrieCausalLMOutput
    passed_on = (*HeadModel.passed_on, "cross_attentions", "cache")
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: FratrieDecoderConfig) -> None:
        super().__init__(config)
        self.model = FratrieDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def apply_head(
        self, states: torch.Tensor, inputs: dict[str, Any], call: HeadCall
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Score the vocabulary at the positions that are asked for."""
        states = slice_logits_to_keep(states, call.logits_to_keep)
        return predict_tokens(self, states, call.labels, call.num_items_in_batch)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start continuous batching (see Hugging Face's method).

        Raises:
            ValueError: for what paged caches have no room for: position biases, and what other mixers keep.
        """
        config = self.config
        biased = config.position_type in ("relative", "alibi")
        if biased or not all(mixer.fits_paged_cache for mixer in config.mixers):
            raise ValueError(
                "Continuous batching serves softmax attention without latents and position bias, not position_type="
                f"{config.position_type!r} with mixer_types={config.mixer_types}: use generate()."
            )
        return super().init_continuous_batching(*args, **kwargs)

    @property
    def _keeps_tokens(self) -> bool:
        """Whether some layer's cache holds every token, so that the cache knows how many there were."""
        return any(mixer.keeps_tokens for mixer in self.model.mixers)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Leave the past out of the mask where all layers keep a state (see Hugging Face's method).

        These states have taken it in, and a mask that grows would make a compiled graph anew for every token.

        Raises:
            ValueError: for a past whose length is unknown.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if self._keeps_tokens:
            return inputs
        tokens = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        mask, cache, length = inputs.get("attention_mask"), kwargs.get("cache"), tokens.shape[1]
        if kwargs.get("is_first_iteration") and cache is not None and cache.has_previous_state():
            # A mask without padding is dropped before, and has left positions of its length.
            _refuse_unknown_past(kwargs.get("position_ids") if mask is None else mask, length)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            inputs["attention_mask"] = mask[:, -length:].clone(memory_format=torch.contiguous_format)
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        if "cache" in model_kwargs:
            cache, is_assistant = model_kwargs["cache"], generation_config.is_assistant
            model_kwargs["cache"] = choose_layers(cache, self.config, self.model.mixers, is_assistant)

    def _prefill(self, input_ids: Any, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if not self._keeps_tokens:
            # In chunks, Hugging Face would ask the cache for its length, which such states do not know.
            prefill_at_once(generation_config, "a model whose layers all keep a state of constant size")
        return super()._prefill(input_ids, generation_config, *args, **kwargs)  # type: ignore[misc]

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieCausalLMOutput:
        """Score every token of the vocabulary as the next one.

        Args:
            labels: `(B, T)`, usually the input ids, -100 where a token is no target; shifted here. A
                `shift_labels` that is given is taken as it is.
            logits_to_keep: number of last positions, or their indices, to score; 0 for all.
            output_router_logits: return the router logits of sparse layers.
            num_items_in_batch: number of targets of the global batch, to divide the loss by.
            input_ids, attention_mask, position_ids, cache, inputs_embeds, encoder_hidden_states,
                encoder_attention_mask, use_cache, global_attention_mask, **kwargs: as for `FratrieDecoderModel`.

        Returns:
            `loss`, `logits` `(B, T, V)` (none in training with `config.chunked_loss`) and `cache`.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": cache,
            "inputs_embeds": inputs_embeds,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "use_cache": use_cache,
            "global_attention_mask": global_attention_mask,
        }
        shifted = kwargs.pop("shift_labels", None)
        if labels is not None:
            if shifted is None:
                shifted = shift_labels(labels, position_ids, attention_mask, kwargs.get("cu_seq_lens_q"))
            labels = shifted
        call = HeadCall(labels, output_router_logits, num_items_in_batch, logits_to_keep)
        return self.run_with_head(inputs, call, **kwargs)


def _refuse_unknown_past(all_tokens: torch.Tensor | None, length: int) -> None:
    if all_tokens is None or all_tokens.shape[1] == length:
        raise ValueError(
            "States of a constant size do not know how many tokens they have seen: to go on from a cache, give "
            "the new tokens as input_ids, and the attention_mask of all tokens."
        )


class FratrieDecoderForSequenceClassification(SequenceClassifier):
    """The decoder with a head that labels texts, by default by their last token."""

    config: FratrieDecoderConfig
    output_class = FratrieSequenceClassifierOutput

    def __init__(self, config: FratrieDecoderConfig) -> None:
        super().__init__(config)
        self.model = FratrieDecoderModel(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieSequenceClassifierOutput:
        """Score the labels of each text (see `FratrieEncoderForSequenceClassification.forward`)."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": cache,
            "inputs_embeds": inputs_embeds,
            "global_attention_mask": global_attention_mask,
        }
        call = HeadCall(labels, output_router_logits, num_items_in_batch)
        return self.run_with_head(inputs, call, **kwargs)

    def apply_head(
        self, states: torch.Tensor, inputs: dict[str, Any], call: HeadCall
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Classify by the real tokens of each text (see `SequenceClassifier`).

        Raises:
            ValueError: for a past in the cache whose tokens the pooling needs.
        """
        pooling, cache = self.config.classifier_pooling, inputs["cache"]
        if cache is not None and pooling != "last" and cache.get_seq_length() > states.shape[1]:
            raise ValueError(
                f"classifier_pooling={pooling!r} needs all tokens of a text at once: leave out the cache."
            )
        return super().apply_head(states, inputs, call)


def prefill_at_once(generation_config: GenerationConfig, model: str) -> None:
    """Have `generate` read a prompt in one pass, where Hugging Face's passes over its chunks do not suit the model."""
    if generation_config.prefill_chunk_size is not None:
        logger.warning_once(f"prefill_chunk_size is not used: {model} reads its prompt in one pass.")
        generation_config.prefill_chunk_size = None  # generate's own copy
