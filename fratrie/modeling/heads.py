"""What heads are made of: the course of a pass through stack, head and losses; pooling; the layers of classifiers.

Shapes: B batch, T positions, D hidden, V vocabulary, M labels.
"""

from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils.generic import ModelOutput

from .calibration import calibrate
from .chunked_loss import chunked_cross_entropy
from .configuration import FratrieConfig, FratrieEncoderConfig
from .experts import RouterLosses, needs_router_logits
from .linear_maps import has_more_to_its_call
from .losses import (
    add_mixer_losses,
    guess_problem_type,
    has_mixer_losses,
    sequence_classification_loss,
    share_of_batch,
    token_cross_entropy,
)
from .normalization import build_norm
from .outputs import FratrieModelOutput
from .pretrained import FratriePreTrainedModel


class ClassificationHead(nn.Module):
    """Dense layers with activation and perhaps norm, then one output per label; dropout before each layer."""

    def __init__(self, config: FratrieConfig) -> None:
        super().__init__()
        sizes = [config.hidden_size, *(config.classifier_hidden_sizes or [])]
        self.dense = nn.ModuleList(
            nn.Linear(before, after, bias=config.classifier_bias) for before, after in pairwise(sizes)
        )
        self.norms = nn.ModuleList(
            build_norm(config.classifier_norm, size, config.norm_eps, config.norm_bias) for size in sizes[1:]
        )
        self.act_fn = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(sizes[-1], config.num_labels or 0, bias=config.classifier_output_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to logits `(…, M)`."""
        for layer, norm in zip(self.dense, self.norms, strict=True):
            features = norm(self.act_fn(layer(self.dropout(features))))
        return self.out_proj(self.dropout(features))


class Pooler(nn.Module):
    """A dense layer and an activation over the vector of the first token (Devlin et al. 2019)."""

    def __init__(self, config: FratrieEncoderConfig) -> None:
        super().__init__()
        assert config.pooler_activation is not None
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.pooler_activation]

    def forward(self, first_BD: torch.Tensor) -> torch.Tensor:
        """Map `(B, D)` to `(B, D)`."""
        return self.act_fn(self.dense(first_BD))


class HeadCall(NamedTuple):
    """What a head is asked for besides the inputs of its stack, as its `forward` documents it.

    `rows` are the places of the labels, counted along their rows, to which an MLM head is to keep.
    """

    labels: torch.Tensor | None
    output_router_logits: bool | None
    num_items_in_batch: torch.Tensor | int | None
    logits_to_keep: int | torch.Tensor = 0
    rows: torch.Tensor | None = None


class HeadModel(FratriePreTrainedModel):
    """A stack, `model`, with a head: what every such model does in a pass. A subclass says what its head computes.

    Class attributes:
        output_class: what a pass returns.
        passed_on: what of the stack's outputs is handed on.
    """

    output_class: ClassVar[type[ModelOutput]]
    passed_on: ClassVar[tuple[str, ...]] = ("hidden_states", "attentions", "router_logits")

    def apply_head(
        self, states: torch.Tensor, inputs: dict[str, Any], call: HeadCall
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Score the states of the stack, and compare the scores with the labels where there are any.

        Args:
            states: `(B, T, D)`.
            inputs: of the stack, by name.
            call: what the head is asked for.

        Returns:
            The loss of the head alone and the logits, each where there is one.
        """
        raise NotImplementedError

    def run_with_head(self, inputs: dict[str, Any], call: HeadCall, **kwargs: Any) -> Any:
        """Run the stack and the head, and add up the losses.

        Args:
            inputs: what the stack takes, by name.
            call: what the head is asked for.
            **kwargs: for the stack.

        Returns:
            An `output_class`.
        """
        is_training = self.training and call.labels is not None
        recorded = needs_router_logits(self.config, is_training, call.output_router_logits)
        outputs: FratrieModelOutput = self.model(
            **inputs,
            output_router_logits=recorded,
            output_mixer_losses=is_training and has_mixer_losses(self.config),
            return_dict=True,
            **kwargs,
        )
        assert outputs.last_hidden_state is not None
        loss, logits = self.apply_head(outputs.last_hidden_state, inputs, call)
        router = RouterLosses.of(self.config, outputs.router_logits, inputs.get("attention_mask"))
        share = share_of_batch(call.labels, call.num_items_in_batch)
        loss = router.add_to(loss, self.config, share)
        return self.output_class(
            loss=add_mixer_losses(loss, outputs.mixer_losses, share),
            logits=logits,
            aux_loss=router.balance,
            z_loss=router.z,
            **{name: getattr(outputs, name) for name in self.passed_on},
        )


class SequenceClassifier(HeadModel):
    """What classifiers of texts and images share: pooling, the classification head, the loss by problem type."""

    classifier: ClassificationHead

    def run_with_head(self, inputs: dict[str, Any], call: HeadCall, **kwargs: Any) -> Any:
        """Run the stack and the head (see `HeadModel.run_with_head`).

        The token that stands for a text is global by default, where the model has such mixers, and without a cache,
        whose past had one of its own.
        """
        takes_them = any(mixer.takes_global_tokens for mixer in self.config.mixers)
        if takes_them and inputs.get("global_attention_mask") is None and inputs.get("cache") is None:
            inputs = {**inputs, "global_attention_mask": self._token_of_text(inputs)}
        return super().run_with_head(inputs, call, **kwargs)

    def _token_of_text(self, inputs: dict[str, Any]) -> torch.Tensor:
        """True at the last real token where texts are classified by it, else at the first, `(B, T)`."""
        if (pixels := inputs.get("pixel_values")) is not None:
            size = (len(pixels), getattr(self.config, "num_patches", 0) + 1)
            tokens = torch.empty(size, device=pixels.device)
        else:
            tokens = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
        mask, pad = inputs.get("attention_mask"), self.config.pad_token_id
        real_tokens = find_real_tokens(tokens, inputs.get("input_ids"), mask, pad)
        place = find_place(real_tokens, "last" if self.config.classifier_pooling == "last" else "first")
        return torch.arange(tokens.shape[1], device=place.device) == place[:, None]

    def apply_head(
        self, states: torch.Tensor, inputs: dict[str, Any], call: HeadCall
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Classify `(B, T, D)` by the real tokens of each row; the loss is that of `config.problem_type`.

        Where that is `None` the first labels say it, and it is kept and saved, as by Hugging Face's heads: pipelines
        and scripts read there whether the logits are of one label, of several, or values. Outside of training the
        logits are calibrated as `config.label_calibration` says.
        """
        mask = inputs.get("attention_mask")
        real_tokens = find_real_tokens(states, inputs.get("input_ids"), mask, self.config.pad_token_id)
        logits = self.classifier(pool(states, real_tokens, self.config.classifier_pooling))
        if self.config.label_calibration and not self.training:
            logits = calibrate(logits, self.config.label_calibration)
        if call.labels is None:
            return None, logits
        if self.config.problem_type is None:
            self.config.problem_type = guess_problem_type(logits, call.labels)
        return sequence_classification_loss(logits, call.labels, self.config, call.num_items_in_batch), logits


class BiasedOutputLayer(nn.Linear):
    """A linear map that rounds before it adds its bias, as BART and Marian do in half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(…, D)` to `(…, V)`."""
        return nn.functional.linear(x, self.weight) + self.bias


def predict_tokens(
    model: Any, states: torch.Tensor, labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Score the vocabulary by `model.lm_head`, and compare the scores with the labels where there are any.

    Args:
        model: in training with `config.chunked_loss` it gives the loss alone, where its output layer allows that.
        states: `(…, D)`.
        labels: `(…)`, token ids, -100 where a token is no target.
        num_items_in_batch: number of targets to divide the loss by.

    Returns:
        The loss and the logits, each where there is one.
    """
    head = model.lm_head
    if labels is not None and model.training and model.config.chunked_loss and _is_weights_alone(head):
        return chunked_cross_entropy(states, head.weight, head.bias, labels, num_items_in_batch), None
    logits = head(states)
    return None if labels is None else token_cross_entropy(logits, labels, num_items_in_batch), logits


def _is_weights_alone(head: nn.Module) -> bool:
    """Whether the weights say all that a call does; adapters, hooks, sharded weights and compiled graphs do more."""
    return (
        type(head) in (nn.Linear, BiasedOutputLayer)
        and type(head.weight) is nn.Parameter
        and not has_more_to_its_call(head)
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def pool(hidden_states: torch.Tensor, real_tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector per sentence.

    Args:
        hidden_states: `(B, T, D)`.
        real_tokens: `(B, T)`, true where a token is no padding; padding may stand on either side.
        pooling: `"first"`, `"mean"` or `"last"` real token.

    Returns:
        `(B, D)`; zeros for the mean of a sentence without real tokens.
    """
    mask_BT = real_tokens.to(hidden_states.dtype)
    if pooling == "mean":
        return (hidden_states * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True).clamp_min(1)
    index = find_place(real_tokens, pooling)
    return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), index]


def find_place(real_tokens: torch.Tensor, which: str) -> torch.Tensor:
    """Place `(B,)` of the `"first"` or `"last"` real token of each row of `(B, T)`."""
    place = torch.arange(real_tokens.shape[1], device=real_tokens.device)
    # The largest of the real places, counted from the end that is looked for.
    order = place if which == "last" else place.flip(0)
    return torch.where(real_tokens, order, -1).argmax(-1)


def find_real_tokens(
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    pad_token_id: int | None,
) -> torch.Tensor:
    """Real tokens `(B, T)`: by the mask (of past tokens too), without one by the padding id, without that all.

    Raises:
        ValueError: when the mask has another form than `(B, T)`.
    """
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(
                f"To find the real tokens of a sentence the attention_mask must be (batch, length), not "
                f"{tuple(attention_mask.shape)}."
            )
        return attention_mask[:, -hidden_states.shape[1] :].bool()
    if input_ids is not None and pad_token_id is not None:
        return input_ids != pad_token_id
    return torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
