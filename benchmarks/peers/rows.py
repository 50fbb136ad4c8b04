"""The rows of the table: which tool, at which setting, by which commands."""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fratrie.training.options import PRETRAINED_ENCODER

from .running import HERE

SEED = 1
# What is left in the folder of a row.
PROBABILITIES, MEASURED = "probabilities.csv", "measured.json"


@dataclass(frozen=True)
class Files:
    """Where in the output folder the split and the weights lie."""

    folder: Path

    @property
    def train(self) -> Path:
        """Texts to learn from, with labels and respondents."""
        return self.folder / "train.jsonl"

    @property
    def test(self) -> Path:
        """Texts to label."""
        return self.folder / "test.jsonl"

    @property
    def ours(self) -> Path:
        """The weights in our format."""
        return self.folder / "weights"

    @property
    def theirs(self) -> Path:
        """The same weights in Hugging Face's."""
        return self.folder / "weights_hf"


@dataclass(frozen=True)
class Row:
    """A tool at one setting.

    Attributes:
        tool: its name and version.
        setting: in words.
        peer: whose virtual environment it runs in.
        options: of the program, by the names that the tool gives them.
    """

    tool: str
    setting: str
    peer: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> Path:
        """The file that a user of the tool writes."""
        return HERE / f"{self.peer}_labels.py"

    def commands(self, python: Path, files: Files, folder: Path) -> list[list[object]]:
        """What to run so that the probabilities lie in `folder`."""
        # -I: nothing but its virtual environment is imported, whatever PYTHONPATH says.
        words = [python, "-I", self.program, files.theirs, files.train, files.test, folder / PROBABILITIES]
        return [[*words, *_options({name: json.dumps(value) for name, value in self.options.items()})]]

    def lines(self) -> int:
        """How many lines a user writes."""
        return code_lines(self.program.read_text(encoding="utf-8"))


class Ours(Row):
    """Our two commands."""

    def commands(self, python: Path, files: Files, folder: Path) -> list[list[object]]:
        """Fine-tune, then label the test part."""
        model, program = folder / "model", python.parent / "fratrie"
        given = {"train_file": files.train, "model": files.ours, "output_dir": model, "report_to": "none"}
        read = {"model": model, "input_file": files.test, "output_file": folder / PROBABILITIES}
        tune = [program, "finetune", "--overwrite_output_dir", *_options(given | self.options)]
        return [tune, [program, "predict", "--overwrite", *_options(read)]]

    def lines(self) -> int:
        """One for each command."""
        return len(self.commands(Path(), Files(Path()), Path()))


ROWS = {
    "ours": Ours(
        "Fratrie",
        "`PRETRAINED_ENCODER`: the upper 6 layers, 10 epochs, rate 4e-4, bfloat16",
        "fratrie",
        PRETRAINED_ENCODER | {"seed": SEED},
    ),
    "setfit": Row(
        "setfit 1.2.0",
        "as it comes, but `num_iterations=1`: 2,636 pairs instead of 1,431,596",
        "setfit",
        {"num_iterations": 1, "seed": SEED},
    ),
    "trainer": Row(
        "transformers 5.24 `Trainer`",
        "as its guide has it: 2 epochs, rate 2e-5, batch 16",
        "trainer",
        {
            "num_train_epochs": 2,
            "learning_rate": 2e-5,
            "per_device_train_batch_size": 16,
            "weight_decay": 0.01,
            "seed": SEED,
        },
    ),
    "trainer_tuned": Row(
        "transformers 5.24 `Trainer`",
        "6 epochs, rate 2e-4, a tenth of warm-up, 16 texts of like length, bfloat16",
        "trainer",
        {
            "num_train_epochs": 6,
            "learning_rate": 2e-4,
            "warmup_steps": 0.1,
            "per_device_train_batch_size": 16,
            "weight_decay": 0.01,
            "train_sampling_strategy": "group_by_length",
            "bf16": True,
            "use_cpu": True,  # without it bf16 is refused
            "seed": SEED,
        },
    ),
    "simpletransformers": Row(
        "simpletransformers 0.70.8",
        "as it comes: 1 epoch, rate 4e-5, batch 8, padded to 128 tokens",
        "simpletransformers",
        {"manual_seed": SEED},
    ),
}


def code_lines(source: str) -> int:
    """Lines of a program that hold code: neither blank, nor a comment alone, nor in the docstring at the top."""
    body = ast.parse(source).body
    described = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) if body else False
    below = source.splitlines()[(body[0].end_lineno or 0) if described else 0 :]
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in below)


def _options(values: dict[str, Any]) -> Sequence[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]
