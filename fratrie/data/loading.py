"""Labelled texts for training and evaluation, and bare texts for prediction, from the files people have."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, List, Value

from fratrie.data.annotation import LABELS, canonical_code, code_labels, read_annotations, text_problem
from fratrie.data.tables import Table, existing_file, raise_row_problems, read_table, read_text

logger = logging.getLogger(__name__)

Problems = defaultdict[str, list[int]]


def load_labelled(
    path: str | PathLike[str],
    label_names: Sequence[str] | None = None,
    text_column: str = "text",
    label_column: str = "labels",
    group_column: str | None = None,
    multi_label: bool | None = None,
    continuation: str = "merge",
) -> Dataset:
    """Read labelled texts into an in-memory dataset with the columns `text` and `labels`.

    The feature of `labels` says the task: `List(ClassLabel)` for several labels a text, `ClassLabel` for one.
    A column of speakers is kept as `respondent`, a column of annotation codes as `code`.

    A cell of labels is a list of names or positions; one name or position; or names in one string separated
    by `,`, `;` or `|` or, where that gives known names or the column has none of these, by spaces. Integers are
    positions in `label_names`, unless all these names are numbers; a column of strings that are all numbers
    is integers if no name is a number. Without a column `labels`, a column `code` is read as annotation
    codes (`jm+, jp-`).

    Args:
        path: .txt (annotation format), .csv, .tsv, .json, .jsonl or .parquet.
        label_names: the known labels in the order of their ids; by default those that the file declares or
            `LABELS` for annotation codes, otherwise all that occur, sorted.
        text_column, label_column: column names; they play no part in .txt files.
        group_column: column that names the speaker; by default `respondent` or `group` where there is one.
        multi_label: several labels a text or one; by default several if any text has a list or two labels.
        continuation: see `read_annotations`; for .txt files.

    Raises:
        ValueError: lists the wrong lines or rows, with the known labels, or the columns there are.
        OSError: the file is missing or cannot be read.
    """
    path = existing_file(path)
    if path.suffix.lower() == ".txt":
        table = _annotation_table(path, continuation)
        text_column, label_column, group_column = "text", "code", "respondent"
    else:
        table = read_table(path)
        if label_column == "labels" and "labels" not in table.columns and "code" in table.columns:
            label_column = "code"
    problems: Problems = defaultdict(list)
    columns = {"text": table.column(text_column, "text_column")}
    features: dict[str, Any] = {"text": Value("string")}
    cells = table.column(label_column, "label_column")
    _check_texts(columns["text"], problems)
    if speakers := _speakers(table, group_column, problems):
        numbered = all(type(speaker) is int for speaker in speakers)
        columns["respondent"] = speakers if numbered else [str(speaker) for speaker in speakers]
        features["respondent"] = Value("int64" if numbered else "string")
    names = table.class_names.get(label_column) if label_names is None else _checked_names(label_names)
    is_open = label_names is None or multi_label is None
    if label_column == "code":
        columns["code"], cells = _read_codes(cells, problems)
        features["code"] = Value("string")
        names, multi_label = names or list(LABELS), multi_label is not False
    names, columns["labels"], several = _read_labels(cells, names, multi_label, problems)
    raise_row_problems(
        path, problems, _advice(names, several, is_open) if any("label" in each for each in problems) else ""
    )
    if not names:
        raise ValueError(f"{path}: no row has a label in the column {label_column!r}")
    features["labels"] = List(ClassLabel(names=names)) if several else ClassLabel(names=names)
    return Dataset.from_dict(columns, features=Features(features))


def load_texts(path: str | PathLike[str], text_column: str = "text", annotated: bool = False) -> list[str]:
    """Read texts to predict: one a line from .txt, or a column of .csv, .tsv, .json, .jsonl or .parquet.

    Only `\\n` and `\\r\\n` end a line of .txt; blank lines there are skipped, and their number is logged.

    Args:
        path: the file.
        text_column: column of the texts; it plays no part in .txt files.
        annotated: the file is in the annotation format; its sentences without codes are the texts.

    Raises:
        ValueError: the file has no texts, an empty cell (with its row), no such column, or another encoding.
        OSError: the file is missing or cannot be read.
    """
    return load_texts_and_others(path, text_column, annotated)[0]


def load_texts_and_others(
    path: str | PathLike[str], text_column: str = "text", annotated: bool = False
) -> tuple[list[str], dict[str, list[Any]]]:
    """Read texts as `load_texts` does, and the other columns of their file."""
    path = existing_file(path)
    if annotated:
        columns = _annotation_table(path, "merge").columns
        return columns.pop("text"), columns
    if path.suffix.lower() == ".txt":
        return _lines(path), {}
    table = read_table(path)
    texts = table.column(text_column, "text_column")
    problems: Problems = defaultdict(list)
    _check_texts(texts, problems)
    raise_row_problems(path, problems, "remove these rows or give them a text")
    return texts, {name: cells for name, cells in table.columns.items() if name != text_column}


def _lines(path: Path) -> list[str]:
    lines = [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{path}: the file is empty, expected one sentence a line")
    if len(texts) < len(lines):
        logger.warning("%s: skipped %d blank line(s)", path, len(lines) - len(texts))
    if all(_begins_with_a_code(text) for text in texts):
        logger.warning(
            "%s: every line begins with what looks like an annotation code, which is read as a part of its text; "
            "annotated reads the sentences alone",
            path,
        )
    return texts


def _begins_with_a_code(line: str) -> bool:
    """Whether a line begins with a code that no French sentence begins with: one with a valence."""
    code = line.split(maxsplit=1)[0].rstrip(",")
    try:
        return bool(set(canonical_code(code)) & set("+-0"))
    except ValueError:
        return False


def _advice(names: Sequence[str], several: bool, is_open: bool) -> str:
    """What the labels are taken for, and how to change what the caller left open."""
    kind = "multi_label_classification" if several else "single_label_classification"
    way_out = " (label_names and multi_label change this; in finetune.py --label_names and --problem_type, here {})"
    known = f"known labels: {', '.join(names)}; several labels a text: {'yes' if several else 'no'}"
    return known + way_out.format(kind) * is_open


class _KnownLabels:
    """Finds labels, written as names (strings) or positions (integers), among known names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.ids = {name: position for position, name in enumerate(names)}
        self.numeric = all(map(_is_number, names))

    def position(self, label: str | int) -> int | None:
        if isinstance(label, str) or self.numeric:
            return self.ids.get(str(label))
        return label if 0 <= label < len(self.ids) else None

    def split(self, cell: str) -> list[str]:
        labels = []
        for part in [cell] if cell in self.ids else _split_at_commas(cell):
            words = part.split()
            whole = part in self.ids or not any(word in self.ids for word in words)
            labels += [part] if whole else words
        return labels


