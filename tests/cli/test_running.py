import io
import os
import signal
import sys
import threading

import pytest
from safetensors import SafetensorError

from fratrie.cli.running import run
from fratrie.training.stopping import Stopped, leave_signals_to_the_main_process


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("say what"), "say what"),
        (FileNotFoundError("no file x.txt"), "no file x.txt"),
        (SafetensorError("header too small"), "header too small"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (ModuleNotFoundError("No module named 'a.b'", name="a.b"), "the package a is missing: install it with pip"),
        (ImportError("requires the protobuf library: pip install protobuf"), "pip install protobuf"),
    ],
)
def test_user_errors_end_with_one_line(capsys, error, told):
    with pytest.raises(SystemExit) as ended:
        run(raising(error))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ModuleNotFoundError("x", name="fratrie.gone"), KeyError(1)])
def test_own_mistakes_are_no_user_errors(error):
    with pytest.raises(type(error)):
        run(raising(error))


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_with_one_line(capsys, name, code):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        run(lambda: os.kill(os.getpid(), number))
    assert ended.value.code == code and capsys.readouterr().err == f"stopped by {name}\n"
    assert signal.getsignal(number) is before


def test_errors_in_threads_take_one_line(capsys):
    def main():
        thread = threading.Thread(target=raising(OSError(28, "No space left on device")))
        thread.start()
        thread.join()

    before = threading.excepthook
    run(main)
    assert capsys.readouterr().err == "error: No space left on device\n"
    assert threading.excepthook is before


def test_of_several_processes_the_first_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        run(raising(Stopped(signal.SIGTERM)))
    assert capsys.readouterr().err == ""


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(lambda: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_own_mistakes_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


def test_letters_that_a_terminal_lacks_end_nothing(monkeypatch):
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, encoding="latin-1", write_through=True))
    run(lambda: print("sœur, mère"))
    assert bytes_out.getvalue() == b"s\\u0153ur, m\xe8re\n"


def test_nothing_said_on_success(capsys):
    run(lambda: None)
    assert capsys.readouterr() == ("", "")


def test_workers_outlive_what_a_group_of_processes_is_sent():
    child = os.fork()
    if child == 0:
        leave_signals_to_the_main_process()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        os.write(writing := os.open(os.devnull, os.O_WRONLY), b".")  # a moment in which signals are heard
        os.close(writing)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
