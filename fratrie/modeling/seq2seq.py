"""The encoder-decoder: an encoder, and a decoder that attends to its states.

Shapes: B batch, S positions of the input, T positions of the output, D hidden, V vocabulary.
"""

from typing import Any, Unpack

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from .configuration import FratrieConfig
from .decoder import FratrieDecoderModel, prefill_at_once
from .encoder import FratrieEncoderModel
from .experts import RouterLosses, needs_router_logits
from .heads import BiasedOutputLayer, predict_tokens
from .layout import RECORDS
from .losses import IGNORED, add_mixer_losses, has_mixer_losses, share_of_batch
from .outputs import FratrieModelOutput, FratrieSeq2SeqLMOutput, FratrieSeq2SeqModelOutput, ModelKwargs
from .pretrained import FratriePreTrainedModel
from .seq2seq_configuration import FratrieSeq2SeqConfig
from .window_cache import choose_layers


class FratrieSeq2SeqPreTrainedModel(FratriePreTrainedModel):
    """What the encoder-decoder models share: tied weights, resizing, the shift of the labels."""

    config: FratrieSeq2SeqConfig
    _can_record_outputs = {}  # noqa: RUF012 (each stack records its own)

    @property
    def stacks(self) -> "FratrieSeq2SeqModel":
        """The bare encoder-decoder."""
        raise NotImplementedError

    def stack_configs(self) -> tuple[FratrieConfig, ...]:
        """The configurations of encoder and decoder."""
        return self.config.stacks

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the encoder's token embedding."""
        embeddings = self.stacks.encoder.embed_tokens
        assert isinstance(embeddings, nn.Embedding)
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the token embedding of the encoder, and of the decoder where they share it."""
        assert isinstance(value, nn.Embedding)
        self.stacks.encoder.embed_tokens = value
        if self.config.share_embeddings:
            self.stacks.decoder.embed_tokens = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary of both stacks (see Hugging Face's method).

        Raises:
            ValueError: when encoder and decoder have vocabularies of their own, and for a vocabulary that lacks a
                special token.
        """
        if new_num_tokens is not None and not self.config.share_embeddings:
            raise ValueError("share_embeddings=False: resize the vocabularies of encoder and decoder one by one.")
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        size = embeddings.weight.shape[0]
        for config in (self.config, *self.config.stacks):
            config.vocab_size = size
        return embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift the labels `(B, T)` to the right, behind the start token; -100 becomes padding.

        Raises:
            ValueError: when the configuration has no start or no padding token.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError(
                f"decoder_start_token_id={start} and pad_token_id={pad} must be set to make decoder inputs of labels."
            )
        shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORED, pad)


