"""The decoder (GPT-like): every token sees the ones before it, and the model continues texts.

Shapes: B batch, T positions, S positions of an encoder, D hidden, V vocabulary, M labels.
"""

from typing import Any, Unpack

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from .configuration import FratrieDecoderConfig
from .heads import ClassificationHead, find_real_tokens, pool
from .losses import sequence_classification_loss, share_of_batch, shift_labels, token_cross_entropy
from .outputs import (
    FratrieCausalLMOutput,
    FratrieModelOutput,
    FratrieSequenceClassifierOutput,
    ModelKwargs,
    refuse_foreign_arguments,
)
from .packing import Packing, find_packing
from .parallel import cache_of_layers, held_layers
from .stack import (
    FratriePreTrainedModel,
    FratrieStack,
    input_shape,
    past_length,
    prefill_at_once,
    require_known_mask,
)


class FratrieDecoderModel(FratrieStack):
    """The bare decoder, which gives a vector a token."""

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
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieModelOutput:
        """Decode a padded batch, a packed one, or what follows a cached past.

        Args:
            input_ids: `(B, T)` token ids; or give `inputs_embeds`.
            attention_mask: `(B, past + T)`, zero at padding on any side; or a ready mask, or one a layer type.
            position_ids: `(B or 1, T)`; rows in which positions start anew hold several documents, which do not see
                each other.
            cache: the past, extended in place.
            inputs_embeds: `(B, T, D)` in the place of the token embeddings.
            encoder_hidden_states: `(B, S, D_encoder)`, where the model has cross-attention.
            encoder_attention_mask: `(B, S)`, zero at padding.
            use_cache: return a cache; by default as configured, but neither in training nor for packed rows.
            **kwargs: as for `FratrieEncoderModel`.

        Returns:
            `last_hidden_state` `(B, T, D)` (at padding zeros without a cache, no meaning with one), `cache`, and what
            was asked for.

        Raises:
            ValueError: for a cache of packed rows, for states of an encoder without cross-attention, and for arguments
                of other models.
        """
        refuse_foreign_arguments(self, kwargs)
        shape = input_shape(input_ids, inputs_embeds)
        options: dict[str, Any] = {**kwargs, "return_dict": True}
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "token_type_ids": None}
        packing = None
        if cache is None:
            packing = self.find_documents(shape, attention_mask, position_ids, options)
        elif isinstance(cache, Cache):
            self._require_mask_of_all_tokens(shape, attention_mask, cache)
            if position_ids is not None and self._may_be_packed(shape, attention_mask):
                mask = None if attention_mask is None else attention_mask[..., -shape[1] :]
                packing = find_packing(shape, mask, position_ids)
        use_cache = self._resolve_use_cache(True if cache is not None else use_cache, packing)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
            if encoder_hidden_states is not None:
                cache = EncoderDecoderCache(cache, DynamicCache())
        if encoder_hidden_states is not None:
            packing = self._refuse_packed_rows(packing)
            options["encoder_hidden_states"] = encoder_hidden_states
            require_known_mask(self.config, encoder_attention_mask, tuple(encoder_hidden_states.shape[:2]))
            options["encoder_attention_mask"] = create_bidirectional_mask(
                self.config,
                encoder_hidden_states.new_empty(*shape, 1),
                encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        if packing is not None and cache is None:
            return self.run_packed(packing, inputs, **options)
        outputs = self.run_rows(inputs, attention_mask, position_ids, cache, **options)
        outputs.cache = cache
        return outputs

    def _resolve_use_cache(self, use_cache: bool | None, packing: Packing | None) -> bool:
        packed_rows = packing is not None and packing.has_packed_rows
        if use_cache and packed_rows:
            raise ValueError("Packed rows hold several documents, which no cache can continue: set use_cache=False.")
        return self.config.use_cache and not self.training and not packed_rows if use_cache is None else use_cache

    def _require_mask_of_all_tokens(self, shape: tuple[int, int], attention_mask: Any, cache: Cache) -> None:
        if torch.compiler.is_compiling() or not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
            return
        # States of linear attention have taken in the past with its padding, and need the mask of new tokens alone.
        needs_past = set(self.held_types) != {"linear_attention"}
        past = past_length(cache_of_layers(cache, held_layers(self.layers))) if needs_past else None
        least = shape[1] + (past if isinstance(past, int) else 0)  # a static cache counts on the device
        given = tuple(attention_mask.shape)
        if given[0] != shape[0] or given[1] < least or (isinstance(past, int) and given[1] > least):
            raise ValueError(
                f"An attention_mask of shape {given} does not fit inputs of shape {shape} after a past of {past}: "
                "give a number a token, past and new."
            )

    @staticmethod
    def _may_be_packed(shape: tuple[int, int], attention_mask: Any) -> bool:
        return shape[1] > 1 and not isinstance(attention_mask, dict) and not torch.compiler.is_compiling()

    @staticmethod
    def _refuse_packed_rows(packing: Packing | None) -> None:
        if packing is not None and packing.has_packed_rows:
            raise ValueError("Rows that hold several documents cannot attend one encoder's states: pad them instead.")


class FratrieDecoderForCausalLM(FratriePreTrainedModel, GenerationMixin):
    """The decoder with a head that predicts the next token (Radford et al. 2018)."""

    config: FratrieDecoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: FratrieDecoderConfig) -> None:
        super().__init__(config)
        self.model = FratrieDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start continuous batching (see Hugging Face's method).

        Raises:
            ValueError: for what paged caches have no room for: position biases and the states of linear attention.
        """
        config = self.config
        biased = config.position_type in ("relative", "alibi")
        if biased or config.kv_lora_rank is not None or "linear_attention" in self.model.layer_types:
            raise ValueError(
                "Continuous batching serves softmax attention without latents and position bias, not position_type="
                f"{config.position_type!r} with layer_types={config.layer_types} and kv_lora_rank="
                f"{config.kv_lora_rank}: use generate()."
            )
        return super().init_continuous_batching(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Leave the past out of the mask where all layers are linear (see Hugging Face's method).

        Their states have taken it in, and a mask that grows would make a compiled graph anew for every token.

        Raises:
            ValueError: for a past whose length is unknown.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if set(self.model.layer_types) != {"linear_attention"}:
            return inputs
        tokens = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        mask, cache, length = inputs.get("attention_mask"), kwargs.get("cache"), tokens.shape[1]
        if kwargs.get("is_first_iteration") and cache is not None and cache.has_previous_state():
            # A mask without padding is dropped before, and has left positions of its length.
            _refuse_unknown_past(kwargs.get("position_ids") if mask is None else mask, length)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            inputs["attention_mask"] = mask[:, -length:].clone(memory_format=torch.contiguous_format)
        return inputs

    def _prefill(self, input_ids: Any, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if set(self.model.layer_types) == {"linear_attention"}:
            # In chunks, Hugging Face would ask the cache for its length, which such states do not know.
            prefill_at_once(generation_config, "a model of linear layers alone")
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
                encoder_attention_mask, use_cache, **kwargs: as for `FratrieDecoderModel`.

        Returns:
            `loss`, `logits` `(B, T, V)` and `cache`.
        """
        shifted = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            output_router_logits=self.needs_router_logits(labels, output_router_logits),
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if shifted is None:
                shifted = shift_labels(labels, position_ids, attention_mask, kwargs.get("cu_seq_lens_q"))
            loss = token_cross_entropy(logits, shifted, num_items_in_batch)
        share = share_of_batch(shifted, num_items_in_batch)
        return self.head_output(
            FratrieCausalLMOutput,
            outputs,
            logits,
            loss,
            share,
            attention_mask,
            cache=outputs.cache,
            cross_attentions=outputs.cross_attentions,
        )


def _refuse_unknown_past(all_tokens: torch.Tensor | None, length: int) -> None:
    if all_tokens is None or all_tokens.shape[1] == length:
        raise ValueError(
            "The states of linear attention do not know how many tokens they have seen: to go on from a cache, give "
            "the new tokens as input_ids, and the attention_mask of all tokens."
        )


class FratrieDecoderForSequenceClassification(FratriePreTrainedModel):
    """The decoder with a head that labels texts, by default by their last token."""

    config: FratrieDecoderConfig

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
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieSequenceClassifierOutput:
        """Score the labels of each text (see `FratrieEncoderForSequenceClassification.forward`)."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            output_router_logits=self.needs_router_logits(labels, output_router_logits),
            return_dict=True,
            **kwargs,
        )
        states = outputs.last_hidden_state
        pooling = self.config.classifier_pooling
        if cache is not None and pooling != "last" and cache.get_seq_length() > states.shape[1]:
            raise ValueError(
                f"classifier_pooling={pooling!r} needs all tokens of a text at once: leave out the cache."
            )
        real_tokens = find_real_tokens(states, input_ids, attention_mask, self.config.pad_token_id)
        logits = self.classifier(pool(states, real_tokens, self.config.classifier_pooling))
        loss = None
        if labels is not None:
            loss = sequence_classification_loss(logits, labels, self.config, num_items_in_batch)
        share = share_of_batch(labels, num_items_in_batch)
        return self.head_output(FratrieSequenceClassifierOutput, outputs, logits, loss, share, attention_mask)
