"""Fine-tuning in a study: depth, rate and epochs chosen by cross-validation, models trained side by side.

Shapes: N sentences, L labels, S seeds.
"""

import logging
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from fratrie.quiet import hide_bars
from fratrie.training.baselines import Fold, rows_of
from fratrie.training.batches import Collator
from fratrie.training.classifiers import ClassifierHead, as_ours, new_classifier
from fratrie.training.encoding import EncodedRows, encode, max_tokens
from fratrie.training.frozen_states import keep_states
from fratrie.training.layers import freeze_below, learning_rates
from fratrie.training.loop import Evaluator, TrainingOptions, create_accelerator, train
from fratrie.training.metrics import MULTI_LABEL, REGRESSION, multilabel_scores
from fratrie.training.model_folders import check_checkpoint, load_config, load_tokenizer
from fratrie.training.options import PRETRAINED_ENCODER
from fratrie.training.schedules import LEAST_STEPS, enough_epochs
from fratrie.training.scoring import predict_logits
from fratrie.training.tasks import Task

from .data import StudyData
from .scores import decisions
from .workers import Workers, number_of_workers, open_workers

Key = TypeVar("Key", bound=Hashable)
Logits = NDArray[np.float32]
Known = Callable[[Key], tuple[Logits, float] | None]
Keep = Callable[[Key, Logits, float], object]
Progress = Callable[[float, float], object]

_EVALUATION_BATCH = 64
# A weight, its gradient, two moments and copies in half precision, with as much again for what a step computes.
_BYTES_OF_A_WEIGHT = 40
# What a step costs beside its trained layers, in layers (multilingual-e5-small, batches of 8 sentences).
_COST_OF_A_STEP = 0.4


@dataclass(frozen=True, order=True)
class Setting:
    """What is searched for.

    Attributes:
        depth: trained layers, from the top; 0 trains the head alone.
        learning_rate: of the top layer, or of the head where it is alone.
        epochs: passes over the sentences.
    """

    depth: int
    learning_rate: float
    epochs: int


@dataclass(frozen=True)
class Recipe:
    """What stays the same in a search, and where it begins.

    Depths are compared in short trainings, since that is most of the work; the best one is then trained longer too.

    Attributes:
        depths: to try; more layers than the encoder has stand for all of them.
        learning_rate: at which depths are compared, of the top layer.
        head_learning_rate: of a head above trained layers.
        lone_head_learning_rate: at which a head is trained alone.
        epochs: at which depths are compared.
        rate_factors: further rates to try at the best depth, as multiples of the first.
        other_epochs: further numbers of epochs to try at the best depth and rate.
        layer_decay: rate of a layer as a share of that of the layer above.
        batch_size: sentences of a step.
        warmup: share of the steps in which the rates rise.
        mixed_precision: of matrix products, `bf16` or `no`.
        max_length: tokens at most; longer sentences are cut.
    """

    depths: Sequence[int] = (0, 1, 2, 3, 6, 12)
    learning_rate: float = PRETRAINED_ENCODER["learning_rate"]
    head_learning_rate: float = PRETRAINED_ENCODER["head_learning_rate"]
    lone_head_learning_rate: float = 0.1
    epochs: int = 8
    rate_factors: Sequence[float] = (0.5,)
    other_epochs: Sequence[int] = (12,)
    layer_decay: float = PRETRAINED_ENCODER["layer_decay"]
    batch_size: int = PRETRAINED_ENCODER["per_device_train_batch_size"]
    warmup: float = 0.1
    mixed_precision: Literal["no", "bf16"] = PRETRAINED_ENCODER["mixed_precision"]
    max_length: int | None = None

    def steps_per_epoch(self, sentences: int) -> int:
        """Optimizer steps in a pass over so many sentences."""
        return math.ceil(sentences / self.batch_size)

    def first_setting(self, depth: int) -> Setting:
        """Where the search begins at a depth."""
        return Setting(depth, self.learning_rate if depth else self.lone_head_learning_rate, self.epochs)

    def stages(self, layers: int) -> list[Callable[[Setting], list[Setting]]]:
        """What to try one after the other, each stage around the best setting so far."""
        depths = sorted({min(depth, layers) for depth in self.depths})
        return [
            lambda _: [self.first_setting(depth) for depth in depths],
            lambda best: [replace(best, learning_rate=best.learning_rate * factor) for factor in self.rate_factors],
            lambda best: [replace(best, epochs=epochs) for epochs in self.other_epochs],
        ]


