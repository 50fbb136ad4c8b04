"""Evaluation over all processes, each row counted once and drawn with the same masks every time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from fratrie.modeling.base_configuration import FratrieBaseConfig

from .batches import Collator, seed_all
from .objective import Objective
from .tracking import progress_bar


def evaluate_loss(
    model: PreTrainedModel, accelerator: Accelerator, dataset: Dataset, collator: Collator, batch_size: int
) -> dict[str, float]:
    """Mean loss over all targets of `dataset`, equal on all processes: `eval_loss` and `eval_targets`.

    Args:
        model: prepared or not.
        accelerator: of the run.
        dataset: rows for `collator`.
        collator: makes a batch with `labels`; its random draws are the same in every evaluation.
        batch_size: rows per batch on one process.

    Raises:
        ValueError: there is no target at all.
    """
    objective = Objective(accelerator.unwrap_model(model))
    loss_sum, targets = 0.0, 0
    rows = range(len(cast(Any, dataset)))
    batches = [rows[first : first + batch_size] for first in rows[::batch_size]]
    with evaluating(model):
        for _, inputs, filler in _batches(accelerator, dataset, collator, batches):
            count = objective.count(inputs)
            loss = float(objective.share(_bare(model, accelerator), inputs, count, total=1))
            if not filler:
                loss_sum, targets = loss_sum + loss, targets + count
    loss_sum, targets = (sum(parts) for parts in zip(*gather_object([(loss_sum, targets)]), strict=True))
    if not targets:
        raise ValueError("the evaluation data hold no target; give more text or mask a larger share")
    return {"eval_loss": loss_sum / targets, "eval_targets": targets}


def perplexity(loss: float) -> float:
    """exp(`loss`), infinite where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def predict(
    model: PreTrainedModel,
    accelerator: Accelerator,
    dataset: Dataset,
    collator: Collator,
    batches: Sequence[Sequence[int]],
    progress: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logits and labels of every row once, in the dataset's order, on the CPU, equal on all processes.

    For heads whose rows have equal shapes (sequence classification).

    Args:
        model: prepared or not.
        accelerator: of the run.
        dataset: rows for `collator`.
        collator: makes a batch, with or without `labels`.
        batches: the rows of each batch; every row once.
        progress: show a progress bar on the main process.

    Returns:
        Logits in float32 `(n, …)`, and labels `(n, …)` or, where the collator gives none, `None`.

    Raises:
        ValueError: the dataset has no rows.
    """
    pieces: list[tuple[int, Tensor, Tensor | None]] = []
    turns = -(-len(batches) // accelerator.num_processes)
    hidden = not (progress and accelerator.is_main_process)
    with evaluating(model), progress_bar(turns, "predicting", hidden=hidden) as bar:
        for place, inputs, filler in _batches(accelerator, dataset, collator, batches):
            bar.update()
            labels = inputs.pop("labels", None)
            logits = _bare(model, accelerator)(**inputs).logits
            if not filler:
                pieces.append((place, logits.float().cpu(), None if labels is None else labels.cpu()))
    ordered = sorted(gather_object(pieces), key=lambda piece: piece[0])
    known = [labels for _, _, labels in ordered if labels is not None]
    order = torch.tensor(list(chain.from_iterable(batches))).argsort()
    return torch.cat([logits for _, logits, _ in ordered])[order], torch.cat(known)[order] if known else None


# Caches cost memory, and with one, packed documents leak.
_WHILE_TRAINING = {"use_cache": False}
# Nobody reads logits of our language models then, but their loss.
_OURS_WHILE_TRAINING = {**_WHILE_TRAINING, "sparse_prediction": True, "chunked_loss": True}


class ConfigSwitch:
    """What the configs of a model say while it is trained or evaluated, and what they said before."""

    def __init__(self, model: torch.nn.Module) -> None:
        configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
        self.fields = [
            (config, name, getattr(config, name), value)
            for config in configs.values()
            for name, value in _fields_while_training(config).items()
            if hasattr(config, name)
        ]

    @contextmanager
    def on(self) -> Iterator[None]:
        """The values for training inside the context."""
        self._set(given=False)
        try:
            yield
        finally:
            self._set(given=True)

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """Inside `on`, the configs as the model came, for saving them."""
        self._set(given=True)
        try:
            yield
        finally:
            self._set(given=False)

    def _set(self, given: bool) -> None:
        for config, name, before, value in self.fields:
            setattr(config, name, before if given else value)


def _fields_while_training(config: Any) -> dict[str, bool]:
    return _OURS_WHILE_TRAINING if isinstance(config, FratrieBaseConfig) else _WHILE_TRAINING


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode without gradients and caches, and back into its mode after."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), ConfigSwitch(model).on():
            yield
    finally:
        model.train(training)


def _bare(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """The model without DDP, whose forward syncs buffers: that would hang where processes have unequal shares."""
    return accelerator.unwrap_model(model)


def _batches(
    accelerator: Accelerator, dataset: Dataset, collator: Collator, batches: Sequence[Sequence[int]]
) -> Iterator[tuple[int, dict[str, Tensor], bool]]:
    """This process's batches as (place, inputs on the device, filler): as many on every process."""
    if not batches:
        raise ValueError("the evaluation data have no rows; give files that hold text")
    for turn in range(-(-len(batches) // accelerator.num_processes)):
        place = turn * accelerator.num_processes + accelerator.process_index
        filler = place >= len(batches)
        seed_all(0, "evaluate", place)
        inputs = collator([dataset[index] for index in batches[0 if filler else place]])
        yield place, dict(send_to_device(inputs, accelerator.device)), filler
