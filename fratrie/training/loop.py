"""The training loop over Accelerate: one exact loss whatever the batching, exact resume, best checkpoint.

Only the balancing loss of experts changes a little with the batching (see `objective`).

`train` runs on any Hugging Face model that returns a loss; `TrainingOptions` are the options that every
training script shares, and `create_accelerator` opens the processes and trackers.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import files
from ..export import export_code, takes_code
from . import checkpoint
from .batches import Collator, EpochBatches, MicroBatch, StepShape, StreamBatches, seed_all
from .context_parallel import Context
from .evaluation import ConfigSwitch, evaluating
from .fingerprint import differences, digest_of, fingerprint_rows, fingerprint_tokenizer
from .launch import LOG_FOLDER, create_accelerator, open_run, sole_use
from .objective import Objective
from .options import TrainingOptions
from .schedules import build_optimizer, build_scheduler
from .stopping import Stopped, StopRequest, stopping_after_the_step
from .tracking import Throughput, progress_bar

__all__ = [
    "Evaluator",
    "NonFiniteLossError",
    "TrainingOptions",
    "TrainingResult",
    "create_accelerator",
    "open_run",
    "train",
]

logger = logging.getLogger(__name__)

RUN_FILE = "run_config.json"
Evaluator = Callable[[PreTrainedModel, Accelerator], dict[str, float]]

# Options that a resumed run may change: they decide what is shown and kept, not how the weights change.
_FREE_OPTIONS = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"),
    *("logging_steps", "report_to", "disable_progress", "dataloader_num_workers", "find_unused_parameters"),
    *("export_code", "context_parallel_size"),  # the context says more of it
}
# Free as well, unless they decide which checkpoint is the best one, and when the search for it ends.
_CHOOSING_OPTIONS = {"eval_strategy", "eval_steps", "per_device_eval_batch_size", "early_stopping_patience"}
# What a run, or the script around it, writes into its folder itself.
_WRITTEN = ("*config.json", "model*.safetensors*", "tokenizer.json", "README.md", "metrics.json")
# Entries of a config that Hugging Face fills in when it saves or loads.
_FREE_CONFIG = {
    *("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache"),
}


@dataclass
class TrainingResult:
    """What a run leaves behind: the last step, the metrics of the kept model and every log record.

    `seconds` counts all pieces of a resumed run, each from its beginning to the checkpoint that it was resumed from.
    """

    global_step: int
    epoch: float
    metrics: dict[str, float]
    best_metric: float | None = None
    best_step: int | None = None
    stopped_early: bool = False
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


class NonFiniteLossError(ValueError):
    """The loss or the gradient norm is NaN or infinite; the message holds the step."""


def train(
    model: PreTrainedModel,
    options: TrainingOptions,
    accelerator: Accelerator,
    train_dataset: Dataset | datasets.IterableDataset,
    collator: Collator,
    *,
    evaluate: Evaluator | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    run_config: dict[str, Any] | None = None,
    learning_rates: Mapping[str, float] | None = None,
    compared: Mapping[str, Any] | None = None,
    context: Context | None = None,
    save: bool = True,
) -> TrainingResult:
    """Train `model` in place and save it, with its tokenizer, in `options.output_dir`.

    The loss of a step is the sum over its real targets divided by their global count. Labels of -100 are no
    targets; labels without -100 (classes, multi-label rows, values) count each element.

    Args:
        model: any Hugging Face model whose forward returns a loss.
        options: of the run.
        accelerator: from `open_run`, which ends it with the script, or from `create_accelerator`, whose caller calls
            its `end_training()` when the script is done.
        train_dataset: rows (dictionaries) for `collator`; a `datasets.IterableDataset` needs `max_steps`.
        collator: makes the batch of tensors with a `labels` entry. It may draw from torch's, numpy's and
            Python's global generators: they are seeded for each micro-batch from its number in the run.
        evaluate: called as `evaluate(model, accelerator)` on every process, in evaluation mode without
            gradients; must return the same metrics on each. `fratrie.training.evaluation` has the parts.
        tokenizer: saved with each checkpoint.
        run_config: everything else worth keeping (data files, model options), written with `options` to
            `run_config.json`.
        learning_rates: peak rates by the name of a weight, for those that differ from `options.learning_rate`.
        compared: what else decides the course of the run or the choice of its best checkpoint, such as a fingerprint
            of the validation data. A resumed run must have all of it, and all rows, as before.
        context: of `open_context`, where several processes hold a part of every row; evaluation has whole rows.
        save: `False` writes nothing into `options.output_dir`: the trained model is the caller's alone.

    At the end the model has the best weights, by `metric_for_best_model`, or without that the last ones. They are
    saved, with the model's code where `options.export_code` asks for it or the model came with it; checkpoints other
    than the best and those to keep are deleted; the trackers are closed. The caller's `accelerator` stays open.

    Nothing of an earlier run is deleted before the first step has been taken. A run that resumes from an older
    checkpoint deletes newer ones when it saves its own.

    Raises:
        ValueError: impossible options, a folder with files that are not of such a run, or a checkpoint that is
            damaged or of a run that differs in what matters.
        BlockingIOError: another run is writing in the folder.
        NonFiniteLossError: the loss or the gradient became NaN or infinite; the last checkpoint stays.
        Stopped: a signal asked for it; a checkpoint has been saved.
    """
    if options.eval_strategy != "no" and evaluate is None and options.metric_for_best_model is not None:
        raise ValueError(f"metric_for_best_model={options.metric_for_best_model!r} needs an evaluation")
    if not save and (options.save_steps or options.metric_for_best_model or options.resume_from_checkpoint):
        raise ValueError("checkpoints, and the best of them, need save=True; or set save_steps=0 and no metric")
    with_code = takes_code(model, options.export_code)
    with sole_use(Path(options.output_dir), accelerator):
        resumed_from, saved = _find_start(Path(options.output_dir), options)
        accelerator.wait_for_everyone()  # nobody writes before all have looked
        context = context or Context()
        batches = _open_batches(train_dataset, collator, options, _step_shape(options, accelerator, context), saved)
        now = _fingerprint(model, options, accelerator, train_dataset, collator)
        now |= {"processes of a context": context.size} if context.size > 1 else {}
        now |= {"learning rates": learning_rates and digest_of(dict(learning_rates))}
        now |= {"tokenizer": fingerprint_tokenizer(tokenizer), **json.loads(json.dumps(compared or {}, default=str))}
        if resumed_from and saved:
            _check_same_run(saved, now, resumed_from)
        run = _Run(model, options, accelerator, batches, now, tokenizer, evaluate, run_config or {}, context, save)
        run.open(resumed_from, saved, learning_rates)
        return run.train(with_code)


def _find_start(output_dir: Path, options: TrainingOptions) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to go on from and its state, if one is asked for, or a folder in which a run can begin."""
    checkpoints = checkpoint.list_checkpoints(output_dir)
    if options.resume_from_checkpoint is None:
        checkpoint.check_folder(output_dir, earlier_versions=options.overwrite_output_dir)
        if not options.overwrite_output_dir:
            _check_nothing_is_replaced(output_dir, bool(checkpoints))
        return None, None
    path = checkpoint.find_checkpoint(output_dir, options.resume_from_checkpoint)
    if path.resolve().parent != output_dir.resolve():
        raise ValueError(f"{path} lies outside {output_dir}; a run goes on in its own output_dir")
    state = checkpoint.load_state(path)
    checkpoint.check_folder(output_dir)
    checkpoint.check_tensors(path, state["tensors"])
    best = state["run"]["best_step"]
    if best is not None and best not in dict(checkpoints):
        raise ValueError(f"checkpoint-{best}, the best one so far, is missing beside {path}: go on from a newer one")
    if newer := [other.name for step, other in checkpoints if step > state["run"]["step"]]:
        logger.warning("going on from %s: %s will be deleted at the next save", path.name, ", ".join(newer))
    return path, state


