from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, GradientState

from fratrie import files
from fratrie.training.launch import create_accelerator, open_inference, open_run, sole_use
from fratrie.training.options import TrainingOptions

CONFIGS = Path(__file__).parents[2] / "scripts" / "accelerate"


@pytest.fixture(autouse=True)
def fresh_accelerate():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def open_one(folder, **changes):
    return create_accelerator(TrainingOptions(str(folder), report_to="none", **changes))


def test_opens_one_process_and_the_folder(tmp_path):
    accelerator = open_one(tmp_path / "new" / "run", mixed_precision="bf16")
    assert (accelerator.num_processes, accelerator.mixed_precision) == (1, "bf16")
    assert (tmp_path / "new" / "run").is_dir()


def test_launcher_cannot_divide_the_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert open_one(tmp_path).gradient_accumulation_steps == 1


def test_a_compiler_of_steps_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ValueError, match="leave out the launcher's dynamo_backend=INDUCTOR"):
        open_one(tmp_path)


def test_fp16_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="'fp16' is not supported"):
        open_one(tmp_path)


def test_processes_that_the_launcher_dropped(tmp_path, monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` leaves in the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="would train alone"):
        open_one(tmp_path)


def test_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=rf"^cannot make the folder {folder} \(.+\); choose another output_dir$"):
            open_one(folder)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_config_files_are_understood_by_accelerate(file):
    config = load_config_from_file(str(file))
    assert config.mixed_precision in ("no", "bf16")
    assert config.num_processes == (1 if config.distributed_type == "NO" else 2)
    if config.distributed_type == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2


def test_training_and_inference_end_what_they_opened(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(Accelerator, "end_training", lambda accelerator: ended.append(accelerator))
    for opened in (open_run(TrainingOptions(str(tmp_path), report_to="none")), open_inference()):
        with opened as accelerator:
            assert not ended
        assert ended.pop() is accelerator
    assert not ended


def test_a_folder_is_one_runs_from_beginning_to_end(tmp_path):
    (tmp_path / ".incomplete-checkpoint-4-01234567").mkdir()
    with open_run(TrainingOptions(str(tmp_path), report_to="none")) as accelerator:
        assert list(tmp_path.iterdir()) == []
        with sole_use(tmp_path, accelerator):  # as `train` asks for it
            pass
        with pytest.raises(BlockingIOError), files.held(tmp_path):
            pass
    with files.held(tmp_path):
        pass


@pytest.mark.parametrize(
    ("before", "written", "stays"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_the_new_folders_of_a_refused_run_go_while_they_are_empty(tmp_path, before, written, stays):
    folder = tmp_path / "runs" / "mine" / "first"
    if before:
        folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="refused"), open_run(TrainingOptions(str(folder), report_to="none")):
        if written:
            (folder / "model").write_text("")
        raise ValueError("refused")
    assert folder.exists() == (tmp_path / "runs").exists() == stays


def test_the_folder_of_another_run_stays(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(BlockingIOError), files.unused_folder_goes(folder):
        folder.mkdir()  # meanwhile, by another run
        raise BlockingIOError
    assert folder.exists()
