"""Every mixer beside softmax attention (SDPA) in one layer, projections included, at growing lengths of one text.

`python -m benchmarks.mixers` prints the times in milliseconds, the ratios and the slope of the cost in the length, and
writes them to `benchmarks/MIXERS.md` with a plot. One thread by default; run it on a quiet machine. All mixers of a
direction take turns, so that a drift of the machine's speed touches all alike.
"""

import math
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
# What a mixer has beyond its name: sizes that the papers use.
FIELDS: dict[str, dict[str, Any]] = {
    "softmax, window": {"layer_types": ["sliding_attention"], "mixer_types": ["softmax"], "sliding_window": 256},
    "latent": {"kv_lora_rank": 64},
    "longformer": {"sliding_window": 256},
    "linformer": {"linformer_rank": 256},
}
# Texts that a machine of 24 GB has room for, where memory grows with the square.
LONGEST = {"adaptive_span": 4096}
# In the order of the table.
NAMES = ("softmax", "softmax, window", *(name for name in MIXERS if name != "softmax"))
# The slope is taken from here up: below it, fixed costs hide how the cost grows.
LONG = 2048


@dataclass
class Options:
    """What to measure."""

    mixers: list[str] = field(
        default_factory=list, metadata={"help": "Names in mixer_types, or «softmax, window»; by default all."}
    )
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
    """Of one mixer in one direction, by length: seconds, those of softmax attention, and bytes at the peak."""

    name: str
    is_causal: bool
    seconds: dict[int, float] = field(default_factory=dict)
    of_softmax: dict[int, float] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)

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
    if unknown := sorted(set(options.mixers) - set(NAMES)):
        raise SystemExit(f"error: --mixers {' '.join(unknown)}: there are {', '.join(NAMES)}")
    torch.set_num_threads(options.threads)
    parts = ["# Mixers beside softmax attention\n", str(__doc__).strip() + "\n", "\n".join(machine.describe()) + "\n"]
    print(*parts, sep="\n", flush=True)
    results = {}
    for passes in ("Forward", "Forward and backward")[: 1 + options.backward]:
        for is_causal in (False, True):
            title = f"{passes}, {'causal' if is_causal else 'bidirectional'}"
            results[title] = in_new_process(options, is_causal, passes != "Forward")
            parts.append(f"## {title}\n\n{table(results[title], options.lengths)}")
            print(parts[-1], flush=True)
    if options.output_file or not options.mixers:
        target = Path(options.output_file or RESULTS)
        target.write_text("\n".join([*parts, f"![Times as fast as softmax attention]({PLOT.name})\n"]), "utf-8")
        draw(results, target.with_name(PLOT.name))


def in_new_process(options: Options, is_causal: bool, backward: bool) -> list[Measured]:
    """What `measure` returns, where no other has left its caches and its memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, options, is_causal, backward).result()


def measure(options: Options, is_causal: bool, backward: bool) -> list[Measured]:
    """Time the mixers that run in one direction at every length, forward or forward and backward."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    names = [name for name in NAMES if name == "softmax" or name in (options.mixers or NAMES)]
    found = {name: Measured(name, is_causal) for name in names if runs(name, is_causal)}
    for length in options.lengths:
        fitting = [name for name in found if length <= LONGEST.get(name, length)]
        work = {name: partial(run, stack(name, is_causal, length), length, backward) for name in fitting}
        seconds = times(work, options.rounds)
        for name, each in ((name, found[name]) for name in fitting):
            each.seconds[length], each.of_softmax[length] = seconds[name], seconds["softmax"]
            each.memory[length] = peak_memory(work[name])
    return list(found.values())


def runs(name: str, is_causal: bool) -> bool:
    """Whether the mixer runs in this direction."""
    mixer = MIXERS[name.partition(",")[0]]
    return mixer.runs_causal if is_causal else mixer.runs_bidirectional


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
        **{"mixer_types": [name], **FIELDS.get(name, {})},
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
    columns = ["mixer", *(f"{n:,}: ms (×)" for n in lengths), f"slope from {LONG:,}", "memory at the longest"]
    lines = [columns, ["---"] * len(columns)]
    for found in results:
        measured = [f"{1e3 * found.seconds[n]:.0f} ({found.ratio(n):.1f})" for n in found.seconds]
        cells = measured + ["–"] * (len(lengths) - len(measured))
        slope = f"{found.slope():.2f}" if sum(n >= LONG for n in found.seconds) > 1 else "–"
        lines.append([f"`{found.name}`", *cells, slope, f"{found.memory[max(found.memory)] / 2**20:.0f} MiB"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(results: Mapping[str, list[Measured]], file: Path) -> None:
    """Times as fast as softmax attention, by length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * math.ceil(len(results) / 2), 9), layout="constrained")
    panels = figure.subplots(2, math.ceil(len(results) / 2), squeeze=False).T.flat
    colours = {name: index for index, name in enumerate(NAMES)}
    for axes, (title, measured) in zip(panels, results.items(), strict=False):
        for found in measured:
            lengths, colour = list(found.seconds), colours[found.name]
            style = {"color": f"C{colour % 10}", "linestyle": "-" if colour < 10 else "--", "marker": "."}
            axes.loglog(lengths, [found.ratio(n) for n in lengths], label=found.name, **style)
        axes.set(title=title, xlabel="tokens", ylabel="times as fast as softmax attention")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(file)


if __name__ == "__main__":
    main()
