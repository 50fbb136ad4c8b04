"""The figures of a report as SVG: text stays text, and the same results give the same bytes.

Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart; marks and lines differ as well.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..names import method_name, shortened
from .tables import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fratrie",
    "text.parse_math": False,  # a dollar sign in a label is one
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
_WIDTH = 7.0  # inches: what A4 leaves between the margins
# Fine-tuning is blue and round, what it is compared with orange or green.
_SERIES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": ":"},
    {"color": "#CC79A7", "marker": "D", "linestyle": "-."},
    {"color": "#000000", "marker": "v", "linestyle": (0, (5, 1))},
)
_TAG, _ID = re.compile("<[^>]*>"), re.compile(r'(\bid="|href="#|url\(#)')
_MOST_WRITTEN = 15  # labels, beyond which the cells of the heat map are too small for their numbers


Made = tuple["Figure", str, str]  # with its caption and description


@dataclass(frozen=True)
class Drawing:
    """A figure: the SVG file, what it shows, and in words what there is to see."""

    name: str
    svg: str
    caption: str
    description: str

    def inline(self) -> str:
        """The element `svg` for a page that holds others: its ids begin with the figure's name."""
        element = _TAG.sub(lambda tag: _ID.sub(rf"\1{self.name}-", tag[0]), self.svg[self.svg.index("<svg") :])
        return element.replace("<svg", f'<svg role="img" aria-labelledby="{self.name}-caption"', 1)


def all_figures(results: Results) -> dict[str, Drawing]:
    """Every figure that the results have something for, by name."""
    makers: dict[str, tuple[str, Callable[[Results], Made | None]]] = {
        "f1_by_label": ("finetuned", _f1_by_label),
        "depth": ("search", _depth),
        "reliability": ("calibration", _reliability),
        "learning_curve": ("learning_curve", _learning_curve),
        "confusion": ("errors", _confusion),
    }
    drawn = [_drawn(name, make, results) for name, (key, make) in makers.items() if results[key] is not None]
    return {drawing.name: drawing for drawing in drawn if drawing}


def _drawn(name: str, make: Callable[[Results], Made | None], results: Results) -> Drawing | None:
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's fonts draw the text
        made = make(results)
        if made is None:
            return None
        figure, caption, description = made
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Drawing(name, file.getvalue(), caption, description)


