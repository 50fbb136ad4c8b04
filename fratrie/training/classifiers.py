"""Sentence classifiers of any Hugging Face family: built, loaded, weighted and frozen for fine-tuning."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from fratrie.checkpoints import (
    CONFIG,
    INDEX,
    WEIGHTS,
    check_checkpoint_files,
    check_config,
    check_kinds,
    check_memory,
    check_tokenizer_config,
    has_tokenizer,
    missing_reader,
    reason_of,
)
from fratrie.conversion.models import RECIPES
from fratrie.data.hub import may_be_hub_id

from .metrics import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType, thresholds_by_name

logger = logging.getLogger(__name__)

# What is fetched of a repository, and of its folders those of sentence-transformers alone, such as 1_Pooling.
_WANTED = [
    *("*config.json", "*.safetensors", "*.safetensors.index.json", "*token*", "*vocab*", "*.model", "merges*"),
    *("*.jinja", "modules.json", "config_sentence_transformers.json"),
]
_UNWANTED = "[!0-9]*/*"
# What libraries raise at a damaged folder, beside the ValueError and OSError that end a script with a message.
LOADING_ERRORS = (
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True)
class Task:
    """What a classifier answers: its problem type and the names of its outputs, in order."""

    problem_type: ProblemType
    labels: list[str]

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "Task":
        """Read the task off a config; no problem type means regression for one output, else one label.

        Raises:
            ValueError: two outputs have one name.
        """
        names = cast(dict[int, str], config.id2label)
        labels = [names[i] for i in range(len(names))]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"config.json: id2label has the label {twice!r} several times: give each output its own")
        return cls(config.problem_type or (REGRESSION if len(labels) == 1 else SINGLE_LABEL), labels)


def checkpoint_folder(name: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint; one that is named by its hub id is fetched, or found in the cache.

    Raises:
        ValueError: there is no such folder, and the name is no hub id, or the hub cannot give it.
    """
    if not os.fspath(name):
        raise ValueError("an empty path names no checkpoint: is a variable of the shell unset?")
    path = Path(name)
    if path.is_dir():
        return path
    complaint = f"{path} is not a folder; give the folder of a checkpoint (config.json, weights, tokenizer)"
    if not may_be_hub_id(str(name)):
        raise ValueError(complaint)
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{complaint}. Nor does a hub give it: {reason}") from error


def check_checkpoint(name: str | os.PathLike[str], tokenizer: bool = True) -> Path:
    """The folder of a checkpoint, if it holds a config, safetensors weights and (unless told otherwise) a tokenizer.

    Args:
        name: a folder or a hub id.
        tokenizer: whether there must be one.

    Raises:
        ValueError: says what is missing or damaged.
    """
    path = checkpoint_folder(name)
    missing = [] if (path / CONFIG).is_file() else [CONFIG]
    if not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        pickled = (path / "pytorch_model.bin").is_file()
        way_out = (
            " (pytorch_model.bin is pickled and not read: in Python, from_pretrained(…, use_safetensors=False) of its "
            "class and save_pretrained write it as safetensors)"
        )
        missing.append(WEIGHTS + way_out * pickled)
    if tokenizer and not has_tokenizer(path):
        missing.append("tokenizer.json")
    if missing:
        raise ValueError(f"{path} is not a complete checkpoint: it lacks {', '.join(missing)}")
    check_checkpoint_files(path)
    return path


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder.

    Raises:
        ValueError: there is none, it cannot be read, or it has no pad token.
    """
    path = Path(folder)
    if not has_tokenizer(path):
        raise ValueError(f"{path} holds no tokenizer (tokenizer.json); train one with scripts/train_tokenizer.py")
    check_kinds(path)
    check_tokenizer_config(path)
    if (path / CONFIG).is_file() and check_config(path)["model_type"] in CONFIG_MAPPING:
        load_config(path)  # whose errors AutoTokenizer, which reads it for the tokenizer's class, passes over
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare exceptions
        package = missing_reader(path)
        needed = f" Its .model file needs a package: pip install {package}" if package else ""
        raise ValueError(f"the tokenizer in {path} cannot be read: {reason_of(error)}{needed}") from error
    _try_tokenizer(tokenizer, path)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer in {path} has no pad token, so texts of different length cannot share a batch: "
            "set one, for example tokenizer.pad_token = tokenizer.eos_token, and save it again"
        )
    return tokenizer


def _try_tokenizer(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    try:
        tried = tokenizer(["a", "b c"], verbose=False)
        if tokenizer.pad_token_id is not None:
            tried = tokenizer.pad(tried)
    except Exception as error:
        raise ValueError(f"the tokenizer in {path} cannot be used: {reason_of(error)}") from error
    if "input_ids" not in tried:
        raise ValueError(f"the tokenizer in {path} gives no input_ids: look at model_input_names")


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise a `ValueError` where a tokenizer numbers tokens otherwise than the one beside a checkpoint, if any.

    The embeddings of a checkpoint belong to its own tokenizer. One that adds tokens to it is welcome.
    """
    if not has_tokenizer(folder):
        return
    numbers, others = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    for token, number in numbers.items():
        if others.get(token) != number:
            raise ValueError(
                f"--tokenizer gives {token!r} the number {others.get(token)}, the tokenizer in {folder} {number}: the "
                "embeddings of that checkpoint belong to its own tokenizer. Leave --tokenizer out"
            )


