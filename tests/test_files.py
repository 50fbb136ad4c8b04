import errno
import os
import signal
import stat
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fratrie import files

OLD = {"config.json": "old", "model.safetensors": "old", "vocab.txt": "old", "mine.txt": "mine"}
NEW = {"config.json": "new", "model.safetensors": "new", "code.py": "new"}


def fill(folder, contents):
    folder.mkdir(exist_ok=True)
    for name, text in contents.items():
        (folder / name).write_text(text)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "below" / "scores.csv"
    with files.new_file(path) as file:
        file.write("é\r\n")
        assert not path.exists()
    assert path.read_bytes() == "é\r\n".encode() and names(path.parent) == ["scores.csv"]
    with pytest.raises(RuntimeError), files.new_file(path) as file:
        file.write("half")
        raise RuntimeError
    assert path.read_bytes() == "é\r\n".encode() and names(path.parent) == ["scores.csv"]
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "half \ud800")
    assert path.read_bytes() == "é\r\n".encode()


def test_a_replaced_file_keeps_its_rights_and_its_links(tmp_path):
    path, link, twin = tmp_path / "a.json", tmp_path / "link.json", tmp_path / "twin.json"
    path.write_text("{}")
    path.chmod(0o640)
    link.symlink_to(path)
    os.link(path, twin)
    files.write_json(link, {"é": [1]})
    assert path.read_text() == '{\n  "é": [\n    1\n  ]\n}\n' and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert twin.read_text() == "{}", "another name of the old file keeps it"


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=f"{name} is no file that could be replaced"):
        files.write_text(tmp_path / name, "text")


def test_a_folder_is_whole_or_absent(tmp_path):
    path = tmp_path / "checkpoint-3"
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), files.new_folder(path) as folder:
            fill(folder, NEW)
            assert not path.exists()
            raise error
        assert names(tmp_path) == []
    with files.new_folder(path) as folder:
        fill(folder, NEW)
    assert contents(path) == NEW and names(tmp_path) == ["checkpoint-3"]


def test_a_model_takes_the_place_of_another(tmp_path):
    fill(tmp_path / "out", OLD | {"model-00001-of-00002.safetensors": "old"})
    with files.new_folder(tmp_path / "out") as folder:
        fill(folder, NEW)
    assert contents(tmp_path / "out") == OLD | NEW
    with files.new_folder(tmp_path / "out", whole=True) as folder:
        fill(folder, {"only.txt": "new"})
    assert contents(tmp_path / "out") == {"only.txt": "new"} and names(tmp_path) == ["out"]


@pytest.mark.parametrize("taken", ["config.json", "model.safetensors", "code.py"])
def test_a_folder_in_the_place_of_a_file_changes_nothing(tmp_path, taken):
    fill(tmp_path / "out", {name: text for name, text in OLD.items() if name != taken})
    fill(tmp_path / "out" / taken, {"thesis.txt": "precious"})
    before = contents(tmp_path / "out")
    with pytest.raises(OSError, match="is a folder, where a file is to be written"):  # noqa: SIM117
        with files.new_folder(tmp_path / "out") as folder:
            fill(folder, NEW)
    assert contents(tmp_path / "out") == before and (tmp_path / "out" / taken / "thesis.txt").exists()


class Killed(BaseException):
    pass


def die_at(monkeypatch, count):
    """Ends this process' life, as far as one can tell, before its n-th call that changes names."""
    calls = [0]

    def dying(function):
        def call(*arguments, **named):
            calls[0] += 1
            if calls[0] >= count:
                raise Killed
            return function(*arguments, **named)

        return call

    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr("shutil.rmtree", dying(lambda *_, **__: None))
    return calls


@pytest.mark.parametrize("whole", [False, True])
def test_killed_at_any_moment_no_half_of_a_model_can_be_read(tmp_path, monkeypatch, whole):
    """The old model, the new one, or none that has a config.json; the foreign file stays."""
    seen = set()
    for count in range(1, 12):
        out = tmp_path / str(count) / "out"
        out.parent.mkdir()
        fill(out, OLD | {"model-00001-of-00002.safetensors": "old"})
        with monkeypatch.context() as patch:
            die_at(patch, count)
            try:
                with files.new_folder(out, whole=whole) as folder:
                    fill(folder, NEW)
            except Killed:
                pass
        found = contents(out) if out.exists() else {}
        state = found.get("config.json")
        seen.add(state)
        if state == "new":
            assert {name: found[name] for name in NEW} == NEW and "model-00001-of-00002.safetensors" not in found
        if state == "old":
            assert {name: found[name] for name in OLD} == OLD
        assert whole or found["mine.txt"] == "mine"
    assert seen == {"old", None, "new"}


