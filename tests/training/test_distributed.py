"""Several processes, started as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("tiny_run.py")
CONFIGS = Path(__file__).parents[2] / "scripts" / "accelerate"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def start(folder, *launcher, **options):
    given = {"output_dir": str(folder), "per_device_train_batch_size": 2, "num_train_epochs": 2, **options}
    command = [sys.executable, *launcher, str(RUN), json.dumps(given)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    report = folder / "report.json"
    return done, json.loads(report.read_text()) if report.exists() else None


def launcher(config, port):
    return ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config), "--main_process_port", port]


def column(report, name):
    return [record[name] for record in report["history"] if name in record]


@pytest.mark.parametrize("stream", [False, True])
def test_two_processes_equal_one(tmp_path, stream):
    """Same loss, gradients, evaluation and predictions, with dropout and random masks, where rows are left over."""
    steps = {"max_steps": 4, "stream": True} if stream else {}
    one, single = start(tmp_path / "one", gradient_accumulation_steps=4, **steps)
    assert one.returncode == 0, one.stderr
    two, double = start(
        tmp_path / "two", *launcher("two_cpu_processes.yaml", "29731"), gradient_accumulation_steps=2, **steps
    )
    assert two.returncode == 0, two.stderr
    assert len(double["logits"]) == 21, "each row is predicted once"
    assert double["labels"] == single["labels"]
    for logits, expected in zip(double["logits"], single["logits"], strict=True):
        assert logits == pytest.approx(expected, abs=1e-6)
    if not stream:  # each process reads its own share of a stream, so the masks differ
        assert column(double, "loss") == pytest.approx(column(single, "loss"), rel=1e-5)
        assert column(double, "grad_norm") == pytest.approx(column(single, "grad_norm"), rel=1e-5)
        assert column(double, "eval_loss") == pytest.approx(column(single, "eval_loss"), rel=1e-5)


def test_two_processes_resume(tmp_path):
    two = launcher("two_cpu_processes.yaml", "29741")
    whole, unbroken = start(tmp_path / "whole", *two, save_steps=2)
    assert whole.returncode == 0, whole.stderr
    start(tmp_path / "part", *two, save_steps=2)
    for folder in (tmp_path / "part").glob("checkpoint-*"):
        if folder.name != "checkpoint-8":
            folder.rename(tmp_path / folder.name)
    resumed, continued = start(tmp_path / "part", *two, save_steps=2, resume_from_checkpoint="last")
    assert resumed.returncode == 0, resumed.stderr
    assert column(continued, "loss") == column(unbroken, "loss")


def test_all_processes_stop_at_a_loss_that_is_not_finite(tmp_path):
    done, report = start(tmp_path, *launcher("two_cpu_processes.yaml", "29751"), poison_process=1)
    assert done.returncode != 0 and report is None
    assert "error: step 1: the loss is nan" in done.stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"], "would train alone"),
        (launcher("multi_gpu_fsdp2.yaml", "29761"), "FSDP was asked for"),
    ],
)
def test_launches_that_would_go_wrong_silently(tmp_path, command, named):
    import torch

    if torch.accelerator.is_available():
        pytest.skip("these launches are right where there are GPUs")
    done, report = start(tmp_path, *command)
    assert done.returncode != 0 and report is None
    assert f"error: {'several processes' if 'alone' in named else 'FSDP'}" in done.stderr and named in done.stderr
