"""What fine-tuning, scoring and prediction of sentence classifiers share: data, rows, logits and scores."""

import errno
import inspect
import logging
import os
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from fratrie.data.corpus import load_family_relations, split_by_respondent
from fratrie.data.loading import load_labelled, load_values
from fratrie.data.repeats import tell_overlap
from fratrie.data.text_files import UTF8, TextFormat

from .bootstrap import f1_intervals
from .classifiers import Task
from .evaluation import predict
from .metrics import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    Scores,
    classification_scores,
    decide,
    probabilities,
)
from .options import ReadingOptions

logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]


AnyProblemType = Literal["auto", "multi_label_classification", "single_label_classification", "regression"]


@dataclass(kw_only=True)
class DataOptions(ReadingOptions):
    """Which texts to learn from, for `HfArgumentParser`; without files the shipped corpus."""

    dataset: Literal["family_relations"] = field(
        default="family_relations", metadata={"help": "The shipped corpus, learnt where no file is given."}
    )
    train_file: str | None = field(
        default=None, metadata={"help": "Labelled texts: .txt (annotation format), .csv, .tsv, .jsonl, .parquet."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Watched while training; by default a part of the train file."}
    )
    test_file: str | None = field(default=None, metadata={"help": "Scored once, at the end."})
    validation_size: float = field(
        default=0.1,
        metadata={"help": "Share of train to watch: of its respondents, or of its rows if it names none; 0: no part."},
    )
    label_column: str = field(default="labels", metadata={"help": "Column of the labels or values."})
    group_column: str | None = field(
        default=None,
        metadata={"help": "Column that names who speaks; by default `respondent` or `group`, if there is one."},
    )
    problem_type: AnyProblemType = field(
        default="auto",
        metadata={"help": "Several labels a text, one, or a real value; `auto` tells the first two from the data."},
    )
    label_names: list[str] | None = field(
        default=None, metadata={"help": "All labels, in the order of the outputs; by default as the data say."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens at most, longer texts are cut; by default what the model takes."}
    )


def task_of(features: Features) -> Task:
    """Read the task off the feature of the column `labels`.

    `List(ClassLabel)` means several labels, `ClassLabel` one of several, a float a real value.

    Raises:
        ValueError: no such column, or a feature that says none of this.
    """
    target = features.get("labels")
    if isinstance(target, List) and isinstance(target.feature, ClassLabel):
        return Task(MULTI_LABEL, list(target.feature.names))
    if isinstance(target, ClassLabel):
        return Task(SINGLE_LABEL, list(target.names))
    if isinstance(target, Value) and target.dtype.startswith("float"):
        return Task(REGRESSION, ["value"])
    raise ValueError(f"the column 'labels' has the feature {target}; expected List(ClassLabel), ClassLabel or a float")


def targets_of(dataset: Dataset) -> NDArray[Any]:
    """Targets as models take them: indicators (N, L) float, classes (N,) int or values (N,) float."""
    task = task_of(dataset.features)
    labels = dataset["labels"][:]  # at once: row by row takes many times as long
    if task.problem_type != MULTI_LABEL:
        return np.asarray(labels, dtype=np.int64 if task.problem_type == SINGLE_LABEL else np.float32)
    targets = np.zeros((len(dataset), len(task.labels)), dtype=np.float32)
    for row, indices in enumerate(labels):
        targets[row, indices] = 1
    return targets


def aligned_targets(dataset: Dataset, task: Task) -> NDArray[Any]:
    """Targets of `targets_of`, with the labels in the order of a model's outputs.

    Raises:
        ValueError: data and model differ in problem type or labels.
    """
    data = task_of(dataset.features)
    if data.problem_type != task.problem_type:
        raise ValueError(f"the data are for {data.problem_type}, the model for {task.problem_type}")
    targets = targets_of(dataset)
    if task.problem_type == REGRESSION or data.labels == task.labels:
        return targets
    if set(data.labels) != set(task.labels):
        raise ValueError(f"the data have the labels {' '.join(data.labels)}, the model {' '.join(task.labels)}")
    order = [data.labels.index(label) for label in task.labels]
    return targets[:, order] if task.problem_type == MULTI_LABEL else np.argsort(order)[targets]


def read_labelled(
    path: str | os.PathLike[str],
    labels: Sequence[str] | None = None,
    problem_type: AnyProblemType = "auto",
    text_column: str = "text",
    label_column: str = "labels",
    group_column: str | None = None,
    form: TextFormat = UTF8,
) -> Dataset:
    """Read a labelled file (annotation format, csv, tsv, jsonl, parquet).

    Args:
        path: the file.
        labels: all label names in order; by default as the file says.
        problem_type: `auto` tells several labels from one by the data; real values must be asked for.
        text_column, label_column, group_column: column names, for all but the annotation format.
        form: encoding and delimiter of the file.

    Raises:
        ValueError: wrong rows, each named; a missing column.
        OSError: the file is missing or cannot be read.
    """
    if problem_type == REGRESSION:
        return load_values(path, text_column, label_column, group_column, form)
    several = None if problem_type == "auto" else problem_type == MULTI_LABEL
    return load_labelled(path, labels, text_column, label_column, group_column, multi_label=several, form=form)


def load_parts(options: DataOptions, seed: int = 0) -> DatasetDict:
    """Labelled parts `train`, `validation` and `test`, as far as there are any.

    Without a validation file a part of train becomes `validation`: whole respondents where the data name them,
    single rows elsewhere, drawn by the seed; none of it with `validation_size=0`. Texts that stand in train and in
    another part are logged.

    Raises:
        ValueError: wrong rows, a test or validation file without a train file, too little to split or to tell apart.
        OSError: a file is missing or cannot be read.
    """
    paths = {part: getattr(options, f"{part}_file") for part in ("train", "validation", "test")}
    files = {part: path for part, path in paths.items() if path is not None}
    columns = (options.text_column, options.label_column, options.group_column, options.text_format())
    if not files:
        refuse_options_of_files(options, "label_column", "group_column", "problem_type", "label_names")
        parts = load_family_relations()
    elif "train" not in files:
        raise ValueError(f"a {' and '.join(files)} file without a train file: give --train_file too")
    elif options.problem_type == REGRESSION and options.label_names:
        raise ValueError(f"label_names={options.label_names!r}: real values have no labels, leave the names out")
    else:
        train = read_labelled(files.pop("train"), options.label_names, options.problem_type, *columns)
        task = task_of(train.features)
        _check_two_classes(task)
        others = {part: read_labelled(path, task.labels, task.problem_type, *columns) for part, path in files.items()}
        parts = DatasetDict(train=train, **others)
    if "validation" not in parts and options.validation_size:
        parts.update(_split(parts["train"], options.validation_size, seed))
    for part in ("validation", "test"):
        if part in parts:
            tell_overlap(part, parts[part]["text"][:], parts["train"]["text"][:])
    return parts


def refuse_options_of_files(options: ReadingOptions, *more: str) -> None:
    """Raise a `ValueError` for an option that says how a file is read, or one of `more`, where no file is given."""
    for name in (*(each.name for each in fields(ReadingOptions)), *more):
        if (value := getattr(options, name)) != getattr(type(options), name):
            raise ValueError(f"{name}={value!r} says how a file is read, and the shipped corpus is none: omit it")


def _check_two_classes(task: Task) -> None:
    if task.problem_type == SINGLE_LABEL and len(task.labels) < 2:
        raise ValueError(
            f"all training texts have the label {task.labels[0]!r}, so there is nothing to tell apart: add texts of "
            "other labels; if texts without it are the others, leave their cells empty and say --problem_type "
            "multi_label_classification"
        )


def _split(train: Dataset, validation_size: float, seed: int) -> DatasetDict:
    if "respondent" in train.column_names:
        return split_by_respondent(train, validation_size, seed)
    if len(train) < 2:
        raise ValueError("one row cannot be split into train and validation; give more, or validation_size=0")
    try:
        halves = train.train_test_split(validation_size, seed=seed)
    except ValueError as error:
        raise ValueError(f"validation_size={validation_size} of {len(train)} rows: {error}") from error
    return DatasetDict(train=halves["train"], validation=halves["test"])


def check_every_label_occurs(dataset: Dataset, allow_missing: bool = False) -> None:
    """Raise a `ValueError` that names the labels no row carries; only log it with `allow_missing`.

    A label that all rows carry, from which nothing is learnt of it, is logged.
    """
    task = task_of(dataset.features)
    if task.problem_type == REGRESSION:
        return
    targets = targets_of(dataset)
    counts = targets.sum(0) if task.problem_type == MULTI_LABEL else np.bincount(targets, minlength=len(task.labels))
    missing = [label for label, count in zip(task.labels, counts, strict=True) if not count]
    if missing and not allow_missing:
        raise ValueError(
            f"no training text carries the label {', '.join(map(repr, missing))}: it cannot be learnt. Add "
            "such texts, leave the label out, take a smaller validation part, or pass --allow_missing_labels"
        )
    if always := [label for label, count in zip(task.labels, counts, strict=True) if count == len(targets)]:
        logger.warning("every training text carries the label %s: any text will get it", ", ".join(map(repr, always)))
    if missing:
        logger.warning("no training text carries the label %s: it will never be predicted", ", ".join(missing))


def balanced_weights(dataset: Dataset) -> list[float]:
    """Weights that give rare labels the same pull as frequent ones.

    Several labels: negatives / positives of each, for the positive term of the loss. One label: the weight
    N / (L · count) of each class. A label that all or no rows carry weighs 1.

    Raises:
        ValueError: for regression, which has no classes.
    """
    task = task_of(dataset.features)
    if task.problem_type == REGRESSION:
        raise ValueError("class weights balance classes, but the targets are real values: use class_weights=none")
    targets = targets_of(dataset)
    if task.problem_type == MULTI_LABEL:
        positives = targets.sum(0)
        ratios = (len(targets) - positives) / np.maximum(positives, 1)
        return [float(r) if 0 < p < len(targets) else 1.0 for r, p in zip(ratios, positives, strict=True)]
    counts = np.bincount(targets, minlength=len(task.labels))
    return [float(len(targets) / (len(counts) * count)) if count else 1.0 for count in counts]


def max_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, requested: int | None = None) -> int | None:
    """The most tokens a text may have: what model and tokenizer allow, or less where requested.

    Raises:
        ValueError: the request exceeds it.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 10**9 else []
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        limits.append(positions - _reserved_positions(model, positions))
    limit = min(limits, default=None)
    if requested is not None and not 1 <= requested <= (limit or requested):
        raise ValueError(f"max_length={requested}: the model takes 1 to {limit} tokens")
    return requested or limit


def _reserved_positions(model: PreTrainedModel, positions: int) -> int:
    """Positions up to the padding index, which RoBERTa and its kin never give to a token."""
    tables = (m for n, m in model.named_modules() if "position" in n and isinstance(m, nn.Embedding))
    padding = (t.padding_idx for t in tables if t.num_embeddings == positions and t.padding_idx is not None)
    return next((index + 1 for index in padding), 0)


def encode(
    texts: Sequence[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    targets: NDArray[Any] | None = None,
) -> Rows:
    """Turn texts into rows of model inputs; texts longer than the model are cut, and how many is logged.

    Args:
        texts: N texts.
        model: the model that will read the rows.
        tokenizer: its tokenizer.
        max_length: tokens at most; the model's own limit when not given.
        targets: what `targets_of` gives; becomes the entry `labels`. Shape: (N,) or (N, L)

    Raises:
        ValueError: a limit beyond the model's, a text without any token, or one the model has no embedding for.
    """
    limit = max_tokens(model, tokenizer, max_length)
    encoded = tokenizer(list(texts), verbose=False)
    names = set(inspect.signature(type(model).forward).parameters) & set(encoded)
    rows: Rows = [{name: encoded[name][i] for name in names} for i in range(len(texts))]
    long = [i for i, row in enumerate(rows) if limit and len(row["input_ids"]) > limit]
    if long:
        cut = tokenizer([texts[i] for i in long], truncation=True, max_length=limit)
        for place, i in enumerate(long):
            rows[i] = {name: cut[name][place] for name in names}
        logger.warning("%d of %d texts are longer than %d tokens and were cut", len(long), len(texts), limit)
    _check_ids(rows, model, tokenizer)
    if targets is not None:
        for row, target in zip(rows, targets.tolist(), strict=True):
            row["labels"] = target
    return rows


def _check_ids(rows: Rows, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    empty = [str(number) for number, row in enumerate(rows, start=1) if not row["input_ids"]]
    if empty:
        raise ValueError(
            f"text {', '.join(empty[:20])}: no token at all, since the tokenizer puts none around a text; leave it out"
        )
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    highest = max([*(max(row["input_ids"]) for row in rows), cast(int, tokenizer.pad_token_id)])
    if highest >= size:
        raise ValueError(
            f"the tokenizer gives the token {highest}, but the model has embeddings for {size}: "
            "they do not belong together"
        )


def predict_logits(
    model: PreTrainedModel,
    accelerator: Accelerator,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    progress: bool = False,
) -> NDArray[np.float32]:
    """Logits of every row, in the order of the rows; batches hold rows of similar length. Shape: (N, L)

    With `progress` a bar shows the batches. Equal on all processes.

    Raises a `ValueError` for a logit that is not finite, or a batch size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    collator = DataCollatorWithPadding(tokenizer)
    ordered = cast(TorchDataset, [rows[i] for i in order])
    values, _ = predict(model, accelerator, ordered, collator, batch_size, progress)
    logits = np.empty(tuple(values.shape), dtype=np.float32)
    logits[order] = values.numpy()
    if not np.isfinite(logits).all():
        row = int(np.argwhere(~np.isfinite(logits))[0][0])
        raise ValueError(f"the model gives NaN or infinity for row {row + 1}: its weights are damaged")
    return logits


def score_rows(
    model: PreTrainedModel,
    accelerator: Accelerator,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    groups: Sequence[Hashable] | None = None,
) -> Scores:
    """Scores of a classifier on rows with labels, decided by the thresholds of its config.

    With `groups`, who speaks in each row, the scores of several labels a text also hold `f1_interval` and
    `present_macro_f1_interval`: how far the F1 of each label, and the macro mean of the labels present, would move
    with other speakers (95 %, bootstrap).
    """
    task = Task.from_config(accelerator.unwrap_model(model).config)
    logits = predict_logits(model, accelerator, rows, tokenizer, batch_size)
    targets = np.asarray([row["labels"] for row in rows])
    thresholds = getattr(accelerator.unwrap_model(model).config, "label_thresholds", None)
    scores = classification_scores(logits, targets, task.problem_type, task.labels, thresholds)
    if groups is not None and task.problem_type == MULTI_LABEL:
        decisions = decide(probabilities(logits, MULTI_LABEL), thresholds)
        by_label, macro = f1_intervals(decisions, targets, groups, task.labels)
        scores |= {"f1_interval": by_label, "present_macro_f1_interval": macro}
    return scores


def open_inference() -> Accelerator:
    """Accelerate without training: the processes that a launcher started, also where there is no GPU."""
    several_on_cpu = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=several_on_cpu)
    log_from_main_process(accelerator)
    return accelerator