def _check_nothing_is_replaced(output_dir: Path, holds_checkpoints: bool) -> None:
    if holds_checkpoints:
        raise ValueError(
            f"{output_dir} holds checkpoints of an earlier run: go on with --resume_from_checkpoint last, "
            "delete them with --overwrite_output_dir, or choose another output_dir"
        )
    for path in itertools.chain.from_iterable(map(output_dir.glob, _WRITTEN)):
        if path.name != RUN_FILE or not _is_of_a_run(path):
            raise ValueError(
                f"{output_dir} holds {path.name}, which this run would replace: choose another output_dir, or say "
                "--overwrite_output_dir"
            )


def _is_of_a_run(file: Path) -> bool:
    """Whether a run that got no further than its beginning left this file."""
    try:
        return {"options", "run", "versions"} <= json.loads(file.read_text(encoding="utf-8")).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _step_shape(options: TrainingOptions, accelerator: Accelerator, context: Context) -> StepShape:
    """The processes of a context compute the same micro-batches."""
    return StepShape(
        options.per_device_train_batch_size,
        options.gradient_accumulation_steps,
        accelerator.process_index // context.size,
        accelerator.num_processes // context.size,
    )


def _open_batches(
    dataset: Dataset | datasets.IterableDataset,
    collator: Collator,
    options: TrainingOptions,
    shape: StepShape,
    saved: dict[str, Any] | None,
) -> EpochBatches | StreamBatches:
    if not isinstance(dataset, datasets.IterableDataset):
        return EpochBatches(dataset, collator, shape, options.seed, options.dataloader_num_workers)
    if options.max_steps <= 0:
        raise ValueError("a stream has no length: give max_steps, the number of optimizer steps")
    place = saved["stream"] if saved else None
    return StreamBatches(dataset, collator, shape, options.seed, options.dataloader_num_workers, place)


