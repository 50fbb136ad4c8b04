"""Sheets of Excel, in which a text stays a text: none becomes a formula, a link, a number or markup."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fratrie.data.annotation import excerpt
from fratrie.data.cells import readable
from fratrie.data.tables import Table

_ROWS, _COLUMNS, _CHARACTERS = 2**20, 2**14, 2**15 - 1
_WIDTHS = (8, 60)  # of columns, in characters
_SAMPLE = 1000  # rows that say how wide a column is
_EXACT = 2**53  # a sheet holds larger whole numbers rounded


def check_sheet(table: Table) -> None:
    """Check that a sheet of Excel can hold a table.

    Raises:
        ValueError: its columns are too many, or a cell is too long; says in which row of the table.
    """
    columns = table.columns
    way_out = "let the name of the output end with .csv, .jsonl or .parquet"
    rows = max(map(len, columns.values()))
    if rows >= _ROWS or len(columns) > _COLUMNS:
        raise ValueError(
            f"{rows:,} rows of {len(columns):,} columns are more than a sheet of Excel holds ({_ROWS - 1:,} and "
            f"{_COLUMNS:,}): {way_out}"
        )
    for name, cells in columns.items():
        for place, cell in enumerate((name, *cells), start=-1):
            if (length := len(readable(cell).encode("utf-16-le")) // 2) > _CHARACTERS:
                where = "the header" if place < 0 else table.told([place])
                raise ValueError(
                    f"{where}: the cell in {excerpt(name)} has {length:,} characters, more than the {_CHARACTERS:,} "
                    f"that Excel holds: {way_out}"
                )


def write_sheet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write an xlsx with one sheet: a bold header that stays in sight, filters, columns as wide as their texts.

    Numbers and truth values stay what they are; any other cell is written as a csv has it.

    Raises:
        ValueError: as `check_sheet`.
        OSError: it cannot be written.
    """
    check_sheet(Table(path, columns, rows=range(2, _ROWS + 1)))
    _write(path, {"labelled": list(columns.items())})


def write_book(path: Path, sheets: Mapping[str, Sequence[tuple[str, Sequence[Any]]]]) -> None:
    """Write an xlsx of several sheets, each of columns with their titles, as `write_sheet` writes one.

    The same cells give the same bytes. A text that is longer than a cell holds is cut.

    Raises:
        OSError: it cannot be written.
    """
    whole = {name: [(_cut(title), [*map(_cut, cells)]) for title, cells in each] for name, each in sheets.items()}
    _write(path, whole, created=datetime.datetime(2000, 1, 1))


def _cut(cell: Any) -> Any:
    """Half of what a cell holds, in which a character may count twice."""
    return cell if isinstance(cell, bool | int | float) else readable(cell)[: _CHARACTERS // 2]


def _write(
    path: Path, sheets: Mapping[str, Sequence[tuple[str, Sequence[Any]]]], created: datetime.datetime | None = None
) -> None:
    import xlsxwriter
    from xlsxwriter.exceptions import FileCreateError

    try:
        # Row by row, so that a long table does not fill the memory; its parts lie beside the file until it is whole.
        with xlsxwriter.Workbook(str(path), {"constant_memory": True, "tmpdir": str(path.parent)}) as book:
            book.set_properties({"created": created})  # by default the time
            for name, columns in sheets.items():
                _fill(book, name, columns)
    except FileCreateError as error:  # all that the library makes of a full disk
        raise error.args[0] from None


def _fill(book: Any, name: str, columns: Sequence[tuple[str, Sequence[Any]]]) -> None:
    sheet, bold, plain = book.add_worksheet(name), book.add_format({"bold": True}), book.add_format()
    for place, (title, cells) in enumerate(columns):
        wrapped = book.add_format({"text_wrap": True, "valign": "top"}) if place == 0 else None
        sheet.set_column(place, place, _width([title, *cells[:_SAMPLE]]), wrapped)
    rows = max(len(cells) for _, cells in columns)
    sheet.freeze_panes(1, 0)
    sheet.autofilter(0, 0, rows, len(columns) - 1)
    sheet.ignore_errors({"number_stored_as_text": f"A1:XFD{rows + 1}"})  # a respondent may be called 007
    for place, (title, _) in enumerate(columns):
        _put(sheet, 0, place, title, bold)
    for row, cells in enumerate(zip(*(cells for _, cells in columns), strict=True), start=1):
        for place, cell in enumerate(cells):
            _put(sheet, row, place, cell, plain)


def _put(sheet: Any, row: int, place: int, cell: Any, form: Any) -> None:
    if isinstance(cell, bool):
        sheet.write_boolean(row, place, cell)
    elif isinstance(cell, int | float) and abs(cell) <= _EXACT:
        sheet.write_number(row, place, cell)
    elif text := readable(cell):
        if text.startswith("<r>") and text.endswith("</r>"):  # in one piece, the library takes it for markup
            status = sheet.write_rich_string(row, place, text[:3], form, text[3:])
        else:
            status = sheet.write_string(row, place, text, form if row == 0 else None)
        assert status == 0, (status, row, place)


def _width(cells: Sequence[Any]) -> int:
    narrowest, widest = _WIDTHS
    return min(widest, max(narrowest, *(len(line) + 2 for cell in cells for line in readable(cell).split("\n"))))
