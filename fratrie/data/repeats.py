"""Texts that stand in the data more than once: told, since they make scores look better than they are."""

import logging
import unicodedata
from collections.abc import Hashable, Sequence

from fratrie.data.annotation import excerpt

logger = logging.getLogger(__name__)


def find_repeats(
    texts: Sequence[str], labels: Sequence[Hashable]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The texts that stand there before, with the same labels and with others; white space is no matter.

    Returns:
        Two lists of places: of the repeated text, and of where it stands first.
    """
    first: dict[str, int] = {}
    same: list[tuple[int, int]] = []
    other: list[tuple[int, int]] = []
    for row, text in enumerate(texts):
        met = first.setdefault(_key(text), row)
        if met != row:
            (same if labels[met] == labels[row] else other).append((row, met))
    return same, other


def tell_overlap(part: str, texts: Sequence[str], train: Sequence[str]) -> None:
    """Log how many texts of a part stand in train too, where a model can have learnt them by heart."""
    known = set(map(_key, train))
    found = [text for text in texts if _key(text) in known]
    if found:
        shown = excerpt(found[0], 60)
        logger.warning("%d of %d texts of %s stand in train too, such as %s", len(found), len(texts), part, shown)


def _key(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
