"""Words that several parts of the package say to people."""

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """A count with its noun: «1 text», «1,318 texts»."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to put behind a name that is unknown: ` (did you mean 'joie'?)`, nothing where none is close.

    Numbers are never taken for slips of one another.
    """
    close = [] if name.isdecimal() else difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
