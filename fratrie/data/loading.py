"""Labelled texts for training and evaluation, and bare texts for prediction, from the files people have."""

import logging
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value

from fratrie.data.annotation import (
    LABELS,
    canonical_code,
    code_labels,
    excerpt,
    first_of,
    read_annotations,
    text_problem,
)
from fratrie.data.cells import whole
from fratrie.data.exports import chosen_labels, flat_tasks, one_annotation_each, texts_of_tasks, usual_columns
from fratrie.data.indicators import are_indicators, read_indicators
from fratrie.data.labels import Problems, plain_name, read_labels
from fratrie.data.tables import Table, raise_row_problems, read_table
from fratrie.data.text_files import UTF8, TextFormat, existing_file, read_text

logger = logging.getLogger(__name__)

_GREATEST = float(np.finfo(np.float32).max)  # beyond it, a value is infinite to a model


def load_labelled(
    path: str | PathLike[str],
    label_names: Sequence[str] | None = None,
    text_column: str = "text",
    label_column: str | Sequence[str] | None = None,
    group_column: str | None = None,
    multi_label: bool | None = None,
    continuation: str = "merge",
    annotator: str | None = None,
    form: TextFormat = UTF8,
) -> Dataset:
    """Read labelled texts into an in-memory dataset with the columns `text`, `row` (see `Table`) and `labels`.

    The feature of `labels` says the task: `List(ClassLabel)` for several labels per text, `ClassLabel` for one.
    A column of speakers is kept as `respondent`, a column of annotation codes as `code`.

    A cell of labels is a list of names or positions; one name or position; names in one string separated
    by `,`, `;`, `|` or `#` or, where that gives known names or the column has none of these, by spaces; or a list as
    Python, json, numpy (`['a' 'b']`) or Label Studio (`{"choices": ["a", "b"]}`) write it. Integers are
    positions in `label_names`, unless all these names are numbers; a column of strings that are all numbers
    is integers if no name is a number. Names that look alike (composed accents or not, invisible characters, special
    and outer spaces) are one; those that differ in case are told. A column `code` holds annotation codes (`jm+, jp-`).

    Several columns are one label each, which has its name, and say where it applies (see `read_indicators`).

    Args:
        path: .txt (annotation format), or a table that `read_table` reads.
        label_names: the known labels in the order of their ids; by default those that the file declares or
            `LABELS` for annotation codes, otherwise all that occur, sorted.
        text_column: column of the texts; like the next two, it plays no part in .txt files.
        label_column: column of the labels, or the columns that say yes or no, one for each label; by default
            `labels`, `label` or `code`, or that of an export (see `fratrie.data.exports`).
        group_column: column that names the speaker; by default `respondent` or `group` where there is one.
        multi_label: several labels per text or one; by default several if any text has a list or two labels.
        continuation: see `read_annotations`; for .txt files.
        annotator: whose labels to read, where a column `annotator` names several.
        form: encoding and delimiter of the file.

    Raises:
        ValueError: lists the wrong lines or rows, with the known labels, or the columns there are.
        OSError: the file is missing or cannot be read.
    """
    path = existing_file(path)
    if path.suffix.lower() == ".txt":
        table = _annotation_table(path, continuation, form)
        text_column, label_columns, group_column = "text", ["code"], "respondent"
    else:
        table = flat_tasks(read_table(path, form))
        text_column, label_columns = usual_columns(table, text_column, label_column, group_column)
        table = one_annotation_each(table, annotator)
    problems: Problems = defaultdict(list)
    columns, features = _texts_and_speakers(table, text_column, label_columns, group_column, problems)
    names = _checked_names(label_names if label_names is not None else table.class_names.get(label_columns[0]))
    is_open = label_names is None or multi_label is None
    cells: Sequence[Any]
    if len(label_columns) > 1:
        names, cells = _read_indicators(table, label_columns, names if label_names is not None else None, problems)
    elif label_columns == ["code"]:
        columns["code"], cells = _read_codes(_label_cells(table, "code"), problems)
        features["code"] = Value("string")
        names, multi_label = names or list(LABELS), multi_label is not False
    else:
        cells, multi_label = chosen_labels(table, _label_cells(table, label_columns[0]), multi_label)
    names, columns["labels"], several = read_labels(table, cells, names, multi_label, problems)
    advice = _advice(names, several, is_open) if any("label" in each for each in problems) else ""
    raise_row_problems(table, problems, advice)
    if not names:
        raise ValueError(f"{path}: no row has a label in the column {label_columns[0]!r}")
    features["labels"] = List(ClassLabel(names=names)) if several else ClassLabel(names=names)
    return Dataset.from_dict(columns, features=Features(features))


