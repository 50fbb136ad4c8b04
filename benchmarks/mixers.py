"""Every mixer beside softmax attention (SDPA) of the same direction, in one layer, at growing lengths of one text.

`python -m benchmarks.mixers` prints the times in milliseconds, two ratios and the slope of the cost in the length, and
writes them to `benchmarks/MIXERS.md` with a plot. Times, slopes and the first ratio are those of the layer, its
projections included. The second ratio is that of the mixing alone: of both layers, what is left without the time that
their linear maps (`nn.Linear`) take by themselves in the same run. Mixers that recur step by step have no such maps.

One thread by default; run it on a quiet machine. All mixers of a direction take turns, so that a drift of the
machine's speed touches all alike.
"""

import math
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
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
# Passes with gradients go up to here.
LONGEST_BACKWARD = 8192
# The slope is taken from here up: below it, fixed costs hide how the cost grows.
LONG = 2048
# What is left of a layer without its linear maps says nothing below this share of its time.
_NOISE = 0.2


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
    """Of one mixer in one direction, by length: seconds of its layer and of the mixing alone, bytes at the peak."""

    name: str
    seconds: dict[int, float] = field(default_factory=dict)
    mixing: dict[int, float] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    softmax: "Measured | None" = None

    def ratio(self, length: int) -> float:
        """How many times as fast as a layer of softmax attention."""
        return (self.softmax or self).seconds[length] / self.seconds[length]

    def mixing_ratio(self, length: int) -> str:
        """The same of the mixing alone, where it takes more time than noise could be."""
        if self.mixing[length] < _NOISE * self.seconds[length]:
            return "–"
        return f"{(self.softmax or self).mixing[length] / self.mixing[length]:.1f}"

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
    softmax = Measured("softmax")
    found = {name: Measured(name, softmax=softmax) for name in names if runs(name, is_causal)} | {"softmax": softmax}
    for length in (n for n in options.lengths if n <= LONGEST_BACKWARD or not backward):
        fitting = [name for name in found if length <= LONGEST.get(name, length)]
        work: dict[tuple[str, str], Callable[[], None]] = {}
        for name in fitting:
            model = stack(name, is_causal, length)
            states = torch.randn(1, length, model.config.hidden_size, device=device())
            work[name, "layer"] = partial(run, model, states, backward)
            work[name, "maps"] = partial(run_maps, linear_maps(model, states), backward)
        seconds = times(work, options.rounds)
        for name, each in ((name, found[name]) for name in fitting):
            each.seconds[length] = seconds[name, "layer"]
            each.mixing[length] = seconds[name, "layer"] - seconds[name, "maps"]
            each.memory[length] = peak_memory(work[name, "layer"])
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


def run(model: FratrieStack, states: torch.Tensor, backward: bool) -> None:
    """One pass of one text `(1, T, D)` through the mixer, the masks that it needs included."""
    layout = Rows(shape=(1, states.shape[1]), given=GivenMask.read(None))
    with torch.set_grad_enabled(backward):
        model.complete(layout, states, None)
        mixed, _ = model.layers[0].mixer(states, layout)
    if backward:
        mixed.sum().backward()
        model.zero_grad()


def linear_maps(model: FratrieStack, states: torch.Tensor) -> list[tuple[nn.Linear, torch.Tensor]]:
    """The linear maps of the mixer, each with what it reads in a pass of this text."""
    maps: list[tuple[nn.Linear, torch.Tensor]] = []
    layers = [layer for layer in model.layers[0].mixer.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(lambda layer, args, _: maps.append((layer, args[0]))) for layer in layers]
    run(model, states, backward=False)
    for hook in hooks:
        hook.remove()
    return maps


def run_maps(maps: list[tuple[nn.Linear, torch.Tensor]], backward: bool) -> None:
    """One pass of what each linear map reads through it alone."""
    for layer, x in maps:
        with torch.set_grad_enabled(backward):
            mapped = layer(x.detach().requires_grad_(backward))
        if backward:
            mapped.backward(torch.ones_like(mapped))
            layer.zero_grad()


def table(results: list[Measured], lengths: list[int]) -> str:
    """Rows in Markdown: milliseconds and ratios by length, slope, memory at the longest."""
    by_length = (f"{n:,}: ms (×; mixing ×)" for n in lengths)
    lines = [["mixer", *by_length, f"slope from {LONG:,}", "memory at the longest"]]
    lines.append(["---"] * len(lines[0]))
    for found in results:
        ratios = {n: f"{found.ratio(n):.1f}; {found.mixing_ratio(n)}" for n in found.seconds}
        measured = [f"{1e3 * found.seconds[n]:.0f} ({ratios[n]})" for n in ratios]
        cells = measured + ["–"] * (len(lengths) - len(measured))
        slope = f"{found.slope():.2f}" if sum(n >= LONG for n in found.seconds) > 1 else "–"
        lines.append([f"`{found.name}`", *cells, slope, f"{found.memory[max(found.memory)] / 2**20:.0f} MiB"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(results: Mapping[str, list[Measured]], file: Path) -> None:
    """Times as fast as a layer of softmax attention, by length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * math.ceil(len(results) / 2), 9), layout="constrained")
    panels = figure.subplots(2, math.ceil(len(results) / 2), squeeze=False).T.flat
    colours = {name: index for index, name in enumerate(NAMES)}
    for axes, (title, measured) in zip(panels, results.items(), strict=False):
        for found in measured:
            lengths, colour = list(found.seconds), colours[found.name]
            style = {"color": f"C{colour % 10}", "linestyle": "-" if colour < 10 else "--", "marker": "."}
            axes.loglog(lengths, [found.ratio(n) for n in lengths], label=found.name, **style)
        axes.set(title=title, xlabel="tokens", ylabel="times as fast as a layer of softmax")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(file)


if __name__ == "__main__":
    main()
