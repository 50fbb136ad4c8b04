"""Columns that say yes or no, one for each label, read into the list of labels that apply to each row."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fratrie.data.annotation import excerpt
from fratrie.data.labels import Problems, plain_name

_PAIRS = (
    *(("0", "1"), ("false", "true"), ("faux", "vrai"), ("no", "yes"), ("non", "oui"), ("n", "y"), ("n", "o")),
    # The value labels of survey tools, which Stata and SPSS keep.
    *(("unchecked", "checked"), ("not selected", "selected"), ("not mentioned", "mentioned"), ("non cité", "cité")),
)
_CROSS = ("", "x")  # nothing but a mark where the label applies


def read_indicators(columns: Mapping[str, Sequence[Any]], problems: Problems) -> list[list[str]]:
    """The labels that apply to each row.

    A column says 0 or 1, false or true, faux or vrai, no or yes, non or oui, or as survey tools do (`_PAIRS`), in any
    case, or has an x where the label applies. An empty cell means no where crosses are made or no column ever says
    no; elsewhere it is a problem.

    Args:
        columns: the cells of each label, N of them.
        problems: gets what is wrong, with the rows.

    Returns:
        A list of names for each of the N rows, in the order of the columns.
    """
    words = {name: [_word(cell) for cell in cells] for name, cells in columns.items()}
    ways = {name: _way(column) for name, column in words.items()}
    says_no = any(ways[name][0] and ways[name][0] in column for name, column in words.items())
    rows: list[list[str]] = [[] for _ in next(iter(words.values()))]
    for name, column in words.items():
        no, yes = ways[name]
        for place, word in enumerate(column):
            if word == yes:
                rows[place].append(name)
            elif not word and no and says_no:
                problems[f"an empty cell in {name!r}, where others say no: write {no} or {yes}"].append(place)
            elif word not in (no, ""):
                shown = excerpt(columns[name][place])
                problems[f"{shown} in {name!r}, expected {no or 'nothing'} or {yes}"].append(place)
    return rows


def are_indicators(cells: Sequence[Any]) -> bool:
    """Whether all cells say yes or no in one way."""
    words = set(map(_word, cells))
    return words != {""} and any(words <= {*pair, ""} for pair in (*_PAIRS, _CROSS))


def _way(column: Sequence[str]) -> tuple[str, str]:
    """The words for no and yes of most cells."""
    counts = Counter(word for word in column if word)
    return max((*_PAIRS, _CROSS), key=lambda pair: sum(counts[word] for word in pair))


def _word(cell: Any) -> str:
    """A cell as it is compared: an absent number is empty, and 1.0 is 1."""
    if cell is None or cell != cell:
        return ""
    word = plain_name(str(cell)).casefold()
    return word[0] if re.fullmatch(r"[01][.,]0+", word) else word
