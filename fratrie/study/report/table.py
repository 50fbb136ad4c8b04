"""A table of a report, which the template writes as HTML, and this module as CSV and LaTeX.

A cell holds the value itself. CSV files have it in full, pages and papers as its column shows it.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fratrie.training.metrics import one_line

NO_VALUE = "–"
PLACE = "d"  # form of a column that says where a sentence stands
_MINUS = "\N{MINUS SIGN}"
_LONG = 40  # characters
_SCORE = ".2f"  # of the study's table, where many stand side by side


class Interval(NamedTuple):
    """The ends of an interval."""

    low: float
    high: float


class Features(NamedTuple):
    """A score on words, and the same on pooled states of the encoder, shown in parentheses."""

    words: float | None
    states: float | None


Cell = str | float | None | Interval | Features


class Run(NamedTuple):
    """A piece of a shown cell, and whether it is the best of its row or column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Column:
    """Title of a column, and how its numbers are shown."""

    title: str
    form: str = ".3f"


@dataclass(frozen=True)
class Table:
    """Cells under columns; `name` is that of its files, `best` where the best of several `Features` stands out."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    best: Literal["of a row", "of a column"] | None = None

    def kind(self, index: int) -> Literal["number", "text", "long text"]:
        """What a column holds: numbers stand to the right, words to the left, and long texts need room."""
        cells = [row[index] for row in self.rows]
        if not all(isinstance(cell, str) for cell in cells):
            return "number"
        return "long text" if any(len(str(cell)) > _LONG for cell in cells) else "text"

    def runs(self) -> list[list[list[Run]]]:
        """The pieces of every cell. A score is the best where no other exceeds it as they are shown."""
        cells = [
            [_pieces(cell, column.form) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows
        ]
        lines = {"of a row": self.rows, "of a column": list(zip(*self.rows, strict=True)), None: ()}[self.best]
        best = [max((f"{s:{_SCORE}}" for cell in line for s in _scores(cell)), default="") for line in lines]

        def marked(row: int, column: int) -> list[Run]:
            wanted = best[row if self.best == "of a row" else column] if _scores(self.rows[row][column]) else None
            return [Run(text, text.strip("()") == wanted) for text in cells[row][column]]

        return [[marked(row, column) for column in range(len(self.columns))] for row in range(len(self.rows))]


def _scores(cell: Cell) -> list[float]:
    return [score for score in cell if score is not None] if isinstance(cell, Features) else []


def _pieces(cell: Cell, form: str) -> list[str]:
    match cell:
        case Interval(low, high):
            return [f"{shown(low, form)} to {shown(high, form)}"]
        case Features(words, None):
            return [shown(words, _SCORE)]
        case Features(words, states):
            return [shown(words, _SCORE), f"({shown(states, _SCORE)})"]
        case _:
            return [shown(cell, form)]


def shown(value: str | float | None, form: str = ".3f") -> str:
    """A value as the report shows it: a count with commas unless the format is that of a place, `d`."""
    if value is None:
        return NO_VALUE
    if isinstance(value, str):
        return one_line(value)
    return f"{value:,}" if isinstance(value, int) and form != PLACE else f"{value:{form}}"


def columns_of(table: Table) -> list[tuple[str, list[Any]]]:
    """Titles and values in full: the parts of an interval have columns of their own."""
    columns = []
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        parts = _parts(cells)
        filled = [_padded(cell, len(parts)) for cell in cells]
        columns += [(f"{column.title} {part}".rstrip(), [cell[i] for cell in filled]) for i, part in enumerate(parts)]
    return columns


def csv_text(table: Table) -> str:
    """The values in full, as a csv file of Python and R."""
    titles, columns = zip(*columns_of(table), strict=True)
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([titles, *zip(*columns, strict=True)])
    return file.getvalue()


def _parts(cells: Iterable[Cell]) -> tuple[str, ...]:
    return next((cell._fields for cell in cells if isinstance(cell, Interval | Features)), ("",))


def _padded(cell: Cell, width: int) -> list[Any]:
    parts = list(cell) if isinstance(cell, tuple) else [cell]
    return parts + [None] * (width - len(parts))


_TEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", _MINUS: "$-$"},
    **{"[": "{[}", "*": "{*}"},  # behind the end of a row they would be its options
}
_TEX_COLUMNS = {"number": "r", "text": "l", "long text": "p{5cm}"}
_TEX_SIGNS = re.compile("|".join(map(re.escape, _TEX)))
_LIGATURE = re.compile(r"([-'`,])(?=\1)")
_NEGATIVE = re.compile(r"(?<!\w)-(?=\d)")


def tex_escaped(text: str) -> str:
    """A text as LaTeX shows it, whatever signs it holds.

    Letters and signs beyond those of pdfLaTeX's fonts, such as emoji, need LuaLaTeX or XeLaTeX and a font with them.
    """
    return _LIGATURE.sub(r"\1{}", _TEX_SIGNS.sub(lambda found: _TEX[found[0]], one_line(text)))


def tex_text(table: Table) -> str:
    """The table as a `table` environment with the rules of booktabs."""
    kinds = [table.kind(i) for i in range(len(table.columns))]
    head = " & ".join(tex_escaped(column.title) for column in table.columns)
    rows = [" & ".join(map(_tex_cell, row, kinds)) for row in table.runs()]
    return "\n".join(
        [
            r"% \usepackage{booktabs}; a wide one fits the page by \resizebox{\textwidth}{!}{…} of graphicx",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{tex_escaped(table.caption)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{''.join(_TEX_COLUMNS[kind] for kind in kinds)}}}",
            r"\toprule",
            rf"{head} \\",
            r"\midrule",
            *(rf"{row} \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _tex_cell(runs: list[Run], kind: str) -> str:
    texts = [_NEGATIVE.sub(_MINUS, run.text) if kind == "number" else run.text for run in runs]
    escaped = map(tex_escaped, texts)
    return " ".join(rf"\textbf{{{t}}}" if run.best else t for t, run in zip(escaped, runs, strict=True))
