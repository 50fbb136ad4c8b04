"""How the options of a command are read: from the command line, and from a file of them."""

from __future__ import annotations

import difflib
import math
from argparse import Action, ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, NoReturn, cast

import yaml
from transformers import HfArgumentParser

from fratrie.data.text_files import existing_file
from fratrie.quiet import hide_bars

_NOTHING = ("null", "Null", "NULL", "~")


class _Parser(HfArgumentParser):
    """Tells mistakes as our other errors are told, in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


class _Loader(yaml.BaseLoader):
    """Makes nothing but texts, lists and mappings, in which no name occurs twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for name, count in Counter(key.value for key, _ in node.value if isinstance(key.value, str)).items():
            if count > 1:
                raise yaml.constructor.ConstructorError(problem=f"{name!r} occurs twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def read_options(description: str | None, *kinds: type) -> tuple[Any, ...]:
    """The options of the command line, one object of each dataclass; `--config FILE` reads some of them from a file.

    Where one of them is `disable_progress`, and given, Hugging Face's own bars are hidden too.

    Raises:
        ValueError: an option that is not there, an empty text (as an unset shell variable leaves it), one that is not
            UTF-8, a number that is not finite, or a file that does not hold options of this command.
        OSError: the file cannot be read.
    """
    parser = _Parser(cast(Any, kinds), description=description, allow_abbrev=False)
    own = _Parser([], add_help=False, allow_abbrev=False)
    for each in (own, parser):
        each.add_argument(
            "--config", action="append", metavar="FILE", help="Options in YAML or JSON; those given here come first."
        )
    files, given = own.parse_known_args()
    arguments = list(given)
    if files.config:
        if len(files.config) > 1:
            raise ValueError(f"--config is given {len(files.config)} times: write the options into one file")
        arguments = [*_options_of_file(files.config[0], parser), *given]
    *found, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        names = [word for word in unknown if word.startswith("--")] or unknown[:1]
        raise ValueError("; ".join(_advise(name, _actions_of(parser)) for name in names) + "; --help lists them")
    for part in found[: len(kinds)]:
        _check_values(part)
    if any(getattr(part, "disable_progress", False) for part in found):
        hide_bars()
    return tuple(found[: len(kinds)])


def _actions_of(parser: ArgumentParser) -> dict[str, Action]:
    """What each option does, without those that tell how to read others."""
    found = {option.removeprefix("--"): each for each in parser._actions for option in each.option_strings}
    return {name: action for name, action in found.items() if name not in ("config", "help", "-h")}


def _advise(name: str, known: Iterable[str]) -> str:
    if not name.startswith("--"):
        return f"{name!r} belongs to no option"
    close = difflib.get_close_matches(name.removeprefix("--").partition("=")[0], known, n=1)
    return f"there is no option {name}{f' (did you mean --{close[0]}?)' if close else ''}"


def _options_of_file(file: str, parser: ArgumentParser) -> Iterator[str]:
    """The options of a file as words of a command line.

    Every value stays as it is written (YAML would take the `no` of `mixed_precision: no` for false); null is as if the
    option were not there.
    """
    actions = _actions_of(parser)
    for name, value in _read_mapping(file).items():
        if name not in actions:
            raise ValueError(f"{file}: {_advise(f'--{name}', actions)}; --help lists them")
        if value in _NOTHING:
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and actions[name].nargs is None:
            raise ValueError(f"{file}: {name} takes one value, not a list")
        if not all(isinstance(each, str) for each in values):
            raise ValueError(f"{file}: {name} is nested: write its value as one text in quotes, as on a command line")
        if value == "":
            raise ValueError(f"{file}: {name} has no value: give it one, or leave the line out")
        yield from (f"--{name}", *values) if isinstance(value, list) else (f"--{name}={value}",)  # it may begin with -


def _read_mapping(file: str) -> dict[str, Any]:
    try:
        options = yaml.load(existing_file(file).read_text("utf-8-sig"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}: save it in this encoding") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: cannot be read as YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{file}: expected a line «option: value» for each option")
    return options


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
