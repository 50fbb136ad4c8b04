"""Hugging Face's own bars and reports, silenced for good or for as long as a context lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


def hide_bars() -> None:
    """Show no progress bars of Hugging Face's libraries from now on: of loading, saving, tables and downloads."""
    import datasets  # which takes long, and importing the package should not
    import huggingface_hub.utils

    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no progress bars of loading and saving: the caller shows its own, or the work is short."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def without_reports() -> Iterator[None]:
    """Print no loading report: the caller judges it."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
