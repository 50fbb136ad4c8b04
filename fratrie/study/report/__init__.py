"""The report of a study: a page that stands alone, tables for a paper and figures, all from `results.json`."""

from .page import write_report

__all__ = ["write_report"]