def search(
    data: StudyData,
    encoder: Path,
    folds: Sequence[Fold],
    recipe: Recipe = Recipe(),
    *,
    seed: int = 42,
    workers: int | None = None,
    known: Known[tuple[int, float, int, int]] | None = None,
    keep: Keep[tuple[int, float, int, int]] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Choose depth, rate and epochs for the best macro-F1 of decisions about sentences that a model has not seen.

    Depths first, then rates at the best depth, then epochs at the best rate. Every fold is labelled by a model that
    learnt the others; decisions are those at a probability of 0.5 (several labels), or the most probable label.

    Args:
        data: of which `train` alone is read.
        encoder: folder of a pretrained encoder of any Hugging Face family, with its tokenizer.
        folds: rows to learn and rows to hold out; every row is held out once.
        recipe: what to try.
        seed: of weights, order and dropout; fold k has `seed + k`.
        workers: processes side by side; by default as many as cores and memory allow. They change no number.
        known: gives logits and seconds that were found before, by `(depth, learning rate, epochs, fold)`.
        keep: called with this key, logits and seconds of each fold when it is found.
        progress: called with the work done and the work in all, about once a second. What later stages will cost is
            estimated until the depth is known.

    Returns:
        `tried`, settings with their `cross_validated_macro_f1`, `f1` by label and `seconds` of all folds; `chosen`,
        one of them; and its `out_of_fold_logits`. Shape: (N, L)

    Raises:
        ValueError: an encoder that does not fit, or a loss that is not finite.
    """
    corpus = _read(data, encoder, recipe)
    tried: list[dict[str, Any]] = []
    logits_of: dict[Setting, Logits] = {}
    best = Setting(corpus.layers, recipe.learning_rate, recipe.epochs)  # until something is known, for the estimate
    stages = recipe.stages(corpus.layers)
    with _open_trainers(corpus, workers, progress) as trainers:
        for number, propose in enumerate(stages):
            settings = [setting for setting in dict.fromkeys(propose(best)) if setting not in logits_of]
            runs = {
                (*_values(setting), fold): _Run(setting, learnt, held_out, seed + fold)
                for setting in settings
                for fold, (learnt, held_out) in enumerate(folds)
            }
            later = [setting for propose_later in stages[number + 1 :] for setting in propose_later(best)]
            trainers.expect(sum(_cost(setting, len(learnt)) for setting in later for learnt, _ in folds))
            found = trainers.predict(runs, known, keep)
            for setting in settings:
                pieces = [found[*_values(setting), fold] for fold in range(len(folds))]
                logits_of[setting] = _in_order(folds, [logits for logits, _ in pieces])
                scores = _scores(logits_of[setting], data)
                tried.append(asdict(setting) | scores | {"seconds": sum(seconds for _, seconds in pieces)})
            chosen = max(tried, key=lambda entry: entry["cross_validated_macro_f1"])
            best = Setting(chosen["depth"], chosen["learning_rate"], chosen["epochs"])
    return {"tried": tried, "chosen": chosen, "out_of_fold_logits": logits_of[best]}


def finetune(
    data: StudyData,
    encoder: Path,
    setting: Setting,
    folders: Mapping[int, Path],
    recipe: Recipe = Recipe(),
    *,
    workers: int | None = None,
    known: Known[int] | None = None,
    keep: Keep[int] | None = None,
    progress: Progress | None = None,
) -> Logits:
    """Train models of one setting on all of train, side by side, and save each with its tokenizer.

    Args:
        data: `train` is learnt, `test` is labelled.
        encoder: as for `search`.
        setting: what `search` chose.
        folders: of the models, by seed.
        recipe: what stays the same.
        workers, progress: as for `search`.
        known: gives logits and seconds that were found before, by the seed, of models that lie in their folders.
        keep: called with the seed, logits and seconds of each model when it is saved.

    Returns:
        Logits of test, by the models in the order of `folders`. Shape: (S, N, L)
    """
    learnt, unseen = rows_of(data.train, data.test)
    runs = {seed: _Run(setting, learnt, unseen, seed, folder) for seed, folder in folders.items()}
    with _open_trainers(_read(data, encoder, recipe, with_test=True), workers, progress) as trainers:
        found = trainers.predict(runs, known, keep)
    return np.stack([found[seed][0] for seed in folders])


def finetuned_logits(
    data: StudyData,
    encoder: Path,
    setting: Setting,
    subsets: Sequence[NDArray[np.int64]],
    recipe: Recipe = Recipe(),
    *,
    seed: int = 42,
    workers: int | None = None,
    known: Known[int] | None = None,
    keep: Keep[int] | None = None,
    progress: Progress | None = None,
) -> Logits:
    """Logits of test, by models that learnt parts of train; one model for each part.

    A small part is seen in more epochs than `setting` says: until `LEAST_STEPS` steps are taken, or as many as all of
    train gets, where these are fewer.

    Args:
        data, encoder, setting, recipe, workers, progress: as for `finetune`.
        subsets: rows of train to learn; a list of them for each model.
        seed: of the first model; that of the next is one more.
        known: gives logits and seconds that were found before, by the place in `subsets`.
        keep: called with this place, logits and seconds of each model when it is found.

    Returns:
        Shape: (len(subsets), N, L)
    """
    learnt, unseen = rows_of(data.train, data.test)
    least = min(LEAST_STEPS, setting.epochs * recipe.steps_per_epoch(len(learnt)))
    runs = {
        place: _Run(_at_least(least, setting, recipe.steps_per_epoch(len(rows))), rows, unseen, seed + place)
        for place, rows in enumerate(subsets)
    }
    with _open_trainers(_read(data, encoder, recipe, with_test=True), workers, progress) as trainers:
        found = trainers.predict(runs, known, keep)
    return np.stack([found[place][0] for place in runs])


def _at_least(steps: int, setting: Setting, steps_per_epoch: int) -> Setting:
    return replace(setting, epochs=enough_epochs(setting.epochs, steps_per_epoch, steps))


def _values(setting: Setting) -> tuple[int, float, int]:
    return setting.depth, setting.learning_rate, setting.epochs


def _scores(logits_NL: Logits, data: StudyData) -> dict[str, Any]:
    scores = multilabel_scores(decisions(logits_NL, data.task), data.train.labels, data.task.labels)
    return {"cross_validated_macro_f1": scores["macro_f1"], "f1": scores["f1"]}


def _in_order(folds: Sequence[Fold], logits: Sequence[Logits]) -> Logits:
    """Logits of all rows from those of each fold."""
    return np.concatenate(logits)[np.concatenate([held_out for _, held_out in folds]).argsort()]


def _cost(setting: Setting, rows: int) -> float:
    """Of learning so many sentences, in passes of a sentence through a trained layer."""
    return (setting.depth + _COST_OF_A_STEP) * rows * setting.epochs


@dataclass(frozen=True)
class _Run:
    """One model to train, and the rows that it labels; saved where a folder is given."""

    setting: Setting
    learnt: NDArray[np.int64]
    unseen: NDArray[np.int64]
    seed: int
    folder: Path | None = None

    def cost(self) -> float:
        return _cost(self.setting, len(self.learnt))


@dataclass(frozen=True)
class _Corpus:
    """What every process knows."""

    encoder: Path
    task: Task
    recipe: Recipe
    rows: EncodedRows
    layers: int
    bytes_of_training: int


def _read(data: StudyData, encoder: Path, recipe: Recipe, with_test: bool = False) -> _Corpus:
    """Encode the sentences, and say early what does not fit."""
    if data.task.problem_type == REGRESSION:
        raise ValueError("a study is about labels, and these are real values: use fratrie finetune")
    checkpoint = check_checkpoint(encoder)
    model, tokenizer = _build(checkpoint, data.task, -1)
    parts = [data.train, data.test] if with_test else [data.train]
    targets = np.concatenate([part.labels for part in parts])
    targets = targets.astype(np.float32) if data.task.problem_type == MULTI_LABEL else targets.argmax(1)
    texts = [text for part in parts for text in part.texts]
    rows = encode(texts, model, tokenizer, recipe.max_length, targets)
    body = model.num_parameters() - cast(torch.nn.Embedding, model.get_input_embeddings()).weight.numel()
    return _Corpus(checkpoint, data.task, recipe, rows, model.config.num_hidden_layers, body * _BYTES_OF_A_WEIGHT)


def _build(encoder: Path, task: Task, depth: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = load_tokenizer(encoder)
    model, new = new_classifier(as_ours(load_config(encoder)), task, ClassifierHead(), encoder)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    freeze_below(model, depth, new)
    tokenizer.model_max_length = max_tokens(model, tokenizer) or tokenizer.model_max_length
    return model, tokenizer


class _Trainers:
    """Processes that train models, and how far they are."""

    def __init__(self, workers: Workers, done: "Synchronized[float]", progress: Progress | None) -> None:
        self.workers, self.done, self.progress = workers, done, progress
        self.planned = self.later = 0.0

    def expect(self, later: float) -> None:
        """Tell the cost of what will be asked for after the next runs."""
        self.later = later

    def predict(
        self, runs: Mapping[Key, _Run], known: Known[Key] | None = None, keep: Keep[Key] | None = None
    ) -> dict[Key, tuple[Logits, float]]:
        """Logits and seconds of all runs, by key."""
        found = {key: done for key in runs if (done := known(key))} if known else {}
        missing = {key: run for key, run in runs.items() if key not in found}
        self.planned += sum(run.cost() for run in missing.values())
        # The longest first: so no process is alone with one at the end.
        calls = {key: (run,) for key, run in sorted(missing.items(), key=lambda item: -item[1].cost())}
        for key, (logits, seconds) in self.workers.results(_train, calls, self._look):
            found[key] = logits, seconds
            if keep:
                keep(key, logits, seconds)
        return found

    def _look(self) -> None:
        if self.progress:
            self.progress(self.done.value, self.planned + self.later)


@contextmanager
def _open_trainers(corpus: _Corpus, number: int | None, progress: Progress | None) -> Iterator[_Trainers]:
    if number is None:  # a GPU has room for one
        number = 1 if torch.accelerator.is_available() else number_of_workers(corpus.bytes_of_training)
    done = multiprocessing.get_context("spawn").Value("d", 0.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_workers(number, _prepare, corpus, Path(folder), shared=(done,)) as workers,
    ):
        yield _Trainers(workers, done, progress)


_trainer: "_Trainer"


def _prepare(corpus: _Corpus, folder: Path, done: "Synchronized[float]") -> None:
    global _trainer
    logging.getLogger("fratrie").setLevel(logging.ERROR)  # the first process has warned already
    hide_bars()
    _trainer = _Trainer(corpus, done, folder)


def _train(run: _Run) -> tuple[Logits, float]:
    return _trainer.train(run)


class _Trainer:
    """Trains one model after the other in a process."""

    def __init__(self, corpus: _Corpus, done: "Synchronized[float]", folder: Path) -> None:
        self.corpus, self.done = corpus, done
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.collators: dict[int, Collator] = {}

    def train(self, run: _Run) -> tuple[Logits, float]:
        """Logits of the rows that the run has not seen, and the seconds that it took."""
        began = time.perf_counter()
        options = self._options(run)
        set_seed(run.seed)
        model, tokenizer = _build(self.corpus.encoder, self.corpus.task, run.setting.depth)
        accelerator = create_accelerator(options)
        collator = self._collator(model, accelerator, tokenizer, run.setting.depth)
        rows = self.corpus.rows
        train(
            model,
            options,
            accelerator,
            cast(Dataset, [rows[index] for index in run.learnt]),
            collator,
            evaluate=self._counts_epochs(run),
            tokenizer=tokenizer,
            learning_rates=self._learning_rates(model, run.setting),
            save=run.folder is not None,
        )
        unseen = [rows[index] for index in run.unseen]
        # A model that is saved is shown whole texts, as its users will.
        shown = collator if run.folder is None else None
        logits = predict_logits(model, accelerator, unseen, tokenizer, _EVALUATION_BATCH, collator=shown)
        return logits, time.perf_counter() - began

    def _options(self, run: _Run) -> TrainingOptions:
        recipe = self.corpus.recipe
        return TrainingOptions(
            output_dir=str(run.folder or self.folder),
            overwrite_output_dir=True,
            learning_rate=run.setting.learning_rate,
            num_train_epochs=run.setting.epochs,
            warmup_steps=recipe.warmup,
            per_device_train_batch_size=recipe.batch_size,
            mixed_precision=recipe.mixed_precision,
            eval_strategy="epoch",
            save_steps=0,
            report_to="none",
            disable_progress=True,
            seed=run.seed,
        )

    def _learning_rates(self, model: PreTrainedModel, setting: Setting) -> dict[str, float]:
        head = self.corpus.recipe.head_learning_rate if setting.depth else setting.learning_rate
        return learning_rates(model, setting.learning_rate, self.corpus.recipe.layer_decay, head)

    def _collator(
        self, model: PreTrainedModel, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, depth: int
    ) -> Collator:
        """Gives the states below the trained layers, which all runs of a depth share."""
        if depth not in self.collators:
            pad = DataCollatorWithPadding(tokenizer)
            states = keep_states(model, accelerator, self.corpus.rows, pad, _EVALUATION_BATCH, self.folder)
            self.collators = {depth: states}
        return self.collators[depth]

    def _counts_epochs(self, run: _Run) -> Evaluator:
        """An evaluation after each epoch that only tells how far the run is."""

        def count(model: PreTrainedModel, accelerator: Accelerator) -> dict[str, float]:
            with self.done.get_lock():
                self.done.value += run.cost() / run.setting.epochs
            return {}

        return count
