"""One definition of the loss: the sum over real targets divided by their count, however the rows are cut.

The balancing loss of experts, which a model adds by itself, is computed per micro-batch, and averaged.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fratrie.modeling.losses import IGNORED, shift_labels
from fratrie.modeling.pretrained import FratriePreTrainedModel


class Objective:
    """Counts the targets of a batch and takes the batch's share of the loss from a Hugging Face model.

    A model that names `num_items_in_batch` in its forward (or sets `accepts_loss_kwargs = True`) is told the
    global count; the loss of any other is taken as the mean over the batch and weighted by its targets, which is
    right for heads that swallow unknown arguments too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        named = "num_items_in_batch" in inspect.signature(model.forward).parameters
        self.told_items = named or getattr(model, "accepts_loss_kwargs", False) is True
        # What continues its own input predicts each token from those before it.
        self.is_ours = isinstance(model, FratriePreTrainedModel)
        self.shifts = model.can_generate() and not model.config.is_encoder_decoder

    def count(self, inputs: dict[str, Tensor]) -> int:
        """Targets in `inputs["labels"]`: entries that are not -100; a causal model never predicts the first of a row.

        Of a model of ours, neither the first token of any document nor of what lies behind padding.

        Raises:
            ValueError: the collator gave no labels.
        """
        if "labels" not in inputs:
            raise ValueError(f"the batch has no labels, only {sorted(inputs)}; the collator must make them")
        labels = inputs["labels"]
        if self.shifts and "shift_labels" not in inputs:  # which are the labels of a part of a row
            # Ours predict nothing from padding, Hugging Face's the first token behind it.
            hints = [inputs.get(name) for name in ("position_ids", "attention_mask", "cu_seq_lens_q")]
            labels = shift_labels(labels, *(hints if self.is_ours else ()))
        return int(labels.ne(IGNORED).sum())

    def share(self, model: nn.Module, inputs: dict[str, Tensor], count: int, total: int) -> Tensor:
        """The part of the batch's `count` targets in the mean over `total` targets; differentiable scalar."""
        extra: dict[str, Any] = {}
        if self.told_items:
            extra["num_items_in_batch"] = torch.tensor(float(max(total, 1)), device=inputs["labels"].device)
        outputs = model(**inputs, **extra)
        if self.told_items:
            return outputs.loss
        if count == 0:  # the mean over nothing is NaN, and so is its gradient even when weighted by zero
            return outputs.logits.float().sum() * 0.0
        return outputs.loss * (count / total)