def _read_labels(
    cells: Sequence[Any], names: list[str] | None, multi_label: bool | None, problems: Problems
) -> tuple[list[str], list[Any], bool]:
    """Label names, label ids of each row (a list, or one id) and whether a row may have several."""
    cells = _numbers_as_positions(cells, names or [])
    split = _splitter(cells, names, multi_label)
    rows: list[list[str | int]] = []
    unread = set()
    for number, cell in enumerate(cells, start=1):
        try:
            rows.append(_cell_labels(cell, split))
        except ValueError as error:
            problems[str(error)].append(number)
            rows.append([])
            unread.add(number)
    listed = any(isinstance(cell, list) for cell in cells) or any(len(row) > 1 for row in rows)
    several = listed if multi_label is None else multi_label
    if names is None:
        rows = [[str(label) for label in row] for row in rows]
        names = sorted({str(label) for row in rows for label in row}, key=_natural_order)
        _check_own_names(names, rows, problems)
    known = _KnownLabels(names)
    ids: list[Any] = []
    for number, row in enumerate(rows, start=1):
        positions = {label: known.position(label) for label in row}
        for label in (label for label, position in positions.items() if position is None):
            problems[f"unknown label {label!r}"].append(number)
        if not several and len(positions) != 1 and number not in unread:
            problems["several labels, expected one" if positions else "no label, expected one"].append(number)
        found = sorted({position for position in positions.values() if position is not None})
        ids.append(found if several else next(iter(found), 0))
    return names, ids, several


def _check_own_names(names: Sequence[str], rows: Sequence[Sequence[str | int]], problems: Problems) -> None:
    """Note names that are several others, written with spaces where the column has commas; tell of look-alikes."""
    several = {name for name in names if " " in name and set(name.split()) <= set(names)}
    for number, row in enumerate(rows, start=1):
        for name in several & set(map(str, row)):
            problems[f"the label {name!r} is made of others: separate labels in one way, by ',' or by spaces"].append(
                number
            )
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[name.casefold()].append(name)
    if pairs := [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]:
        logger.warning("labels that differ in case alone are different labels: %s", "; ".join(pairs))