def load_values(
    path: str | PathLike[str],
    text_column: str = "text",
    label_column: str | Sequence[str] | None = None,
    group_column: str | None = None,
    annotator: str | None = None,
    form: TextFormat = UTF8,
) -> Dataset:
    """Read texts with a real value each into a dataset as `load_labelled` does, `labels` being a float.

    A column of strings may have decimal commas, unless they may be those of thousands.

    Raises:
        ValueError: lists the rows without a finite number or a text, or the columns there are; several columns.
        OSError: the file is missing or cannot be read.
    """
    table = read_table(path, form)
    text_column, label_columns = usual_columns(table, text_column, label_column, group_column)
    if len(label_columns) > 1:
        raise ValueError(f"label_column={label_columns}: a regression learns the values of one column")
    table = one_annotation_each(table, annotator)
    problems: Problems = defaultdict(list)
    columns, features = _texts_and_speakers(table, text_column, label_columns, group_column, problems)
    columns["labels"] = values = []
    cells = table.column(label_columns[0], "label_column")
    commas = _has_decimal_commas(cells)
    for place, cell in enumerate(cells):
        try:
            values.append(_finite(cell.replace(",", ".") if commas else cell))
        except (TypeError, ValueError, OverflowError):
            problems[f"{excerpt(cell)}, expected a number in {label_columns[0]!r} for regression"].append(place)
    raise_row_problems(table, problems)
    return Dataset.from_dict(columns, features=Features(features | {"labels": Value("float32")}))


def load_texts(
    path: str | PathLike[str], text_column: str = "text", annotated: bool = False, form: TextFormat = UTF8
) -> list[str]:
    """Read texts: one per line from .txt, or a column of a table that `read_table` reads.

    Only `\\n` and `\\r\\n` end a line of .txt. Blank lines and empty cells are left out, which is logged.

    Args:
        path: the file.
        text_column: column of the texts; it plays no part in .txt files.
        annotated: the file is in the annotation format; its sentences without codes are the texts.
        form: encoding and delimiter of the file.

    Raises:
        ValueError: the file has no texts, a cell that is no text (with its row), no such column, or another encoding.
        OSError: the file is missing or cannot be read.
    """
    texts, others = load_texts_and_others(path, text_column, annotated, form)
    return [texts[place] for place in places_of_texts(others, texts)]


def load_texts_and_others(
    path: str | PathLike[str], text_column: str = "text", annotated: bool = False, form: TextFormat = UTF8
) -> tuple[Sequence[Any], Table]:
    """Read the cells of texts as they are, empty ones too, and the table of the other columns of their file."""
    path = existing_file(path)
    if annotated:
        table, text_column = _annotation_table(path, "merge", form), "text"
    elif path.suffix.lower() == ".txt":
        table, text_column = _lines(path, form), "text"
    elif text_column not in (table := read_table(path, form)).columns:
        table = texts_of_tasks(table)
    texts = table.column(text_column, "text_column")
    others = {name: cells for name, cells in table.columns.items() if name != text_column}
    return texts, replace(table, columns=others)


