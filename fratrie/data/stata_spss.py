"""Files of Stata and SPSS as columns of text, each cell as a csv file would hold it."""

from pathlib import Path
from typing import Any

from fratrie.data.sheets import cell_text

KINDS = (".dta", ".sav", ".zsav", ".por")


def read_variables(path: Path, encoding: str | None = None) -> dict[str, list[str]]:
    """The variables of a file by name: a value as its label says it, where it has one; missing ones are empty.

    Args:
        path: of the file.
        encoding: of its texts, where the file itself says it wrongly or, as those of old versions, not at all; a .por
            file has an alphabet of its own.

    Raises:
        ImportError: the package pyreadstat is not installed.
        ValueError: the file is damaged, of another kind than its name says, or of another encoding.
    """
    try:
        import pyreadstat
    except ModuleNotFoundError:
        raise ImportError(
            f"{path}: a file of Stata or SPSS is read by the package pyreadstat: pip install 'fratrie[statistics]'"
        ) from None
    kind = path.suffix.lower()
    read: Any = {".dta": pyreadstat.read_dta, ".por": pyreadstat.read_por}.get(kind, pyreadstat.read_sav)
    options = {} if kind == ".por" else {"encoding": encoding}
    try:
        variables, meta = read(path, output_format="dict", **options)
    except (pyreadstat.ReadstatError, pyreadstat.PyreadstatError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path}: not a readable file of Stata or SPSS, of another kind than its name says, or of another "
            f"encoding (--encoding): {error}"
        ) from None
    labels = meta.variable_value_labels
    return {name: [_text(value, labels.get(name, {})) for value in values] for name, values in variables.items()}


def _text(value: Any, labels: dict[Any, str]) -> str:
    return "" if value is None else labels.get(value) or cell_text(value)