def _numbers_as_positions(cells: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
    """Cells with strings of numbers turned to integers, if all are such and no known name is a number."""
    words = {cell: re.findall(r"[^,;|\s]+", cell) for cell in cells if isinstance(cell, str)}
    all_numbers = all(_is_number(word) for row in words.values() for word in row)
    if not names or not all_numbers or any(map(_is_number, names)):
        return cells
    numbers = {cell: [int(word) for word in row] for cell, row in words.items()}
    read = {cell: row if len(row) > 1 else next(iter(row), None) for cell, row in numbers.items()}
    return [read[cell] if isinstance(cell, str) else cell for cell in cells]


def _splitter(cells: Sequence[Any], names: list[str] | None, multi_label: bool | None) -> Callable[[str], list[str]]:
    """How a string of labels is cut, judged over the whole column."""
    if multi_label is False:
        return lambda cell: [cell] if cell else []
    if names is not None:
        return _KnownLabels(names).split
    strings = [cell.strip() for cell in cells if isinstance(cell, str)]
    if any(re.search(r"[,;|]", cell) for cell in strings):
        return _split_at_commas
    if multi_label is None and any(len(cell.split()) > 1 for cell in strings):
        logger.warning(
            "labels with spaces are read as several labels each; if a name holds spaces, "
            "name all labels (label_names) or ask for one label a text"
        )
    return str.split


def _split_at_commas(cell: str) -> list[str]:
    return [part.strip() for part in re.split(r"[,;|]", cell) if part.strip()]


def _cell_labels(cell: Any, split: Callable[[str], list[str]]) -> list[str | int]:
    """The labels of one cell, as written; a ValueError says why it holds none."""
    if cell is None:
        return []
    if isinstance(cell, str):
        return [*split(cell.strip())]
    labels = cell if isinstance(cell, list) else [cell]
    for label in labels:
        if type(label) is not int and not (isinstance(label, str) and label.strip()):
            raise ValueError(f"label {label!r}, expected a name or a whole number")
    if len(set(labels)) < len(labels) and all(isinstance(label, int) for label in labels):
        raise ValueError(f"label positions {labels} repeat, expected a set of positions (no zeros and ones)")
    return labels


def _read_codes(cells: Sequence[Any], problems: Problems) -> tuple[list[str], list[list[str]]]:
    """Annotation codes in canonical form, and their labels."""
    codes, labels = [], []
    for number, cell in enumerate(cells, start=1):
        try:
            code = canonical_code("" if cell is None else str(cell))
        except ValueError as error:
            problems[str(error)].append(number)
            code = ""
        codes.append(code)
        labels.append(list(code_labels(code)) if code else [])
    return codes, labels


def _annotation_table(path: Path, continuation: str) -> Table:
    segments = read_annotations(path, continuation)
    names = ("text", "code", "respondent")
    return Table(path, {name: [getattr(segment, name) for segment in segments] for name in names})


def _speakers(table: Table, group_column: str | None, problems: Problems) -> list[Any]:
    """The column of speakers, or nothing if the file has none and none was asked for."""
    candidates = [name for name in ("respondent", "group") if name in table.columns]
    name = group_column or next(iter(candidates), None)
    if name is None:
        return []
    speakers = table.column(name, "group_column")
    missing = [number for number, speaker in enumerate(speakers, start=1) if speaker in (None, "")]
    if missing:
        problems[f"no {name}"] += missing
    return speakers


def _check_texts(texts: Sequence[Any], problems: Problems) -> None:
    for number, text in enumerate(texts, start=1):
        problem = text_problem(text) if isinstance(text, str) else f"is {text!r}, expected a string"
        if problem:
            problems[f"the text {problem}"].append(number)


def _checked_names(names: Sequence[str]) -> list[str]:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"label_names={list(names)!r}: expected one name or more, each of them once")
    return list(names)


def _natural_order(name: str) -> tuple[bool, int, str]:
    return not _is_number(name), int(name) if _is_number(name) else 0, name


def _is_number(name: str) -> bool:
    return name.removeprefix("-").isdecimal()
