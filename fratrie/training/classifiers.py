"""Sentence classifiers of any Hugging Face family: built around a checkpoint or from scratch, weighted, loaded."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fratrie.checkpoints import CONFIG, check_memory, reason_of
from fratrie.conversion.models import RECIPES
from fratrie.modeling.base_configuration import FratrieBaseConfig
from fratrie.modeling.calibration import check_points
from fratrie.quiet import without_reports

from .metrics import MULTI_LABEL, REGRESSION, thresholds_by_name
from .model_folders import LOADING_ERRORS, check_checkpoint, load_config, load_tokenizer
from .tasks import Task

logger = logging.getLogger(__name__)


def as_ours(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of our classifier for a checkpoint of a family that our block can be; other configs as they are."""
    recipe = RECIPES.get(config.model_type)
    if recipe is None:
        return config
    heads = [head for head in recipe.heads if _classifies_sequences(head.ours)]
    try:
        return recipe.read_config(config, heads[0]) if heads else config
    except ValueError as error:
        logger.warning("%s It is trained as Hugging Face's own class.", error)
        return config


def _classifies_sequences(our_class: type[PreTrainedModel]) -> bool:
    """Whether `AutoModelForSequenceClassification` builds this class, or a user's own below it."""
    built: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(cast(Any, our_class.config_class), None)
    return built is not None and issubclass(built, our_class)


@dataclass(frozen=True)
class ClassifierHead:
    """Choices of the classification head and its loss; `None` keeps what the config says."""

    pooling: str | None = None
    hidden_sizes: list[int] | None = None
    class_weights: list[float] | None = None


def new_classifier(
    config: PreTrainedConfig, task: Task, head: ClassifierHead, checkpoint: Path | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """A classifier for the task: around the weights of a checkpoint, or from scratch.

    Args:
        config: of the model; its labels, problem type and head are set.
        task: what the classifier answers.
        head: choices of the head and its loss.
        checkpoint: folder of the weights; without one all weights are new. Of one that gives labels already, a label
            gets the weights of the label of its name.

    Returns:
        The model in float32, and the names of the weights that the checkpoint did not give, or not for every label.

    Raises:
        ValueError: no such head, weights that do not fit, or a choice that the model does not have.
    """
    before = list((config.id2label or {}).values())
    _set_head(config, task, head)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"model type {config.model_type!r} has no head that classifies sequences; use an encoder")
    try:
        check_memory(partial(AutoModelForSequenceClassification.from_config, trust_remote_code=False), config)
        if checkpoint is None:
            model = AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
            new = {name for name, _ in model.named_parameters()}
        else:
            model, info = _read_model(checkpoint, config=config, dtype=torch.float32, ignore_mismatched_sizes=True)
            new = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
    except (ValueError, *LOADING_ERRORS) as error:
        raise ValueError(
            f"{checkpoint or config.model_type}: the model cannot be built: {reason_of(error)}"
        ) from error
    if task.problem_type != REGRESSION:
        new |= _sort_head_by_name(model, before, task.labels, new)
    _check_only_the_head_is_new(model, new, checkpoint)
    weights = head.class_weights
    if weights and not (task.problem_type == MULTI_LABEL and hasattr(config, "pos_weight")):
        weigh_loss(model, task.problem_type, weights)
    return model, new


def _set_head(config: PreTrainedConfig, task: Task, head: ClassifierHead) -> None:
    config.id2label = dict(enumerate(task.labels))
    config.label2id = {label: i for i, label in enumerate(task.labels)}
    config.problem_type = task.problem_type
    own = {"classifier_pooling": head.pooling, "classifier_hidden_sizes": head.hidden_sizes}
    for name, value in own.items():
        if value is None:
            continue
        if not hasattr(config, name):
            raise ValueError(f"{name}={value}: a {config.model_type!r} model has no such choice; leave it out")
        try:
            setattr(config, name, value)
        except StrictDataclassError as error:
            raise ValueError(f"{name}={value} does not fit a {config.model_type!r} model: {error}") from error
    for name in ("label_thresholds", "label_calibration"):
        if hasattr(config, name):
            setattr(config, name, None)
    if hasattr(config, "pos_weight"):
        config.pos_weight = head.class_weights if task.problem_type == MULTI_LABEL else None


