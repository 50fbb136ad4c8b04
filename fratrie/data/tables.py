"""Files of rows (csv, spreadsheets, Stata, SPSS, json, jsonl, parquet) read into plain columns, or one of them row by
row.

The readers guess no types: in a French corpus «nan» and «null» are words, and a label may be called `0`."""

import codecs
import csv
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from fratrie.data import sheets, stata_spss
from fratrie.data.annotation import excerpt, first_of
from fratrie.data.text_files import UTF8, TextFormat, checked_lines, existing_file, open_text, read_text

csv.field_size_limit(2**31 - 1)  # a cell may hold a whole book; Python takes 131,072 characters for a mistake

_EXCEL_LINE = re.compile(r'\ufeff?"?sep=(.)"?(\r\n?|\n)', re.IGNORECASE)
_SAMPLE = 1000
_DEEPEST = 50  # what is deeper could be parsed, but not shown or written again


@dataclass(frozen=True)
class Table:
    """Columns of equal length by name.

    `class_names` holds the label names of columns that declare them, `rows` where the rows stand in the file as people
    find them: by the number that a spreadsheet program shows beside them, which counts the header and blank rows too,
    by the line of a .txt or of json lines, elsewhere counted from 1.
    """

    path: Path
    columns: Mapping[str, Sequence[Any]]
    class_names: dict[str, list[str]] = field(default_factory=dict)
    rows: Sequence[int] = range(1, sys.maxsize)

    def column(self, name: str, option: str) -> Sequence[Any]:
        """The values of a column; a ValueError names the columns there are and the option that picks one."""
        if name not in self.columns:
            raise missing_column(self.path, name, self.columns, option)
        return self.columns[name]

    def told(self, places: Sequence[int]) -> str:
        """The rows at these places: `row 3`, or `rows 3, 4, … and 12 more`; `line 3` of a .txt."""
        numbers = list(dict.fromkeys(str(self.rows[place]) for place in places))
        return f"{row_noun(self.path)}{'' if len(numbers) == 1 else 's'} {', '.join(first_of(numbers))}"

    def of_rows(self, places: Sequence[int]) -> "Table":
        """The table of some of its rows."""
        columns = {name: [cells[place] for place in places] for name, cells in self.columns.items()}
        return replace(self, columns=columns, rows=[self.rows[place] for place in places])


def row_noun(path: str | PathLike[str]) -> str:
    """What people call a row of a file: `line` of a .txt, `row` of any other."""
    return "line" if Path(path).suffix.lower() == ".txt" else "row"


def has_header(path: str | PathLike[str]) -> bool:
    """Whether a spreadsheet program shows the file, which then counts its header as a row."""
    return Path(path).suffix.lower() in (".csv", ".tsv", *sheets.KINDS)


def missing_column(source: str | PathLike[str], name: str, there: Iterable[str], option: str) -> ValueError:
    """The error for a column that is not there; `option` is the name of the argument that picks another."""
    assert option.isidentifier(), option
    columns = ", ".join(first_of([excerpt(column) for column in there]))
    return ValueError(f"{source}: no column {name!r}; its columns are {columns}: pick one by {option} (--{option})")


def read_table(path: str | PathLike[str], form: TextFormat = UTF8) -> Table:
    """Read a .csv, .tsv, .xlsx, .xls, .ods, .dta, .sav, .zsav, .por, .json, .jsonl or .parquet file.

    All but json and parquet give strings. csv, tsv and spreadsheets have a header line; Excel's first line `sep=;` is
    understood, and a column without a name and content is left out. json: one object per line, or one array of
    objects; an absent key is None.

    Raises:
        ValueError: the content is not what the extension promises (with the line), or there are no rows.
        OSError: the file is missing or cannot be read.
    """
    path = existing_file(path)
    table = _READERS[table_kind(path)](path, form)
    if not any(table.columns.values()):
        raise ValueError(f"{path}: the file holds no rows")
    return table


def stream_column(path: str | PathLike[str], column: str, form: TextFormat = UTF8) -> Iterator[tuple[int, Any]]:
    """The rows and cells of a column that `read_table` would read, one after another.

    For json, the first row says which columns there are.

    Raises:
        ValueError: as `read_table`, once the wrong row is reached.
        OSError: as `read_table`.
    """
    path = existing_file(path)
    kind = table_kind(path)
    if kind == ".parquet":
        yield from enumerate(_stream_parquet(path, column), start=1)
    elif kind in (".csv", ".tsv"):
        yield from _stream_csv(path, column, form)
    elif kind in (*sheets.KINDS, *stata_spss.KINDS) or (kind == ".json" and _begins_an_array(path, form)):
        table = _READERS[kind](path, form)
        yield from zip(table.rows, table.column(column, "text_column"), strict=False)
    else:
        yield from _stream_json_lines(path, column, form)


