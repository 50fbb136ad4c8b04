"""Texts that stand in the data more than once: told, since they make scores look better than they are."""

import logging
import unicodedata
from collections.abc import Hashable, Sequence
from os import PathLike

from fratrie.data.annotation import excerpt

logger = logging.getLogger(__name__)


def tell_repeats(path: str | PathLike[str], texts: Sequence[str], labels: Sequence[Hashable]) -> None:
    """Log how many texts of a file are repeated, and how many of these bear other labels; white space is no matter."""
    first: dict[str, int] = {}
    repeated: list[tuple[int, int]] = []
    conflicting: list[tuple[int, int]] = []
    for row, text in enumerate(texts):
        met = first.setdefault(_key(text), row)
        if met != row:
            (repeated if labels[met] == labels[row] else conflicting).append((row, met))
    for pairs, what in (
        (repeated, "repeat an earlier text"),
        (conflicting, "repeat an earlier text with other labels"),
    ):
        if pairs:
            row, met = pairs[0]
            where = f"row {row + 1} is row {met + 1} again: {excerpt(texts[row], 60)}"
            logger.warning("%s: %d of %d rows %s, such as %s", path, len(pairs), len(texts), what, where)


def tell_overlap(part: str, texts: Sequence[str], train: Sequence[str]) -> None:
    """Log how many texts of a part stand in train too, where a model can have learnt them by heart."""
    known = set(map(_key, train))
    found = [text for text in texts if _key(text) in known]
    if found:
        shown = excerpt(found[0], 60)
        logger.warning("%d of %d texts of %s stand in train too, such as %s", len(found), len(texts), part, shown)


def _key(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