def test_a_folder_is_deleted_by_its_name_first(tmp_path, monkeypatch):
    fill(tmp_path / "checkpoint-1", NEW)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, 2)
        files.remove_folder(tmp_path / "checkpoint-1")
    (left,) = names(tmp_path)
    assert left.startswith(".incomplete-checkpoint-1-")
    files.sweep(tmp_path)
    assert names(tmp_path) == []


def test_of_a_link_to_a_folder_the_link_goes(tmp_path):
    fill(tmp_path / "elsewhere", NEW)
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere")
    files.remove_folder(tmp_path / "checkpoint-1")
    assert names(tmp_path) == ["elsewhere"] and contents(tmp_path / "elsewhere") == NEW


def test_sweeps_what_nobody_holds_and_is_of_ours(tmp_path):
    for name in (
        ".incomplete-a.csv-01234567",
        ".incomplete-b-89abcdef",
        ".incomplete-notes",
        ".incomplete-a.csv-draft",
    ):
        fill(tmp_path / name, {"half": ""})
    with files.held(tmp_path / ".incomplete-b-89abcdef"):
        files.sweep(tmp_path, "a.csv")
        files.sweep(tmp_path)
        assert names(tmp_path) == [".incomplete-a.csv-draft", ".incomplete-b-89abcdef", ".incomplete-notes"]
    files.sweep(tmp_path)
    assert names(tmp_path) == [".incomplete-a.csv-draft", ".incomplete-notes"]


def test_the_next_one_to_write_a_file_sweeps_its_leftovers(tmp_path):
    fill(tmp_path / ".incomplete-a.csv-01234567", {"half": ""})
    files.write_text(tmp_path / "a.csv", "whole")
    assert names(tmp_path) == ["a.csv"]


HOLDER = """
import os, signal, sys, time
from pathlib import Path
import files  # alone: the package takes seconds to import
with files.held(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lock_is_held_once_and_dies_with_its_process(tmp_path):
    with files.held(tmp_path) as is_locked:
        assert is_locked
        with pytest.raises(BlockingIOError), files.held(tmp_path):
            pass
    with files.held(tmp_path):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(files.__file__)},
    )
    child = int(holder.stdout.readline())
    assert holder.wait(30) == -signal.SIGKILL
    try:
        os.kill(child, 0)  # it lives, and holds nothing
        with files.held(tmp_path) as is_locked:
            assert is_locked
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_without_locks_nothing_is_refused_or_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    fill(tmp_path / ".incomplete-b-89abcdef", {"half": ""})
    with files.held(tmp_path) as first, files.held(tmp_path) as second:
        assert not first and not second
    with files.new_folder(tmp_path / "b") as folder:
        fill(folder, NEW)
    assert names(tmp_path) == [".incomplete-b-89abcdef", "b"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_an_error_of_the_system_whoever_says_it(tmp_path, error):
    with pytest.raises(OSError, match=r"cannot write .*checkpoint-2: No space left") as raised:  # noqa: SIM117
        with files.new_folder(tmp_path / "checkpoint-2"):
            raise error
    assert raised.value.errno == errno.ENOSPC and names(tmp_path) == []


def test_a_file_within_a_folder_is_told_by_the_folder(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as raised, files.new_folder(tmp_path / "model") as folder:
        monkeypatch.setattr(files, "flush", full)
        files.write_text(folder / "code.py", "x = 1")
    assert raised.value.strerror == f"cannot write {tmp_path / 'model'}: No space left on device"


def test_other_failures_keep_their_words(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"input\.csv"), files.new_file(tmp_path / "output.csv"):
        (tmp_path / "input.csv").read_text()
    with pytest.raises(ValueError, match="row 3"), files.new_file(tmp_path / "output.csv"):
        raise ValueError("row 3")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*x\.csv: .*"):
        files.write_text(tmp_path / "file" / "x.csv", "")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_weights_are_as_readable_as_other_files(tmp_path, mask):
    """safetensors writes 0600."""
    before = os.umask(mask)
    try:
        with files.new_folder(tmp_path / "model") as folder:
            save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")
        files.write_text(tmp_path / "metrics.json", "{}")
    finally:
        os.umask(before)
    written = [tmp_path / "metrics.json", *(tmp_path / "model").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o666 & ~mask}


def test_names_of_any_length(tmp_path):
    path = tmp_path / ("n" * 250 + ".csv")
    files.write_text(path, "text")
    assert path.read_text() == "text"
