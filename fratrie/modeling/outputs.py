"""What the models return: Hugging Face's outputs, and what a mixture of experts adds to them."""

from dataclasses import dataclass

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