def _canvas(height: float) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _f1_by_label(results: Results) -> Made:
    """Marks with their intervals for the fine-tuned model and the classical method of either features."""
    labels = results["data"]["labels"]
    shown = {method_name("finetuned"): results["finetuned"]["test"]} | _best_classical(results["classical"] or {})
    figure, axes = _canvas(1 + 0.1 * len(labels) * (1 + len(shown)))
    for index, (name, scores) in enumerate(shown.items()):
        places = [row + (index - (len(shown) - 1) / 2) * 0.22 for row in range(len(labels))]
        f1 = [scores["f1"][label] for label in labels]
        intervals = scores.get("f1_interval") or {}
        ends = [intervals.get(label) or [scores["f1"][label]] * 2 for label in labels]
        style = {key: _SERIES[index][key] for key in ("color", "marker")}
        axes.hlines(places, [low for low, _ in ends], [high for _, high in ends], colors=style["color"], linewidth=1.2)
        axes.plot(f1, places, linestyle="none", markersize=5, label=name, **style)
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
    axes.set(xlabel="F1 on the test part", xlim=(-0.02, 1.02), ylim=(len(labels) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper left", ncols=len(shown))
    caption = "F1 of each label, with 95 % intervals"
    text = f"Fine-tuning and what cross-validation likes best of the classical methods: {', '.join(list(shown)[1:])}."
    return figure, caption, text if len(shown) > 1 else "Fine-tuning alone."


def _best_classical(classical: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The method that cross-validation likes best, for either features: test has no part in the choice."""
    best: dict[str, tuple[float, str, Any]] = {}
    for method, tried in classical.items():
        for features, found in tried.items():
            score = found["cross_validated_macro_f1"]
            if features not in best or score > best[features][0]:
                best[features] = score, method_name(f"{method} {features}"), found["test"]
    return {name: test for _, name, test in best.values()}


def _depth(results: Results) -> Made | None:
    """All settings as marks, and a line through the best of every depth."""
    tried, chosen = results["search"]["tried"], results["search"]["chosen"]
    best: dict[int, float] = {}
    for each in tried:
        best[each["depth"]] = max(each["cross_validated_macro_f1"], best.get(each["depth"], 0))
    depths = sorted(best)
    if len(depths) < 2:
        return None
    figure, axes = _canvas(2.8)
    points = [(each["depth"], each["cross_validated_macro_f1"]) for each in tried]
    axes.plot(*zip(*points, strict=True), "o", markersize=4, color="#777777", fillstyle="none", label="tried")
    axes.plot(depths, [best[depth] for depth in depths], color=_SERIES[0]["color"], label="best of the depth")
    place = chosen["depth"], best[chosen["depth"]]
    axes.plot(*place, "*", markersize=14, color=_SERIES[1]["color"], label="chosen")
    axes.set_xticks(depths)
    axes.set(xlabel="trainable layers", ylabel="macro-F1, cross-validated")
    figure.legend(loc="outside upper left", ncols=3)
    scores = ", ".join(f"{best[depth]:.3f} with {depth or 'the head alone'}" for depth in depths)
    return figure, "Cross-validated macro-F1 by trainable layers", f"The best macro-F1 of each depth: {scores}."


def _reliability(results: Results) -> Made:
    """Share of true labels against mean probability, over the number of decisions in each bin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH * 0.7, 4.2), layout="constrained")
    axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    axes.plot([0, 1], [0, 1], color="#777777", linewidth=0.8)
    for style, (stage, bins) in zip((_SERIES[1], _SERIES[0]), _filled_bins(results).items(), strict=True):
        confidence, frequency = [b["confidence"] for b in bins], [b["frequency"] for b in bins]
        axes.plot(confidence, frequency, label=f"{stage} calibration", markersize=4, **style)
        middles = [(b["low"] + b["high"]) / 2 for b in bins]
        counts.plot(middles, [b["count"] for b in bins], markersize=4, **style)
    axes.set(ylabel="share that has the label", xlim=(0, 1), ylim=(0, 1))
    counts.set(xlabel="probability", ylabel="count", yscale="log")
    counts.yaxis.set_major_formatter("{x:,.0f}")
    counts.minorticks_off()
    figure.legend(loc="outside upper left", ncols=2)
    ece = results["calibration"]["ece"]
    text = f"The mean expected calibration error is {ece['mean_before']:.3f} before and {ece['mean_after']:.3f} after."
    return figure, "Reliability of the probabilities on test, all labels together", text


def _filled_bins(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    reliability = results["calibration"]["reliability"]
    return {stage: [b for b in reliability[stage] if b["count"]] for stage in ("before", "after")}


def _learning_curve(results: Results) -> Made | None:
    """The mean of the draws as a line, each draw as a mark, and a band from the lowest to the highest."""
    curve = results["learning_curve"]
    sizes = curve["sizes"]
    if len(sizes) < 2:
        return None
    figure, axes = _canvas(3)
    for index, (name, drawn) in enumerate(curve["methods"].items()):
        style = _SERIES[index % len(_SERIES)]
        axes.plot(sizes, [fmean(draws) for draws in drawn], label=method_name(name), markersize=5, **style)
        axes.fill_between(sizes, [*map(min, drawn)], [*map(max, drawn)], color=style["color"], alpha=0.15, linewidth=0)
    axes.set(xscale="log", xlabel="sentences learnt from", ylabel="macro-F1 on test")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    figure.legend(loc="outside upper left", ncols=3)
    ends = ", ".join(
        f"{method_name(name)} from {fmean(drawn[0]):.3f} to {fmean(drawn[-1]):.3f}"
        for name, drawn in curve["methods"].items()
    )
    draws = ": mean, and the band of all draws" if curve["draws"] > 1 else ""
    caption = f"Macro-F1 by number of sentences{draws}"
    return figure, caption, f"From {sizes[0]:,} to {sizes[-1]:,} sentences: {ends}."


def _confusion(results: Results) -> Made | None:
    """A cell for each label missed (row) and label wrongly given (column) in one sentence."""
    found = results["errors"]["confusion"]
    labels, counts = found["labels"], found["missed_given"]
    most = max(map(max, counts))
    if not most:
        return None
    side = 1 + 0.32 * len(labels) if len(labels) <= _MOST_WRITTEN else _WIDTH
    figure, axes = _canvas(min(side, _WIDTH))
    axes.pcolormesh(counts, cmap="Blues", vmin=0, vmax=most, edgecolors="white", linewidth=0.5)
    if len(labels) <= _MOST_WRITTEN:
        _write_counts(axes, counts, most)
    middles = [place + 0.5 for place in range(len(labels))]
    names = [shortened(label) for label in labels]
    axes.set_yticks(middles, names)
    axes.set_xticks(middles, names, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set(xlabel="label wrongly given", ylabel="label missed", aspect="equal")
    axes.invert_yaxis()
    axes.grid(visible=False)
    caption = "Labels missed (rows) and labels wrongly given (columns) in the same sentence"
    return figure, caption, "Darker cells hold more sentences; the largest counts stand in the table below."


def _write_counts(axes: "Axes", counts: Sequence[Sequence[int]], most: int) -> None:
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            if count:
                colour = "white" if count > most / 2 else "black"
                axes.text(column + 0.5, row + 0.5, str(count), color=colour, ha="center", va="center", fontsize=8)
