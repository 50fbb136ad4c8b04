"""What the models return: Hugging Face's outputs, and what a mixture of experts adds to them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    ImageClassifierOutput,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


class ModelKwargs(TypedDict, total=False):
    """What every model takes besides its inputs; Hugging Face reads here that attentions can be asked for."""

    output_attentions: bool | None
    output_hidden_states: bool | int | list[int] | None
    return_dict: bool | None
    cu_seq_lens_q: torch.Tensor | None
    cu_seq_lens_k: torch.Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    seq_idx: torch.Tensor | None
    shift_labels: torch.Tensor | None
    output_mixer_losses: bool | None


# What some model of ours or of Hugging Face takes, and what it does there.
_ELSEWHERE = frozenset(
    {
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "pixel_values"),
        *("encoder_attention_mask", "encoder_outputs", "cache", "past_key_values"),
        *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids"),
        *("head_mask", "decoder_head_mask", "cross_attn_head_mask", "global_attention_mask", "bool_masked_pos"),
        *("interpolate_pos_encoding", "labels", "cu_seq_lens_q", "output_hidden_states", "output_attentions"),
        *("output_router_logits", "return_dict", "use_cache", "num_items_in_batch", "logits_to_keep", "first_layer"),
    }
)
# What callers give to every model, and what changes no state.
_HARMLESS = frozenset(
    {
        *ModelKwargs.__annotations__,
        *("output_router_logits", "labels", "num_items_in_batch", "logits_to_keep", "use_cache", "return_loss"),
    }
)


def refuse_foreign_arguments(model: object, kwargs: Mapping[str, object]) -> None:
    """Refuse what a model does not take and would change its result elsewhere, and misspelt names.

    Others go on to the attention implementation, which may be one of the caller's own.

    Raises:
        ValueError: with the name, and the closest one.
    """
    if torch.compiler.is_compiling():
        return
    for name in kwargs.keys() - _HARMLESS:
        if kwargs[name] is None or kwargs[name] is False:  # asks for nothing
            continue
        if name in _ELSEWHERE:
            raise ValueError(f"{type(model).__name__} takes no {name}: leave it out.")
        if close := difflib.get_close_matches(name, _ELSEWHERE, n=1, cutoff=0.8):
            raise ValueError(f"{type(model).__name__} takes no {name}: did you mean {close[0]}?")


@dataclass
class FratrieModelOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Output of a stack; `router_logits` holds `(B · T, E)` a sparse layer, `pooler_output` `(B, D)`.

    `mixer_losses` are what mixers add to the training loss, weighed.
    """

    pooler_output: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    mixer_losses: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieCausalLMOutput(CausalLMOutputWithCrossAttentions):
    """`aux_loss` and `z_loss` are the router's losses before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieMaskedLMOutput(MaskedLMOutput):
    """`aux_loss` and `z_loss` are the router's losses before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieSequenceClassifierOutput(SequenceClassifierOutput):
    """`aux_loss` and `z_loss` are the router's losses before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieImageClassifierOutput(ImageClassifierOutput):
    """`aux_loss` and `z_loss` are the router's losses before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieTokenClassifierOutput(TokenClassifierOutput):
    """`aux_loss` and `z_loss` are the router's losses before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieSeq2SeqModelOutput(Seq2SeqModelOutput):
    """The router logits of both stacks, and what mixers of either add to the training loss."""

    encoder_router_logits: tuple[torch.Tensor, ...] | None = None
    decoder_router_logits: tuple[torch.Tensor, ...] | None = None
    mixer_losses: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieSeq2SeqLMOutput(Seq2SeqLMOutput):
    """`aux_loss` and `z_loss` are the mean router losses of the sparse stacks, before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    encoder_router_logits: tuple[torch.Tensor, ...] | None = None
    decoder_router_logits: tuple[torch.Tensor, ...] | None = None