def _read_model(path: Path, **choices: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Model and loading report; the callers judge the report, so the library need not print it as well."""
    with without_reports():
        return AutoModelForSequenceClassification.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
            **choices,
        )


@torch.no_grad()
def _sort_head_by_name(model: PreTrainedModel, before: list[str], labels: Sequence[str], new: set[str]) -> set[str]:
    """Give each label the row of the output layer that the label of this name had, or a new one.

    Returns:
        The names of the weights with new rows.
    """
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    name, output = next(each for each in reversed(layers) if not each[0].startswith(f"{model.base_model_prefix}."))
    names = {f"{name}.{part}" for part, _ in output.named_parameters()}
    if before == list(labels) or names & new or output.out_features != len(labels):
        return set()
    kept = [label for label in labels if label in before]
    logger.info("labels that the checkpoint gives already: %s; it learns the others anew", ", ".join(kept) or "none")
    rows = {part: weight.clone() for part, weight in output.named_parameters()}
    nn.init.normal_(output.weight, std=getattr(model.config, "initializer_range", 0.02))
    if output.bias is not None:
        nn.init.zeros_(output.bias)
    for label in kept:
        for part, weight in output.named_parameters():
            weight[labels.index(label)] = rows[part][before.index(label)]
    return names if len(kept) < len(labels) else set()


def _check_only_the_head_is_new(model: PreTrainedModel, new: set[str], checkpoint: Path | None) -> None:
    if checkpoint is None:
        logger.info("all weights are new: the model learns from scratch")
        return
    body = sorted(name for name in new if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name)
    if body:
        raise ValueError(
            f"{checkpoint} does not fit its config: {len(body)} weights of the body are missing or of "
            f"another shape, such as {', '.join(body[:3])}"
        )
    logger.info("new weights: %s", ", ".join(sorted(new)) or "none")


def weigh_loss(model: PreTrainedModel, problem_type: str, weights: Sequence[float]) -> None:
    """Let the model return a loss weighted by class, for heads whose config knows no weights.

    Args:
        model: a classifier, changed in place.
        problem_type: several labels, or one.
        weights: one per class.

    Several labels: binary cross-entropy with the weights on the positive term; one label: cross-entropy
    with one weight per class. Both are sums over targets divided by `num_items_in_batch`, or by their number.
    """
    forward = model.forward
    weight = torch.tensor(list(weights))

    def weighted(
        *args: Any, labels: Tensor | None = None, num_items_in_batch: Tensor | None = None, **kwargs: Any
    ) -> Any:
        output = forward(*args, **kwargs)
        if labels is None:
            return output
        logits = output.logits.float()
        if problem_type == MULTI_LABEL:
            total = nn.functional.binary_cross_entropy_with_logits(
                logits, labels.float(), pos_weight=weight.to(logits.device), reduction="sum"
            )
        else:
            total = nn.functional.cross_entropy(logits, labels, weight.to(logits.device), reduction="sum")
        output["loss"] = total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)
        return output

    setattr(model, "forward", weighted)  # noqa: B010 (a method of this one model)


def load_classifier(
    folder: str | os.PathLike[str], thresholds: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Task]:
    """Load a fine-tuned classifier with its tokenizer, ready to predict.

    Args:
        folder: a folder or a hub id.
        thresholds: of the labels, instead of those in its config, as `thresholds_by_name` takes them.

    Raises:
        ValueError: says what the folder lacks, or which threshold does not fit.
    """
    path = check_checkpoint(folder)
    tokenizer = load_tokenizer(path)
    config = load_config(path)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"{path}: model type {config.model_type!r} has no head that classifies sequences")
    try:
        check_memory(partial(AutoModelForSequenceClassification.from_config, trust_remote_code=False), config)
        model, info = _read_model(path)
    except (ValueError, *LOADING_ERRORS) as error:
        raise ValueError(f"{path}: the model cannot be loaded: {reason_of(error)}") from error
    if info["missing_keys"]:
        raise ValueError(
            f"{path} is not a fine-tuned classifier: it lacks {', '.join(sorted(info['missing_keys'])[:4])}; "
            "fine-tune it first with fratrie finetune"
        )
    task = Task.from_config(config)
    if thresholds is not None and task.problem_type != MULTI_LABEL:
        raise ValueError(f"--label_thresholds are for several labels per text, but the task is {task.problem_type}")
    _check_calibration(model.config, task.labels, path / CONFIG)
    if task.problem_type == MULTI_LABEL:
        own = _own_thresholds(model.config, task.labels, path / CONFIG)
        model.config.label_thresholds = own if thresholds is None else thresholds_by_name(thresholds, task.labels, own)
    return model.eval(), tokenizer, task


def _check_calibration(config: PreTrainedConfig, labels: Sequence[str], place: Path) -> None:
    """Our own configs have checked theirs already."""
    points = getattr(config, "label_calibration", None)
    if points is None or isinstance(config, FratrieBaseConfig):
        return
    try:
        check_points(points, len(labels))
    except TypeError as error:
        raise ValueError(f"{place}: label_calibration holds no points: {error}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _own_thresholds(config: PreTrainedConfig, labels: Sequence[str], place: Path) -> list[float] | None:
    """The thresholds of a config in the order of the labels; only our own configs have checked theirs already."""
    own = getattr(config, "label_thresholds", None)
    if own is None:
        return None
    try:
        if isinstance(own, list):
            if len(own) != len(labels):
                raise ValueError(
                    f"label_thresholds has {len(own)} values for {len(labels)} labels: give one per label"
                )
            own = dict(zip(labels, own, strict=True))
        return thresholds_by_name(own, labels)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
