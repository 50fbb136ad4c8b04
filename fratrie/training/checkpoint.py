"""Checkpoints that are complete or absent, without pickle.

A checkpoint `checkpoint-<step>` is a Hugging Face model folder with the tokenizer and two more files:
`optimizer.safetensors` (moments by weight name) and `trainer_state.json` (everything else, and a checksum of each
tensor and of itself). What has been changed since, by a disk or by hand, is refused with its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import files
from ..checkpoints import check_kinds
from ..quiet import without_bars
from .fingerprint import digest_of

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")
_CHECKSUM = "checksum"


class EarlierVersionError(ValueError):
    """The checkpoint is of a version that kept no checksums."""


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints below `output_dir`, oldest first."""
    found = [(match, path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found if (path / STATE_FILE).is_file())


def remove_checkpoints(output_dir: Path, keep_last: int, keep_step: int | None = None, now: int | None = None) -> None:
    """Delete all checkpoints except the newest ones and one more.

    Args:
        output_dir: of the run.
        keep_last: how many of the newest are kept.
        keep_step: the step of the one more, such as the best one.
        now: the step of the run. Checkpoints of later steps, which it left by resuming from an older one, are deleted
            first.
    """
    checkpoints = list_checkpoints(output_dir)
    behind = [step for step, _ in checkpoints if now is None or step <= now]
    kept = {keep_step, *behind[max(0, len(behind) - keep_last) :]}
    for step, path in reversed(checkpoints):
        if step not in kept:
            files.remove_folder(path)


def check_folder(output_dir: Path, earlier_versions: bool = False) -> None:
    """Check that whatever is named like a checkpoint is the complete state of a run in this folder.

    Anything else belongs to somebody, or is damaged, and must not be overwritten.

    Args:
        output_dir: of the run.
        earlier_versions: accept checkpoints of earlier versions, because they are about to be deleted.

    Raises:
        ValueError: names the folder that is not.
    """
    for path in sorted(output_dir.glob("checkpoint-*")):
        if _NAME.fullmatch(path.name):
            with suppress(*[EarlierVersionError] * earlier_versions):
                load_state(path)


def find_checkpoint(output_dir: Path, name: str) -> Path:
    """The folder of checkpoint `name`: a path, or `last` for the newest one below `output_dir`.

    If the newest one is damaged, no older one is taken instead: hours of work may lie between them.

    Raises:
        ValueError: there is no complete checkpoint.
        OSError: something in it is not a regular file.
    """
    path = Path(name)
    if name == "last":
        checkpoints = list_checkpoints(output_dir)
        if not checkpoints:
            raise ValueError(f"{output_dir} holds no checkpoint to resume from; start without resuming")
        path = checkpoints[-1][1]
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}: give a path, as {output_dir / path.name}, or last")
    missing = [file for file in (STATE_FILE, OPTIMIZER_FILE, "config.json") if not (path / file).is_file()]
    if missing:
        raise ValueError(f"{path} is no checkpoint to resume from: it lacks {', '.join(missing)}; {_way_out(path)}")
    check_kinds(path)
    return path


def _way_out(path: Path) -> str:
    return f"move {path} away, then go on from another checkpoint or start anew"


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Any],
) -> None:
    """Write the checkpoint folder `path`; every process must call it, the main one writes.

    Args:
        path: the folder, `checkpoint-<step>`.
        model, optimizer: the prepared ones.
        accelerator: of the run.
        tokenizer: saved with the model.
        state: everything else, in what JSON can hold.
    """
    weights = accelerator.get_state_dict(model)
    unwrapped = cast(PreTrainedModel, accelerator.unwrap_model(model))
    moments = optimizer_tensors(unwrapped, optimizer)
    if accelerator.is_main_process:
        with files.new_folder(path, whole=True) as folder:
            write_model(folder, unwrapped, weights, tokenizer)
            save_file(moments, folder / OPTIMIZER_FILE)
            checksums = {file.name: tensor_checksums(file) for file in sorted(folder.glob("*.safetensors"))}
            _write_state(folder, state | {"tensors": checksums})
    accelerator.wait_for_everyone()


def replace_state(path: Path, state: dict[str, Any], accelerator: Accelerator) -> None:
    """Write another state into the checkpoint folder `path`, whose tensors stay; every process must call it."""
    if accelerator.is_main_process:
        _write_state(path, state | {"tensors": load_state(path)["tensors"]})
    accelerator.wait_for_everyone()


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    as_read = json.loads(json.dumps(state))
    files.write_json(folder / STATE_FILE, as_read | {_CHECKSUM: digest_of(as_read)})


def tensor_checksums(file: Path) -> dict[str, str]:
    """A digest of type, shape and bytes of each tensor in a safetensors file, by name.

    Raises:
        SafetensorError: the file is damaged.
    """
    sums = {}
    with safe_open(file, "pt") as opened:
        for name in sorted(opened.keys()):
            tensor = opened.get_tensor(name)
            digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
            sums[name] = digest.hexdigest()[:32]
    return sums


