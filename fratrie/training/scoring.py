"""Logits and scores of a sentence classifier on encoded rows."""

from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from fratrie.modeling.calibration import calibrate_all
from fratrie.modeling.heads import SequenceClassifier
from fratrie.pipelines.bulk import plan_batches

from .batches import Collator
from .bootstrap import f1_intervals
from .encoding import EncodedRows
from .evaluation import predict
from .metrics import MULTI_LABEL, Scores, classification_scores, decide, probabilities
from .tasks import Task


def predict_logits(
    model: PreTrainedModel,
    accelerator: Accelerator,
    rows: EncodedRows,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    progress: bool = False,
    collator: Collator | None = None,
) -> NDArray[np.float32]:
    """Logits of every row, calibrated as the config says, in the order of the rows, equal on all processes.

    Shape: (N, L)

    Args:
        model: a classifier.
        accelerator: from `open_inference` or `open_run`.
        rows: N rows from `encode`; batches are those of the pipelines (`plan_batches`).
        tokenizer: pads the batches.
        batch_size: most rows of a batch on one process.
        progress: show a progress bar.
        collator: makes the batches; by default the tokenizer pads them.

    Raises:
        ValueError: a logit is not finite, or the batch size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    batches = plan_batches([len(row["input_ids"]) for row in rows], batch_size)
    collator = collator or DataCollatorWithPadding(tokenizer)
    values, _ = predict(model, accelerator, cast(Dataset, rows), collator, batches, progress)
    points = getattr(accelerator.unwrap_model(model).config, "label_calibration", None)
    # Ours calibrates by itself, also within an adapter.
    if points and not any(isinstance(part, SequenceClassifier) for part in model.modules()):
        values = calibrate_all(values, points)
    logits = values.numpy()
    if not np.isfinite(logits).all():
        row = int(np.argwhere(~np.isfinite(logits))[0][0])
        raise ValueError(f"the model gives NaN or infinity for text {row + 1} of {len(rows)}: its weights are damaged")
    return logits


def score_rows(
    model: PreTrainedModel,
    accelerator: Accelerator,
    rows: EncodedRows,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    groups: Sequence[Hashable] | None = None,
    collator: Collator | None = None,
) -> Scores:
    """Scores of a classifier on rows with labels, decided by the thresholds of its config.

    Args:
        model: a classifier.
        accelerator: from `open_inference` or `open_run`.
        rows: from `encode`, with their targets.
        tokenizer: pads the batches.
        batch_size: most rows of a batch on one process.
        groups: who speaks in each row. With them, the scores of several labels per text also hold `f1_interval` and
            `present_macro_f1_interval`: how far the F1 of each label, and the macro mean of the labels present, would
            move with other speakers (95 %, bootstrap); `interval_groups` counts the speakers.
        collator: makes the batches; by default the tokenizer pads them.

    Raises:
        ValueError: a logit is not finite, or the batch size is below 1.
    """
    task = Task.from_config(accelerator.unwrap_model(model).config)
    logits = predict_logits(model, accelerator, rows, tokenizer, batch_size, collator=collator)
    targets = np.asarray([row["labels"] for row in rows])
    thresholds = getattr(accelerator.unwrap_model(model).config, "label_thresholds", None)
    scores = classification_scores(logits, targets, task.problem_type, task.labels, thresholds)
    if groups is not None and task.problem_type == MULTI_LABEL:
        decisions = decide(probabilities(logits, MULTI_LABEL), thresholds)
        by_label, macro = f1_intervals(decisions, targets, groups, task.labels)
        scores |= {"f1_interval": by_label, "present_macro_f1_interval": macro, "interval_groups": len(set(groups))}
    return scores
