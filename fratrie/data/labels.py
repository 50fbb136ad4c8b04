"""Cells of labels: names in one string, lists as other tools write them, positions; one spelling for equal looks."""

import ast
import json
import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from fratrie.data.annotation import excerpt, first_of, text_problem
from fratrie.data.tables import Table
from fratrie.wording import did_you_mean

logger = logging.getLogger(__name__)

Problems = defaultdict[str, list[int]]

_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = rf"(?:np\.str_\()?({_STRING}|-?(?:0|[1-9]\d{{0,17}}))\)?"
_COMMAS, _SPACES = (
    re.compile(rf"[\[({{]\s*(?:{_ITEM}(?:{mark}{_ITEM})*\s*,?)?\s*[\])}}]") for mark in (r"\s*,\s*", r"\s+")
)
_CHOICES = re.compile(r"""\{\s*['"]choices['"]\s*:\s*(.*?)\s*\}""", re.DOTALL)
_PIECE_OF_A_LIST = re.compile(r"""[\[{"].*|.*[\]}]|'.*'|array\(.*""", re.DOTALL)
_ESCAPED = re.compile(r"'(?=[=+\-@][^']*$)")  # as `Output` keeps a spreadsheet from taking a cell for a formula
_WRITE_SO = 'write names with one mark between them, or ["a", "b"]; if it is a name, name all labels (label_names)'
# Neither seen nor heard: zero width space, word joiner, byte order mark, soft hyphen, marks of direction.
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff\u00ad\u200e\u200f"))
_JOINERS = "\u200c\u200d "  # within a name, they make one sign of several


def plain_name(name: str) -> str:
    """The spelling that stands for all that look like it: composed (NFC), nothing invisible, plain single spaces."""
    return " ".join(unicodedata.normalize("NFC", name).translate(_INVISIBLE).split()).strip(_JOINERS)


def read_labels(
    table: Table, cells: Sequence[Any], names: list[str] | None, multi_label: bool | None, problems: Problems
) -> tuple[list[str], list[Any], bool]:
    """Read a column of labels, as `load_labelled` describes it.

    Args:
        table: whose rows are told.
        cells: the column.
        names: the known labels in the order of their ids; by default all that occur, sorted.
        multi_label: several labels per text or one; by default as the cells say.
        problems: gets what is wrong, with the rows.

    Returns:
        Label names, label ids of each row (a list, or one id), and whether a row may have several.
    """
    known, wrong = _KnownLabels(names or []), Problems(list)
    cells = _unpacked(_plain(table, cells), known, wrong)
    cells = _numbers_as_positions(cells, names or [])
    split = _splitter(cells, known if names else None, multi_label)
    rows: list[list[str | int]] = []
    for place, cell in enumerate(cells):
        try:
            rows.append(_cell_labels(cell, split, known))
        except ValueError as error:
            wrong[str(error)].append(place)
            rows.append([])
    _refuse_indicators(rows, known, wrong)
    listed = any(isinstance(cell, list) for cell in cells) or any(len(row) > 1 for row in rows)
    several = listed if multi_label is None else multi_label
    if names is None:
        rows = [[str(label) for label in row] for row in rows]
        names = sorted({str(label) for row in rows for label in row}, key=_natural_order)
        _check_own_names(names, rows, wrong)
        _tell_marks(table, cells, rows, several)
        known = _KnownLabels(names)
    ids = _positions(rows, known, several, wrong)
    problems |= wrong
    return names, ids, several