def raise_row_problems(table: Table, problems: dict[str, list[int]], advice: str = "") -> None:
    """Report all problems of a file at once.

    Args:
        table: what was read of the file.
        problems: places of rows in the table, from 0, by what is wrong with them.
        advice: the way out, as a last line.

    Raises:
        ValueError: there are any; lists each with its rows.
    """
    if problems:
        lines = first_of([f"  {table.told(places)}: {problem}" for problem, places in problems.items()])
        lines += [f"  {advice}"] if advice else []
        remark = " (rows as a spreadsheet shows them)" if has_header(table.path) else ""
        raise ValueError("\n".join([f"{table.path}{remark}:", *lines]))


def table_kind(path: Path) -> str:
    """The extension of a file of rows; a ValueError for any other."""
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise ValueError(
            f"{path}: unknown extension {path.suffix!r}; rename or convert the file to one of "
            f"{', '.join(_READERS)} or .txt"
        )
    return kind


# --- csv and tsv ---


def _read_csv(path: Path, form: TextFormat) -> Table:
    text = read_text(path, form)
    return _table_of(path, _csv_rows(io.StringIO(text, newline=""), path, _delimiter(path, form)))


def _table_of(path: Path, rows: Iterable[tuple[int, list[str]]]) -> Table:
    """The columns of numbered rows, the header first, but those without a name and content."""
    (first, header), *rows = list(rows) or [(1, [])]
    _check_header(path, first, header)
    if ragged := [_ragged(path, number, row, header) for number, row in rows if len(row) != len(header)]:
        raise ValueError("\n".join(first_of(ragged)))
    columns = [(name, [row[place] for _, row in rows]) for place, name in enumerate(header)]
    columns = [(name, cells) for name, cells in columns if name.strip() or any(map(str.strip, cells))]
    if len(dict(columns)) < len(columns):
        raise ValueError(
            f"{path}, row {first}: several columns with content have no name in {excerpt(header, 300)}: name them"
        )
    return Table(path, dict(columns), rows=[number for number, _ in rows])


def _stream_csv(path: Path, column: str, form: TextFormat) -> Iterator[tuple[int, str]]:
    delimiter = _delimiter(path, form)
    with open_text(path, form) as file:
        rows = _csv_rows(file, path, delimiter)
        first, header = next(rows, (1, []))
        _check_header(path, first, header)
        if column not in header:
            raise missing_column(path, column, header, "text_column")
        place = header.index(column)
        for number, row in rows:
            if len(row) != len(header):
                raise ValueError(_ragged(path, number, row, header))
            yield number, row[place]


