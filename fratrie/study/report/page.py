"""`write_report`: the page that people read, and the tables and figures as files for a paper."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fratrie.data.output_sheets import write_book
from fratrie.data.tables import has_header
from fratrie.files import new_folder
from fratrie.training.metrics import FEW_GROUPS, absent_labels, one_line
from fratrie.wording import counted

from ..names import quoted
from .figures import all_figures
from .methods import methods
from .summary import summary
from .table import columns_of, csv_text, shown, tex_text
from .tables import Results, all_tables, drawn_from, has_states, place_in

_LISTS = ("conflicts", "confident_errors", "label_issues")  # of sentences, which are for reading and not for a paper
_STRENGTHS = 4  # shades of a word that speaks for a label, or against it


class Piece(NamedTuple):
    """A piece of a text: its weight for the label, and the class of its shade, none without a weight."""

    text: str
    weight: float | None = None
    shade: str = ""


def write_report(results: Results, folder: str | PathLike[str]) -> Path:
    """Write `report.html`, `tables/*.csv` and `*.tex`, `tables.xlsx` and `figures/*.svg`.

    The page stands alone: it loads nothing, and runs no script. The same results give the same bytes.

    Args:
        results: what `results.json` holds. A section whose key is null is left out.
        folder: for the files; others in it stay.

    Returns:
        The path of the page.

    Raises:
        OSError: a file cannot be written; says which.
    """
    if not (results["learning_curve"] or {}).get("methods"):  # all its methods may be left out
        results = {**results, "learning_curve": None}
    tables, figures = all_tables(results), all_figures(results)
    with new_folder(folder) as made:
        (made / "tables").mkdir()
        (made / "figures").mkdir()
        for name, table in tables.items():
            _write(made / "tables" / f"{name}.csv", csv_text(table))
            if name not in _LISTS:
                _write(made / "tables" / f"{name}.tex", tex_text(table))
        write_book(made / "tables.xlsx", {name: columns_of(table) for name, table in tables.items()})
        for name, figure in figures.items():
            _write(made / "figures" / f"{name}.svg", figure.svg)
        _write(made / "report.html", _page(results, tables, figures))
    return Path(folder) / "report.html"


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))  # half characters have no other form


def _page(results: Results, tables: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"one_line": one_line, "quoted": quoted, "pieces": pieces, "figure": shown}
    environment.filters |= {"counted": counted, "has_header": has_header}
    environment.globals |= {"few_groups": FEW_GROUPS, "place_in": place_in}
    return environment.get_template("report.html.jinja").render(
        results=results,
        tables=tables,
        figures=figures,
        summary=summary(results),
        methods=methods(results),
        with_states=has_states(results),
        drawn_from=drawn_from(results),
        absent=absent_labels(results["data"]["parts"]["test"]),
    )


def pieces(sentence: Mapping[str, Any]) -> list[Piece]:
    """The weighted pieces of a sentence, and what stands between them; the strongest has the darkest shade."""
    found = []
    most = max((abs(weight) for _, weight in sentence["pieces"]), default=0) or 1
    for piece, weight in sentence["pieces"]:
        word = piece.rstrip()
        found += [Piece(word, weight, _shade(weight / most)), Piece(piece[len(word) :])]
    return found


def _shade(strength: float) -> str:
    level = round(abs(strength) * _STRENGTHS)
    return f"{'for' if strength > 0 else 'against'}-{level}" if level else ""
