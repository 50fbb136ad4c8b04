"""How the options of a command are read: from the command line, and from a file of them."""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

import yaml
from transformers import HfArgumentParser

from fratrie.data.text_files import existing_file, read_text

_NOTHING = ("null", "Null", "NULL", "~")


def read_options(description: str | None, *kinds: type) -> tuple[Any, ...]:
    """The options of the command line, one object of each dataclass; `--config FILE` reads some of them from a file.

    Raises:
        ValueError: an empty text (as an unset shell variable leaves it), one that is not UTF-8, a number that
            is not finite, or a file that does not hold options of this command.
        OSError: the file cannot be read.
    """
    parser = HfArgumentParser(cast(Any, kinds), description=description, allow_abbrev=False)
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (own, parser):
        each.add_argument("--config", metavar="FILE", help="Options in YAML or JSON; those given here come first.")
    file, given = own.parse_known_args()
    arguments = [*_options_of_file(file.config, parser), *given] if file.config is not None else sys.argv[1:]
    found = parser.parse_args_into_dataclasses(arguments)[: len(kinds)]
    for part in found:
        _check_values(part)
    return found


def _options_of_file(file: str, parser: ArgumentParser) -> Iterator[str]:
    """The options of a file as words of a command line.

    Every value stays as it is written (YAML would take the `no` of `mixed_precision: no` for false); null is as if the
    option were not there.
    """
    known = {option for action in parser._actions for option in action.option_strings} - {"--config", "--help"}
    for name, value in _read_mapping(file).items():
        if f"--{name}" not in known:
            raise ValueError(f"{file}: there is no option {name!r}; --help lists them")
        if value in _NOTHING:
            continue
        yield f"--{name}"
        yield from [_word(file, name, each) for each in (value if isinstance(value, list) else [value])]


def _read_mapping(file: str) -> dict[str, Any]:
    path = existing_file(file)
    try:
        options = yaml.load(read_text(path), Loader=yaml.BaseLoader)  # which makes nothing but texts, lists, mappings
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{file}: expected a line «option: value» for each option")
    return options


def _word(file: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{file}: {name} is nested: write its value as one text, {json.dumps(json.dumps(value))}")
    return value


def _check_values(options: Any) -> None:
    for each in fields(options):
        value = getattr(options, each.name)
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if value != each.default and "" in texts:
            raise ValueError(f"--{each.name} is empty: give it a value (is a variable of the shell unset?) or omit it")
        if wrong := [text for text in texts if text.encode(errors="replace").decode() != text]:
            raise ValueError(f"--{each.name} {wrong[0]!r} is not UTF-8, as the names of files must be: rename it")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{each.name} {value}: expected a finite number")
