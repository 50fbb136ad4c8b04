"""Sheets of spreadsheets (xlsx, xls, ods) as rows of text, each cell as a csv file would hold it."""

import datetime
from pathlib import Path
from typing import Any

from fratrie.data.annotation import excerpt

KINDS = (".xlsx", ".xls", ".ods")


def read_sheet(path: Path, sheet: str | None = None) -> list[tuple[int, list[str]]]:
    """The rows of a sheet that are not blank, of equal width, each with its number (from 1).

    Args:
        path: of the file.
        sheet: its name; by default the only one that has content.

    Raises:
        ValueError: the file is damaged or locked by a password, has no such sheet, or several with content and none is
            named.
    """
    from python_calamine import CalamineError, CalamineWorkbook

    try:
        with CalamineWorkbook.from_path(path) as book:
            names = book.sheet_names
            if sheet is not None and sheet not in names:
                raise ValueError(f"{path}: no sheet {sheet!r}; there are {', '.join(map(excerpt, names))}")
            found = {name: _rows(book.get_sheet_by_name(name)) for name in names if sheet in (None, name)}
    except CalamineError as error:
        raise ValueError(f"{path}: not a readable spreadsheet, or locked by a password: {error}") from None
    filled = {name: rows for name, rows in found.items() if rows}
    if len(filled) > 1:
        raise ValueError(f"{path}: several sheets have content, {', '.join(filled)}: pick one by sheet (--sheet)")
    return next(iter(filled.values()), [])


def _rows(sheet: Any) -> list[tuple[int, list[str]]]:
    rows = [[_text(cell) for cell in row] for row in sheet.to_python(skip_empty_area=False)]
    return [(number, row) for number, row in enumerate(rows, start=1) if any(row)]


def _text(cell: Any) -> str:
    """A cell as text: a whole number without the fraction that spreadsheets store, a day without its midnight."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, bool):
        return str(cell).upper()
    if isinstance(cell, datetime.datetime) and cell.time() == datetime.time():
        cell = cell.date()
    return cell.isoformat() if isinstance(cell, datetime.date | datetime.time) else str(cell)
