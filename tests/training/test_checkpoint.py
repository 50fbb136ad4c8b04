import os

import pytest
import torch
from safetensors.torch import load_file

from fratrie import files
from fratrie.training import checkpoint


def fill(folder, steps):
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / checkpoint.STATE_FILE).write_text("{}")


@pytest.mark.parametrize(
    ("keep_last", "keep_step", "left"),
    [(2, None, [20, 100]), (1, 9, [9, 100]), (0, None, []), (0, 20, [20]), (9, None, [3, 9, 20, 100])],
)
def test_keeps_the_newest_and_the_best(tmp_path, keep_last, keep_step, left):
    fill(tmp_path, [100, 9, 20, 3])
    (tmp_path / "checkpoint-best").mkdir()
    checkpoint.remove_checkpoints(tmp_path, keep_last, keep_step)
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path)] == left
    assert (tmp_path / "checkpoint-best").exists(), "not one of ours"


def test_state_that_is_damaged(tmp_path):
    (tmp_path / checkpoint.STATE_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"trainer_state\.json is damaged"):
        checkpoint.load_state(tmp_path)


def test_killed_while_deleting_leaves_no_half_that_counts(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2, 3])

    def killed(path):
        (path / checkpoint.STATE_FILE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.shutil, "rmtree", killed)
        checkpoint.remove_checkpoints(tmp_path, keep_last=2)
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path)] == [2, 3]
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def moved(model, optimizer):
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return optimizer


def test_optimizer_goes_there_and_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    first = moved(model, torch.optim.AdamW(model.parameters()))
    checkpoint.save_file(checkpoint.optimizer_tensors(model, first), tmp_path / checkpoint.OPTIMIZER_FILE)
    assert "0.weight/exp_avg" in load_file(tmp_path / checkpoint.OPTIMIZER_FILE)
    second = torch.optim.AdamW([{"params": [w for w in model.parameters() if w.ndim == d]} for d in (2, 1)])
    checkpoint.load_optimizer(model, second, tmp_path)
    for weight in model.parameters():
        for key, value in first.state[weight].items():
            assert torch.equal(second.state[weight][key], value)


def test_a_pipe_in_the_place_of_the_weights_is_not_opened(tmp_path):
    for name in (checkpoint.STATE_FILE, checkpoint.OPTIMIZER_FILE, "config.json"):
        (tmp_path / name).write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors is a pipe or a device"):
        checkpoint.find_checkpoint(tmp_path.parent, str(tmp_path))


def test_optimizer_of_another_model(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    first = moved(model, torch.optim.AdamW(model.parameters()))
    checkpoint.save_file(checkpoint.optimizer_tensors(model, first), tmp_path / checkpoint.OPTIMIZER_FILE)
    other = torch.nn.Linear(4, 3)
    with pytest.raises(ValueError, match="which the model does not have"):
        checkpoint.load_optimizer(other, torch.optim.AdamW(other.parameters()), tmp_path)
    (tmp_path / checkpoint.OPTIMIZER_FILE).write_bytes(b"\x80\x04not safetensors")
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load_optimizer(model, first, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("0.weight/exp_avg", torch.zeros(3), r"0.weight/exp_avg is float32 \(3,\), but the weight float32 \(3, 4\)"),
        ("0.weight/exp_avg", torch.zeros(3, 4).half(), "is float16"),
        ("0.bias/exp_avg_sq", None, "lacks 0.bias/exp_avg_sq"),
    ],
)
def test_moments_that_do_not_fit_are_refused_by_name(tmp_path, name, value, told):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    optimizer = moved(model, torch.optim.AdamW(model.parameters()))
    moments = checkpoint.optimizer_tensors(model, optimizer)
    moments = {key: moment for key, moment in (moments | {name: value}).items() if moment is not None}
    checkpoint.save_file(moments, tmp_path / checkpoint.OPTIMIZER_FILE)
    with pytest.raises(ValueError, match=told):
        checkpoint.load_optimizer(model, optimizer, tmp_path)
