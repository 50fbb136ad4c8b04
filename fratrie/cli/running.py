"""How commands start and end."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fratrie.training.stopping import Stopped, stopping_at_once

# SafetensorError: a damaged file. MemoryError, RecursionError: sizes and depths that a user has asked for.
_USER_ERRORS = (ValueError, OSError, ImportError, SafetensorError, MemoryError, RecursionError)
_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def run(main: Callable[[], object]) -> None:
    """Call `main`; an error that a user caused ends it with one line, `error: …`, and exit code 2.

    A signal that asks to stop ends it with one line and 128 + its number. Our own mistakes keep their traceback.
    Letters that the terminal cannot show are printed as `\\u0153`.
    """
    program = Path(sys.argv[0])
    if program.parent == Path(__file__).parent:  # by `python -m` or `accelerate launch -m`
        sys.argv[0] = f"fratrie {program.stem.replace('_', '-')}"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with stopping_at_once(), _threads_that_tell_one_line():
            main()
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{stop}\n")
        sys.exit(128 + stop.number)
    except Exception as error:
        if (reason := _reason(error)) is None:
            raise
        sys.stderr.write(f"error: {reason}\n")
        sys.exit(2)


@contextmanager
def _threads_that_tell_one_line() -> Iterator[None]:
    """Errors in the threads of a tracker, which Python would show with a traceback, are told in one line."""
    hook = threading.excepthook

    def tell(failure: threading.ExceptHookArgs) -> None:
        reason = _reason(failure.exc_value) if isinstance(failure.exc_value, Exception) else None
        if reason is None:
            hook(failure)
        else:
            sys.stderr.write(f"error: {reason}\n")

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = hook


def _reason(error: Exception) -> str | None:
    """What to tell users about an error that they caused; None for our own mistakes."""
    text = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text)):
        return f"not enough memory: take a smaller model, smaller batches or shorter texts ({text or 'no details'})"
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply ({text})"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return None if package == "fratrie" else f"the package {package} is missing: install it with pip ({text})"
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror  # without «[Errno 28]»
    return text if isinstance(error, _USER_ERRORS) else None
