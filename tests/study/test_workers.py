import multiprocessing
import time

import psutil
import pytest

from fratrie.study.workers import open_workers

KILL_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_results_errors_and_a_death_with_which_all_ends():
    looks, before = [], psutil.Process().children()
    with (
        pytest.raises(ValueError, match="a worker process was killed"),
        open_workers(2, exec, "import builtins; builtins.answer = 40") as workers,
    ):
        calls = {"sum": ("answer + 2",), "threads": ("__import__('os').environ['OMP_NUM_THREADS']",)}
        assert dict(workers.results(eval, calls, lambda: looks.append(1))) == {"sum": 42, "threads": "1"}
        assert looks
        with pytest.raises(ValueError, match="invalid literal for int"):
            list(workers.results(int, {1: ("one",)}, looks.clear))
        began = time.monotonic()
        list(workers.results(exec, {1: ("import time; time.sleep(600)",), 2: (KILL_ITSELF,)}, looks.clear))
    assert time.monotonic() - began < 60
    trackers = [child for child in psutil.Process().children() if "resource_tracker" in " ".join(child.cmdline())]
    assert len(psutil.Process().children()) == len({*before, *trackers})


def test_large_arguments_do_not_keep_this_process_waiting_and_shared_ones_are_shared():
    """More than a pipe holds: a process reads it when it has imported what it needs, which takes seconds."""
    counter = multiprocessing.get_context("spawn").Value("i", 0)
    with open_workers(1, prepare, "x" * 10**6, shared=(counter,)) as workers:
        began = time.monotonic()
        future = workers._pool.submit(len, "one")
        submitted = time.monotonic() - began
        assert future.result() == 3
        assert submitted < (time.monotonic() - began) / 2
    assert counter.value == 10**6


def prepare(text, counter):
    counter.value += len(text)
