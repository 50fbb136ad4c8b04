"""Writes the table of all fields: `python docs/configuration.py > docs/configuration.md`."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import get_args

import fratrie
from fratrie.modeling.configuration import FratrieConfig

HEAD = """# The configuration

Every field of every model, with its default. A field that is unknown or contradicts another is a `ValueError` that
says the way out; a value of another type, or none of the choices, is Hugging Face's `StrictDataclassError`. This page
is written from the docstrings by `python docs/configuration.py`.

`norm_slots("pre" | "post" | "sandwich", "layer_norm" | "rms_norm")` fills the norm fields of the usual layouts, and
`fratrie.preset(name, **changes)` gives the configuration of a published architecture (`fratrie.PRESETS`).
"""
CLASSES = {
    "All three siblings": FratrieConfig,
    "Encoder (`FratrieEncoderConfig`)": fratrie.FratrieEncoderConfig,
    "Decoder (`FratrieDecoderConfig`)": fratrie.FratrieDecoderConfig,
    "Encoder-decoder (`FratrieSeq2SeqConfig`)": fratrie.FratrieSeq2SeqConfig,
}


def entries(config_class: type) -> dict[str, str]:
    """The entries of the docstring's `Args`: names, with commas between them, and what they mean."""
    text = inspect.cleandoc(config_class.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = [entry.strip().partition(": ") for entry in re.split(r"\n(?= {4}\S)", text)]
    return {" ".join(names.split()): " ".join(meaning.split()) for names, _, meaning in found}


def rows(config_class: type) -> Iterator[str]:
    """One table row an entry."""
    by_name = {field.name: field for field in fields(config_class)}
    for names, meaning in entries(config_class).items():
        shown = [by_name[name] for name in names.split(", ")]
        kinds, defaults = dict.fromkeys(map(_kind, shown)), dict.fromkeys(map(_default, shown))
        title = ", ".join(f"`{field.name}`" for field in shown)
        yield f"| {title} | {', '.join(kinds)} | {', '.join(defaults)} | {_cell(meaning)} |"


def own_defaults(config_class: type) -> str:
    """The shared fields whose default differs in a sibling."""
    shared = {field.name: field.default for field in fields(FratrieConfig)}
    changed = [
        f for f in fields(config_class) if f.name in FratrieConfig.__annotations__ and f.default != shared[f.name]
    ]
    return ", ".join(f"`{field.name}={field.default!r}`" for field in changed)


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, config_class in CLASSES.items():
        lines += [f"## {title}", ""]
        if defaults := own_defaults(config_class):
            lines += [f"Defaults of its own: {defaults}.", ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|", *rows(config_class), ""]
    return "\n".join(lines).rstrip() + "\n"


def _kind(field: Field) -> str:
    plain = isinstance(field.type, type) and not get_args(field.type)
    kind = field.type.__name__ if plain else re.sub(r"\b(\w+\.)+", "", str(field.type))
    return f"`{_cell(kind)}`"


def _default(field: Field) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return f"`{value!r}`" if value is not MISSING else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
