"""Train the same small decoder with each mixer on the same texts, and compare loss, speed, memory and cache.

Each mixer is trained in a process of its own; its peak memory is what that process needs above what it starts with.
The output folder holds the models, mixers.md and mixers.png. Example:
fratrie compare-mixers --mixers softmax linear retention gru --max_steps 200 --output_dir runs/mixers
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fratrie.files import write_text
from fratrie.training.comparison import ComparisonOptions, Trained, read_corpus, train_with

from .options import read_options
from .running import run


def main() -> None:
    """Train, print a row after each mixer, and write the table and the plot."""
    (options,) = read_options(__doc__, ComparisonOptions)
    head = ("mixer", "weights", "loss", "tokens/s", "peak memory", f"cache of {options.block_size} tokens")
    lines = [_line(head), _line(["---"] * len(head))]
    results = []
    for result in _train_each(options):
        results.append(result)
        lines.append(_line(_cells(result)))
        print("\n".join(lines if len(results) == 1 else lines[-1:]), flush=True)
    folder = Path(options.output_dir)
    write_text(folder / "mixers.md", "\n".join(lines) + "\n")
    _draw(results, folder / "mixers.png")
    print(f"The table and the plot lie in {folder}.")


def _train_each(options: ComparisonOptions) -> Iterator[Trained]:
    corpus = read_corpus(options)
    for mixer in options.mixers:
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool.submit(train_with, mixer, options, corpus).result()


def _cells(result: Trained) -> list[str]:
    return [
        f"`{result.mixer}`",
        f"{result.parameters:,}",
        f"{result.loss:.3f}",
        f"{result.tokens_per_second:,.0f}",
        f"{result.peak_bytes / 2**20:,.0f} MiB",
        f"{result.cache_bytes / 2**10:,.0f} KiB",
    ]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _draw(results: list[Trained], file: Path) -> None:
    """Loss over the steps, and loss against speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    curves, points = figure.subplots(1, 2)
    for index, result in enumerate(results):
        curves.plot(*zip(*result.losses, strict=True), "-" if index < 10 else "--", label=result.mixer)
        points.plot(result.tokens_per_second, result.loss, "o", color=f"C{index % 10}")
        points.annotate(result.mixer, (result.tokens_per_second, result.loss), fontsize="small")
    curves.set(xlabel="step", ylabel="training loss")
    curves.legend(fontsize="small")
    points.set(xlabel="tokens per second in training", ylabel="loss on held-out texts")
    figure.savefig(file)


if __name__ == "__main__":
    run(main)