class _KnownLabels:
    """Finds labels, written as names (strings) or positions (integers), among known names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.ids = {plain_name(name): position for position, name in enumerate(names)}
        self.numeric = all(map(_is_number, names))

    def position(self, label: str | int) -> int | None:
        if isinstance(label, str) or self.numeric:
            return self.ids.get(str(label))
        return label if 0 <= label < len(self.ids) else None

    def split(self, cell: str) -> list[str]:
        labels = []
        for part in [cell] if cell in self.ids else _split_at_marks(cell):
            words = part.split()
            whole = part in self.ids or not any(word in self.ids for word in words)
            labels += [part] if whole else words
        return labels


def _positions(
    rows: Sequence[Sequence[str | int]], known: _KnownLabels, several: bool, problems: Problems
) -> list[Any]:
    ids: list[Any] = []
    reported = {place for places in problems.values() for place in places}
    for place, row in enumerate(rows):
        positions = {label: known.position(label) for label in row}
        for label in (label for label, position in positions.items() if position is None):
            problems[f"unknown label {excerpt(label)}{did_you_mean(str(label), known.ids)}"].append(place)
        if not several and len(positions) != 1 and (positions or place not in reported):
            problems["several labels, expected one" if positions else "no label, expected one"].append(place)
        found = sorted({position for position in positions.values() if position is not None})
        ids.append(found if several else next(iter(found), 0))
    return ids


# --- cells ---


def _plain(table: Table, cells: Sequence[Any]) -> list[Any]:
    """The cells with the plain spelling of all their strings, those of a csv without the apostrophe before a formula.

    Tells where more was changed, but for outer spaces.
    """
    changed = defaultdict(list)

    def plain(value: Any, place: int) -> Any:
        if isinstance(value, list):
            return [plain(item, place) for item in value]
        if isinstance(value, dict):
            return {key: plain(item, place) for key, item in value.items()}
        if not isinstance(value, str):
            return value
        spelling = plain_name(value)
        if " ".join(re.split(r"[ \t\r\n]+", value.strip(" \t\r\n"))) != spelling:
            changed[ascii(value)].append(place)
        return spelling

    bare = [_ESCAPED.sub("", cell) if isinstance(cell, str) else cell for cell in cells]
    read = [plain(cell, place) for place, cell in enumerate(bare)]
    if changed:
        told = "; ".join(first_of([f"{table.told(places)}: {value:.60}" for value, places in changed.items()], 5))
        logger.warning(
            "labels of %d row(s) hold invisible characters, special spaces or letters apart from their accents, and "
            "are read as the labels that look alike (%s)",
            len({place for places in changed.values() for place in places}),
            told,
        )
    return read


def _unpacked(cells: Sequence[Any], known: _KnownLabels, problems: Problems) -> list[Any]:
    """The cells with lists that other tools wrote as text turned into lists."""
    unpacked, choices = [], False
    for place, cell in enumerate(cells):
        try:
            unpacked.append(_list_in(cell) if _may_be_a_list(cell, known) else cell)
            choices |= _names_choices(cell)
        except ValueError as error:
            problems[str(error)].append(place)
            unpacked.append(None)
    if not any(isinstance(new, list) and not isinstance(old, list) for new, old in zip(unpacked, cells, strict=True)):
        return unpacked
    # Between lists, a bare string is one label: Label Studio writes a single choice so.
    for place, cell in enumerate(unpacked):
        if isinstance(cell, str) and cell:
            if not choices and re.search(r"[,;|#\s]", cell) and cell not in known.ids:
                wrong = f"the cell {excerpt(cell)} is no list, as others of the column are: {_WRITE_SO}"
                problems[wrong].append(place)
            unpacked[place] = [cell]
    return unpacked


def _may_be_a_list(cell: Any, known: _KnownLabels) -> bool:
    if not isinstance(cell, str):
        return isinstance(cell, dict)
    return cell not in known.ids and bool(re.fullmatch(r"[\[{].*[\]}]|\(\s*['\"].*\)", cell))


def _names_choices(cell: Any) -> bool:
    return isinstance(cell, dict) or (isinstance(cell, str) and bool(_CHOICES.fullmatch(cell)))


def _list_in(cell: str | dict[str, Any]) -> list[Any]:
    """The list that Python, json, numpy or Label Studio wrote into a cell; a ValueError says that it is none."""
    if isinstance(cell, dict):
        choices = cell.get("choices") if len(cell) == 1 else None
        if not isinstance(choices, str | list):
            raise ValueError(f"label {excerpt(cell)}, expected a name or a whole number")
        return [choices] if isinstance(choices, str) else choices
    inner = match[1] if (match := _CHOICES.fullmatch(cell)) else cell
    if re.fullmatch(_STRING, inner):
        return [_unquoted(inner)]
    if not (_COMMAS.fullmatch(inner) or _SPACES.fullmatch(inner)):
        raise ValueError(f"the cell {excerpt(cell)} looks like a list, but not of names in quotes: {_WRITE_SO}")
    return [_unquoted(item) for item in re.findall(_ITEM, inner)]


def _unquoted(item: str) -> Any:
    try:
        value = json.loads(item)
    except ValueError:
        try:
            value = ast.literal_eval(item)
        except SyntaxError as error:
            raise ValueError(f"the name {excerpt(item)} in a list cannot be read: {error.msg}") from None
    return plain_name(value) if isinstance(value, str) else value


def _numbers_as_positions(cells: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
    """Cells with strings of numbers turned to integers, if all are such and no known name is a number."""
    words = {cell: re.findall(r"[^,;|#\s]+", cell) for cell in cells if isinstance(cell, str)}
    all_numbers = all(_is_number(word) for row in words.values() for word in row)
    if not names or not all_numbers or any(map(_is_number, names)):
        return cells
    numbers = {cell: [int(word) for word in row] for cell, row in words.items()}
    read = {cell: row if len(row) > 1 else next(iter(row), None) for cell, row in numbers.items()}
    return [read[cell] if isinstance(cell, str) else cell for cell in cells]


def _splitter(
    cells: Sequence[Any], known: _KnownLabels | None, multi_label: bool | None
) -> Callable[[str], list[str]]:
    """How a string of labels is cut, judged over the whole column."""
    if multi_label is False:
        return lambda cell: [cell] if cell else []
    if known is not None:
        return known.split
    strings = [cell for cell in cells if isinstance(cell, str)]
    if any(re.search(_HASH, cell) for cell in strings):
        logger.warning(
            "labels are split at '#'; if a name holds one, name all labels (label_names) or ask for one label per text"
        )
        return _split_at_hashes
    if any(re.search(r"[,;|]", cell) for cell in strings):
        return _split_at_marks
    if multi_label is None and any(len(cell.split()) > 1 for cell in strings):
        logger.warning(
            "labels with spaces are read as several labels each; if a name holds spaces, "
            "name all labels (label_names) or ask for one label per text"
        )
    return str.split


_HASH = r"(?<=[^\s#])#(?=[^\s#])"  # doccano's; «C#» and «#mot» are names


def _split_at_hashes(cell: str) -> list[str]:
    parts = re.split(_HASH, cell) if cell else []
    if len(parts) > 1 and re.search(r"[,;|]", cell):
        raise ValueError(f"the cell {excerpt(cell)} separates labels in two ways: {_WRITE_SO}")
    return [part for each in parts for part in _split_at_marks(each)]


def _split_at_marks(cell: str) -> list[str]:
    return [part.strip() for part in re.split(rf"[,;|]|{_HASH}", cell) if part.strip()]


def _cell_labels(cell: Any, split: Callable[[str], list[str]], known: _KnownLabels) -> list[str | int]:
    """The labels of one cell, as written; a ValueError says why it holds none."""
    if cell is None:
        return []
    labels = split(cell) if isinstance(cell, str) else cell if isinstance(cell, list) else [cell]
    for label in labels:
        if type(label) is not int and not (isinstance(label, str) and label):
            raise ValueError(f"label {excerpt(label)}, expected a name or a whole number")
        if isinstance(label, str) and label not in known.ids:
            if problem := text_problem(label):
                raise ValueError(f"the label {excerpt(label)} {problem}")
            if isinstance(cell, str) and _PIECE_OF_A_LIST.fullmatch(label):
                raise ValueError(f"the label {excerpt(label)} looks like a piece of a list: {_WRITE_SO}")
    return list(labels)


def _refuse_indicators(rows: list[list[str | int]], known: _KnownLabels, problems: Problems) -> None:
    """Note rows of zeros and ones, a place for each label, which are no labels; they become rows without any."""
    written = [[str(label) for label in row] for row in rows if row]
    # Positions are a set, so nobody writes 1, 0 but for two places.
    places = len(set(map(len, written))) == 1 and {"0", "1"} >= {label for row in written for label in row}
    turned = places and ["1", "0"] in written
    for place, row in enumerate(rows):
        named = known.ids.keys() >= set(map(str, row)) and (known.numeric or all(isinstance(x, str) for x in row))
        repeats = len(set(map(str, row))) < len(row)
        numbers = all(type(label) is int for label in row) or set(map(str, row)) <= {"0", "1"}
        if not named and ((turned and row) or (repeats and numbers)):
            shown = f"[{', '.join(map(str, row[:12]))}{', …' if len(row) > 12 else ''}]"
            problems[
                f"label positions {shown} repeat, or are zeros and ones with a place for each label: "
                "write the names of the labels that apply, or a set of their positions"
            ].append(place)
            rows[place] = []


def _check_own_names(names: Sequence[str], rows: Sequence[Sequence[str | int]], problems: Problems) -> None:
    """Note names that are several others, written with spaces where the column has commas; tell of look-alikes."""
    several = {name for name in names if " " in name and set(name.split()) <= set(names)}
    for place, row in enumerate(rows):
        for name in several & set(map(str, row)):
            problems[f"the label {name!r} is made of others: separate labels in one way, by ',' or by spaces"].append(
                place
            )
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[name.casefold()].append(name)
    if pairs := [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]:
        logger.warning("labels that differ in case alone are different labels: %s", "; ".join(first_of(pairs)))


def _tell_marks(table: Table, cells: Sequence[Any], rows: Sequence[Sequence[str | int]], several: bool) -> None:
    """Tell by which marks labels are separated, and what is read as one label and may be meant as several."""
    first: dict[str, str] = {}
    alone: dict[str, int] = {}
    among_others: set[str | int] = set()
    for place, (cell, row) in enumerate(zip(cells, rows, strict=True)):
        if not isinstance(cell, str):
            continue
        marks = re.findall(rf"[,;|]|{_HASH}", cell)
        for mark in marks:
            first.setdefault(mark, f"{mark!r} ({table.told([place])}: {excerpt(cell, 40)})")
        if marks:
            among_others |= set(row)
        elif re.search(r"\s", cell):
            alone.setdefault(cell, place)
    shown = " and ".join(first.values())
    if first and not several:
        logger.warning("each cell is one label, also one with %s", shown)
    elif first:
        logger.info("labels are separated by %s", shown)
        names = [
            f"{excerpt(name, 40)} ({table.told([place])})" for name, place in alone.items() if name not in among_others
        ]
        if names:
            logger.warning(
                "cells with spaces and without such a mark are one label each, %s: where several are meant, separate "
                "them as the others are",
                ", ".join(first_of(names, 5)),
            )


def _natural_order(name: str) -> tuple[bool, int, str]:
    return not _is_number(name), int(name) if _is_number(name) else 0, name


def _is_number(name: str) -> bool:
    return len(name) < 19 and name.removeprefix("-").isdecimal()
