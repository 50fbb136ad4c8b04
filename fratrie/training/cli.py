"""Command-line manners that the scripts share."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run(main: Callable[[], object]) -> None:
    """Call `main`; what a user causes (`ValueError`, `OSError`) ends as `error: …` with exit code 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 2
