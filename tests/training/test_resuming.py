"""What runs leave alone in a folder, what they check before they go on, and how they stop."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from short_runs import (
    Killed,
    assert_equal_weights,
    bert_without_dropout,
    every_step,
    killed_at,
    losses,
    multi_label,
    multi_label_bert,
    options,
    random_masks,
    run,
    scripted,
    stream,
    tiny_bert,
    tiny_bert_of_other_seed,
    token_rows,
)

from fratrie import files
from fratrie.training import checkpoint
from fratrie.training.loop import NonFiniteLossError, create_accelerator, train
from fratrie.training.stopping import Stopped

pytestmark = pytest.mark.slow  # each test trains several times


def steps_in(folder):
    return [step for step, _ in checkpoint.list_checkpoints(folder)]


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def go_on(folder, **changes):
    return run(folder, tiny_bert_of_other_seed(), resume_from_checkpoint="last", **changes)


# What belongs to somebody else


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", [{"mine.txt": "precious"}, {"trainer_state.json": '{"log_history": []}'}])
def test_a_foreign_checkpoint_is_refused_and_stays(tmp_path, overwrite, content):
    foreign = tmp_path / "checkpoint-2"
    foreign.mkdir()
    for name, text in content.items():
        (foreign / name).write_text(text)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "thesis.txt").write_text("precious")
    before = snapshot(tmp_path)
    with pytest.raises(
        ValueError, match=rf"{foreign} is .*: move {foreign} away|{foreign} is .*; move {foreign} away"
    ):
        run(tmp_path, max_steps=2, save_steps=1, overwrite_output_dir=overwrite)
    assert snapshot(tmp_path) == before
    foreign.rename(tmp_path / "mine")
    run(tmp_path, max_steps=2, save_steps=1, overwrite_output_dir=overwrite)
    assert steps_in(tmp_path) == [1, 2] and (tmp_path / "final" / "thesis.txt").read_text() == "precious"


def test_an_earlier_run_is_not_mixed_in(tmp_path):
    run(tmp_path, max_steps=2, save_steps=1)
    with pytest.raises(ValueError, match="earlier run"):
        run(tmp_path, max_steps=1, save_steps=1)
    run(tmp_path, max_steps=1, save_steps=1, overwrite_output_dir=True)
    assert steps_in(tmp_path) == [1]


OF_A_MODEL = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "generation_config.json"]


@pytest.mark.parametrize("name", ["README.md", "metrics.json", "run_config.json", *OF_A_MODEL])
def test_what_lies_in_the_folder_is_not_replaced_unasked(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"holds {name}, which this run would replace"):
        run(tmp_path, max_steps=1)
    assert (tmp_path / name).read_text() == "{}"
    run(tmp_path, max_steps=1, overwrite_output_dir=True)


def test_a_run_that_ended_early_can_be_begun_again(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, evaluate=killed_at(1), **every_step())
    assert (tmp_path / "run_config.json").exists()
    run(tmp_path, max_steps=1)


def test_overwriting_speaks_of_runs_alone(tmp_path):
    run(tmp_path, max_steps=2, save_steps=1, report_to="tensorboard")
    (tmp_path / "logs" / "notes.txt").write_text("precious")
    (tmp_path / "checkpoint-best").mkdir()
    (log,) = (tmp_path / "logs").glob("events*")
    run(tmp_path, max_steps=1, save_steps=1, overwrite_output_dir=True)
    assert steps_in(tmp_path) == [1] and not log.exists()
    assert (tmp_path / "logs" / "notes.txt").exists() and (tmp_path / "checkpoint-best").exists()


def nan_labels(rows):
    batch = multi_label(rows)
    return {**batch, "labels": batch["labels"].fill_(torch.nan)}


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "warmup_steps=1000", {"warmup_steps": 1000}),
        (ValueError, "the training data has no rows", {"rows": Dataset.from_list([])}),
        (ValueError, "fewer rows than the 4 of one step", {"rows": stream(3), "max_steps": 2}),
        (NonFiniteLossError, "step 1: the loss is nan", {"model": multi_label_bert(), "collator": nan_labels}),
    ],
)
def test_a_run_that_cannot_begin_leaves_the_earlier_one(tmp_path, error, message, changes):
    run(tmp_path, max_steps=2, save_steps=1, report_to="tensorboard")
    before = snapshot(tmp_path)
    with pytest.raises(error, match=message):
        run(tmp_path, overwrite_output_dir=True, **changes)
    assert snapshot(tmp_path) == before


def test_two_runs_in_one_folder(tmp_path):
    with files.held(tmp_path), pytest.raises(BlockingIOError, match=f"another run is writing in {tmp_path}"):
        run(tmp_path, max_steps=1)
    run(tmp_path, max_steps=1)


def test_leftovers_of_killed_runs_are_swept(tmp_path):
    (tmp_path / ".incomplete-checkpoint-4-01234567").mkdir()
    run(tmp_path, max_steps=1)
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("failing", ["save_file", "write_model"])
def test_a_full_disk_leaves_earlier_checkpoints(tmp_path, monkeypatch, failing):
    saved = getattr(checkpoint, failing)

    def full(*arguments, **named):
        if len(steps_in(tmp_path)) == 2:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        return saved(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, failing, full)
        with pytest.raises(OSError, match=r"cannot write .*checkpoint-3: No space left"):
            run(tmp_path, max_steps=4, save_steps=1, save_total_limit=9)
    assert steps_in(tmp_path) == [1, 2] and hidden(tmp_path) == []
    unbroken, _ = run(tmp_path / "unbroken", max_steps=4)
    resumed, _ = go_on(tmp_path, max_steps=4, save_steps=1)
    assert_equal_weights(unbroken, resumed)


# Going on


def test_going_back_to_an_older_checkpoint_keeps_the_runs_own_newest(tmp_path, caplog):
    common = {"max_steps": 8, "save_steps": 2, **every_step()}
    unbroken, _ = run(tmp_path, save_total_limit=9, **common)
    assert steps_in(tmp_path) == [2, 4, 6, 8]
    back = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2"), "save_total_limit": 2}
    with pytest.raises(Killed):
        run(tmp_path, evaluate=killed_at(1), **back, **common)
    assert steps_in(tmp_path) == [2, 4, 6, 8], "nothing is deleted before something is saved"
    assert "checkpoint-4, checkpoint-6, checkpoint-8 will be deleted at the next save" in caplog.text
    with pytest.raises(Killed):
        run(tmp_path, evaluate=killed_at(3), **back, **common)
    assert steps_in(tmp_path) == [2, 4]
    model, _ = go_on(tmp_path, save_total_limit=2, **common)
    assert steps_in(tmp_path) == [6, 8]
    assert_equal_weights(unbroken, model)


def test_a_checkpoint_that_is_not_there_is_not_called_damaged(tmp_path):
    with pytest.raises(ValueError, match=f"no folder checkpoint-2: give .*, as {tmp_path}/checkpoint-2, or last"):
        run(tmp_path, max_steps=4, resume_from_checkpoint="checkpoint-2")


def test_a_copy_of_a_checkpoint_under_another_name_is_refused_and_stays(tmp_path):
    run(tmp_path, max_steps=4, save_steps=2)
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-9")
    with pytest.raises(ValueError, match="checkpoint-9 is a copy of checkpoint-2 under another name"):
        go_on(tmp_path, max_steps=4, save_steps=2)
    with pytest.raises(ValueError, match="checkpoint-9 is a copy"):
        run(tmp_path, max_steps=4, save_steps=2, overwrite_output_dir=True)
    assert steps_in(tmp_path) == [2, 4, 9]


def test_the_best_checkpoint_must_be_there(tmp_path):
    chosen = {"metric_for_best_model": "f1", "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    run(tmp_path, evaluate=scripted([0.5, 0.1, 0.1]), max_steps=3, **chosen)
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="checkpoint-1, the best one so far, is missing"):
        go_on(tmp_path, evaluate=scripted([]), max_steps=3, **chosen)


def test_seconds_of_all_pieces_count(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, evaluate=killed_at(3), max_steps=4, save_steps=2, **every_step())
    state = checkpoint.load_state(tmp_path / "checkpoint-2")
    assert state["run"]["seconds"] > 0
    checkpoint._write_state(tmp_path / "checkpoint-2", state | {"run": {**state["run"], "seconds": 1000.0}})
    _, result = go_on(tmp_path, max_steps=4, save_steps=2)
    assert 1000 < result.seconds < 1100


def train_two_steps(folder, learning_rates=None, compared=None, rows=None, model=tiny_bert, **changes):
    common = {"max_steps": 2, "save_steps": 1, "metric_for_best_model": "f1"} | every_step()
    AcceleratorState._reset_state(True)
    chosen = options(folder, **{**common, **changes})
    rows = Dataset.from_list(token_rows()) if rows is None else rows
    given = {"learning_rates": learning_rates, "compared": compared or {"validation data": "a"}}
    evaluate = scripted([0.1, 0.2, 0.3, 0.4])
    return train(model(), chosen, create_accelerator(chosen), rows, random_masks, evaluate=evaluate, **given)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_steps") / "run"
    train_two_steps(folder)
    return folder


def test_goes_on_with_the_same_run(two_steps, tmp_path):
    folder = shutil.copytree(two_steps, tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-2")
    assert train_two_steps(folder, resume_from_checkpoint="last").global_step == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 2e-2}, "learning_rate: 0.01 then, 0.02 now"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"rows": Dataset.from_list(token_rows(21))}, "data: "),
        ({"rows": Dataset.from_list([*token_rows()[:13], {"input_ids": [9]}, *token_rows()[14:]])}, "data: "),
        ({"model": bert_without_dropout}, "config.hidden_dropout_prob"),
        ({"model": lambda: tiny_bert(attn_implementation="eager")}, "attention kernel: 'sdpa' then, 'eager' now"),
        ({"learning_rates": {"bert.embeddings.LayerNorm.weight": 0.1}}, "learning rates: None then"),
        ({"compared": {"validation data": "b"}}, "validation data: 'a' then, 'b' now"),
        ({"eval_steps": 2}, "eval_steps: 1 then, 2 now"),
    ],
)
def test_refuses_to_go_on_with_another_run(two_steps, change, named):
    before = snapshot(two_steps)
    with pytest.raises(ValueError, match=named):
        train_two_steps(two_steps, resume_from_checkpoint="last", **change)
    assert snapshot(two_steps) == before


def test_going_on_needs_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        run(tmp_path, resume_from_checkpoint="last")
    with pytest.raises(ValueError, match="there is no folder"):
        run(tmp_path, resume_from_checkpoint=str(tmp_path / "nowhere"))


# Damage

STATES = {
    "empty object": "{}",
    "list": "[]",
    "null": "null",
    "half": '{"run": {',
    "deep": "[" * 100_000,
    "no file": None,
    "a missing key": lambda state: state["run"].pop("step"),
    "a wrong type": lambda state: state["run"].update(step="2"),
    "another number": lambda state: state["schedule"].update(last_epoch=1),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with its checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, max_steps=4, save_steps=2)
    return folder


def damaged(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    return folder, folder / "checkpoint-4"


def assert_refused_and_the_way_out_works(folder, path, named):
    """Named, nothing changed; with the checkpoint moved away, the one before leads to the same end."""
    before = snapshot(folder)
    with pytest.raises(ValueError, match=named) as raised:
        go_on(folder, max_steps=4, save_steps=2)
    assert snapshot(folder) == before and f"move {path} away, then go on from another" in str(raised.value)
    path.rename(folder.parent / "away")
    go_on(folder, max_steps=4, save_steps=2)
    assert steps_in(folder) == [2, 4]
    weights = Path("model.safetensors")
    assert snapshot(folder)[weights] == before[weights]


@pytest.mark.parametrize("kind", STATES)
def test_a_damaged_state(finished, tmp_path, kind):
    folder, path = damaged(finished, tmp_path)
    file, content = path / checkpoint.STATE_FILE, STATES[kind]
    if callable(content):
        state = json.loads(file.read_text())
        content(state)
        content = json.dumps(state)
    if content is None:
        file.unlink()
        with pytest.raises(ValueError, match=f"{path} is no checkpoint of a run: it lacks trainer_state.json"):
            go_on(folder, max_steps=4, save_steps=2)
        return
    file.write_text(content)
    assert_refused_and_the_way_out_works(folder, path, rf"{file} is damaged")


def flip_a_byte(file, name):
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    content[8 + size + start] ^= 1
    file.write_bytes(content)


MOMENT = "bert.embeddings.LayerNorm.weight/exp_avg"
DAMAGE = {
    "a byte of a weight": ("model", "bert.embeddings.LayerNorm.weight", flip_a_byte),
    "a byte of a moment": ("optimizer", MOMENT, flip_a_byte),
    "another shape": ("optimizer", MOMENT, lambda moments: moments.update({MOMENT: torch.zeros(3)})),
    "another type": ("optimizer", MOMENT, lambda moments: moments.update({MOMENT: moments[MOMENT].half()})),
    "missing": ("optimizer", MOMENT, lambda moments: moments.pop(MOMENT)),
    "one more": ("optimizer", "mine", lambda moments: moments.update(mine=torch.zeros(1))),
    "cut off": ("model", "", lambda file, name: file.write_bytes(file.read_bytes()[:100])),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_tensors(finished, tmp_path, kind):
    folder, path = damaged(finished, tmp_path)
    name, tensor, damage = DAMAGE[kind]
    file = path / f"{name}.safetensors"
    if damage.__code__.co_argcount == 2:
        damage(file, tensor)
    else:
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, file)
    assert_refused_and_the_way_out_works(folder, path, rf"{file} is damaged.*{tensor}")


def test_a_damaged_newest_checkpoint_does_not_keep_from_an_older_one(finished, tmp_path):
    folder, path = damaged(finished, tmp_path)
    flip_a_byte(path / "optimizer.safetensors", MOMENT)
    run(folder, max_steps=4, save_steps=2, resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert snapshot(folder)[Path("model.safetensors")] == (finished / "model.safetensors").read_bytes()


def test_a_checkpoint_of_an_earlier_version(finished, tmp_path):
    folder, path = damaged(finished, tmp_path)
    state = json.loads((path / checkpoint.STATE_FILE).read_text())
    del state["checksum"], state["tensors"]
    (path / checkpoint.STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"is of an earlier version .*--model .*checkpoint-4"):
        go_on(folder, max_steps=4, save_steps=2)
    run(folder, max_steps=4, save_steps=2, overwrite_output_dir=True)


# Stopping


def stopping_at(step, *signals):
    """A collator that gets the process told to stop while it makes the batch of a step."""

    def collator(rows):
        collator.calls += 1
        for number in signals * (collator.calls == step):
            os.kill(os.getpid(), number)
        return random_masks(rows)

    collator.calls = 0
    return collator


@pytest.fixture(autouse=True)
def heard_signals():
    """Signals as a terminal hands them on: `nohup`, and shells in the background, have them ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "save_steps", "step"), [("SIGTERM", 0, 3), ("SIGHUP", 2, 4), ("SIGINT", 0, 5)])