class FratrieSeq2SeqModel(FratrieSeq2SeqPreTrainedModel):
    """The bare encoder-decoder (Vaswani et al. 2017)."""

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FratrieSeq2SeqConfig) -> None:
        super().__init__(config)
        config.validate_architecture()  # fields may have been set since
        config.check_model_sizes()
        encoder_config, decoder_config = config.stacks
        decoder_config.cross_attention_hidden_size = encoder_config.hidden_size
        self.encoder = FratrieEncoderModel(encoder_config)
        self.decoder = FratrieDecoderModel(decoder_config)
        self.post_init()

    @property
    def stacks(self) -> "FratrieSeq2SeqModel":
        """The bare encoder-decoder: the model itself."""
        return self

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the decoder's embedding as tied to the encoder's, where the configuration shares them."""
        shared = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        return shared if self.config.share_embeddings else {}

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieSeq2SeqModelOutput:
        """Encode the input, unless `encoder_outputs` is given, and decode.

        Args:
            input_ids: `(B, S)`; or give `inputs_embeds` or `encoder_outputs`.
            attention_mask: `(B, S)`, zero at padding.
            decoder_input_ids: `(B, T)`; or give `decoder_inputs_embeds`.
            decoder_attention_mask: `(B, past + T)`, zero at padding.
            encoder_outputs: output of the encoder, or a tuple that begins with its last hidden state.
            cache: the decoder's past, extended in place.
            inputs_embeds, decoder_inputs_embeds: instead of the token embeddings.
            decoder_position_ids: `(B or 1, T)`.
            use_cache: return a cache.
            global_attention_mask: `(B, S)`, of the encoder's tokens (see `FratrieEncoderModel`).
            **kwargs: as for `FratrieEncoderModel`, for both stacks; `token_type_ids` and `position_ids` are the
                encoder's.

        Returns:
            `last_hidden_state` `(B, T, D)` of the decoder, `cache`, and what was asked for of both stacks.

        Raises:
            ValueError: for no input of the decoder or two, and as the stacks do.
        """
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError(
                "Give exactly one of decoder_input_ids and decoder_inputs_embeds, or labels. Hugging Face's BART "
                "makes them from its inputs: prepare_decoder_input_ids_from_labels(input_ids)."
            )
        recorded = {name: getattr(self.config, name) for name in RECORDS if getattr(self.config, name)}
        options: dict[str, Any] = {**recorded, **kwargs, "return_dict": True}
        of_encoder = {name: options.pop(name) for name in ("token_type_ids", "position_ids") if name in options}
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                global_attention_mask=global_attention_mask,
                **of_encoder,
                **options,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = FratrieModelOutput(last_hidden_state=encoder_outputs[0])
        if use_cache is None and not self.config.use_cache:
            use_cache = False
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            use_cache=use_cache,
            **options,
        )
        return FratrieSeq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            cache=decoder_outputs.cache,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            encoder_router_logits=getattr(encoder_outputs, "router_logits", None),
            decoder_router_logits=decoder_outputs.router_logits,
            mixer_losses=(
                *(getattr(encoder_outputs, "mixer_losses", None) or ()),
                *(decoder_outputs.mixer_losses or ()),
            )
            or None,
        )


class FratrieSeq2SeqForConditionalGeneration(FratrieSeq2SeqPreTrainedModel, GenerationMixin):
    """The encoder-decoder with a head that predicts the next token of the output."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: FratrieSeq2SeqConfig) -> None:
        super().__init__(config)
        self.model = FratrieSeq2SeqModel(config)
        sizes = (config.stacks[1].hidden_size, config.vocab_size)
        self.lm_head = BiasedOutputLayer(*sizes) if config.lm_head_bias else nn.Linear(*sizes, bias=False)
        self.post_init()

    @property
    def stacks(self) -> FratrieSeq2SeqModel:
        """The bare encoder-decoder."""
        return self.model

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Add the positions, which no cache of linear attention knows (see Hugging Face's method)."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if inputs.get("cache") is None:
            return inputs
        mask = kwargs.get("decoder_attention_mask")
        places = (torch.ones_like(input_ids) if mask is None else mask).long().cumsum(-1).sub(1).clamp_min(0)
        places = places[:, -inputs["decoder_input_ids"].shape[1] :]
        # A view would bring the strides of a longer tensor with every token, for which a compiled graph is made anew.
        inputs["decoder_position_ids"] = places.clone(memory_format=torch.contiguous_format)
        return inputs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        decoder, kind = self.config.stacks[1], generation_config.cache_implementation or "dynamic"
        no_new_one = model_kwargs.get("cache") is not None or generation_config.use_cache is False
        if no_new_one or kind == "quantized" or all(mixer.keeps_tokens for mixer in decoder.mixers):
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if "cache" in model_kwargs:
                cache, is_assistant = model_kwargs["cache"], generation_config.is_assistant
                model_kwargs["cache"] = choose_layers(cache, decoder, self.model.decoder.mixers, is_assistant)
            return None
        # Hugging Face lays out the cache of the encoder's states like the decoder's own, and fails at layers that keep
        # no tokens.
        own: Cache
        if kind in ALL_STATIC_CACHE_IMPLEMENTATIONS:
            own = StaticCache(decoder, max_cache_length, offloading="offloaded" in kind)
        else:
            own = DynamicCache(config=decoder, offloading="offloaded" in kind)
        model_kwargs["cache"] = EncoderDecoderCache(own, DynamicCache())
        return None

    def _prefill(self, input_ids: Any, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        # In chunks, Hugging Face would cut the encoder's mask to the length of the decoder's inputs.
        prefill_at_once(generation_config, "an encoder-decoder")
        return super()._prefill(input_ids, generation_config, *args, **kwargs)  # type: ignore[misc]

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the head as tied to the decoder's embedding, besides what the bare model ties."""
        tied = PreTrainedModel.get_expanded_tied_weights_keys(self, all_submodels) if all_submodels else {}
        if self.config.tie_word_embeddings:
            stack = "encoder" if self.config.share_embeddings else "decoder"
            tied["lm_head.weight"] = f"model.{stack}.embed_tokens.weight"
        return tied

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieSeq2SeqLMOutput:
        """Score every token of the vocabulary as the next one of the output.

        Args:
            labels: `(B, T)` ids of the output, -100 at padding; without decoder inputs these are made from them.
            output_router_logits: return the router logits of sparse layers.
            num_items_in_batch: number of targets of the global batch, to divide the loss by.
            **kwargs: these and the inputs as for `FratrieSeq2SeqModel`.

        Returns:
            `loss`, `logits` `(B, T, V)` (none in training with `config.chunked_loss`) and `cache`.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        is_training = self.training and labels is not None
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            output_router_logits=any(
                needs_router_logits(stack, is_training, output_router_logits) for stack in self.config.stacks
            ),
            output_mixer_losses=is_training and any(has_mixer_losses(stack) for stack in self.config.stacks),
            return_dict=True,
            global_attention_mask=global_attention_mask,
            **kwargs,
        )
        states = outputs.last_hidden_state
        if self.config.scale_decoder_outputs:
            states = states * self.config.stacks[1].hidden_size ** -0.5
        loss, logits = predict_tokens(self, states, labels, num_items_in_batch)
        encoder_config, decoder_config = self.config.stacks
        encoder_router = RouterLosses.of(encoder_config, outputs.encoder_router_logits, attention_mask)
        real_tokens = decoder_attention_mask
        if real_tokens is None and labels is not None:
            real_tokens = (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0  # up to the last target
        decoder_router = RouterLosses.of(decoder_config, outputs.decoder_router_logits, real_tokens)
        if labels is not None:
            share = share_of_batch(labels, num_items_in_batch)
            loss = encoder_router.add_to(loss, encoder_config, share)
            loss = decoder_router.add_to(loss, decoder_config, share)
            loss = add_mixer_losses(loss, outputs.mixer_losses, share)
        return FratrieSeq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
            aux_loss=_mean(encoder_router.balance, decoder_router.balance),
            z_loss=_mean(encoder_router.z, decoder_router.z),
            encoder_router_logits=outputs.encoder_router_logits,
            decoder_router_logits=outputs.decoder_router_logits,
        )


def _mean(*losses: torch.Tensor | None) -> torch.Tensor | None:
    known = [loss for loss in losses if loss is not None]
    return torch.stack(known).mean() if known else None
