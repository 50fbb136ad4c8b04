"""Context parallelism: several processes hold a part of every row each, and attend in a ring.

In a loop of one's own, whose processes read the same batches:

    context = open_context(model, size=2)
    inputs = context.split(batch)
    count = inputs["labels"].ne(-100).sum()
    torch.distributed.all_reduce(count)
    model(**inputs, num_items_in_batch=count).loss.backward()

The gradients of all processes are then to be summed. The loss is that of whole rows; only the balancing loss of
experts is one of each part, as it is of each micro-batch.

Shapes: B batch, T positions, N real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fratrie.modeling.attention import SoftmaxAttention
from fratrie.modeling.blockwise import NAME
from fratrie.modeling.heads import SequenceClassifier
from fratrie.modeling.losses import IGNORED, shift_labels
from fratrie.modeling.ring import RingMask, places_of

_BATCH = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "labels"}


@dataclass(frozen=True)
class Context:
    """The processes that hold a row together.

    Attributes:
        size: their number.
        place: of this process among them.
        group: as torch knows them; `None` is all.
        config: of the model.
    """

    size: int = 1
    place: int = 0
    group: Any = None
    config: Any = None

    def split(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """This process's part of a batch, of which each process of the context has the whole.

        Args:
            inputs: `input_ids` and, as far as the model takes them, `labels`, `token_type_ids`, padding as
                `attention_mask`, `position_ids` that start anew with each document; each `(B, T)`.

        Returns:
            Arguments of the model. Rows are padded to a multiple of twice the processes; labels of a causal model are
            those of the next tokens already.

        Raises:
            ValueError: for arguments that cannot be split, and a mask that is not padding.
        """
        if self.size == 1:
            return inputs
        if unknown := sorted(set(inputs) - _BATCH):
            raise ValueError(f"A context of several processes cannot split {unknown}: leave them out.")
        padding, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
        ids = inputs["input_ids"]
        if padding is not None and padding.shape != ids.shape:
            raise ValueError(
                f"An attention_mask of shape {tuple(padding.shape)} cannot be split over processes: give the padding, "
                f"{tuple(ids.shape)}."
            )
        documents = documents_of(ids, padding, position_ids)
        parts: dict[str, Any] = {
            name: inputs[name] for name in ("input_ids", "token_type_ids", "labels") if name in inputs
        }
        parts["position_ids"] = _positions_of(ids, padding) if position_ids is None else position_ids.expand(ids.shape)
        if "labels" in parts and self.config.is_causal_stack:
            parts["labels"] = shift_labels(parts["labels"], position_ids, padding)
        missing = -ids.shape[1] % (2 * self.size)
        if missing and documents is None:
            documents = torch.zeros_like(ids)
        here = places_of(ids.shape[1] + missing, self.place, self.size).to(ids.device)
        fill = {"labels": IGNORED, "input_ids": self.config.pad_token_id or 0}
        parts = {name: _take(x, here, missing, fill.get(name, 0)) for name, x in parts.items()}
        mask = None if documents is None else _take(documents, here, missing, -1)
        if "labels" in parts and self.config.is_causal_stack:
            parts["shift_labels"] = parts["labels"]
        without_cache = {"use_cache": False} if self.config.is_causal_stack else {}
        return parts | without_cache | {"attention_mask": self._masks(mask, ids.device)}

    def _masks(self, documents: Tensor | None, device: torch.device) -> dict[str, RingMask]:
        causal, windows = self.config.is_causal_stack, {"sliding_attention": self.config.sliding_window}
        options: dict[str, Any] = {"group": self.group, "documents": documents, "device": device, "is_causal": causal}
        return {kind: RingMask(window=windows.get(kind), **options) for kind in set(self.config.layer_types)}


def open_context(model: PreTrainedModel, size: int) -> Context:
    """Split the rows of a model's batches over groups of `size` processes; the attention becomes `blockwise`.

    Every process must call it. Processes that follow one another by rank are a context.

    Raises:
        ValueError: for processes that are not a multiple of `size`, and for a model that has layers, positions or a
            head that need whole rows.
    """
    if size == 1:
        return Context()
    _check_model(model)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if size < 1 or processes % size:
        raise ValueError(
            f"context_parallel_size={size} does not divide the {processes} processes: launch a multiple of it."
        )
    model.set_attn_implementation(NAME)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, processes, size)]
    context, place = divmod(dist.get_rank(), size)
    return Context(size, place, groups[context], model.config)


def _check_model(model: nn.Module) -> None:
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", True) or not hasattr(config, "mixers"):
        raise ValueError(
            f"context_parallel_size is for Fratrie's encoders and decoders, not for a {type(model).__name__}: leave "
            "it out."
        )
    if isinstance(model, SequenceClassifier) or getattr(config, "patch_size", None):
        raise ValueError(f"A {type(model).__name__} reads whole rows at its head: leave out context_parallel_size.")
    # A kernel of its own would take the tokens of one process for the whole row.
    if any(
        getattr(mixer, "attend", None) is not SoftmaxAttention.attend
        or mixer.adds_to_scores
        or mixer.mask_form != "scores"
        for mixer in config.mixers
    ):
        raise ValueError(
            f"context_parallel_size is for softmax attention, not for mixer_types={config.mixer_types}: leave it out."
        )
    if config.position_type in ("relative", "alibi"):
        raise ValueError(
            f"position_type={config.position_type!r} adds a bias to the scores, of which each process would know a "
            "part: use rotary positions with context_parallel_size."
        )


def documents_of(ids: Tensor, padding: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """The number of each token's document, `(B, T)`, -1 at padding; `None` where each row is one document.

    Args:
        ids: `(B, T)`.
        padding: `(B, T)`, zero at padding.
        position_ids: `(B or 1, T)`; a position that is not above the last real one begins a document.
    """
    rows, length = ids.shape
    real = torch.ones_like(ids, dtype=torch.bool) if padding is None else padding.to(ids.device).bool()
    cells_N = real.flatten().nonzero()[:, 0]
    rows_N = cells_N // length
    starts_N = rows_N.diff(prepend=rows_N.new_full((1,), -1)) != 0
    if position_ids is not None:
        positions_N = position_ids.to(ids.device).expand(rows, length).flatten()[cells_N]
        starts_N = starts_N | (positions_N.diff(prepend=positions_N[:1] - 1) <= 0)
    if len(cells_N) == rows * length and int(starts_N.sum()) == rows:
        return None
    documents = torch.full_like(ids, -1).flatten()
    documents[cells_N] = starts_N.cumsum(0)
    return documents.unflatten(0, (rows, length))


def _positions_of(ids: Tensor, padding: Tensor | None) -> Tensor:
    if padding is not None:
        return (padding.long().cumsum(-1) - 1).clamp_min(0)
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def _take(x_BT: Tensor, places: Tensor, missing: int, value: int) -> Tensor:
    return nn.functional.pad(x_BT, (0, missing), value=value).index_select(1, places)
