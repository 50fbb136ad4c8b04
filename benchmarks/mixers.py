"""Every mixer beside softmax attention (SDPA) in one layer, projections included, at growing lengths of one text.

`python -m benchmarks.mixers` prints the times in milliseconds, the ratios and the slope of the cost in the length, and
writes them to `benchmarks/MIXERS.md` with a plot. One thread by default; run it on a quiet machine. Each mixer is
measured in a process of its own, in turns with softmax attention in the same direction, so that a drift of the
machine's speed touches both alike.
"""

import math
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import HfArgumentParser

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling.layout import Rows
from fratrie.modeling.masks import GivenMask
from fratrie.modeling.mixers import MIXERS
from fratrie.modeling.stack import FratrieStack

from . import machine
from .timing import device, peak_memory, times

RESULTS = Path(__file__).with_name("MIXERS.md")
PLOT = Path(__file__).with_name("mixers.svg")
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 256}
# What a mixer needs beyond its name, and the sizes that the table is about.
FIELDS: dict[str, dict[str, object]] = {"latent": {"kv_lora_rank": 64}}
# The slope is taken from here up: below it, fixed costs hide how the cost grows.
LONG = 2048


@dataclass
class Options:
    """What to measure."""

    mixers: list[str] = field(default_factory=list, metadata={"help": "Names in mixer_types, by default all."})
    lengths: list[int] = field(
        default_factory=lambda: [1024, 2048, 4096, 8192, 16384], metadata={"help": "Tokens of the text."}
    )
    backward: bool = field(default=True, metadata={"help": "Measure forward + backward passes as well."})
    rounds: int = field(default=3, metadata={"help": "Measured rounds, after one to warm up."})
    threads: int = field(default=1, metadata={"help": "Threads of an operation."})
    output_file: str | None = field(
        default=None, metadata={"help": "Where to write; by default MIXERS.md, if all mixers are measured."}
    )


@dataclass(frozen=True)
class Measured:
    """Of one mixer, by length: seconds of its layer and of softmax attention's, and the peak of memory in bytes."""

    name: str
    is_causal: bool
    seconds: dict[int, float]
    of_softmax: dict[int, float]
    memory: dict[int, int]

    def ratio(self, length: int) -> float:
        """How many times as fast as softmax attention."""
        return self.of_softmax[length] / self.seconds[length]

    def slope(self) -> float:
        """Growth of the cost in the length: 1 for a cost that grows with the length, 2 with its square."""
        first, last = (bound(n for n in self.seconds if n >= LONG) for bound in (min, max))
        return math.log(self.seconds[last] / self.seconds[first]) / math.log(last / first)


def main() -> None:
    """Measure, print, write and draw."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    if unknown := sorted(set(options.mixers) - MIXERS.keys()):
        raise SystemExit(f"error: --mixers {' '.join(unknown)}: there are {', '.join(MIXERS)}")
    torch.set_num_threads(options.threads)
    parts = ["# Mixers beside softmax attention\n", str(__doc__).strip() + "\n", "\n".join(machine.describe()) + "\n"]
    print(*parts, sep="\n", flush=True)
    results = {}
    for backward in (False, True)[: 1 + options.backward]:
        title = "Forward and backward" if backward else "Forward"
        results[title] = [in_new_process(measure, name, options, backward) for name in options.mixers or MIXERS]
        parts.append(f"## {title}\n\n{table(results[title], options.lengths)}")
        print(parts[-1], flush=True)
    if options.output_file or not options.mixers:
        target = Path(options.output_file or RESULTS)
        target.write_text("\n".join([*parts, f"![Times as fast as softmax attention]({PLOT.name})\n"]), "utf-8")
        draw(results, target.with_name(PLOT.name))


def in_new_process(work: Callable[..., Measured], *arguments: object) -> Measured:
    """What one call returns, where no other has left its caches and its memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure(name: str, options: Options, backward: bool) -> Measured:
    """Time one mixer at every length, forward or forward and backward."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    is_causal = MIXERS[name].runs_causal
    found = Measured(name, is_causal, {}, {}, {})
    for length in options.lengths:
        stacks = {kind: stack(kind, is_causal, length) for kind in dict.fromkeys(("softmax", name))}
        work = {kind: partial(run, model, length, backward) for kind, model in stacks.items()}
        seconds = times(work, options.rounds)
        found.seconds[length], found.of_softmax[length] = seconds[name], seconds["softmax"]
        found.memory[length] = peak_memory(work[name])
    return found


def stack(name: str, is_causal: bool, length: int) -> FratrieStack:
    """A stack of one layer with this mixer, without positions."""
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if is_causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    config = config_class(
        **SIZES,
        num_hidden_layers=1,
        position_type="none",
        max_position_embeddings=length,
        mixer_types=[name],
        **FIELDS.get(name, {}),
        **({"use_cache": False} if is_causal else {}),
    )
    return model_class(config).to(device()).eval()


def run(model: FratrieStack, length: int, backward: bool) -> None:
    """One pass of one text through the mixer, the masks that it needs included."""
    states = torch.randn(1, length, model.config.hidden_size, device=device())
    layout = Rows(shape=(1, length), given=GivenMask.read(None))
    with torch.set_grad_enabled(backward):
        model.complete(layout, states, None)
        mixed, _ = model.layers[0].mixer(states, layout)
    if backward:
        mixed.sum().backward()
        model.zero_grad()


def table(results: list[Measured], lengths: list[int]) -> str:
    """Rows in Markdown: milliseconds, times as fast as softmax, slope, memory at the longest."""
    columns = ["mixer", "stack", *(f"{n:,}: ms (×)" for n in lengths), "slope", f"memory at {lengths[-1]:,}"]
    lines = [columns, ["---"] * len(columns)]
    for found in results:
        cells = [f"{1e3 * found.seconds[n]:.0f} ({found.ratio(n):.1f})" for n in lengths]
        slope = f"{found.slope():.2f}" if sum(n >= LONG for n in lengths) > 1 else "–"
        stack = "causal" if found.is_causal else "bidirectional"
        lines.append([f"`{found.name}`", stack, *cells, slope, f"{found.memory[lengths[-1]] / 2**20:.0f} MiB"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(results: Mapping[str, list[Measured]], file: Path) -> None:
    """Times as fast as softmax attention, by length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(results), 5), layout="constrained")
    for axes, (title, measured) in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True
    ):
        for index, found in enumerate(measured):
            lengths = list(found.seconds)
            style = "-" if index < 10 else "--"
            axes.loglog(lengths, [found.ratio(n) for n in lengths], style, marker=".", label=found.name)
        axes.set(title=title, xlabel="tokens", ylabel="times as fast as softmax attention")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file)


if __name__ == "__main__":
    main()
