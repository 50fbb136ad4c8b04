import os
import sys
from dataclasses import dataclass, field, fields

import pytest
from transformers import HfArgumentParser

from fratrie.cli.options import read_options
from fratrie.data.text_files import TextFormat
from fratrie.training.options import RANGES, ReadingOptions, TrainingOptions


def parse(*arguments):
    return HfArgumentParser(TrainingOptions).parse_args_into_dataclasses(["--output_dir", "x", *arguments])[0]


def test_every_option_is_explained_and_parsed():
    parser = HfArgumentParser(TrainingOptions)
    assert all(action.help for action in parser._actions)
    options = parse(
        "--mixed_precision", "bf16", "--max_steps", "7", "--greater_is_better", "false", "--warmup_steps", "5"
    )
    assert (options.mixed_precision, options.max_steps, options.greater_is_better) == ("bf16", 7, False)
    assert parse().mixed_precision is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"per_device_train_batch_size": -1}, "per_device_train_batch_size=-1"),
        ({"num_train_epochs": 0}, "num_train_epochs=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs=inf must lie between 0 and 1000000"),
        ({"num_train_epochs": float("nan"), "max_steps": 3}, "num_train_epochs=nan"),
        ({"max_steps": 10**18}, "max_steps=1000000000000000000"),
        ({"per_device_train_batch_size": 10**15}, "per_device_train_batch_size=1000000000000000"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"adam_beta1": 2}, "adam_beta1=2"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0 must lie between 0 and 0.999999"),
        ({"adam_epsilon": -1e-8}, "adam_epsilon=-1e-08"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": float("nan")}, "warmup_steps=nan"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf"),
        ({"save_steps": -1}, "save_steps=-1"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1"),
        ({"dataloader_num_workers": 10**6}, "dataloader_num_workers=1000000"),
        ({"seed": -1}, "seed=-1 must lie between 0 and 2147483647"),
        ({"seed": 10**30}, "seed=1000"),
        ({"early_stopping_patience": 2}, "needs metric_for_best_model"),
        ({"metric_for_best_model": "f1", "eval_strategy": "no"}, "needs an eval_strategy"),
    ],
)
def test_impossible_options(changes, named):
    with pytest.raises(ValueError, match=named):
        TrainingOptions("x", **changes)


@pytest.mark.parametrize(
    ("metric", "given", "greater"),
    [
        ("eval_loss", None, False),
        ("eval_perplexity", None, False),
        ("eval_macro_f1", None, True),
        ("eval_loss", True, True),
        ("f1", False, False),
    ],
)
def test_direction_of_a_metric(metric, given, greater):
    options = TrainingOptions("x", metric_for_best_model=metric, greater_is_better=given)
    assert options.better_is_greater() is greater


@dataclass(kw_only=True)
class _Options(ReadingOptions):
    file: str | None = None
    files: list[str] = field(default_factory=list)
    rate: float = 1.0
    overrides: str = ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", ""], "--file is empty"),
        (["--files", "a", ""], "--files is empty"),
        (["--text_column", ""], "--text_column is empty"),
        (["--files", "a", os.fsdecode(b"caf\xe9.txt")], r"--files 'caf\\udce9.txt' is not UTF-8"),
        (["--rate", "inf"], "--rate inf: expected a finite number"),
        (["--rate", "nan"], "--rate nan: expected a finite number"),
    ],
)
def test_empty_values_and_endless_numbers_are_refused(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(ValueError, match=message):
        read_options("A script.", _Options)


def test_what_is_given_comes_back(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--encoding", "cp1252", "--delimiter", ";", "--overrides", ""])
    (options,) = read_options("A script.", _Options)
    assert options.text_format() == TextFormat("cp1252", ";") and options.files == []


def test_every_number_has_a_range():
    numbers = {each.name for each in fields(TrainingOptions) if each.type in (int, float, "int", "float")}
    assert numbers == set(RANGES)
