"""The command `fratrie`, also `python -m fratrie.cli`: choose a subcommand and hand it the rest of the line.

`fratrie_command` runs this file without the package, which takes seconds to import: it is read for subcommands alone.
"""

import ast
import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_help())
    elif name in ("-V", "--version"):
        print(f"fratrie {_own_version()} (torch {version('torch')}, transformers {version('transformers')})")
    else:
        from fratrie.cli.running import run

        run(_subcommand)


def _own_version() -> str:
    try:
        return version("fratrie")
    except PackageNotFoundError:  # a clone that is not installed
        from fratrie import __version__

        return __version__


def _subcommand() -> None:
    _, name, *rest = sys.argv
    if name not in COMMANDS:
        raise ValueError(f"no command {name!r}: there are {', '.join(COMMANDS)} (fratrie --help says what they do)")
    sys.argv = [f"fratrie {name}", *rest]  # what `--help` and errors call the program
    importlib.import_module(f"fratrie.cli.{_module(name)}").main()


def _module(command: str) -> str:
    return command.replace("-", "_")


def _help() -> str:
    """All commands, each with the first words of its module, which is not imported for them."""
    lines = [f"  {name:<16}{_summary(name)}" for name in COMMANDS]
    usage = "usage: fratrie COMMAND [options]   (fratrie COMMAND --help lists the options; --version)"
    return "\n".join([usage, "", *lines])


def _summary(command: str) -> str:
    file = Path(__file__).with_name(f"{_module(command)}.py")
    document = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert document
    return re.split(r"[:,.]\s", document, maxsplit=1)[0]


if __name__ == "__main__":
    main()
