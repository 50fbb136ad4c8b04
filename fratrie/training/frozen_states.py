"""The states that frozen layers make of each text: computed once, kept in a file, and given to the layers above.

Shapes: B batch, T positions, N tokens of all texts, D hidden.
"""

import copy
import hashlib
import itertools
import logging
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from fratrie.modeling.stack import FratrieStack

from .batches import Collator
from .encoding import EncodedRows
from .evaluation import evaluating
from .tracking import progress_bar

logger = logging.getLogger(__name__)

_READ_BY_EMBEDDINGS = ("input_ids", "token_type_ids")
Text = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class FrozenStates:
    """A collator that gives the states of texts, which enter a layer, in the place of their tokens.

    Attributes:
        pad: the collator of tokens, which gives an `attention_mask`.
        first_layer: that the states enter.
        weights: digest of the weights below; a resumed run must have the same.
        states_ND: of all texts, one after another.
        spans: where each text lies in them.
    """

    pad: Collator
    first_layer: int
    weights: str
    states_ND: Tensor
    spans: dict[Text, slice]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch with `inputs_embeds` `(B, T, D)`, zeros at padding, and `first_layer`."""
        batch = self.pad(rows)
        states = torch.cat([self.states_ND[self.spans[_text(row)]] for row in rows])
        real_BT = batch["attention_mask"].bool()
        states_BTD = states.new_zeros(*real_BT.shape, states.shape[-1])
        states_BTD[real_BT] = states
        others = {name: value for name, value in batch.items() if name not in _READ_BY_EMBEDDINGS}
        return {**others, "inputs_embeds": states_BTD, "first_layer": self.first_layer}


def frozen_depth(model: PreTrainedModel) -> int:
    """Number of layers, from the embeddings up, whose states training cannot change.

    It is 0 for a model that is not ours, where one of these layers is sparse, or its mixer has a loss (these losses
    count), and for a reversible stack, whose layers are entered by two streams.
    """
    stack = model.base_model
    if not isinstance(stack, FratrieStack) or stack.config.reversible:
        return 0
    above = {"norm": len(stack.layers), "pooler": len(stack.layers)}
    trained = [name.split(".") for name, weight in stack.named_parameters() if weight.requires_grad]
    depths = [int(rest[0]) if part == "layers" else above.get(part, 0) for part, *rest in trained]
    depth = min(depths, default=len(stack.layers))
    has_losses = any(mixer.has_loss for mixer in stack.config.mixers[:depth])
    return 0 if has_losses or "sparse" in (stack.config.mlp_layer_types or [])[:depth] else depth


def keep_states(
    model: PreTrainedModel,
    accelerator: Accelerator,
    rows: EncodedRows,
    pad: Collator,
    batch_size: int,
    folder: str | os.PathLike[str],
    progress: bool = False,
) -> Collator:
    """Compute what the frozen layers of a classifier make of texts, once and without dropout.

    The states lie in a file without a name, mapped into memory, which the system removes when nothing uses it any
    more, however the process ends. Each process computes and keeps those of all texts, since it may meet any of them.

    Args:
        model: a classifier, which is moved to the accelerator's device.
        accelerator: of the run, with its mixed precision.
        rows: from `encode`; several folds may share them.
        pad: the collator of such rows.
        batch_size: rows per batch.
        folder: for the file; of a file system with room.
        progress: show a progress bar.

    Returns:
        `FrozenStates` of the rows; `pad` where no layer is frozen, where no mask tells states from padding, and with
        FSDP, whose models a device may have no room for.

    Raises:
        ValueError: too little room for the file.
    """
    depth = frozen_depth(model)
    if not depth or accelerator.distributed_type == DistributedType.FSDP or "attention_mask" not in pad(rows[:1]):
        return pad
    stack = _lower_part(model.to(accelerator.device).base_model, depth)
    inputs = {_text(row): {name: value for name, value in row.items() if name != "labels"} for row in rows}
    texts = sorted(inputs, key=lambda text: len(text[0]))
    ends = list(itertools.accumulate(len(text[0]) for text in texts))
    spans = {text: slice(end - len(text[0]), end) for text, end in zip(texts, ends, strict=True)}
    kept_ND: Tensor | None = None
    hidden = not (progress and accelerator.is_main_process)
    with evaluating(stack), accelerator.autocast(), progress_bar(len(texts), "frozen layers", hidden=hidden) as bar:
        for start in range(0, len(texts), batch_size):
            batch = texts[start : start + batch_size]
            padded = send_to_device(pad([inputs[text] for text in batch]), accelerator.device)
            states_BTD = stack(**padded, return_dict=True).last_hidden_state
            if kept_ND is None:
                kept_ND = _map_file((ends[-1], states_BTD.shape[-1]), states_BTD.dtype, folder)
            place = slice(spans[batch[0]].start, spans[batch[-1]].stop)
            kept_ND[place] = states_BTD[padded["attention_mask"].bool()].cpu()
            bar.update(len(batch))
    assert kept_ND is not None
    logger.info(
        "frozen layers: %d; their states of %d texts are kept in a temporary file of %.1f MB",
        *(depth, len(texts), kept_ND.nbytes / 1e6),
    )
    return FrozenStates(pad, depth, _digest(stack), kept_ND, spans)


def _text(row: dict[str, Any]) -> Text:
    return tuple(tuple(row[name]) for name in _READ_BY_EMBEDDINGS if name in row)


def _lower_part(stack: FratrieStack, depth: int) -> FratrieStack:
    """Embeddings and lowest layers of a stack, on the same weights, without the norm at its end."""
    lower = copy.copy(stack)
    lower._modules = {**stack._modules, "layers": stack.layers[:depth], "norm": nn.Identity()}
    return lower


def _map_file(shape: tuple[int, int], dtype: torch.dtype, folder: str | os.PathLike[str]) -> Tensor:
    size = shape[0] * shape[1] * dtype.itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        try:  # a disk that fills up later would kill the process while it writes into the map
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ValueError(
                f"{folder} has no room for the states of frozen layers, {size / 1e9:.1f} GB ({error}): choose another "
                "output_dir, or compute them in every epoch with --recompute_frozen_states"
            ) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).view(shape)


def _digest(stack: nn.Module) -> str:
    digest = hashlib.sha256()
    for weight in stack.parameters():
        digest.update(weight.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
