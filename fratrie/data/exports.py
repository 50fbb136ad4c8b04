"""Exports of annotation tools as plain tables: of Label Studio (json, json-min, csv) and doccano (jsonl, csv).

Label Studio's json holds tasks with their annotations, its other exports one row for each annotation
(https://labelstud.io/guide/export.html). doccano writes one file for each annotator, or one for all who work together.
"""

import itertools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fratrie.data.annotation import excerpt, first_of
from fratrie.data.tables import Table

logger = logging.getLogger(__name__)

_OF_LABEL_STUDIO = {"id", "annotator", "annotation_id"}
_KEPT_BY_LABEL_STUDIO = _OF_LABEL_STUDIO | {"created_at", "updated_at", "lead_time", "agreement"}
_CHOICES = re.compile(r"""\{\s*['"]choices['"]\s*:.*\}""", re.DOTALL)


def flat_tasks(table: Table) -> Table:
    """Tasks of Label Studio as one row for each annotation, with its choices as lists; any other table as it is.

    Tasks that nobody annotated, or that were skipped, are left out and logged. An annotation without choices is a row
    without labels. Predictions are nobody's annotations.

    Raises:
        ValueError: no task has an annotation, or no annotation a choice.
    """
    annotations = table.columns.get("annotations") or table.columns.get("completions")
    data = table.columns.get("data")
    if not annotations or not data or not _are_tasks(data, annotations):
        return table
    ids = table.columns.get("id", range(len(data)))
    kept = [
        (place, {**fields, "id": task}, annotation)
        for place, (fields, task, those) in enumerate(zip(data, ids, annotations, strict=True))
        for annotation in those or []
        if not (annotation.get("was_cancelled") or annotation.get("skipped"))
    ]
    places = [place for place, _, _ in kept]
    rows = [
        {**fields, "annotator": _annotator(annotation), "annotation_id": annotation.get("id")}
        for _, fields, annotation in kept
    ]
    choices = [_choices(annotation) for _, _, annotation in kept]
    if not any(choices):
        raise ValueError(f"{table.path}: tasks of Label Studio, and no annotation of them holds choices, as labels do")
    if left := len(data) - len(set(places)):
        logger.warning(
            "%s: %d of %d tasks are not annotated, or were skipped, and are left out", table.path, left, len(data)
        )
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
    columns |= {name: [each.get(name, []) for each in choices] for name in dict.fromkeys(itertools.chain(*choices))}
    return Table(table.path, columns, rows=[table.rows[place] for place in places])


def texts_of_tasks(table: Table) -> Table:
    """Tasks of Label Studio as one row each, with the fields of their data; any other table as it is."""
    data = table.columns.get("data")
    if not data or not all(isinstance(fields, dict) for fields in data):
        return table
    columns = {name: [fields.get(name) for fields in data] for name in dict.fromkeys(itertools.chain(*data))}
    kept = {name: table.columns[name] for name in ("id",) if name in table.columns}
    return replace(table, columns=kept | columns)


def one_annotation_each(table: Table, annotator: str | None = None) -> Table:
    """The table with the rows of one annotator, where one is asked for, and one annotation of each task.

    Args:
        table: any; tasks are known in an export of Label Studio, annotators by the column `annotator`.
        annotator: whose rows to keep; by default those of all, who must have met different tasks.

    Raises:
        ValueError: a task has several annotations, or there is no such annotator.
    """
    who = [str(name) for name in table.columns.get("annotator", [])]
    if annotator is not None:
        if annotator not in who:
            there = f"; there are {_counted(who)}" if who else ", nor a column of them"
            raise ValueError(f"{table.path}: no annotator {annotator!r}{there}")
        if others := len(who) - who.count(annotator):
            logger.warning("%s: %d annotations of others than %s are left out", table.path, others, annotator)
        table = table.of_rows([place for place, name in enumerate(who) if name == annotator])
        who = [annotator] * who.count(annotator)
    rows_of_task: defaultdict[str, list[int]] = defaultdict(list)
    for place, task in enumerate(table.columns["id"] if _is_exported(table) else []):
        rows_of_task[str(task)].append(place)
    again = [places for places in rows_of_task.values() if len(places) > 1]
    if not again:
        return table
    if len({who[place] for places in again for place in places}) > 1:
        raise ValueError(
            f"{table.path}: {len(again)} tasks have annotations of several annotators ({_counted(who)}): choose one "
            "by annotator (--annotator)"
        )
    told = table.told([place for places in again for place in places])
    raise ValueError(f"{table.path}: several annotations of one task by the same annotator, {told}: keep one of each")


