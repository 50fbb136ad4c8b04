"""The table of speeds: each row beside Hugging Face's models with the same weights, and beside their best setting.

`python -m benchmarks.all` measures every module of `benchmarks/rows`, each in a process of its own, prints its rows
and at the end writes them to `benchmarks/RESULTS.md`. Run it on a quiet machine. All candidates of a row take turns,
and the ratios are of their median times, so that a drift of the machine's speed touches all alike.
"""

import importlib
import logging
import multiprocessing
import pkgutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import HfArgumentParser

from . import machine, rows, timing
from .timing import Row

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = """# Speed beside Hugging Face

Written by `python -m benchmarks.all`. «Times as fast» is beside Hugging Face as it comes: its time divided by ours,
and by its own at its best setting. All have the same weights; their outputs are compared before their times. «Limit»
is the ratio that ours would reach on this machine if it took no longer than its matrix products (the optimizer: than
moving its bytes), which are timed alone; [LIMITS.md](LIMITS.md) says what the rest is.
"""
COLUMNS = (
    "work",
    "ours: times as fast",
    "Hugging Face's best: times as fast",
    "goal",
    "limit",
    "our time or rate",
    "note",
)


@dataclass
class Options:
    """What to measure and where to write it."""

    rows: list[str] = field(default_factory=list, metadata={"help": "Modules of benchmarks/rows, by default all."})
    rounds: int = field(default=3, metadata={"help": "Measured rounds, after one to warm up."})
    threads: int = field(default=torch.get_num_threads(), metadata={"help": "Threads of an operation."})
    profile: bool = field(
        default=False, metadata={"help": "Print also which operators take the time of each candidate, row by row."}
    )
    output_file: str | None = field(
        default=None, metadata={"help": "Where to write the table; by default RESULTS.md, if all rows are measured."}
    )


def main() -> None:
    """Measure, print and write."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    if unknown := set(options.rows) - set(names()):
        raise SystemExit(f"error: --rows {' '.join(sorted(unknown))}: there are {', '.join(names())}")
    if options.rounds < 1:
        raise SystemExit(f"error: --rounds {options.rounds} must be at least 1")
    torch.set_num_threads(options.threads)
    parts = [HEAD, "\n".join(machine.describe()) + "\n"]
    print(*parts, sep="\n", flush=True)
    for name in options.rows or names():
        parts.append(in_new_process(name, options))
        print(parts[-1], flush=True)
    if options.output_file or not options.rows:
        Path(options.output_file or RESULTS).write_text("\n".join(parts), encoding="utf-8")


def names() -> list[str]:
    """The modules of `benchmarks/rows`."""
    return sorted(module.name for module in pkgutil.iter_modules(rows.__path__))


def in_new_process(name: str, options: Options) -> str:
    """The part of one module, measured where no other has left its caches and its memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(section, name, options).result()


def section(name: str, options: Options) -> str:
    """The part of one module in Markdown: what it is about, and its table."""
    if options.profile:
        logging.basicConfig(format="%(message)s")
        logging.getLogger(timing.__name__).setLevel(logging.INFO)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    module = importlib.import_module(f"{rows.__name__}.{name}")
    return f"## {name}\n{module.__doc__.strip()}\n\n{table(module.measure(options.rounds))}"


def table(measured: Sequence[Row]) -> str:
    """Rows in Markdown."""
    cells = [
        [row.work, *map(_ratio, (row.against_default, row.hf_best, row.goal, row.limit)), row.ours, row.note]
        for row in measured
    ]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
