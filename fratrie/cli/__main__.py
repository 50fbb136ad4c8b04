"""The command `fratrie`, also `python -m fratrie.cli`: choose a subcommand and hand it the rest of the line."""

import ast
import importlib
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from fratrie import __version__

from .running import run

COMMANDS = (
    "demo",
    "train-tokenizer",
    "pretrain",
    "finetune",
    "evaluate",
    "predict",
    "study",
    "convert",
    "account",
    "compare-mixers",
)


def main() -> None:
    """Run the subcommand that the command line begins with."""
    run(_main)


def _main() -> None:
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        print(_help())
        return
    if name in ("-V", "--version"):
        print(f"fratrie {__version__} (torch {version('torch')}, transformers {version('transformers')})")
        return
    if name not in COMMANDS:
        raise ValueError(f"no command {name!r}: there are {', '.join(COMMANDS)} (fratrie --help says what they do)")
    sys.argv = [f"fratrie {name}", *rest]  # what `--help` and errors call the program
    importlib.import_module(_module(name)).main()


def _module(command: str) -> str:
    return f"{__package__}.{command.replace('-', '_')}"


def _help() -> str:
    """All commands, each with the first words of its module, which is not imported for them."""
    lines = [f"  {name:<16}{_summary(name)}" for name in COMMANDS]
    usage = "usage: fratrie COMMAND [options]   (fratrie COMMAND --help lists the options; --version)"
    return "\n".join([usage, "", *lines])


def _summary(command: str) -> str:
    spec = find_spec(_module(command))
    assert spec and spec.origin
    document = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    assert document
    return re.split(r"[:,.]\s", document, maxsplit=1)[0]


if __name__ == "__main__":
    main()