def check_tensors(path: Path, checksums: dict[str, dict[str, str]]) -> None:
    """Check that the tensors of a checkpoint are as they were saved.

    Raises:
        ValueError: names the first file and tensor that are not.
    """
    for name, saved in checksums.items():
        file = path / name
        try:
            found = tensor_checksums(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged ({error}): {_way_out(path)}") from error
        for tensor in sorted(saved.keys() | found.keys()):
            if tensor not in found:
                raise ValueError(f"{file} is damaged: it lacks the tensor {tensor}; {_way_out(path)}")
            if found[tensor] != saved.get(tensor):
                raise ValueError(f"{file} is damaged: the tensor {tensor} is not as it was saved; {_way_out(path)}")


def save_final(
    output_dir: Path, model: nn.Module, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write the trained model into `output_dir` itself, replacing an older one; every process must call it."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        with files.new_folder(output_dir) as folder:
            write_model(folder, cast(PreTrainedModel, accelerator.unwrap_model(model)), weights, tokenizer)
    accelerator.wait_for_everyone()


def write_model(
    folder: Path,
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write the Hugging Face folder of `model` with `weights` and its tokenizer."""
    with without_bars():
        model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_state(path: Path) -> dict[str, Any]:
    """The `state` that `save_checkpoint` was given, with the checksums of its `tensors`.

    Raises:
        EarlierVersionError: a checkpoint of ours without checksums.
        ValueError: a folder without a state, a damaged one, one of another trainer, or a copy under another name.
    """
    file = path / STATE_FILE
    if not file.is_file():
        raise ValueError(f"{path} is no checkpoint of a run: it lacks {STATE_FILE}; {_way_out(path)}")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): {_way_out(path)}") from error
    known = state if isinstance(state, dict) else {}
    if "log_history" in known:
        raise ValueError(f"{path} is a checkpoint of another trainer, such as transformers.Trainer: {_way_out(path)}")
    if _CHECKSUM not in known and "fingerprint" in known:
        raise EarlierVersionError(
            f"{path} is of an earlier version of fratrie, which kept no checksums: go on from its weights by --model "
            f"{path} in another output_dir, or start anew with --overwrite_output_dir"
        )
    if known.pop(_CHECKSUM, None) != digest_of(known):
        raise ValueError(f"{file} is damaged: it is not as it was saved; {_way_out(path)}")
    if path.name != (name := f"checkpoint-{known['run']['step']}"):
        raise ValueError(f"{path} is a copy of {name} under another name: {_way_out(path)}")
    return known


def load_weights(model: nn.Module, path: Path, accelerator: Accelerator) -> None:
    """Put the weights of the model folder `path` into `model`, prepared or not.

    Raises:
        ValueError: they do not fit.
    """
    unwrapped = cast(PreTrainedModel, accelerator.unwrap_model(model))
    try:
        with without_bars():
            loaded, found = cast(Any, type(unwrapped)).from_pretrained(
                path, dtype=unwrapped.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        if found["missing_keys"]:
            raise ValueError(f"the weights of {path} lack {sorted(found['missing_keys'])}; use another checkpoint")
        # Full tensors fill the shards of FSDP2 as well as a plain module.
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
    """Restore what `optimizer_tensors` gathered.

    Raises:
        ValueError: it does not fit `model`.
    """
    try:
        tensors = load_file(path / OPTIMIZER_FILE)
    except SafetensorError as error:
        raise ValueError(f"{path / OPTIMIZER_FILE} is damaged ({error}); use another checkpoint") from error
    weights = dict(model.named_parameters())
    kinds = {name.rsplit("/", 1)[-1] for name in tensors}
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        weight_name, key = name.rsplit("/", 1)
        if weight_name not in weights:
            raise ValueError(f"{path / OPTIMIZER_FILE} holds {weight_name}, which the model does not have")
        weight = weights[weight_name]
        if key != "step" and (value.shape != weight.shape or value.dtype != weight.dtype):
            raise ValueError(
                f"{path / OPTIMIZER_FILE}: {name} is {_describe(value)}, but the weight {_describe(weight)}; "
                "use another checkpoint"
            )
        if lacking := [kind for kind in kinds if f"{weight_name}/{kind}" not in tensors]:
            raise ValueError(f"{path / OPTIMIZER_FILE} lacks {weight_name}/{lacking[0]}; use another checkpoint")
        states.setdefault(weight, {})[key] = _sharded_like(value, weight) if value.ndim else value
    ordered = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbered = {index: states[weight] for index, weight in enumerate(ordered) if weight in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sharded_like(value: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, DTensor):
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
    return value
