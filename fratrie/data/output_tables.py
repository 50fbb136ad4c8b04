"""What a classifier says of texts, written as csv, xlsx, jsonl or parquet, which `fratrie.data.loading` reads again.

Two more formats bring the labels of the model to where people correct them: jsonl for doccano, tasks for Label Studio.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from fratrie.data.cells import as_json, readable, whole
from fratrie.data.output_sheets import check_sheet, write_sheet
from fratrie.data.sheets import read_sheet
from fratrie.data.tables import Table
from fratrie.data.text_files import open_text
from fratrie.files import new_path

Format = Literal["csv", "xlsx", "jsonl", "parquet", "doccano", "label_studio"]
_TOOLS: dict[Format, str] = {"doccano": ".jsonl", "label_studio": ".json"}
_SUFFIXES: dict[Format, str] = {"csv": ".csv", "xlsx": ".xlsx", "jsonl": ".jsonl", "parquet": ".parquet"}
_JSON_KEYS = {
    **{"jsonl": ["text", "labels", "scores"], "doccano": ["text", "label", "scores"]},
    **{"label_studio": ["text", "scores"]},
}

# What a spreadsheet would calculate, or take for a command; in its wide form, too.
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?")
_PLAIN_NAME = re.compile(r"[\w+\-.]+")  # such names are told apart between commas, whoever reads them

_Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class LabelledTexts:
    """N texts with what a classifier says of them.

    Args:
        texts: N cells. One without a text has no labels, and its scores are NaN.
        names: of the L labels or, in regression, of the values.
        scores: probabilities or values. Shape: (N, L)
        labels: N lists of names; `None` in regression.
        several: a text may have several labels.
        notes: more columns of ours, N cells each.
        others: the other columns of the input, N cells of any type each.
    """

    texts: Sequence[Any]
    names: Sequence[str]
    scores: NDArray[np.float64]
    labels: Sequence[list[str]] | None
    several: bool = True
    notes: _Columns = field(default_factory=dict)
    others: _Columns = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """How labelled texts are written.

    Args:
        format: of the file.
        excel: a csv that a French Excel opens with a double click: byte order mark, semicolons, decimal commas.
        escape_formulas: `'` stands before the cells of a csv that a spreadsheet takes for formulas.

    Raises:
        ValueError: what is said of a csv is said of another format.
    """

    format: Format
    excel: bool = False
    escape_formulas: bool = False

    def __post_init__(self) -> None:
        if self.format != "csv" and (self.excel or self.escape_formulas):
            raise ValueError(f"excel and escape_formulas are for .csv: {self.format} needs neither, leave them out")

    def check(self, table: Table) -> None:
        """Check, before the work, that a file can hold these cells.

        Raises:
            ValueError: a sheet of Excel has fewer rows or columns, or a shorter cell; says which.
        """
        if self.format == "xlsx":
            check_sheet(table)

    def write(self, path: Path, table: LabelledTexts) -> None:
        """Write a file as `fratrie.files.new_path` does."""
        with new_path(path) as made:
            if self.format == "csv":
                self._write_csv(made, _flat(table, joined=True))
            elif self.format == "xlsx":
                write_sheet(made, _flat(table, joined=True))
            elif self.format == "parquet":
                _write_parquet(made, table)
            elif self.format == "label_studio":
                made.write_text("[\n" + ",\n".join(map(as_json, _tasks(table))) + "\n]\n", "utf-8", newline="")
            else:
                lines = [as_json(record) + "\n" for record in _records(table, self.format)]
                made.write_text("".join(lines), "utf-8", newline="")

    def is_earlier(self, path: Path, names: Sequence[str]) -> bool:
        """Whether a file begins as those that `write` writes for these labels."""
        expected = list(_free(["text", "labels", *names], "label_"))
        try:
            return any(list(header)[: len(expected)] == expected for header in _headers(path, self.format))
        except (ValueError, LookupError, TypeError, AttributeError, csv.Error):
            return False

    def _write_csv(self, path: Path, columns: _Columns) -> None:
        with path.open("w", encoding="utf-8-sig" if self.excel else "utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=";" if self.excel else ",")
            for row in (tuple(columns), *zip(*columns.values(), strict=True)):
                writer.writerow([self._csv_cell(cell) for cell in row])

    def _csv_cell(self, cell: Any) -> str:
        text = readable(cell)
        if self.excel and isinstance(cell, float):
            text = text.replace(".", ",")
        is_formula = _FORMULA.match(text) and not _NUMBER.fullmatch(text)
        return f"'{text}" if self.escape_formulas and is_formula else text


def output_format(path: Path, asked: Literal["auto", "doccano", "label_studio"] = "auto") -> Format:
    """The format that is asked for or, by default, that the name of the file says.

    Raises:
        ValueError: the file has another name than those of the format.
    """
    suffixes = _SUFFIXES if asked == "auto" else {asked: _TOOLS[asked]}
    for kind, suffix in suffixes.items():
        if path.suffix.lower() == suffix:
            return kind
    raise ValueError(f"cannot write {path}: give the output a name that ends with {' or '.join(suffixes.values())}")


def labelling_interface(names: Sequence[str], several: bool) -> str:
    """What the settings of a Label Studio project must hold (Labeling Interface, Code) to show our tasks."""
    choices = "".join(f"<Choice value={quoteattr(name)}/>" for name in names)
    several_or_one = "multiple" if several else "single"
    return (
        f'<View><Text name="text" value="$text"/><Choices name="labels" toName="text" choice="{several_or_one}">'
        f"{choices}</Choices></View>"
    )


# --- columns ---


def _number(value: float) -> float | None:
    """Six digits, as many as single precision has."""
    return None if math.isnan(value) else float(f"{value:.6g}")


def _is_text(cell: Any) -> bool:
    return isinstance(cell, str) and bool(cell.strip())


def _flat(table: LabelledTexts, joined: bool) -> _Columns:
    """A column for each score; `joined`: the labels of a text are one string."""
    ours = ["text"] if table.labels is None else ["text", "labels"]
    labels = [] if table.labels is None else [_cells_of_labels(table, joined)]
    scores = [[_number(score) for score in column] for column in table.scores.T]
    names = _free([*ours, *table.names], "label_")
    return _beside(dict(zip(names, [table.texts, *labels, *scores], strict=True)), table)


def _nested(table: LabelledTexts, label_key: str) -> _Columns:
    """The scores of a text in one cell, by label."""
    if table.labels is None:
        return _flat(table, joined=False)
    scores = [dict(zip(table.names, map(_number, row), strict=True)) for row in table.scores]
    return _beside({"text": table.texts, label_key: _cells_of_labels(table, False), "scores": scores}, table)


def _cells_of_labels(table: LabelledTexts, joined: bool) -> Sequence[Any]:
    assert table.labels is not None
    if not table.several:
        return [labels[0] if labels else None for labels in table.labels]
    if not joined:
        return table.labels
    join = ",".join if all(map(_PLAIN_NAME.fullmatch, table.names)) else as_json
    return [join(labels) if labels else "" for labels in table.labels]


def _beside(columns: _Columns, table: LabelledTexts) -> _Columns:
    """The columns, and behind them notes and others under names that are free.

    Where ours is `label` (for doccano), a reader would take the `labels` of the input for what the annotators say.
    """
    more = [*table.notes.items(), *table.others.items()]
    names = _free([*columns, *(name for name, _ in more)], "input_", {"labels"} - columns.keys())
    return dict(zip(names, [*columns.values(), *(cells for _, cells in more)], strict=True))


def _free(names: Sequence[str], prefix: str, reserved: Iterable[str] = ()) -> Iterator[str]:
    """The names, those that are reserved or that an earlier one has taken behind a prefix."""
    taken = set(reserved)
    for name in names:
        while name in taken:
            name = prefix + name
        taken.add(name)
        yield name


# --- formats ---


def _records(table: LabelledTexts, kind: Format) -> Iterator[dict[str, Any]]:
    """The rows as objects; those without a text are none for the tools, which refuse them."""
    columns = _nested(table, "label" if kind == "doccano" else "labels")
    for row in zip(*columns.values(), strict=True):
        if kind == "jsonl" or _is_text(row[0]):
            yield dict(zip(columns, row, strict=True))


def _tasks(table: LabelledTexts) -> Iterator[dict[str, Any]]:
    """Tasks of Label Studio, which sorts by `score`: how sure the model is of its least sure label."""
    for number, data in enumerate(_records(table, "label_studio"), start=1):
        given, scores = data.pop("labels"), data["scores"]
        choices = [given] if isinstance(given, str) else given
        parts = {"id": f"labels-{number}", "from_name": "labels", "to_name": "text", "type": "choices"}
        yield {
            "data": data,
            "predictions": [
                {
                    "model_version": "fratrie",
                    "score": min(score if name in choices else 1 - score for name, score in scores.items()),
                    "result": [parts | {"value": {"choices": choices}}] if choices else [],
                }
            ],
        }


def _write_parquet(path: Path, table: LabelledTexts) -> None:
    import pyarrow
    from pyarrow import parquet

    text, number = pyarrow.string(), pyarrow.float64()
    labels = [] if table.labels is None else [pyarrow.list_(text) if table.several else text]
    types = [text, *labels, *[number] * len(table.names)]
    columns = _flat(table, joined=False)
    arrays = [_typed(cells, kind) for cells, kind in zip_longest(columns.values(), types)]
    parquet.write_table(pyarrow.table(dict(zip(map(whole, columns), arrays, strict=True))), path)


def _typed(cells: Sequence[Any], kind: Any = None) -> Any:
    """A column of Arrow: of this type, else of the one plain type that all cells have, else of texts."""
    import pyarrow

    if kind or not any(isinstance(cell, list | tuple | dict) for cell in cells):
        try:
            return pyarrow.array(cells, kind)
        except (pyarrow.ArrowException, ValueError, OverflowError):
            assert kind is None, kind
    return pyarrow.array([None if cell is None else readable(cell) for cell in cells], pyarrow.string())


def _headers(path: Path, kind: Format) -> Iterator[Sequence[str]]:
    """What may be the names of the columns of a file; those of json as if its scores were columns."""
    if kind == "xlsx":
        yield read_sheet(path)[0][1]
    elif kind == "parquet":
        from pyarrow import parquet

        yield parquet.read_schema(path).names
    else:
        with open_text(path) as file:
            first, second = file.readline().removeprefix("\ufeff"), file.readline()
        if kind == "csv":
            for mark in ",;":
                yield [name.removeprefix("'") for name in next(csv.reader([first], delimiter=mark), [])]
        else:
            record = json.loads(second.rstrip(",\n"))["data"] if kind == "label_studio" else json.loads(first)
            keys = _JSON_KEYS[kind]
            if list(record)[: len(keys)] == keys:
                yield list(_free(["text", "labels", *record["scores"]], "label_"))