def usual_columns(
    table: Table, text_column: str, label_column: str | Sequence[str] | None, group_column: str | None
) -> tuple[str, list[str]]:
    """The columns of texts and of labels: as they are named, else as tools call them.

    In an export of Label Studio the answers to its only question are the labels: a column `labels` of it may come from
    a model, along with the texts.

    Raises:
        ValueError: several columns of an export may hold the labels, or no name is given.
    """
    there = table.columns
    spoken_for = _KEPT_BY_LABEL_STUDIO | {"respondent", "group", text_column, group_column}
    others = [name for name in there if name not in spoken_for]
    exported = _is_exported(table)
    if label_column is not None:
        labels = [label_column] if isinstance(label_column, str) else list(label_column)
        if not labels:
            raise ValueError("label_column=[]: name the column of the labels, or one for each label")
    elif exported:
        labels = [name for name in others if any(map(_is_chosen, there[name]))] or others
        if len(labels) > 1:
            shown = ", ".join(first_of([excerpt(name) for name in labels]))
            raise ValueError(f"{table.path}: {shown} may hold the labels: choose by label_column (--label_column)")
    else:
        labels = [next((name for name in ("labels", "label", "code") if name in there), "labels")]
    if text_column == "text" and "text" not in there:
        texts = [name for name in others if name not in labels] if exported else ["data"]
        if len(texts) == 1 and {texts[0], *labels} <= there.keys():
            text_column = texts[0]
    return text_column, labels


def chosen_labels(table: Table, cells: Sequence[Any], multi_label: bool | None) -> tuple[Sequence[Any], bool | None]:
    """The cells of labels, and whether a text may have several, as Label Studio means them; those of others as given.

    A bare name is one choice, whatever spaces or commas it has. By default a text has one label where each has one.
    """
    if not _is_exported(table):
        return cells, multi_label
    chosen = [[cell] if isinstance(cell, str) and cell.strip() and not _is_chosen(cell) else cell for cell in cells]
    if multi_label is None and all(isinstance(cell, list) and len(cell) == 1 for cell in chosen):
        multi_label = False
    return chosen, multi_label


def _is_exported(table: Table) -> bool:
    return table.columns.keys() >= _OF_LABEL_STUDIO


def _are_tasks(data: Sequence[Any], annotations: Sequence[Any]) -> bool:
    return all(isinstance(fields, dict) for fields in data) and all(
        those is None or (isinstance(those, list) and all(isinstance(each, dict) for each in those))
        for those in annotations
    )


def _annotator(annotation: dict[str, Any]) -> str:
    who = annotation.get("completed_by")
    if isinstance(who, dict):
        who = who.get("email") or who.get("id")
    return "" if who is None else str(who)


def _choices(annotation: dict[str, Any]) -> dict[str, list[Any]]:
    """What was chosen, by the name of the question."""
    found: dict[str, list[Any]] = {}
    for result in annotation.get("result") or []:
        value = result.get("value") if isinstance(result, dict) else None
        if isinstance(value, dict) and isinstance(value.get("choices"), list):
            found.setdefault(str(result.get("from_name")), []).extend(value["choices"])
    return found


def _is_chosen(cell: Any) -> bool:
    return isinstance(cell, list | dict) or (isinstance(cell, str) and bool(_CHOICES.fullmatch(cell.strip())))


def _counted(names: Sequence[str]) -> str:
    return ", ".join(first_of([f"{name}: {count}" for name, count in sorted(Counter(names).items())]))
