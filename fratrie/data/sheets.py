"""Sheets of spreadsheets (xlsx, xls, ods) as rows of text, each cell as a csv file would hold it."""

import datetime
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fratrie.data.annotation import excerpt, first_of

KINDS = (".xlsx", ".xls", ".ods")


def read_sheet(path: Path, sheet: str | None = None) -> list[tuple[int, list[str]]]:
    """The rows of a sheet that are not blank, of equal width, each with its number (from 1).

    Args:
        path: of the file.
        sheet: its name; by default the only one that has content.

    Raises:
        ValueError: the file is damaged or locked by a password, has no such sheet, several with content and none is
            named, or (xlsx, ods) cells with an error or with a formula that was never computed.
    """
    from python_calamine import CalamineError, CalamineWorkbook

    try:
        with CalamineWorkbook.from_path(path) as book:
            names = book.sheet_names
            if sheet is not None and sheet not in names:
                raise ValueError(f"{path}: no sheet {sheet!r}; there are {', '.join(map(excerpt, names))}")
            found = {name: _rows(book.get_sheet_by_name(name)) for name in names if sheet in (None, name)}
    except CalamineError as error:
        raise ValueError(
            f"{path}: not a readable spreadsheet, locked by a password, or of another kind than its name says: {error}"
        ) from None
    filled = {name: rows for name, rows in found.items() if rows}
    if len(filled) > 1:
        raise ValueError(f"{path}: several sheets have content, {', '.join(filled)}: pick one by sheet (--sheet)")
    for name, rows in filled.items():
        if faults := _cells_without_value(path, name):
            raise ValueError(
                f"{path}: cells of the sheet {name!r} hold an error or a formula that was never computed, "
                f"{', '.join(first_of(faults))}: mend them, or open the file in a spreadsheet program and save it"
            )
        return rows
    return []


def _rows(sheet: Any) -> list[tuple[int, list[str]]]:
    rows = [[cell_text(cell) for cell in row] for row in sheet.to_python(skip_empty_area=False)]
    return [(number, row) for number, row in enumerate(rows, start=1) if any(row)]


def _cells_without_value(path: Path, sheet: str) -> list[str]:
    """The cells that are read as if they were empty, and are not: those with errors, and formulas without a result."""
    find = {".xlsx": _faults_of_xlsx, ".ods": _faults_of_ods}.get(path.suffix.lower())
    if find is None:
        return []
    with zipfile.ZipFile(path) as archive:
        return find(archive, sheet)


def _faults_of_xlsx(archive: zipfile.ZipFile, sheet: str) -> list[str]:
    """By their names, such as B7."""
    links = {link.get("Id"): link.get("Target", "") for link in _parsed(archive, "xl/_rels/workbook.xml.rels")}
    entry = next(each for each in _parsed(archive, "xl/workbook.xml").iter() if _is(each, "sheet", name=sheet))
    target = links[next(value for name, value in entry.items() if name.endswith("}id"))]
    faults = []
    with archive.open(target.removeprefix("/") if target.startswith("/") else f"xl/{target}") as file:
        for _, cell in ElementTree.iterparse(file):
            if _is(cell, "c"):
                parts = {part.tag.rpartition("}")[2]: part.text for part in cell}
                uncomputed = "f" in parts and not parts.get("v") and cell.get("t") != "str"
                if cell.get("t") == "e" or uncomputed:
                    faults.append(cell.get("r", "?"))
                cell.clear()
    return faults


def _faults_of_ods(archive: zipfile.ZipFile, sheet: str) -> list[str]:
    """By what stands in them."""
    faults = []
    for table in _parsed(archive, "content.xml").iter():
        if _is(table, "table", name=sheet):
            for cell in table.iter():
                said = {name.rpartition("}")[2]: value for name, value in cell.items()}
                kinds = [value for name, value in cell.items() if name.endswith("}value-type")]
                if _is(cell, "table-cell") and ("error" in kinds or ("formula" in said and not kinds)):
                    faults.append("".join(cell.itertext()) or said["formula"])
    return faults


def _parsed(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(archive.read(name))


def _is(element: ElementTree.Element, kind: str, **attributes: str) -> bool:
    """Whether an element is of this kind and has these attributes, in whatever namespace."""
    said = {name.rpartition("}")[2]: value for name, value in element.items()}
    return element.tag.rpartition("}")[2] == kind and attributes.items() <= said.items()


def cell_text(cell: Any) -> str:
    """A cell as text: a whole number without the fraction that spreadsheets store, a day without its midnight."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, bool):
        return str(cell).upper()
    if isinstance(cell, datetime.datetime) and cell.time() == datetime.time():
        cell = cell.date()
    return cell.isoformat() if isinstance(cell, datetime.date | datetime.time) else str(cell)
