"""The encoder (BERT-like): every token sees all others. It reads texts, or images as patches (ViT-like).

Shapes: B batch, T positions, D hidden, V vocabulary, M labels.
"""

from typing import Any, Unpack

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils.generic import can_return_tuple

from .configuration import FratrieEncoderConfig
from .heads import (
    ClassificationHead,
    HeadCall,
    HeadModel,
    Pooler,
    SequenceClassifier,
    find_real_tokens,
    pool,
    predict_tokens,
)
from .layout import PACKED_KWARGS, find_layout
from .losses import target_rows, token_cross_entropy
from .normalization import build_norm
from .outputs import (
    FratrieImageClassifierOutput,
    FratrieMaskedLMOutput,
    FratrieModelOutput,
    FratrieSequenceClassifierOutput,
    FratrieTokenClassifierOutput,
    ModelKwargs,
)
from .stack import FratrieStack, input_shape


class FratrieEncoderModel(FratrieStack):
    """The bare encoder, which gives one vector per token, and one per text where it has a pooler."""

    config: FratrieEncoderConfig

    def __init__(self, config: FratrieEncoderConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.pooler = Pooler(config) if config.pooler_activation and add_pooling_layer else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        first_layer: int = 0,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieModelOutput:
        """Encode a padded batch or a packed one, or images.

        Args:
            input_ids: `(B, T)` token ids; or give `inputs_embeds`.
            attention_mask: `(B, T)`, zero at padding on any side; or a ready `(B, 1, T, T)`.
            token_type_ids: `(B, T)`, where the model has token types.
            position_ids: `(B or 1, T)`; rows in which positions start anew hold several documents, which do not see
                each other.
            inputs_embeds: `(B, T, D)` instead of the token embeddings.
            pixel_values: `(B, channels, height, width)` instead of all these, where the model reads images.
            first_layer: the layer that `inputs_embeds` enter; above 0 they are states that the layers below have made
                (`hidden_states[first_layer]`; after the last layer, what its norm has not seen), and are not embedded.
            global_attention_mask: `(B, T)`, nonzero at tokens that see their whole document and are seen by all of it,
                in models with such mixers (`"longformer"`); by default there are none.
            **kwargs: `output_hidden_states`, `output_attentions` (eager attention only), `output_router_logits`,
                `return_dict`, and Hugging Face's flash-attention arguments for packed rows.

        Returns:
            `last_hidden_state` `(B, T, D)` (zeros at padding) and what was asked for. With gradients the recorded
            states are those of the graph, padding included.

        Raises:
            ValueError: for no input or several, for pixels that the model does not read, for a `first_layer` that is
                not there or without its states, and for arguments of other models.
        """
        self.refuse_foreign_arguments(kwargs, global_attention_mask)
        if pixel_values is not None:
            if not self.config.patch_size:
                raise ValueError("pixel_values given to a model of texts: set patch_size in its configuration.")
            if first_layer:
                raise ValueError(f"first_layer={first_layer} takes states as inputs_embeds, not pixel_values.")
            inputs_embeds = self.embed_tokens(pixel_values) if inputs_embeds is None else None
        shape = input_shape(input_ids, inputs_embeds)
        inputs = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "token_type_ids": token_type_ids,
            "global_attention_mask": global_attention_mask,
        }
        options: dict[str, Any] = {**kwargs, "return_dict": True}
        for name in PACKED_KWARGS:  # the layout says the same
            options.pop(name, None)
        bounds = kwargs.get("cu_seq_lens_q")
        layout = find_layout(self.config, shape, attention_mask, position_ids, bounds, options)
        outputs = self.run(inputs, layout, first_layer=first_layer, **options)
        if self.pooler is not None:
            states = outputs.last_hidden_state
            assert states is not None
            real_tokens = find_real_tokens(states, input_ids, attention_mask, self.config.pad_token_id)
            outputs.pooler_output = self.pooler(pool(states, real_tokens, "first"))
        return outputs


