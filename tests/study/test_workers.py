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
