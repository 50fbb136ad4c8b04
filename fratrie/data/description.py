"""What was understood of labelled texts, to be looked at before anything is learnt from them."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from datasets import ClassLabel, Dataset, List

from fratrie.data.annotation import excerpt, first_of
from fratrie.data.repeats import find_repeats
from fratrie.wording import counted


def describe(dataset: Dataset, noun: str = "row", texts: int = 3) -> str:
    """Number of texts and respondents, the first texts with their labels, counts of the labels, repeated texts.

    Args:
        dataset: with the columns of `load_labelled` or `load_values`.
        noun: what a row of its file is called, as `row_noun` says.
        texts: how many of the first to show.

    Returns:
        Several lines for a terminal; what would steer it is escaped. They hold texts of the data.
    """
    return "\n  ".join(_lines(dataset, noun, texts))


def _lines(dataset: Dataset, noun: str, first: int) -> Iterator[str]:
    texts, labels, rows = (dataset[name][:] for name in ("text", "labels", "row"))
    kind, shown, summary = _reading(dataset)
    speakers = set(dataset["respondent"][:]) if "respondent" in dataset.column_names else ()
    of_whom = f" of {counted(len(speakers), 'respondent')}" if speakers else ""
    yield f"{counted(len(texts), 'text')}{of_whom}, {kind}"
    for row, text, label in zip(rows[:first], texts[:first], labels[:first], strict=True):
        yield f"{noun} {row}: {excerpt(text, 80)} → {shown(label)}"
    yield summary
    same, other = find_repeats(texts, [tuple(label) if isinstance(label, list) else label for label in labels])
    for pairs, what in ((same, "with the same labels"), (other, "with other labels")):
        if pairs:
            again, met = pairs[0]
            where = f"{noun} {rows[again]} repeats {noun} {rows[met]}: {excerpt(texts[again], 60)}"
            yield f"{counted(len(pairs), 'repetition')} of an earlier text {what}, such as {where}"


def _reading(dataset: Dataset) -> tuple[str, Callable[[Any], str], str]:
    """What is asked of a text, how its labels are shown, and a line on all labels."""
    feature, labels = dataset.features["labels"], dataset["labels"][:]
    if not isinstance(feature, List | ClassLabel):
        values = f"values from {min(labels):g} to {max(labels):g}, {sum(labels) / len(labels):.4g} in the mean"
        return "a value for each", "{:g}".format, values
    several = isinstance(feature, List)
    names = [name if name.isprintable() else excerpt(name) for name in (feature.feature if several else feature).names]
    counts = Counter(label for row in labels for label in row) if several else Counter(labels)
    summary = "labels: " + ", ".join(
        first_of([f"{name} {counts[position]:,}" for position, name in enumerate(names)], 50)
    )
    if not several:
        return "one label each", names.__getitem__, summary
    empty = sum(not row for row in labels)
    summary += f"; {counted(empty, 'text')} without a label" if empty else ""
    return "several labels each", lambda row: ", ".join(names[label] for label in row) or "no label", summary