def _fingerprint(
    model: PreTrainedModel,
    options: TrainingOptions,
    accelerator: Accelerator,
    dataset: Dataset | datasets.IterableDataset,
    collator: Collator,
) -> dict[str, Any]:
    """What decides the course of the run, flat, as JSON gives it back."""
    stream = isinstance(dataset, datasets.IterableDataset)
    rows: Any = list(cast(datasets.IterableDataset, dataset).take(8)) if stream else dataset
    free = _FREE_OPTIONS | (set() if options.metric_for_best_model else _CHOOSING_OPTIONS)
    trained = {name: list(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}
    entries = {name: value for name, value in asdict(options).items() if name not in free} | {
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "first rows" if stream else "data": fingerprint_rows(rows),
        "dataloader_num_workers": options.dataloader_num_workers if stream else None,
        "model": type(model).__name__,
        "attention kernel": model.config._attn_implementation,
        "trained weights": f"{len(trained)} tensors, {digest_of(trained)}",
    }
    config = {f"config.{key}": value for key, value in model.config.to_dict().items()}
    entries |= {key: value for key, value in config.items() if key.partition(".")[2] not in _FREE_CONFIG}
    if is_dataclass(collator):
        values = {f"collator.{item.name}": getattr(collator, item.name) for item in fields(collator)}
        simple = (bool, int, float, str)
        entries |= {key: value for key, value in values.items() if isinstance(value, simple)}
    return json.loads(json.dumps(entries, default=str))


def _check_same_run(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    different = differences(saved["fingerprint"], now)
    if different:
        raise ValueError(
            f"{path} is of a run that differs from this one:\n  "
            + "\n  ".join(different)
            + "\nresume with the same options and data, or start a new run from its weights"
        )


@dataclass
class _State:
    """What a checkpoint must know beside weights and moments; all of it fits in JSON."""

    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)
    best_step: int | None = None
    evaluations_without_gain: int = 0
    seconds: float = 0.0
    # The step was taken, but the run was stopped before the evaluation and the saving that may follow it.
    cut_short: bool = False


class _Run:
    """The moving parts of a run between its first and its last step."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: TrainingOptions,
        accelerator: Accelerator,
        batches: EpochBatches | StreamBatches,
        fingerprint: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase | None,
        evaluate: Evaluator | None,
        run_config: dict[str, Any],
        context: Context,
        save: bool,
    ) -> None:
        self.options, self.accelerator, self.batches, self.context = options, accelerator, batches, context
        self.saves = save
        self.fingerprint, self.tokenizer, self.evaluate = fingerprint, tokenizer, evaluate
        self.run_config, self.stop, self.has_begun = run_config, StopRequest(), False
        self.opened, self.earlier_seconds = time.perf_counter(), 0.0
        self.saved: Path | None = None  # the checkpoint that has the present weights and moments
        self.objective, self.switch, self.throughput = Objective(model), ConfigSwitch(model), Throughput()
        self.model, self.state, self.folder = model, _State(), Path(options.output_dir)
        epoch_steps = batches.steps_per_epoch or 0
        by_epochs = math.ceil(options.num_train_epochs * epoch_steps)
        self.total_steps = options.max_steps if options.max_steps > 0 else by_epochs

    def open(
        self, resumed_from: Path | None, saved: dict[str, Any] | None, learning_rates: Mapping[str, float] | None
    ) -> None:
        """Prepare model, optimizer and schedule, as they were at the checkpoint if one is given."""
        options = self.options
        if resumed_from:
            checkpoint.load_weights(self.model, resumed_from, self.accelerator)
        betas = (options.adam_beta1, options.adam_beta2)
        raw = build_optimizer(
            self.model,
            options.learning_rate,
            options.weight_decay,
            betas,
            options.adam_epsilon,
            self.accelerator.device,
            learning_rates,
        )
        self.model, self.optimizer = self.accelerator.prepare(self.model, raw)
        self.weights = list(self.model.parameters())
        if resumed_from:
            checkpoint.load_optimizer(self._bare_model(), self.optimizer.optimizer, resumed_from)
        self.scheduler = build_scheduler(
            self.optimizer.optimizer, options.lr_scheduler_type, options.warmup_steps, self.total_steps
        )
        if saved:
            self.state, self.saved = _State(**saved["run"]), resumed_from
            self.earlier_seconds = self.state.seconds
            self._set_schedule(saved["schedule"])

    def train(self, with_code: bool) -> TrainingResult:
        """Run to the last step or until patience ends, and save the final model."""
        self.model.train()
        try:
            with stopping_after_the_step() as self.stop:
                with self.switch.on(), self._progress() as progress:
                    self._take_steps(progress)
                self._begin()
                result = self._finish(with_code)
                if number := self._asked_to_stop():
                    where = f"the model is saved in {self.folder}, without its scores{self._way_on()}"
                    raise Stopped(number, where if self.saves else "")
                return result
        finally:
            for tracker in self.accelerator.trackers * self.has_begun:
                tracker.finish()

    def _take_steps(self, progress: tqdm) -> None:
        if self.state.cut_short:
            self._begin()
            self.state.cut_short = False
            self._evaluate_and_save()
        steps = itertools.islice(self.batches.steps(self.state.step), self.total_steps - self.state.step)
        for micro_batches in itertools.takewhile(lambda _: self._patient(), steps):
            loss, norm, stop = self._step(micro_batches)
            self._begin()
            if self._due(self.options.logging_steps):
                self._log_progress(norm)
            progress.update()
            progress.set_postfix(loss=f"{loss:.4g}", refresh=False)
            if stop:
                self._leave()
            self._evaluate_and_save()

    def _begin(self) -> None:
        """With the first step taken, what the run needs is known to be there: an earlier run may go."""
        if self.has_begun:
            return
        if self.saves and self.accelerator.is_main_process:
            if self.options.overwrite_output_dir and not self.saved:
                checkpoint.remove_checkpoints(self.folder, keep_last=0)
                for log in (self.folder / LOG_FOLDER).glob("events.out.tfevents.*"):
                    log.unlink()
            files.write_json(self.folder / RUN_FILE, self._whole_configuration())
        self.accelerator.init_trackers("", init_kwargs={"tensorboard": {"purge_step": self.state.step + 1}})
        self.has_begun = True

    def _whole_configuration(self) -> dict[str, Any]:
        return {
            "options": asdict(self.options),
            "run": self.run_config,
            "processes": self.accelerator.num_processes,
            "mixed_precision": self.accelerator.mixed_precision,
            "device": str(self.accelerator.device),
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, datasets)},
        }

    def _asked_to_stop(self) -> int:
        """The signal that any process has heard, or 0; every process must ask."""
        return max(gather_object([self.stop.number]))

    def _leave(self) -> NoReturn:
        """Save after the step and before its evaluation, which may be long; the resumed run catches up on it."""
        self.state.cut_short = True
        where = ""
        if self.saves:
            self._save(at_least=1)
            where = f"step {self.state.step} is saved in {self.saved}{self._way_on()}"
        raise Stopped(self._asked_to_stop(), where)

    def _way_on(self) -> str:
        any_saved = checkpoint.list_checkpoints(self.folder)
        return "; go on with --resume_from_checkpoint last" if any_saved else ""

    def _progress(self) -> tqdm:
        hidden = self.options.disable_progress or not self.accelerator.is_main_process
        return progress_bar(self.total_steps, "training", done=self.state.step, hidden=hidden, unit="step")

    def _patient(self) -> bool:
        patience = self.options.early_stopping_patience
        return not patience or self.state.evaluations_without_gain < patience

    def _step(self, micro_batches: list[MicroBatch]) -> tuple[float, float, bool]:
        """One optimizer step: its loss, the mean over all targets, its gradient norm, and whether to stop after it.

        Equal on all processes.
        """
        parts = [replace(batch, inputs=self.context.split(batch.inputs)) for batch in micro_batches]
        counts = [0 if part.filler else self.objective.count(part.inputs) for part in parts]
        total = int(self._sum(torch.tensor(sum(counts))))
        loss = torch.zeros((), device=self.accelerator.device)
        for batch, part, count in zip(micro_batches, parts, counts, strict=True):
            self._meter(batch)
            loss += self._forward_backward(part, count, total)
        norm = self._clip()
        value, signals = self._sum(torch.stack([loss, torch.full_like(loss, self.stop.number)])).tolist()
        if not math.isfinite(value) or not math.isfinite(norm):
            raise NonFiniteLossError(self._divergence(value, norm))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.step += 1
        self.state.losses.append(value)
        return value, norm, signals > 0

    def _forward_backward(self, batch: MicroBatch, count: int, total: int) -> Tensor:
        inputs = dict(send_to_device(batch.inputs, self.accelerator.device))
        seed_all(self.options.seed, "forward", batch.number * self.context.size + self.context.place)
        with nullcontext() if batch.last else self.accelerator.no_sync(self.model):
            share = self.objective.share(self.model, inputs, count, total)
            if batch.filler:
                share = share * 0.0
            # Processes average their gradients; the share is already one of the whole.
            self.accelerator.backward(share * self.accelerator.num_processes)
        return share.detach().float()

    def _meter(self, batch: MicroBatch) -> None:
        ids = batch.inputs.get("input_ids", batch.inputs["labels"])
        mask = batch.inputs.get("attention_mask")
        tokens = ids.numel() if mask is None else int(mask.sum())
        counted = not batch.filler and self.context.place == 0
        self.throughput.add(samples=len(ids) * counted, tokens=tokens * counted)

    def _clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.weights, self.options.max_grad_norm or math.inf)
        return float(cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _sum(self, value: Tensor) -> Tensor:
        return cast(Tensor, self.accelerator.reduce(value.to(self.accelerator.device), "sum"))

    def _divergence(self, loss: float, norm: float) -> str:
        kept = checkpoint.list_checkpoints(self.folder)
        last = f"the last checkpoint is {kept[-1][1]}" if kept else "no checkpoint has been saved yet"
        return (
            f"step {self.state.step + 1}: the loss is {loss} and the gradient norm {norm}; stopped without "
            f"taking the step, {last}. Lower the learning rate, lengthen the warm-up or look at the data"
        )

    def _due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step == self.total_steps

    def _epoch(self) -> float:
        if isinstance(self.batches, StreamBatches):
            return float(self.batches.epoch)
        return self.state.step / self.batches.steps_per_epoch

    def _log_progress(self, norm: float) -> None:
        losses, self.state.losses = self.state.losses, []
        rates = self.throughput.read()
        summed = self._sum(torch.tensor(list(rates.values()))).tolist()
        self._record(
            {
                "loss": sum(losses) / len(losses),
                "grad_norm": norm,
                "learning_rate": float(self.scheduler.get_last_lr()[0]),
                **dict(zip(rates, summed, strict=True)),
            }
        )

    def _record(self, values: dict[str, float]) -> None:
        record = {"step": self.state.step, "epoch": round(self._epoch(), 4), **values}
        self.state.history.append(record)
        self.accelerator.log(values, step=self.state.step)
        if self.accelerator.is_main_process:
            logger.info("%s", record)

    def _evaluate_and_save(self) -> None:
        improved = self._evaluation_due() and self._evaluate()
        save_steps = self.options.save_steps
        if improved or (save_steps and self.state.step % save_steps == 0):
            self._save()

    def _evaluation_due(self) -> bool:
        strategy, steps_per_epoch = self.options.eval_strategy, self.batches.steps_per_epoch
        if self.evaluate is None or strategy == "no":
            return False
        if strategy == "steps":
            return self._due(self.options.eval_steps)
        return self._due(steps_per_epoch or self.total_steps)

    def _evaluate(self) -> bool:
        """Evaluate, and say whether the watched metric is better than ever."""
        assert self.evaluate is not None
        with self.throughput.pause(), evaluating(self.model):
            metrics = self.evaluate(self.model, self.accelerator)
        self.state.metrics = metrics
        self._record(metrics)
        name = self.options.metric_for_best_model
        if name is None:
            return False
        if name not in metrics:
            raise ValueError(f"metric_for_best_model={name!r} is none of the metrics {sorted(metrics)}")
        sign = 1 if self.options.better_is_greater() else -1
        best = self.state.best_metrics.get(name, -sign * math.inf)
        if sign * metrics[name] > sign * best:
            self.state.best_metrics, self.state.best_step = metrics, self.state.step
            self.state.evaluations_without_gain = 0
            return True
        self.state.evaluations_without_gain += 1
        return False

    def _save(self, at_least: int = 0) -> None:
        """Save a checkpoint, or its state alone where the weights are saved already, and delete older ones."""
        self.state.seconds = self._seconds()
        state = {
            "run": asdict(self.state),
            "fingerprint": self.fingerprint,
            "schedule": {"last_epoch": self.scheduler.last_epoch, "_last_lr": self.scheduler.get_last_lr()},
            "stream": self.batches.state(),
        }
        path = self.folder / f"checkpoint-{self.state.step}"
        with self.throughput.pause(), self.switch.as_given():
            if self.saved and self.saved.resolve() == path.resolve():
                checkpoint.replace_state(path, state, self.accelerator)
            else:
                checkpoint.save_checkpoint(
                    path, self.model, self.optimizer.optimizer, self.accelerator, self.tokenizer, state
                )
        self.saved = path
        self._delete_old_checkpoints(at_least)

    def _delete_old_checkpoints(self, at_least: int = 0) -> None:
        if self.accelerator.is_main_process:
            keep = max(at_least, self._to_keep())
            checkpoint.remove_checkpoints(self.folder, keep, self.state.best_step, now=self.state.step)
        self.accelerator.wait_for_everyone()

    def _seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.opened

    def _to_keep(self) -> int:
        return self.options.save_total_limit if self.options.save_steps else 0

    def _set_schedule(self, saved: dict[str, Any]) -> None:
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **saved})
        groups = self.optimizer.optimizer.param_groups
        for group, rate in zip(groups, saved["_last_lr"], strict=True):
            group["lr"] = rate

    def _bare_model(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def _finish(self, with_code: bool) -> TrainingResult:
        state, name = self.state, self.options.metric_for_best_model
        if state.best_step is not None:
            best = self.folder / f"checkpoint-{state.best_step}"
            checkpoint.load_weights(self.model, best, self.accelerator)
        if self.saves:
            self._save_final(with_code)
        # Accelerate wraps forward for mixed precision; the caller gets its own model back.
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.accelerator.free_memory()
        return TrainingResult(
            global_step=state.step,
            epoch=self._epoch(),
            metrics=state.best_metrics or state.metrics,
            best_metric=state.best_metrics.get(name) if name else None,
            best_step=state.best_step,
            stopped_early=not self._patient(),
            seconds=round(self._seconds(), 2),
            history=state.history,
        )

    def _save_final(self, with_code: bool) -> None:
        checkpoint.save_final(self.folder, self.model, self.accelerator, self.tokenizer)
        if with_code and self.accelerator.is_main_process:
            export_code(self._bare_model(), self.folder)
        self._delete_old_checkpoints()
