"""Starts the command `fratrie` from its file, so that `--help` need not wait until the package is imported."""

import runpy
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run `fratrie/cli/__main__.py`, as `python -m fratrie.cli` does after it has imported the package."""
    package = find_spec("fratrie")
    assert package and package.origin
    runpy.run_path(str(Path(package.origin).with_name("cli") / "__main__.py"), run_name="__main__")
