"""Sentences that stand in a corpus more than once: some make scores look better, some contradict each other."""

from typing import Any

from fratrie.data.repeats import find_repeats

from .data import StudyData


def repeats(data: StudyData, most: int = 50) -> dict[str, Any]:
    """Count the sentences that stand there before, in the order of train and then test.

    Args:
        data: train and test.
        most: contradictions to quote.

    Returns:
        `counts` of those repeated within `train`, within `test`, and of those of test in train (`both`), with
        the `same` labels as before and with `other` ones. `conflicts` are the first of the latter: `text`, and `again`
        and `before` the `part`, `row` and `labels` of both places.
    """
    parts = {"train": data.train, "test": data.test}
    places = [(name, place) for name, part in parts.items() for place in range(len(part.texts))]
    texts = [text for part in parts.values() for text in part.texts]
    labels = [tuple(row) for part in parts.values() for row in part.labels.tolist()]
    same, other = find_repeats(texts, labels)

    def where(pair: tuple[int, int]) -> str:
        (part, _), (earlier, _) = (places[each] for each in pair)
        return part if part == earlier else "both"

    def described(each: int) -> dict[str, Any]:
        name, place = places[each]
        given = [label for label, on in zip(data.task.labels, labels[each], strict=True) if on]
        return {"part": name, "row": parts[name].row(place), "labels": given}

    counts = {
        kind: {"same": sum(where(pair) == kind for pair in same), "other": sum(where(pair) == kind for pair in other)}
        for kind in (*parts, "both")
    }
    conflicts = [
        {"text": texts[again], "again": described(again), "before": described(before)}
        for again, before in other[:most]
    ]
    return {"counts": counts, "conflicts": conflicts}
