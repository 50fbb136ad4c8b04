"""Files of rows (csv, tsv, json, jsonl, parquet) read into plain columns, and UTF-8 text with located errors.

The readers guess no types: in a French corpus «nan» and «null» are words, and a label may be called `0`."""

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from fratrie.data.annotation import excerpt


@dataclass(frozen=True)
class Table:
    """Columns of equal length by name; `class_names` holds the label names of columns that declare them."""

    path: Path
    columns: dict[str, list[Any]]
    class_names: dict[str, list[str]] = field(default_factory=dict)

    def column(self, name: str, option: str) -> list[Any]:
        """The values of a column; a ValueError names the columns there are and the option that picks one."""
        if name not in self.columns:
            there = ", ".join(map(repr, self.columns))
            raise ValueError(
                f"{self.path}: no column {name!r}; its columns are {there}: pick one by {option} (--{option})"
            )
        return self.columns[name]


def read_table(path: str | PathLike[str]) -> Table:
    """Read a .csv, .tsv, .json, .jsonl or .parquet file (UTF-8).

    csv and tsv: a header line, then strings; a csv whose header has semicolons or tabs and no comma is split at
    these. json: objects one a line, or one array of objects; an absent key is None.

    Raises:
        ValueError: the content is not what the extension promises (with the line), or there are no rows.
        OSError: the file is missing or cannot be read.
    """
    path = existing_file(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"{path}: unknown extension {path.suffix!r}; rename or convert the file to one of "
            f"{', '.join(_READERS)} or .txt"
        )
    table = reader(path)
    if not any(table.columns.values()):
        raise ValueError(f"{path}: the file holds no rows")
    return table


def existing_file(path: str | PathLike[str]) -> Path:
    """The path if a file is there; otherwise FileNotFoundError or IsADirectoryError."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a file")
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file")
    return path


def read_text(path: Path) -> str:
    """The text of a UTF-8 file without its byte order mark; a ValueError locates the first wrong byte."""
    data = path.read_bytes()
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        offset = error.start + (len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0)
        line = data.count(b"\n", 0, offset) + 1
        raise ValueError(
            f"{path}, line {line}: byte 0x{data[offset]:02x} at offset {offset} is not UTF-8: save the file as UTF-8"
        ) from None


def raise_row_problems(path: Path, problems: dict[str, list[int]], advice: str = "") -> None:
    """Raise one ValueError that lists each problem with its rows, if there are any problems."""
    if problems:
        lines = [f"  {_shown_rows(rows)}: {problem}" for problem, rows in problems.items()]
        lines += [f"  {advice}"] if advice else []
        raise ValueError("\n".join([f"{path} (rows counted from 1, without a header):", *lines]))


def _shown_rows(rows: Sequence[int], most: int = 20) -> str:
    shown = ", ".join(map(str, rows[:most]))
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}{more}"


def _read_csv(path: Path) -> Table:
    text = read_text(path)
    header_line = text.split("\n", 1)[0]
    others = [mark for mark in ";\t" if mark in header_line and "," not in header_line]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else others[0] if others else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, problems = [], []
    try:
        header = next(reader, [])
        for row in reader:
            if row and len(row) != len(header):
                problems.append(
                    f"{path}, line {reader.line_num}: {len(row)} fields, expected {len(header)} as in the "
                    f"header: {excerpt(delimiter.join(row))}"
                )
            elif row:
                rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}; are all quotes closed?") from None
    if len(set(header)) != len(header):
        problems.insert(0, f"{path}, line 1: a column name occurs twice in {header}")
    if problems:
        raise ValueError("\n".join(problems))
    return Table(path, {name: [row[i] for row in rows] for i, name in enumerate(header)})


def _read_json(path: Path) -> Table:
    text = read_text(path)
    try:
        array = json.loads(text) if text.lstrip().startswith("[") else None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid json: {error.msg}") from None
    rows, problems = _json_lines(text.split("\n")) if array is None else (array, [])
    if array is not None:
        problems = [
            f"row {number}: {excerpt(repr(row))} is no object, expected {{...}}"
            for number, row in enumerate(array, start=1)
            if not isinstance(row, dict)
        ]
    if problems:
        raise ValueError("\n".join(f"{path}, {problem}" for problem in problems))
    names = dict.fromkeys(name for row in rows for name in row)
    return Table(path, {name: [row.get(name) for row in rows] for name in names})


def _json_lines(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    rows, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row, problem = json.loads(line), "no object"
        except json.JSONDecodeError as error:
            row, problem = None, f"{error.msg} at character {error.colno}"
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(f"line {number}: {problem}, expected one json object a line: {excerpt(line)}")
    return rows, problems


def _read_parquet(path: Path) -> Table:
    import pyarrow
    from datasets import ClassLabel, Dataset, LargeList, List
    from pyarrow import parquet

    try:
        dataset = Dataset(parquet.read_table(path))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from None
    columns = dataset.to_dict()
    class_names = {}
    for name, feature in dataset.features.items():
        label = feature.feature if isinstance(feature, List | LargeList) else feature
        if isinstance(label, ClassLabel):
            class_names[name] = label.names
            columns[name] = [_class_names(value, label.names) for value in columns[name]]
    return Table(path, columns, class_names)


def _class_names(value: Any, names: Sequence[str]) -> Any:
    """Label positions as names; -1 stands for no label in `datasets`."""
    if isinstance(value, list):
        return [_class_names(item, names) for item in value]
    if value is None or value == -1:
        return None
    return names[value] if 0 <= value < len(names) else value


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