def places_of_texts(table: Table, texts: Sequence[Any]) -> list[int]:
    """The places of the texts of a table that a model can read; those of empty cells are left out, and logged.

    Raises:
        ValueError: a cell that is no text, or no text at all.
    """
    empty = [place for place, text in enumerate(texts) if text is None or (isinstance(text, str) and not text.strip())]
    places = sorted(set(range(len(texts))) - set(empty))
    problems: Problems = defaultdict(list)
    _check_texts(texts, problems, places)
    raise_row_problems(table, problems, "remove these rows or give them a text")
    if not places:
        raise ValueError(f"{table.path}: all {len(texts)} texts are empty")
    if empty:
        logger.warning("%s: %d text(s) are empty and not read (%s)", table.path, len(empty), table.told(empty))
    return places


def _lines(path: Path, form: TextFormat) -> Table:
    lines = [line.removesuffix("\r") for line in read_text(path, form).removesuffix("\n").split("\n")]
    rows = [number for number, line in enumerate(lines, start=1) if line.strip()]
    texts = [lines[row - 1] for row in rows]
    if not texts:
        raise ValueError(f"{path}: the file is empty, expected one sentence per line")
    if len(texts) < len(lines):
        logger.warning("%s: skipped %d blank line(s)", path, len(lines) - len(texts))
    codes = [_code_of(text) for text in texts]
    # «si» and «ai» are words too: of a text, some line begins otherwise, or none with a valence.
    if all(codes) and any(set(code) & set("+-0") for code in codes):
        logger.warning(
            "%s: every line begins with what looks like an annotation code, which is read as a part of its text; "
            "annotated reads the sentences alone",
            path,
        )
    return Table(path, {"text": texts}, rows=rows)


def _code_of(line: str) -> str:
    """What a line begins with, if it can be an annotation code, the first term of one, or `&`; else nothing."""
    code = line.split(maxsplit=1)[0].rstrip(",")
    try:
        return code if code == "&" else canonical_code(code)
    except ValueError:
        return ""


def _advice(names: Sequence[str], several: bool, is_open: bool) -> str:
    """What the labels are taken for, and how to change what the caller left open."""
    if not names:
        return ""
    kind = "multi_label_classification" if several else "single_label_classification"
    way_out = " (label_names and multi_label change this; as a command: --label_names and --problem_type, here {})"
    known = f"known labels: {', '.join(first_of(names, 50))}; several labels per text: {'yes' if several else 'no'}"
    return known + way_out.format(kind) * is_open


def _has_decimal_commas(cells: Sequence[Any]) -> bool:
    """Whether commas stand for decimal points, as a French Excel writes them, and cannot be those of thousands."""
    if not all(isinstance(cell, str) for cell in cells):
        return False
    with_comma = [cell for cell in cells if "," in cell]
    thousands = all(re.fullmatch(r"\s*[-+]?\d{1,3}(,\d{3})+\s*", cell) for cell in with_comma)
    return not thousands and not any("." in cell for cell in cells)


def _finite(cell: Any) -> float:
    if isinstance(cell, bool) or not abs(value := float(cell)) <= _GREATEST:
        raise ValueError
    return value


def _label_cells(table: Table, label_column: str) -> Sequence[Any]:
    """The column of labels; where there is none, a ValueError also names the columns that may be one label each."""
    if label_column not in table.columns:
        places = [name for name, cells in table.columns.items() if are_indicators(cells)]
        if len(places) > 1:
            shown = " ".join(name if re.fullmatch(r"\w+", name) else shlex.quote(name) for name in places)
            raise ValueError(
                f"{table.path}: no column {label_column!r}, but columns that say yes or no: if each is a label, name "
                f"them by label_column (--label_column {shown})"
            )
    return table.column(label_column, "label_column")