class FratrieEncoderForMaskedLM(HeadModel):
    """The encoder with a head that fills in masked tokens (Devlin et al. 2019)."""

    config: FratrieEncoderConfig
    output_class = FratrieMaskedLMOutput
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: FratrieEncoderConfig) -> None:
        super().__init__(config)
        if config.patch_size:
            raise ValueError(f"patch_size={config.patch_size}: a model of images has no words to fill in.")
        self.model = FratrieEncoderModel(config, add_pooling_layer=False)
        self.head_dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.head_act_fn = ACT2FN[config.head_activation or config.hidden_act]
        norm = config.final_norm or config.feed_forward_output_norm or "layer_norm"
        self.head_norm = build_norm(norm, config.hidden_size, config.norm_eps, config.norm_bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def apply_head(
        self, states: torch.Tensor, inputs: dict[str, Any], call: HeadCall
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Score the vocabulary at every position, or at the masked ones alone."""
        labels = call.labels
        if labels is not None and call.rows is not None:
            states = states.flatten(0, 1).index_select(0, call.rows.to(states.device))
            labels = labels.flatten().index_select(0, call.rows)
        states = self.head_norm(self.head_act_fn(self.head_dense(states)))
        return predict_tokens(self, states, labels, call.num_items_in_batch)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieMaskedLMOutput:
        """Score every token of the vocabulary at every position.

        Args:
            labels: `(B, T)` true ids of the masked tokens, -100 elsewhere.
            output_router_logits: return the router logits of sparse layers.
            num_items_in_batch: number of targets of the global batch, to divide the loss by.
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask, **kwargs: as
                for `FratrieEncoderModel`.

        Returns:
            `loss`, and `logits` `(B, T, V)`; in training with `config.sparse_prediction` those of the masked tokens
            alone, and with `config.chunked_loss` none.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "global_attention_mask": global_attention_mask,
        }
        rows = None
        if labels is not None and self.training and self.config.sparse_prediction:
            rows = target_rows(labels)  # before the stack has work for a device, for which the host would wait here
        call = HeadCall(labels, output_router_logits, num_items_in_batch, rows=rows)
        return self.run_with_head(inputs, call, **kwargs)


class FratrieEncoderForSequenceClassification(SequenceClassifier):
    """The encoder with a head that labels sentences: one label, several at once, or numbers."""

    config: FratrieEncoderConfig
    output_class = FratrieSequenceClassifierOutput

    def __init__(self, config: FratrieEncoderConfig) -> None:
        super().__init__(config)
        self.model = FratrieEncoderModel(config, add_pooling_layer=False)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieSequenceClassifierOutput:
        """Score the labels of each sentence.

        Args:
            labels: by `config.problem_type` `(B,)` for one label, `(B, M)` for several (integers are cast) and for
                regression.
            output_router_logits: return the router logits of sparse layers.
            num_items_in_batch: number of targets of the global batch, to divide the loss by.
            global_attention_mask: `(B, T)`, as for `FratrieEncoderModel`; where such mixers get none, the token is
                global that stands for the sentence: the last one with `classifier_pooling="last"`, else the first.
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs: as for
                `FratrieEncoderModel`.

        Returns:
            `loss` and `logits` `(B, M)`.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "global_attention_mask": global_attention_mask,
        }
        call = HeadCall(labels, output_router_logits, num_items_in_batch)
        return self.run_with_head(inputs, call, **kwargs)


class FratrieEncoderForTokenClassification(HeadModel):
    """The encoder with a head that labels each token."""

    config: FratrieEncoderConfig
    output_class = FratrieTokenClassifierOutput

    def __init__(self, config: FratrieEncoderConfig) -> None:
        super().__init__(config)
        self.model = FratrieEncoderModel(config, add_pooling_layer=False)
        self.classifier = ClassificationHead(config)
        self.post_init()

    def apply_head(
        self, states: torch.Tensor, inputs: dict[str, Any], call: HeadCall
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Score the labels of every token."""
        logits = self.classifier(states)
        if call.labels is None:
            return None, logits
        return token_cross_entropy(logits, call.labels, call.num_items_in_batch), logits

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        global_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieTokenClassifierOutput:
        """Score the labels of each token.

        Args:
            labels: `(B, T)`, -100 where a token has none.
            output_router_logits: return the router logits of sparse layers.
            num_items_in_batch: number of targets of the global batch, to divide the loss by.
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, global_attention_mask, **kwargs: as
                for `FratrieEncoderModel`.

        Returns:
            `loss` and `logits` `(B, T, M)`.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "global_attention_mask": global_attention_mask,
        }
        call = HeadCall(labels, output_router_logits, num_items_in_batch)
        return self.run_with_head(inputs, call, **kwargs)


class FratrieEncoderForImageClassification(SequenceClassifier):
    """The encoder with a head that labels images (Dosovitskiy et al. 2021)."""

    config: FratrieEncoderConfig
    output_class = FratrieImageClassifierOutput
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012 (Hugging Face's form)

    def __init__(self, config: FratrieEncoderConfig) -> None:
        super().__init__(config)
        if not config.patch_size:
            raise ValueError("A model that labels images needs a patch_size in its configuration, such as 16.")
        self.model = FratrieEncoderModel(config, add_pooling_layer=False)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[ModelKwargs],
    ) -> FratrieImageClassifierOutput:
        """Score the labels of each image.

        Args:
            pixel_values: `(B, channels, height, width)`, as the model's image processor gives them.
            labels: by `config.problem_type` `(B,)` for one label, `(B, M)` for several and for regression.
            output_router_logits: return the router logits of sparse layers.
            num_items_in_batch: number of targets of the global batch, to divide the loss by.
            **kwargs: as for `FratrieEncoderModel`.

        Returns:
            `loss` and `logits` `(B, M)`.
        """
        inputs = {"pixel_values": pixel_values}
        call = HeadCall(labels, output_router_logits, num_items_in_batch)
        return self.run_with_head(inputs, call, **kwargs)
