"""What the models return: Hugging Face's outputs, and what a mixture of experts adds to them."""

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


@dataclass
class FratrieModelOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Output of a stack; `router_logits` holds `(B · T, E)` a sparse layer, `pooler_output` `(B, D)`."""

    pooler_output: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


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
    """The router logits of both stacks."""

    encoder_router_logits: tuple[torch.Tensor, ...] | None = None
    decoder_router_logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class FratrieSeq2SeqLMOutput(Seq2SeqLMOutput):
    """`aux_loss` and `z_loss` are the mean router losses of the sparse stacks, before their weights."""

    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    encoder_router_logits: tuple[torch.Tensor, ...] | None = None
    decoder_router_logits: tuple[torch.Tensor, ...] | None = None