def load_config(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    """Load the config of a folder.

    Raises:
        ValueError: no JSON, an unknown model type or field, or fields that contradict one another.
        OSError: there is none.
    """
    check_config(Path(folder))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, *LOADING_ERRORS) as error:
        raise ValueError(f"{Path(folder) / CONFIG}: {reason_of(error)}") from error


def as_ours(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of our classifier for a checkpoint of a family that our block can be; other configs as they are."""
    recipe = RECIPES.get(config.model_type)
    if recipe is None:
        return config
    heads = [head for head in recipe.heads if head.ours.__name__.endswith("ForSequenceClassification")]
    try:
        return recipe.read_config(config, heads[0]) if heads else config
    except ValueError as error:
        logger.warning("%s It is trained as Hugging Face's own class.", error)
        return config


@dataclass(frozen=True)
class Head:
    """Choices of the classification head and its loss; `None` keeps what the config says."""

    pooling: str | None = None
    hidden_sizes: list[int] | None = None
    class_weights: list[float] | None = None


def new_classifier(
    config: PreTrainedConfig, task: Task, head: Head, checkpoint: Path | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """A classifier for the task: around the weights of a checkpoint, or from scratch.

    Returns:
        The model in float32, and the names of the weights that the checkpoint did not give.

    Raises:
        ValueError: no such head, weights that do not fit, or a choice that the model does not have.
    """
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
    _check_only_the_head_is_new(model, new, checkpoint)
    weights = head.class_weights
    if weights and not (task.problem_type == MULTI_LABEL and hasattr(config, "pos_weight")):
        weigh_loss(model, task.problem_type, weights)
    return model, new


def _set_head(config: PreTrainedConfig, task: Task, head: Head) -> None:
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
    if hasattr(config, "label_thresholds"):
        config.label_thresholds = None
    if hasattr(config, "pos_weight"):
        config.pos_weight = head.class_weights if task.problem_type == MULTI_LABEL else None


def _read_model(path: Path, **choices: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Model and loading report; the callers judge the report, so the library need not print it as well."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
            **choices,
        )
    finally:
        transformers_logging.set_verbosity(verbosity)


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

    Several labels: binary cross-entropy with the weights on the positive term; one label: cross-entropy
    with a weight a class. Both are sums over targets divided by `num_items_in_batch`, or by their number.
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


def freeze_below(model: PreTrainedModel, trainable_layers: int, new: set[str]) -> list[str]:
    """Freeze the body of a classifier but its top layers.

    The head, the pooler and the weights that no checkpoint gave stay trainable.

    Args:
        model: with a list of layers in its body, as long as `config.num_hidden_layers`.
        trainable_layers: number of layers from the top; -1 freezes nothing, 0 trains the head alone.
        new: names of weights without pretrained values, as `new_classifier` returns them.

    Returns:
        Names of the trainable weights.

    Raises:
        ValueError: a number out of range, or not one list of layers to count.
    """
    count = getattr(model.config, "num_hidden_layers", 0)
    if not -1 <= trainable_layers <= count:
        raise ValueError(f"trainable_layers={trainable_layers}: the model has {count} layers; give -1 to {count}")
    if trainable_layers >= 0:
        body, prefix = model.base_model, f"{model.base_model_prefix}."
        stack = _layer_list(body, count, "trainable_layers", "-1")
        top = tuple(f"{stack}.{i}." for i in range(count - trainable_layers, count))
        for name, weight in body.named_parameters():
            weight.requires_grad_(name.startswith(top) or "pooler" in name or prefix + name in new)
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def learning_rates(
    model: PreTrainedModel, rate: float, layer_decay: float = 1.0, head_rate: float | None = None
) -> dict[str, float]:
    """A learning rate for every weight: high in a new head, falling with the depth of pretrained layers.

    The top layer, and what the body has behind it, learns at `rate`; each layer below at `layer_decay` times the rate
    of the one above, and the embeddings at `layer_decay` times that of the lowest layer (Howard & Ruder 2018).

    Args:
        model: with a list of layers in its body, as long as `config.num_hidden_layers`, if rates fall.
        rate: of the top layer.
        layer_decay: above 0, at most 1.
        head_rate: of the head and the pooler; `rate` when not given.

    Raises:
        ValueError: a decay or rate out of range, or not one list of layers to count.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay={layer_decay} must lie above 0 and not above 1 (1: one rate for all layers)")
    if head_rate is not None and not head_rate >= 0:
        raise ValueError(f"head_learning_rate={head_rate} must not be negative")
    prefix = f"{model.base_model_prefix}."
    rates = {name: rate for name, _ in model.named_parameters()}
    if layer_decay < 1:
        count = model.config.num_hidden_layers
        stack = f"{prefix}{_layer_list(model.base_model, count, 'layer_decay', '1')}."
        depth = count  # a body's modules stand in the order of their use: embeddings, layers, what comes after them
        for name in (name for name in rates if name.startswith(prefix)):
            if name.startswith(stack):
                depth = count - 1 - int(name.removeprefix(stack).partition(".")[0])
            elif depth < count:
                depth = 0
            rates[name] = rate * layer_decay**depth
    if head_rate is not None:
        rates |= {name: head_rate for name in rates if not name.startswith(prefix) or "pooler" in name}
    return rates


def _layer_list(body: nn.Module, count: int, option: str, neutral: str) -> str:
    """The name of the one list of `count` modules that is not part of another list."""
    stacks = [
        name
        for name, part in body.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count and not re.search(r"\.\d+\.", name)
    ]
    if len(stacks) != 1:
        raise ValueError(
            f"{option}: {type(body).__name__} has {len(stacks)} lists of {count} layers "
            f"({', '.join(stacks)}), expected one; use {neutral}"
        )
    return stacks[0]


def load_classifier(
    folder: str | os.PathLike[str], thresholds: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Task]:
    """Load a fine-tuned classifier with its tokenizer, ready to predict.

    Args:
        folder: a folder or a hub id.
        thresholds: of the labels, in place of those that its config holds, as `thresholds_by_name` takes them.

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
            "fine-tune it first with scripts/finetune.py"
        )
    task = Task.from_config(config)
    if thresholds is not None and task.problem_type != MULTI_LABEL:
        raise ValueError(f"--label_thresholds are for several labels a text, but the task is {task.problem_type}")
    if task.problem_type == MULTI_LABEL:
        own = _own_thresholds(model.config, task.labels, path / CONFIG)
        model.config.label_thresholds = own if thresholds is None else thresholds_by_name(thresholds, task.labels, own)
    return model.eval(), tokenizer, task


def _own_thresholds(config: PreTrainedConfig, labels: Sequence[str], place: Path) -> list[float] | None:
    """The thresholds of a config in the order of the labels; only our own configs have checked theirs already."""
    own = getattr(config, "label_thresholds", None)
    if own is None:
        return None
    try:
        if isinstance(own, list):
            if len(own) != len(labels):
                raise ValueError(f"label_thresholds has {len(own)} values for {len(labels)} labels: give one a label")
            own = dict(zip(labels, own, strict=True))
        return thresholds_by_name(own, labels)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
