"""What the rows of the table share: the row, times of candidates that take turns, and the peak of memory."""

import ctypes
import logging
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from .limits import profile

logger = logging.getLogger(__name__)

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Row:
    """One line of the table; ratios above 1 mean less time than Hugging Face's defaults take.

    Attributes:
        work: what was measured, in one phrase.
        against_default: Hugging Face's time as it comes, divided by ours.
        hf_best: Hugging Face's time as it comes, divided by its time at its best setting.
        goal: the least `against_default` that is aimed at.
        ours: our time or rate, with its unit.
        note: what else a reader must know, such as Hugging Face's best setting or a difference of outputs.
        limit: what `against_default` would be if our work were its matrix products alone, or the moving of its bytes.
    """

    work: str
    against_default: float | None
    hf_best: float | None
    goal: float | None
    ours: str
    note: str = ""
    limit: float | None = None


def device() -> torch.device:
    """Where the rows are measured: on the accelerator, or without one on the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    """Wait for the accelerator, which works on after a call has returned."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    synchronise()
    start = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - start


def times(candidates: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """Median seconds of each candidate.

    The candidates take turns, so that a drift of the machine's speed touches all alike: one round to warm up, then
    `rounds` that count. Ratios are to be taken of these medians. Where this module logs, a profile of each follows.
    """
    for work in candidates.values():
        work()
    measured = [{name: seconds(work) for name, work in candidates.items()} for _ in range(rounds)]
    if logger.isEnabledFor(logging.INFO):
        for name, work in candidates.items():
            logger.info("%s\n%s", name, profile(work))
    return {name: statistics.median(each[name] for each in measured) for name in candidates}


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes that one call needs at its peak, beyond what is held before it (on a processor: Linux alone)."""
    synchronise()
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        synchronise()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, but is held for later, would hide a part of the peak
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(entry: str) -> int:
    match = re.search(rf"^{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024
