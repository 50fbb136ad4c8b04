"""Opening Accelerate and the output folder, and refusing launches that would go wrong silently."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast_object_list,
)

from .. import files
from .options import TrainingOptions

LOG_FOLDER = "logs"
_SUPPORTED = {
    *(DistributedType.NO, DistributedType.FSDP),
    *(DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU),
}
_in_use: set[Path] = set()  # folders that this process has for itself


@contextmanager
def open_run(options: TrainingOptions) -> Iterator[Accelerator]:
    """Accelerate for the whole of a training script, whose output folder no other run can use meanwhile.

    When the script is done, trackers and process group are ended. Folders made for a script that then refuses its
    options or data go again.

    Raises:
        ValueError: as `create_accelerator`.
        OSError: as `create_accelerator`, and `BlockingIOError` as `sole_use`.
    """
    output_dir = Path(options.output_dir)
    with files.unused_folder_goes(output_dir):
        accelerator = create_accelerator(options)
        with sole_use(output_dir, accelerator):
            yield accelerator
            accelerator.end_training()


@contextmanager
def sole_use(output_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Lock `output_dir` for this run, until the context or the main process ends, and sweep out what killed ones left.

    Every process must call it; within itself it does nothing.

    Raises:
        BlockingIOError: another run has it; the same on every process.
    """
    folder = output_dir.resolve()
    if folder in _in_use:
        yield
        return
    with ExitStack() as stack:
        if broadcast_object_list([accelerator.is_main_process and not _lock(folder, stack)])[0]:
            raise BlockingIOError(
                f"another run is writing in {output_dir}: wait for its end or choose another output_dir"
            )
        _in_use.add(folder)
        stack.callback(_in_use.remove, folder)
        yield


def _lock(folder: Path, stack: ExitStack) -> bool:
    try:
        stack.enter_context(files.held(folder))
    except BlockingIOError:
        return False
    files.sweep(folder)
    return True


def create_accelerator(options: TrainingOptions) -> Accelerator:
    """Open Accelerate as `options` and the launcher say; call it once, before loading data and model.

    Raises:
        ValueError: fp16, a compiler of steps, or a launch whose processes would not know of one another.
        OSError: a folder that cannot be written.
    """
    output_dir = Path(options.output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the folder {output_dir} ({error.strerror}); choose another output_dir"
        raise type(error)(reason) from error
    if not os.access(output_dir, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write in {output_dir}; choose another output_dir or change its rights")
    accelerator = Accelerator(
        cpu=_several_on_cpu(),
        mixed_precision=options.mixed_precision,
        # As a plugin: the launcher can override a bare number, and the loss would be divided twice.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=None if options.report_to == "none" else options.report_to,
        project_config=ProjectConfiguration(str(output_dir), logging_dir=str(output_dir / LOG_FOLDER)),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=options.find_unused_parameters)],
    )
    _check_processes(accelerator)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed precision {accelerator.mixed_precision!r} is not supported; use 'bf16' or 'no'")
    compiler = accelerator.state.dynamo_plugin.backend
    if compiler != DynamoBackend.NO:  # its modules have other names, under which no checkpoint is found again
        launched = f"dynamo_backend={compiler.value}"
        raise ValueError(f"the steps of a training are not compiled here: leave out the launcher's {launched}")
    return accelerator


@contextmanager
def open_inference() -> Iterator[Accelerator]:
    """Accelerate without training: the processes that a launcher started, also where there is no GPU."""
    accelerator = Accelerator(cpu=_several_on_cpu())
    log_from_main_process(accelerator)
    yield accelerator
    accelerator.end_training()


def log_from_main_process(accelerator: Accelerator) -> None:
    """Show what this package logs on stderr, once; the records of the loop go to the progress bar and the tracker."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fratrie").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    logging.getLogger("fratrie.training.loop").setLevel(logging.WARNING)


def _several_on_cpu() -> bool:
    """Without GPU, Accelerate joins several processes only if told that they are CPU processes."""
    return _world_size() > 1 and not torch.accelerator.is_available()


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_processes(accelerator: Accelerator) -> None:
    # `accelerate launch` without a distributed backend starts one process for any --num_processes above 1,
    # of which only the rendezvous address remains to be seen.
    swallowed = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if accelerator.num_processes != _world_size() or (swallowed and "WORLD_SIZE" not in os.environ):
        raise ValueError(
            f"several processes were asked for, but this one is process 1 of {accelerator.num_processes} and "
            "would train alone. Launch several processes with `accelerate launch --multi_gpu --num_processes N`, "
            "also on the CPU (there `--cpu` and MULTI_CPU start only one)"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not accelerator.is_fsdp2:
        raise ValueError(
            f"FSDP was asked for, but Accelerate runs {accelerator.distributed_type.value} on {accelerator.device}: "
            "FSDP needs GPUs and fsdp_version 2; on the CPU launch with --multi_gpu alone"
        )
    if accelerator.distributed_type not in _SUPPORTED:
        raise ValueError(f"{accelerator.distributed_type.value} is not supported; use DDP or FSDP2")