def test_a_run_that_was_asked_to_stop_goes_on_to_the_same_end(tmp_path, number, save_steps, step):
    """Also where the evaluation of that step would have been the best one, and at the very last step."""
    scores = [0.1, 0.5, 0.7, 0.9, 0.2]
    common = {"max_steps": 5, "save_steps": save_steps, "metric_for_best_model": "f1", **every_step()}
    unbroken, reference = run(tmp_path / "unbroken", evaluate=scripted(scores), **common)
    folder, given = tmp_path / "run", getattr(signal, number)
    with pytest.raises(Stopped) as raised:
        run(folder, evaluate=scripted(scores), collator=stopping_at(step, given), **common)
    told = f"stopped by {number}: step {step} is saved in {folder}/checkpoint-{step}; go on with"
    assert raised.value.number == given and str(raised.value).startswith(told)
    assert steps_in(folder)[-1] == step
    model, result = go_on(folder, evaluate=scripted(scores[step - 1 :]), **common)
    assert_equal_weights(unbroken, model)
    assert losses(result) == losses(reference) and result.best_step == reference.best_step == 4
    assert [record.get("f1") for record in result.history] == [record.get("f1") for record in reference.history]
    assert steps_in(folder) == steps_in(tmp_path / "unbroken")


def test_a_second_signal_leaves_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match=r"stopped by SIGINT$"):
        run(tmp_path, collator=stopping_at(3, signal.SIGINT, signal.SIGINT), max_steps=5)
    assert steps_in(tmp_path) == [] and signal.getsignal(signal.SIGINT) is before


def test_what_a_launcher_repeats_is_no_second_signal(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(Stopped, match="step 3 is saved"):
        run(tmp_path, collator=stopping_at(3, signal.SIGINT, signal.SIGINT), max_steps=5)


def test_asked_to_stop_when_all_steps_are_taken(tmp_path, monkeypatch):
    save = checkpoint.save_final

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save_final", signalled)
    with pytest.raises(Stopped, match="the model is saved in"):
        run(tmp_path, max_steps=1)
    assert (tmp_path / "model.safetensors").exists()
