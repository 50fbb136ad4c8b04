"""The report of a study: a page that stands alone, tables for a paper and figures, all from `results.json`."""

import json
from pathlib import Path

from .page import write_report

__all__ = ["PUBLISHED", "write_report"]

# F1 of the study whose protocol this is, on its own corpus: `published` of the results on the shipped one.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