def _read_indicators(
    table: Table, label_columns: Sequence[str], names: list[str] | None, problems: Problems
) -> tuple[list[str], list[list[str]]]:
    """The names of the labels that have a column each, and the labels of each row."""
    found = {plain_name(name): table.column(name, "label_column") for name in label_columns}
    own = list(found)
    if len(own) < len(label_columns):
        raise ValueError(f"{table.path}: label_column={label_columns}: two names look alike, rename one")
    if names is not None and set(map(plain_name, names)) != set(own):
        raise ValueError(
            f"{table.path}: label_column names {', '.join(own)}, the known labels are {', '.join(names)}: name one "
            "column for each of these, and no other"
        )
    return names or own, read_indicators(found, problems)


def _read_codes(cells: Sequence[Any], problems: Problems) -> tuple[list[str], list[list[str]]]:
    """Annotation codes in canonical form, and their labels."""
    codes, labels = [], []
    for place, cell in enumerate(cells):
        try:
            code = canonical_code("" if cell is None else str(cell))
        except ValueError as error:
            problems[str(error)].append(place)
            code = ""
        codes.append(code)
        labels.append(list(code_labels(code)) if code else [])
    return codes, labels


def _annotation_table(path: Path, continuation: str, form: TextFormat) -> Table:
    segments = read_annotations(path, continuation, form.encoding)
    names = ("text", "code", "respondent")
    columns = {name: [getattr(segment, name) for segment in segments] for name in names}
    return Table(path, columns, rows=[segment.line for segment in segments])


def _texts_and_speakers(
    table: Table, text_column: str, label_columns: Sequence[str], group_column: str | None, problems: Problems
) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Columns and features: `text`, `row` and, where the file names who speaks or it is asked for, `respondent`."""
    usual = [name for name in ("respondent", "group") if name in table.columns.keys() - {text_column, *label_columns}]
    name = group_column or next(iter(usual), None)
    named = {text_column, *label_columns, name}
    if len(named) < 2 + len(label_columns):
        label_column = label_columns[0] if len(label_columns) == 1 else list(label_columns)
        shown = f"text_column={text_column!r}, label_column={label_column!r}, group_column={name!r}"
        raise ValueError(f"{table.path}: {shown}: texts, labels and speakers need a column each")
    unread = [excerpt(other) for other in table.columns if other not in named]
    if unread and named - {None} <= table.columns.keys():
        logger.info("%s: columns that are not read: %s", table.path, ", ".join(first_of(unread)))
    texts = table.column(text_column, "text_column")
    columns = {"text": texts, "row": list(table.rows[: len(texts)])}
    features: dict[str, Any] = {"text": Value("string"), "row": Value("int64")}
    _check_texts(texts, problems)
    if name is None:
        return columns, features
    speakers = table.column(name, "group_column")
    missing = [place for place, speaker in enumerate(speakers) if _is_nobody(speaker)]
    if missing:
        problems[f"no {name}: fill these cells, or rename the column if it does not say who speaks"] += missing
    numbered = all(type(speaker) is int and abs(speaker) < 2**63 for speaker in speakers)
    columns["respondent"] = speakers if numbered else [whole(str(speaker)) for speaker in speakers]
    return columns, features | {"respondent": Value("int64" if numbered else "string")}


def _is_nobody(speaker: Any) -> bool:
    """Whether a cell is empty, as files and tools that have no empty cells write it."""
    return speaker is None or speaker != speaker or (isinstance(speaker, str) and not speaker.strip())


def _check_texts(texts: Sequence[Any], problems: Problems, places: Iterable[int] | None = None) -> None:
    for place in range(len(texts)) if places is None else places:
        text = texts[place]
        problem = text_problem(text) if isinstance(text, str) else f"is {excerpt(text)}, expected a string"
        if problem:
            problems[f"the text {problem}"].append(place)


def _checked_names(names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    spellings = [plain_name(name) for name in names]
    if not names or not all(spellings) or len(set(spellings)) < len(names):
        shown = excerpt(list(names), 300)
        raise ValueError(f"label_names={shown}: expected one name or more, each of them once and unlike the others")
    return list(names)