def _csv_rows(file: TextIO, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The number in a spreadsheet and the fields of each row that is not blank or of empty cells, the header first."""
    if not _EXCEL_LINE.fullmatch(file.readline()):
        file.seek(0)
    number = 0
    try:
        for number, row in enumerate(csv.reader(checked_lines(file, path), delimiter=delimiter, strict=True), start=1):
            if any(row) or len(row) == 1:  # of several empty cells, Excel has made a blank row
                yield number, row
    except csv.Error as error:
        raise ValueError(f"{path}, row {number + 1}: {error}; are all quotes closed?") from None


def _delimiter(path: Path, form: TextFormat) -> str:
    """What stands between the columns: as asked for, as Excel's first line or the name of the file says, or the mark
    that cuts the header and every row of a sample into as many fields.

    Raises:
        ValueError: two marks do so.
    """
    if form.delimiter:
        return form.delimiter
    with open_text(path, form) as file:
        if told := _EXCEL_LINE.fullmatch(file.readline()):
            return told[1]
    if path.suffix.lower() == ".tsv":
        return "\t"
    wrong = {mark: count for mark in ",;\t" if (count := _misfits(path, form, mark)) is not None}
    fitting = [mark for mark, count in wrong.items() if not count]
    if len(fitting) > 1:
        shown = " and ".join(map(repr, fitting))
        raise ValueError(f"{path}: {shown} both cut all rows alike: say which one by delimiter (--delimiter)")
    return min(wrong, key=lambda mark: wrong[mark], default=",")


def _misfits(path: Path, form: TextFormat, mark: str) -> int | None:
    """How many rows of the sample have other fields than the header if cut at the mark; None if it cuts no header."""
    with open_text(path, form) as file:
        try:
            rows = [row for _, row in itertools.islice(_csv_rows(file, path, mark), _SAMPLE)]
        except ValueError:
            return _SAMPLE if mark in _first_line(path, form) else None
    return sum(len(row) != len(rows[0]) for row in rows) if rows and len(rows[0]) > 1 else None


def _first_line(path: Path, form: TextFormat) -> str:
    with open_text(path, form) as file:
        return file.readline()


def _check_header(path: Path, number: int, header: Sequence[str]) -> None:
    if [name for name, count in Counter(header).items() if count > 1 and name.strip()]:
        raise ValueError(f"{path}, row {number}: a column name occurs twice in {excerpt(header, 300)}")


def _ragged(path: Path, number: int, row: Sequence[str], header: Sequence[str]) -> str:
    return (
        f"{path}, row {number}: {len(row)} fields, expected {len(header)} as in the header: {excerpt(list(row))} "
        "(a field that holds the delimiter stands in quotes; --delimiter names another)"
    )


# --- spreadsheets ---


def _read_spreadsheet(path: Path, form: TextFormat) -> Table:
    return _table_of(path, sheets.read_sheet(path, form.sheet))


# --- Stata and SPSS ---


def _read_variables(path: Path, form: TextFormat) -> Table:
    encoding = None if form.encoding == UTF8.encoding else codecs.lookup(form.encoding).name
    return Table(path, stata_spss.read_variables(path, encoding))


# --- json ---


def _read_json(path: Path, form: TextFormat) -> Table:
    text = read_text(path, form)
    found, problems = _json_array(text, path) if text.lstrip().startswith("[") else _json_rows(text.split("\n"))
    if problems:
        raise ValueError("\n".join(first_of([f"{path}, {problem}" for problem in problems])))
    names = dict.fromkeys(name for _, row in found for name in row)
    columns = {name: [row.get(name) for _, row in found] for name in names}
    return Table(path, columns, rows=[number for number, _ in found])


def _json_array(text: str, path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    try:
        rows = list(enumerate(parsed_json(text), start=1))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid json: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid json: {error}") from None
    wrong = [(number, row) for number, row in rows if not isinstance(row, dict)]
    return rows, [f"row {number}: {excerpt(row)} is no object, expected {{...}}" for number, row in wrong]


def _json_rows(lines: Iterable[str]) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    rows, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append((number, _json_row(number, line)))
            except ValueError as error:
                problems.append(str(error))
    return rows, problems


def _json_row(number: int, line: str) -> dict[str, Any]:
    problem = "no object"
    try:
        row = parsed_json(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.colno}"
    except ValueError as error:
        problem = str(error)
    else:
        if isinstance(row, dict):
            return row
    raise ValueError(f"line {number}: {problem}, expected one json object per line: {excerpt(line)}")


def parsed_json(text: str) -> Any:
    """What JSON says; a `ValueError` also for what is too deep, and for a key that occurs twice."""
    too_deep = "lists or objects are nested too deeply"
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [child for each in level if isinstance(each, list | dict) for child in _children(each)]
    if level:
        raise ValueError(too_deep)
    return value


def _children(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} occurs twice in an object")
    return found


def _begins_an_array(path: Path, form: TextFormat) -> bool:
    with open_text(path, form) as file:
        return next((line for line in file if line.strip()), "").lstrip("\ufeff \t").startswith("[")


def _stream_json_lines(path: Path, column: str, form: TextFormat) -> Iterator[tuple[int, Any]]:
    there: Iterable[str] | None = None
    with open_text(path, form, newline="\n") as file:
        for number, line in enumerate(checked_lines(file, path), start=1):
            if line.strip():
                try:
                    row = _json_row(number, line)
                except ValueError as error:
                    raise ValueError(f"{path}, {error}") from None
                there = there or row
                if column not in there:
                    raise missing_column(path, column, there, "text_column")
                yield number, row.get(column)


# --- parquet ---


def _read_parquet(path: Path, form: TextFormat) -> Table:
    import pyarrow

    data = _open_parquet(path)
    try:
        columns = data.read().to_pydict()
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from None
    class_names = _declared_names(path, data.schema_arrow)
    for name, names in class_names.items():
        columns[name] = [_class_names(value, names) for value in columns[name]]
    return Table(path, columns, class_names)


def _open_parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        # Of this file alone: read_table would add columns that it reads out of the names of the folders.
        data = parquet.ParquetFile(path)
        names = data.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from None
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: a column name occurs twice in {excerpt(names, 300)}")
    return data


def _declared_names(path: Path, schema: Any) -> dict[str, list[str]]:
    """The label names of the columns for which `datasets` has written them into the file."""
    from datasets import ClassLabel, Features, LargeList, List

    if b"huggingface" not in (schema.metadata or {}):
        return {}
    try:
        features = Features.from_arrow_schema(schema)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: its description by `datasets` cannot be read: {error}") from None
    labels = {name: each.feature if isinstance(each, List | LargeList) else each for name, each in features.items()}
    return {name: list(label.names) for name, label in labels.items() if isinstance(label, ClassLabel)}


def _stream_parquet(path: Path, column: str) -> Iterator[Any]:
    import pyarrow

    data = _open_parquet(path)
    if column not in data.schema_arrow.names:
        raise missing_column(path, column, data.schema_arrow.names, "text_column")
    try:
        for batch in data.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from None


def _class_names(value: Any, names: Sequence[str]) -> Any:
    """Label positions as names; -1 stands for no label in `datasets`."""
    if isinstance(value, list):
        return [_class_names(item, names) for item in value]
    if value is None or value == -1:
        return None
    return names[value] if 0 <= value < len(names) else value


_READERS: dict[str, Callable[[Path, TextFormat], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    **dict.fromkeys(sheets.KINDS, _read_spreadsheet),
    **dict.fromkeys(stata_spss.KINDS, _read_variables),
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
