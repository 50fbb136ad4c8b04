"""The training loop over Accelerate: one exact loss whatever the batching, exact resume, best checkpoint.

Of the balancing loss of experts alone the batching changes a little (see `objective`).

`train` runs on any Hugging Face model that returns a loss; `TrainingOptions` are the options that every
training script shares, and `create_accelerator` opens the processes and trackers.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import checkpoint
from .batches import Collator, EpochBatches, MicroBatch, StepShape, StreamBatches, seed_all
from .evaluation import CacheSwitch, evaluating
from .launch import LOG_FOLDER, create_accelerator
from .objective import Objective
from .options import TrainingOptions
from .schedules import build_optimizer, build_scheduler
from .tracking import Throughput

__all__ = [
    "Evaluator",
    "NonFiniteLossError",
    "TrainingOptions",
    "TrainingResult",
    "create_accelerator",
    "train",
]

logger = logging.getLogger(__name__)

RUN_FILE = "run_config.json"
Evaluator = Callable[[PreTrainedModel, Accelerator], dict[str, float]]

# Options that a resumed run may change: they decide what is shown and kept, not how the weights go on.
_FREE_OPTIONS = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"),
    *("eval_strategy", "eval_steps", "per_device_eval_batch_size", "early_stopping_patience"),
    *("logging_steps", "report_to", "disable_progress", "dataloader_num_workers", "find_unused_parameters"),
    "export_code",
}
# Entries of a config that Hugging Face fills in when it saves or loads.
_FREE_CONFIG = {
    *("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache"),
}


@dataclass
class TrainingResult:
    """What a run leaves behind: the last step, the metrics of the kept model and every log record."""

    global_step: int
    epoch: float
    metrics: dict[str, float]
    best_metric: float | None = None
    best_step: int | None = None
    stopped_early: bool = False
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
) -> TrainingResult:
    """Train `model` in place and save it, with its tokenizer, in `options.output_dir`.

    The loss of a step is the sum over its real targets divided by their global count. Labels of -100 are no
    targets; labels without -100 (classes, multi-label rows, values) count each element.

    Args:
        model: any Hugging Face model whose forward returns a loss.
        options: of the run.
        accelerator: from `create_accelerator`; call its `end_training()` when the script is done.
        train_dataset: rows (dictionaries) for `collator`; a `datasets.IterableDataset` needs `max_steps`.
        collator: makes the batch of tensors with a `labels` entry. It may draw from torch's, numpy's and
            Python's global generators: they are seeded for each micro-batch from its number in the run.
        evaluate: called as `evaluate(model, accelerator)` on every process, in evaluation mode without
            gradients; must return the same metrics on each. `fratrie.training.evaluation` has the parts.
        tokenizer: saved with each checkpoint.
        run_config: everything else worth keeping (data files, model options), written with `options` to
            `run_config.json`.
        learning_rates: peak rates by the name of a weight, for those that differ from `options.learning_rate`.

    With `metric_for_best_model` the model ends with the best weights, else with the last.

    Raises:
        ValueError: impossible options, or a checkpoint of a run that differs in what matters.
        NonFiniteLossError: the loss or the gradient became NaN or infinite; the last checkpoint stays.
    """
    if options.eval_strategy != "no" and evaluate is None and options.metric_for_best_model is not None:
        raise ValueError(f"metric_for_best_model={options.metric_for_best_model!r} needs an evaluation")
    resumed_from = _prepare_folder(Path(options.output_dir), options, accelerator)
    shape = StepShape(
        options.per_device_train_batch_size,
        options.gradient_accumulation_steps,
        accelerator.process_index,
        accelerator.num_processes,
    )
    saved = checkpoint.load_state(resumed_from) if resumed_from else None
    batches = _open_batches(train_dataset, collator, shape, options, accelerator, saved)
    fingerprint = _fingerprint(model, options, accelerator, train_dataset, collator)
    if resumed_from and saved:
        _check_same_run(saved["fingerprint"], fingerprint, resumed_from)
    if accelerator.is_main_process:
        _write_run_config(options, accelerator, run_config)
    run = _Run(model, options, accelerator, batches, fingerprint, tokenizer, evaluate)
    run.open(resumed_from, saved, learning_rates)
    return run.train()


def _prepare_folder(output_dir: Path, options: TrainingOptions, accelerator: Accelerator) -> Path | None:
    """Clear what may be cleared and find the checkpoint to resume from, if one is asked for."""
    resumed_from = None
    if options.resume_from_checkpoint is not None:
        resumed_from = checkpoint.find_checkpoint(output_dir, options.resume_from_checkpoint)
        if resumed_from.resolve().parent != output_dir.resolve():
            raise ValueError(f"{resumed_from} lies outside {output_dir}; a run goes on in its own output_dir")
    elif not options.overwrite_output_dir and checkpoint.list_checkpoints(output_dir):
        raise ValueError(
            f"{output_dir} holds checkpoints of an earlier run: go on with --resume_from_checkpoint last, "
            "delete them with --overwrite_output_dir, or choose another output_dir"
        )
    elif not options.overwrite_output_dir and (output_dir / "config.json").exists():
        raise ValueError(
            f"{output_dir} holds a model, which this run would replace: choose another output_dir, or say "
            "--overwrite_output_dir"
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoint.remove_checkpoints(output_dir, keep_last=sys.maxsize if resumed_from else 0)
        if options.overwrite_output_dir and not resumed_from:
            shutil.rmtree(output_dir / LOG_FOLDER, ignore_errors=True)
    accelerator.wait_for_everyone()
    return resumed_from


def _write_run_config(options: TrainingOptions, accelerator: Accelerator, run_config: dict[str, Any] | None) -> None:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, datasets)}
    everything = {
        "options": asdict(options),
        "run": run_config or {},
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "device": str(accelerator.device),
        "versions": versions,
    }
    text = json.dumps(everything, indent=2, ensure_ascii=False, default=str)
    (Path(options.output_dir) / RUN_FILE).write_text(text + "\n", encoding="utf-8")


def _open_batches(
    dataset: Dataset | datasets.IterableDataset,
    collator: Collator,
    shape: StepShape,
    options: TrainingOptions,
    accelerator: Accelerator,
    saved: dict[str, Any] | None,
) -> EpochBatches | StreamBatches:
    if not isinstance(dataset, datasets.IterableDataset):
        return EpochBatches(dataset, collator, shape, options.seed, options.dataloader_num_workers)
    if options.max_steps <= 0:
        raise ValueError("a stream has no length: give max_steps, the number of optimizer steps")
    place = saved["streams"][accelerator.process_index] if saved else None
    return StreamBatches(dataset, collator, shape, options.seed, accelerator, options.dataloader_num_workers, place)


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
    entries = {name: value for name, value in asdict(options).items() if name not in _FREE_OPTIONS} | {
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "data": checkpoint.fingerprint_rows(rows),
        "dataloader_num_workers": options.dataloader_num_workers if stream else None,
        "model": type(model).__name__,
        "trainable weights": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
    }
    config = {f"config.{key}": value for key, value in model.config.to_dict().items()}
    entries |= {key: value for key, value in config.items() if key.partition(".")[2] not in _FREE_CONFIG}
    if is_dataclass(collator):
        values = {f"collator.{item.name}": getattr(collator, item.name) for item in fields(collator)}
        simple = (bool, int, float, str)
        entries |= {key: value for key, value in values.items() if isinstance(value, simple)}
    return json.loads(json.dumps(entries, default=str))


def _check_same_run(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    different = checkpoint.differences(saved, now)
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
    ) -> None:
        self.options, self.accelerator, self.batches = options, accelerator, batches
        self.fingerprint, self.tokenizer, self.evaluate = fingerprint, tokenizer, evaluate
        self.objective, self.cache, self.throughput = Objective(model), CacheSwitch(model), Throughput()
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
        if resumed_from:
            checkpoint.load_optimizer(self._bare_model(), self.optimizer.optimizer, resumed_from)
        self.scheduler = build_scheduler(
            self.optimizer.optimizer, options.lr_scheduler_type, options.warmup_steps, self.total_steps
        )
        if saved:
            self.state = _State(**saved["run"])
            self._set_schedule(saved["schedule"])
        self.accelerator.init_trackers("", init_kwargs={"tensorboard": {"purge_step": self.state.step + 1}})

    def train(self) -> TrainingResult:
        """Run to the last step or until patience ends, and save the final model."""
        steps = itertools.islice(self.batches.steps(self.state.step), self.total_steps - self.state.step)
        self.model.train()
        try:
            with self.cache.off(), self._progress() as progress:
                for micro_batches in itertools.takewhile(lambda _: self._patient(), steps):
                    loss = self._step(micro_batches)
                    progress.update()
                    progress.set_postfix(loss=f"{loss:.4g}", refresh=False)
                    self._after_step()
            return self._finish()
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _progress(self) -> tqdm:
        hidden = self.options.disable_progress or not self.accelerator.is_main_process
        return tqdm(total=self.total_steps, initial=self.state.step, desc="training", disable=hidden)

    def _patient(self) -> bool:
        patience = self.options.early_stopping_patience
        return not patience or self.state.evaluations_without_gain < patience

    def _step(self, micro_batches: list[MicroBatch]) -> float:
        """One optimizer step; returns its loss, the mean over all targets of all processes."""
        counts = [0 if batch.filler else self.objective.count(batch.inputs) for batch in micro_batches]
        total = int(self._sum(torch.tensor(sum(counts))))
        loss = torch.zeros((), device=self.accelerator.device)
        for batch, count in zip(micro_batches, counts, strict=True):
            loss += self._forward_backward(batch, count, total)
        norm = self._clip()
        value = float(self._sum(loss))
        if not math.isfinite(value) or not math.isfinite(norm):
            raise NonFiniteLossError(self._divergence(value, norm))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.step += 1
        self.state.losses.append(value)
        if self._due(self.options.logging_steps):
            self._log_progress(norm)
        return value

    def _forward_backward(self, batch: MicroBatch, count: int, total: int) -> Tensor:
        inputs = dict(send_to_device(batch.inputs, self.accelerator.device))
        self._meter(batch)
        seed_all(self.options.seed, "forward", batch.number)
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
        counted = not batch.filler
        self.throughput.add(samples=len(ids) * counted, tokens=tokens * counted)

    def _clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm or math.inf)
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

    def _after_step(self) -> None:
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

    def _save(self) -> None:
        state = {
            "run": asdict(self.state),
            "fingerprint": self.fingerprint,
            "schedule": {"last_epoch": self.scheduler.last_epoch, "_last_lr": self.scheduler.get_last_lr()},
            "streams": gather_object([self.batches.state()]),
        }
        path = self.folder / f"checkpoint-{self.state.step}"
        with self.throughput.pause(), self.cache.as_given():
            checkpoint.save_checkpoint(
                path, self.model, self.optimizer.optimizer, self.accelerator, self.tokenizer, state
            )
        if self.accelerator.is_main_process:
            checkpoint.remove_checkpoints(self.folder, self._to_keep(), self.state.best_step)
        self.accelerator.wait_for_everyone()

    def _to_keep(self) -> int:
        return self.options.save_total_limit if self.options.save_steps else 0

    def _set_schedule(self, saved: dict[str, Any]) -> None:
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **saved})
        groups = self.optimizer.optimizer.param_groups
        for group, rate in zip(groups, saved["_last_lr"], strict=True):
            group["lr"] = rate

    def _bare_model(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def _finish(self) -> TrainingResult:
        state, name = self.state, self.options.metric_for_best_model
        if state.best_step is not None:
            best = self.folder / f"checkpoint-{state.best_step}"
            checkpoint.load_weights(self.model, best, self.accelerator)
        checkpoint.save_final(self.folder, self.model, self.accelerator, self.tokenizer)
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
            history=state.history,
        )