def log_from_main_process(accelerator: Accelerator) -> None:
    """Show what this package logs on stderr, once; the records of the loop go to the progress bar and the tracker."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fratrie").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    logging.getLogger("fratrie.training.loop").setLevel(logging.WARNING)


def prepare_output(
    path: str | os.PathLike[str],
    read: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    is_ours: Callable[[Path], bool] | None = None,
    overwrite: bool = False,
) -> Path:
    """The path of a file to write later, its folder created; what cannot be written fails here, before the work.

    Args:
        path: the file to write.
        read: the file that is read, which must not be lost.
        model: the folder of the model, whose files must not be lost either.
        is_ours: whether a file is an earlier output, which may be replaced.
        overwrite: replace any other file, too.

    Raises:
        ValueError: the file is one of these, has the name of a file of models, or is another's.
        OSError: the folder cannot be created, or the file not be written.
    """
    if not os.fspath(path):
        raise ValueError("an empty path names no output: is a variable of the shell unset?")
    output = Path(path)
    if _MODEL_FILES.fullmatch(output.name):
        raise ValueError(f"{path} has the name of a file that belongs to a model: choose another --output_file")
    try:
        place = Path(os.path.realpath(output)).parent  # it is made there and renamed
        place.mkdir(parents=True, exist_ok=True)
        if _exists(output):
            _check_replaceable(output, read, model)
            if not overwrite and not (is_ours and is_ours(output)):
                raise ValueError(f"{path} is no earlier output for this model: choose another file, or --overwrite")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise type(error)(f"cannot write {path} ({error.strerror}): choose another --output_file") from error
    return output


def _exists(path: Path) -> bool:
    """Whether there is something; unlike pathlib's, it raises an OSError for a circle of links or an endless name."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _check_replaceable(
    output: Path, read: str | os.PathLike[str] | None, model: str | os.PathLike[str] | None
) -> None:
    kept = [Path(read)] if read is not None else []
    kept += [file for file in Path(model).iterdir() if file.is_file()] if model and Path(model).is_dir() else []
    if any(file.exists() and output.samefile(file) for file in kept):
        raise ValueError(f"{output} is a file that is read, and would be lost: choose another --output_file")
    if not output.is_file():
        raise FileExistsError(errno.EEXIST, "it is no regular file")


# Where they lie, there is a model, or a reader would take them for one.
_MODEL_FILES = re.compile(
    r"(.*config|tokenizer|vocab|special_tokens_map|added_tokens|trainer_state|modules)\.json"
    r"|.*\.safetensors(\.index\.json)?|(merges|vocab)\.txt|.*\.(model|jinja|bin)"
)
