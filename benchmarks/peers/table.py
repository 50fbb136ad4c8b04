"""The page that `python -m benchmarks.peers` writes: F1 with intervals, and what each tool took."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from fratrie.data.annotation import LABELS
from fratrie.training.bootstrap import bootstrap_f1, percentile_interval
from fratrie.training.metrics import multilabel_scores
from fratrie.training.tasks import targets_of

from .rows import MEASURED, PROBABILITIES, ROWS, Row

HEAD = """# Beside the tools that people would pick instead

Written by `python -m benchmarks.peers`: 1,318 sentences of the family-relations corpus to learn from, 11 labels at
once, scored on the 330 of the test part, whose respondents no model has met. All tools start from the same weights
(multilingual-e5-small, whole vocabulary), take a label at a probability above 0.5, and run alone, once, with the
seed 1, without a network, each in its own virtual environment (`benchmarks/peers/requirements`).
"""
LEGEND = """«Beside ours» is the difference of the macro-F1. Intervals are by bootstrap over the 58 respondents of the
test part, paired for the difference. Minutes are those from the start of the program to the written probabilities,
with imports, training and labelling. Memory is that of the program and what it starts, at its most. Lines are those of
code in the program that a user writes (`benchmarks/peers/*_labels.py`), for ours the commands. Installed is the
virtual environment, torch for the CPU included.

## How the settings were chosen
Ours by cross-validation on the training part of this very corpus, among some twenty
([family_relations.md](family_relations.md)); no other tool had that. A tool's first row is what its documentation
says. setfit learns from all pairs of sentences by default, which would take days here, so it has one round of pairs
for each sentence. The second row of `Trainer` follows what that search found for these weights, as far as the tool has
it: a rate between those of the layers, a warm-up, and six epochs, which take as long here as our ten or longer. A rate
of its own was not searched for; with a search, or more epochs, it should do better. simpletransformers trains the same
model with the same loss, so with as many epochs it should come near that row; it was not run so, for want of time. The
test part was not looked at. Each ran once; with the seeds 1, 2 and 3 ours has had a macro-F1 of 0.904, 0.911 and
0.909.

## What the table does not say
- Ours needs no program because it does one thing. `Trainer` takes any task, model and loss, and setfit is made for
  a few dozen sentences, not for 1,318.
- The weights have BERT's layers with the vocabulary of XLM-R. simpletransformers knows only BERT's own tokenizer for
  them, so its program puts another in that place. It pads all texts to one length. It forks to read the texts to
  label, and hangs there after torch has computed in threads, so its program starts that process anew.
- simpletransformers is installed with transformers 4.57; on a few sentences it ran with 5.24 too.
- AugmentedSocialScientist 3.0.0 takes one label a text (cross-entropy, the most probable label), so it is not here.
- No tool was tried on a GPU.
"""
COLUMNS = (
    "tool",
    "setting",
    "macro-F1 (95 %)",
    "beside ours (95 %)",
    "micro-F1 (95 %)",
    "minutes",
    "memory, GB",
    "lines",
    "installed, GB",
)
SHORT = ("tool", "setting", "macro-F1 (95 %)", "minutes", "memory, GB", "lines")


@dataclass(frozen=True)
class Measured:
    """What a row gave and took.

    Attributes:
        probabilities: of each label in each test sentence. Shape: (N, L)
        seconds: of all its commands, from start to end.
        peak: bytes of memory at their most.
        installed: bytes of its virtual environment.
    """

    probabilities: NDArray[np.float64]
    seconds: float
    peak: int
    installed: int


def read(folder: Path) -> Measured:
    """What was measured of a row, from its folder."""
    with (folder / PROBABILITIES).open(encoding="utf-8", newline="") as file:
        probabilities = np.array([[float(row[label]) for label in LABELS] for row in csv.DictReader(file)])
    return Measured(probabilities, **json.loads((folder / MEASURED).read_text(encoding="utf-8")))


def page(lines: Sequence[Sequence[str]], machine: Sequence[str]) -> str:
    """All that is known: what was measured on what, the lines of `lines_of`, and how to read them."""
    return "\n".join([HEAD, "\n".join(machine) + "\n", markdown([COLUMNS, *lines]), LEGEND])


def short_table(lines: Sequence[Sequence[str]]) -> str:
    """Of the lines of `lines_of` what stands in the README."""
    return markdown([[line[COLUMNS.index(column)] for column in SHORT] for line in [COLUMNS, *lines]])


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its header."""
    header, *others = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *others])


def lines_of(found: Mapping[str, Measured], test: Dataset) -> list[list[str]]:
    """The cells of each row, in the order of `COLUMNS`."""
    truth, groups = targets_of(test).astype(int), list(test["respondent"])
    scores = {name: score(row.probabilities > 0.5, truth, groups) for name, row in found.items()}
    return [cells(ROWS[name], row, scores[name], scores.get("ours")) for name, row in found.items()]


@dataclass(frozen=True)
class Scores:
    """F1 of a row on the test part, and in every draw of its respondents (R).

    Attributes:
        macro, micro: means over labels, and over all decisions.
        macro_draws, micro_draws: the same in every draw. Shape: (R,)
    """

    macro: float
    micro: float
    macro_draws: NDArray[np.float64]
    micro_draws: NDArray[np.float64]


def score(decided: NDArray[np.bool_], truth: NDArray[np.int64], groups: Sequence[int]) -> Scores:
    """Score decisions against the truth, both of shape (N, L), where `groups` says who speaks (N)."""
    means = multilabel_scores(decided.astype(int), truth)
    # Over all decisions F1 is that of the one label «this label on this sentence».
    decision, true = decided.reshape(-1, 1), truth.reshape(-1, 1)
    speakers = np.repeat(groups, truth.shape[1]).tolist()
    return Scores(
        means["macro_f1"],
        means["micro_f1"],
        bootstrap_f1(decided, truth, groups)[:, -1],
        bootstrap_f1(decision, true, speakers)[:, 0],
    )


def cells(row: Row, measured: Measured, scores: Scores, ours: Scores | None) -> list[str]:
    """A line of the table; the difference to ours is that in the same draws."""
    apart = "–"
    if ours and ours is not scores:
        apart = _with_interval(scores.macro - ours.macro, scores.macro_draws - ours.macro_draws, "+.3f")
    return [
        row.tool,
        row.setting,
        _with_interval(scores.macro, scores.macro_draws, ".3f"),
        apart,
        _with_interval(scores.micro, scores.micro_draws, ".3f"),
        f"{measured.seconds / 60:.1f}",
        f"{measured.peak / 1e9:.1f}",
        str(row.lines()),
        f"{measured.installed / 1e9:.1f}",
    ]


def _with_interval(value: float, draws: NDArray[np.float64], form: str) -> str:
    ends = percentile_interval(draws)
    assert ends  # every draw of the test part holds a label
    return f"{value:{form}} ({ends[0]:{form}} to {ends[1]:{form}})"
