"""Several processes: through the launcher as a user starts them, else forked from a server that has the imports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT, free_port, run_forked

from fratrie import files

RUN = Path(__file__).with_name("tiny_run.py")
CONFIG = Path(__file__).parents[2] / "scripts" / "accelerate" / "two_cpu_processes.yaml"

pytestmark = pytest.mark.distributed


def options_of(folder, changes):
    common = {"output_dir": str(folder), "per_device_train_batch_size": 2, "num_train_epochs": 2}
    return json.dumps(common | changes)


def launched(folder, *launcher, **changes):
    """Run by `accelerate launch`; gives exit code, errors and report."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, str(RUN), options_of(folder, changes)]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr, report_of(folder)


def forked(folder, number, environment=None, **changes):
    """Run as `number` processes that find one another; gives exit code, errors and report.

    Where torch 2.13 gathers sharded tensors over gloo it corrupts its memory about once in half a million calls (two
    processes that do nothing but call `full_tensor` die of it as well). Such a crash says nothing of the run, which
    is then repeated from the folder as it was.
    """
    before = folder.with_name(f"{folder.name}-before")
    if folder.exists():
        shutil.copytree(folder, before)
    for _ in range(2):
        done = run_forked(RUN, options_of(folder, changes), processes=number, environment=environment)
        if not (done.crashed and changes.get("sharded")):
            break
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, folder)
    shutil.rmtree(before, ignore_errors=True)
    return done.returncode, done.stderr, report_of(folder)


def report_of(folder):
    report = folder / "report.json"
    return json.loads(report.read_text()) if report.exists() else None


def column(report, name):
    return [record[name] for record in report["history"] if name in record]


@pytest.mark.parametrize(
    "how", [pytest.param("launched", marks=pytest.mark.slow), "ignoring num_items_in_batch", "sharded"]
)
def test_two_processes_equal_one(tmp_path, how):
    """Same loss, gradients, evaluation and predictions, with dropout and random masks, where rows are left over."""
    bert = how.startswith("ignoring")
    code, errors, single = forked(tmp_path / "one", 1, gradient_accumulation_steps=4, bert=bert)
    assert code == 0, errors
    two, options = tmp_path / "two", {"gradient_accumulation_steps": 2, "bert": bert}
    if how == "launched":
        started = ["--config_file", str(CONFIG), "--main_process_port", free_port()]
        code, errors, double = launched(two, *started, **options)
    else:
        code, errors, double = forked(two, 2, sharded=how == "sharded", **options)
    assert code == 0, errors
    assert len(column(single, "loss")) == 6 and len(column(single, "eval_loss")) == 3
    for name in ("loss", "grad_norm", "eval_loss"):
        assert column(double, name) == pytest.approx(column(single, name), rel=1e-5), name
    assert len(double["logits"]) == 21, "each row is predicted once"
    assert double["labels"] == single["labels"]
    assert torch.allclose(torch.tensor(double["logits"]), torch.tensor(single["logits"]), atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_resume(tmp_path, sharded):
    folder = tmp_path / "run"
    code, errors, unbroken = forked(folder, 2, save_steps=2, save_total_limit=9, sharded=sharded)
    assert code == 0, errors
    for step in (10, 12):
        (folder / f"checkpoint-{step}").rename(tmp_path / f"checkpoint-{step}")
    changes = {"save_steps": 2, "save_total_limit": 9, "resume_from_checkpoint": "last"}
    code, errors, resumed = forked(folder, 2, sharded=sharded, **changes)
    assert code == 0, errors
    assert len(column(resumed, "loss")) == 12
    assert column(resumed, "loss") == column(unbroken, "loss")
    assert resumed["seen"] != unbroken["seen"], "it was not run from the start"


def test_two_processes_of_a_stream_equal_one(tmp_path):
    """The same rows in the same micro-batches, with the same random masks and dropout."""
    code, errors, single = forked(tmp_path / "one", 1, stream=True, max_steps=7, gradient_accumulation_steps=2)
    assert code == 0, errors
    code, errors, double = forked(tmp_path / "two", 2, stream=True, max_steps=7)
    assert code == 0, errors
    first_pass = double["seen"][:10] + double["seen"][14:24]  # of either process
    assert sorted(first_pass) == list(range(20)), "20 of 21 rows fill the steps of a pass, each row once"
    assert sorted(double["seen"]) == sorted(single["seen"])
    for name in ("loss", "grad_norm", "eval_loss"):
        assert column(double, name) == pytest.approx(column(single, name), rel=1e-5), name


def test_one_process_that_is_asked_to_stop_stops_all(tmp_path):
    """All save the same step, leave with the same code, and go on to the end of a run that nobody stopped."""
    common = {"max_steps": 6, "save_steps": 0}
    code, errors, unbroken = forked(tmp_path / "unbroken", 2, **common)
    assert code == 0, errors
    folder = tmp_path / "run"
    code, errors, _ = forked(folder, 2, stop_process=1, **common)
    assert code == 143 and errors == "stopped by SIGTERM: step 3 is saved in " + (
        f"{folder}/checkpoint-3; go on with --resume_from_checkpoint last\n"
    )
    code, errors, resumed = forked(folder, 2, resume_from_checkpoint="last", **common)
    assert code == 0, errors
    assert column(resumed, "loss") == column(unbroken, "loss")
    assert column(resumed, "eval_loss") == column(unbroken, "eval_loss")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "unbroken" / "model.safetensors").read_bytes()


def test_all_processes_refuse_a_folder_that_is_in_use(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with files.held(folder):
        code, errors, report = forked(folder, 2, max_steps=1)
    assert code == 2 and report is None and errors.count(f"error: another run is writing in {folder}") == 2


def test_all_processes_stop_at_a_loss_that_is_not_finite(tmp_path):
    code, errors, report = forked(tmp_path / "run", 2, poison_process=1)
    assert code == 2 and report is None
    assert errors.count("error: step 1: the loss is nan") == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="with GPUs these launches are right")
def test_launches_that_would_go_wrong_silently(tmp_path):
    (tmp_path / "say.py").write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    said = subprocess.run([*launch, tmp_path / "say.py"], capture_output=True, text=True, check=True, timeout=300)
    code, errors, report = forked(tmp_path / "one", 1, json.loads(said.stdout.splitlines()[-1]))
    assert code == 2 and report is None
    assert "error: several processes were asked for" in errors
    code, errors, report = forked(tmp_path / "two", 2, {"ACCELERATE_USE_FSDP": "true"})
    assert code == 2 and report is None
    assert "error: FSDP was asked for, but Accelerate runs MULTI_CPU" in errors
