"""What a run tells while it goes: throughput, log records, progress bar."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from tqdm.auto import tqdm

_SECONDS_BETWEEN_LINES = 60


def progress_bar(
    total: int | None, description: str, *, done: int = 0, hidden: bool = False, unit: str = "it"
) -> tqdm:
    """A progress bar on stderr; call `update`, and use it as a context.

    Args:
        total: number of units, `None` if unknown.
        description: shown before the bar.
        done: units that were done before.
        hidden: show nothing.
        unit: name of a unit.

    Off a terminal, in a log file, it is one line per minute, and none before the first minute is over.
    """
    common: dict[str, Any] = {"total": total, "desc": description, "initial": done, "disable": hidden, "unit": unit}
    if sys.stderr.isatty():
        return tqdm(**common)
    # With a fixed number of updates between looks at the clock, no thread of tqdm prints in between.
    pace = {"delay": _SECONDS_BETWEEN_LINES, "mininterval": _SECONDS_BETWEEN_LINES, "miniters": 1}
    return _LinesOfProgress(file=sys.stderr, **common, **pace)


def pace_bars_of_datasets() -> None:
    """Slow down the bars of the library `datasets`: off a terminal they would print 20 times per second."""
    import datasets

    if not sys.stderr.isatty():
        datasets.config.PBAR_REFRESH_TIME_INTERVAL = _SECONDS_BETWEEN_LINES


class _LinesOfProgress(tqdm):
    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """Prints each state on a line of its own, where tqdm prints over the one before."""

        def print_line(state: str) -> None:
            file.write(f"{state}\n")
            file.flush()

        return print_line

    def close(self) -> None:
        """End the bar: the lines stand as they are."""
        self.delay = math.inf  # until then tqdm has nothing to finish
        super().close()


@dataclass
class Throughput:
    """Rates since the last reading, by `clock` in seconds."""

    clock: Callable[[], float] = time.perf_counter
    _since: float = field(init=False)
    _counts: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def add(self, **counts: int) -> None:
        """Count what was worked through, by name."""
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def pause(self) -> _Pause:
        """A context whose time does not count (evaluation, saving)."""
        return _Pause(self)

    def read(self) -> dict[str, float]:
        """`{"<name>_per_second": rate}` of everything counted, and start anew."""
        now = self.clock()
        elapsed = max(now - self._since, 1e-9)
        rates = {f"{name}_per_second": count / elapsed for name, count in self._counts.items()}
        self._since, self._counts = now, {}
        return rates


@dataclass
class _Pause:
    meter: Throughput
    _entered: float = 0.0

    def __enter__(self) -> None:
        self._entered = self.meter.clock()

    def __exit__(self, *exception: object) -> None:
        self.meter._since += self.meter.clock() - self._entered
