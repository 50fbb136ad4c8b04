"""Checkpoints that are complete or absent, without pickle.

A checkpoint `checkpoint-<step>` is a Hugging Face model folder with the tokenizer and two more files:
`optimizer.safetensors` (moments by weight name) and `trainer_state.json` (everything else).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".incomplete-"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path` that takes its place at the end, or vanishes on an exception."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _flush_to_disk(file)
        if path.exists():
            replaced = path.with_name(f"{_TEMPORARY}replaced-{path.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(path.with_name(f"{_TEMPORARY}replaced-{path.name}"), ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints below `output_dir`, oldest first."""
    found = [(match, path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found if (path / STATE_FILE).is_file())


def remove_checkpoints(output_dir: Path, keep_last: int, keep_step: int | None = None) -> None:
    """Delete all checkpoints but the `keep_last` newest and that of `keep_step`, and unfinished ones."""
    checkpoints = list_checkpoints(output_dir)
    for step, path in checkpoints[: max(0, len(checkpoints) - keep_last)]:
        if step != keep_step:
            shutil.rmtree(path)
    for path in output_dir.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def find_checkpoint(output_dir: Path, name: str) -> Path:
    """The folder of checkpoint `name`: a path, or `last` for the newest one below `output_dir`.

    Raises `ValueError` where there is no complete checkpoint.
    """
    if name == "last":
        checkpoints = list_checkpoints(output_dir)
        if not checkpoints:
            raise ValueError(f"{output_dir} holds no checkpoint to resume from; start without resuming")
        return checkpoints[-1][1]
    path = Path(name)
    missing = [file for file in (STATE_FILE, OPTIMIZER_FILE, "config.json") if not (path / file).is_file()]
    if missing:
        raise ValueError(f"{path} is no checkpoint to resume from: it lacks {', '.join(missing)}")
    return path


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Any],
) -> None:
    """Write the checkpoint folder `path`; every process must call it, the main one writes.

    `model` and `optimizer` are the prepared ones; `state` is what JSON can hold.
    """
    weights = accelerator.get_state_dict(model)
    unwrapped = cast(PreTrainedModel, accelerator.unwrap_model(model))
    moments = optimizer_tensors(unwrapped, optimizer)
    if accelerator.is_main_process:
        with atomic_folder(path) as folder:
            write_model(folder, unwrapped, weights, tokenizer)
            save_file(moments, folder / OPTIMIZER_FILE)
            (folder / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    accelerator.wait_for_everyone()


def save_final(
    output_dir: Path, model: nn.Module, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write the trained model into `output_dir` itself; every process must call it."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        with atomic_folder(output_dir / "final") as folder:
            write_model(folder, cast(PreTrainedModel, accelerator.unwrap_model(model)), weights, tokenizer)
        for file in (output_dir / "final").iterdir():
            file.replace(output_dir / file.name)
        (output_dir / "final").rmdir()
    accelerator.wait_for_everyone()


def write_model(
    folder: Path,
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write the Hugging Face folder of `model` with `weights` and its tokenizer."""
    with quiet():
        model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Hugging Face's own progress bars for loading and saving."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def load_state(path: Path) -> dict[str, Any]:
    """The `state` that `save_checkpoint` was given. Raises `ValueError` for a damaged file."""
    try:
        return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path / STATE_FILE} is damaged ({error}); resume from another checkpoint") from error


def load_weights(model: nn.Module, path: Path, accelerator: Accelerator) -> None:
    """Put the weights of the model folder `path` into `model`, prepared or not.

    Raises `ValueError` where they do not fit.
    """
    unwrapped = cast(PreTrainedModel, accelerator.unwrap_model(model))
    try:
        with quiet():
            loaded, found = cast(Any, type(unwrapped)).from_pretrained(
                path, dtype=unwrapped.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        if found["missing_keys"]:
            raise ValueError(f"the weights of {path} lack {sorted(found['missing_keys'])}; use another checkpoint")
        # With full tensors in, the shards of FSDP2 are filled as well as a plain module.
        set_model_state_dict(unwrapped, loaded.state_dict(), options=StateDictOptions(full_state_dict=True))
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights of {path} do not fit the model: {error}") from error


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `{"<weight name>/<state name>": tensor}`, gathered from shards, on the CPU."""
    return {
        f"{name}/{key}": _full(value).cpu().contiguous()
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Restore what `optimizer_tensors` gathered. Raises `ValueError` where it does not fit `model`."""
    try:
        tensors = load_file(path / OPTIMIZER_FILE)
    except SafetensorError as error:
        raise ValueError(f"{path / OPTIMIZER_FILE} is damaged ({error}); use another checkpoint") from error
    weights = dict(model.named_parameters())
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        weight_name, key = name.rsplit("/", 1)
        if weight_name not in weights:
            raise ValueError(f"{path / OPTIMIZER_FILE} holds {weight_name}, which the model does not have")
        weight = weights[weight_name]
        states.setdefault(weight, {})[key] = _sharded_like(value, weight) if value.ndim else value
    ordered = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbered = {index: states[weight] for index, weight in enumerate(ordered) if weight in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sharded_like(value: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, DTensor):
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
    return value


def fingerprint_rows(dataset: Dataset, samples: int = 64) -> str:
    """A digest of the number of rows and of `samples` rows spread evenly, equal for equal data."""
    size = len(cast(Any, dataset))
    digest = hashlib.sha256(str(size).encode())
    for index in sorted({round(place * (size - 1) / (samples - 1)) for place in range(samples)}):
        digest.update(repr(_plain(dataset[index])).encode())
    return digest.hexdigest()[:16]


def _plain(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: _plain(value) for key, value in sorted(row.items())}
    return row.tolist() if hasattr(row, "tolist") else row


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each entry that differs between two runs."""
    return [
        f"{key}: {saved.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]
