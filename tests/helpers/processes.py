"""Python programs in processes forked from a server that has read the libraries, which a new one takes seconds for."""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# One server a process of tests, started when the first of them needs it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["processes", "fratrie.training.loop", "fratrie.training.classifiers", "fratrie.modeling.encoder"]
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Ended:
    """The first exit code that is not 0, and what all processes wrote, in the order of their ranks."""

    returncode: int
    stdout: str
    stderr: str
    crashed: bool  # whether native code ended one of them


def free_port():
    with socket.socket() as open_socket:
        open_socket.bind(("127.0.0.1", 0))
        return str(open_socket.getsockname()[1])


def run_forked(*arguments, processes=1, environment=None, seconds=300):
    """Run `python *arguments` (a script, or -c and its code) as so many processes, which find one another."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(processes):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            given = os.environ | ENVIRONMENT | (own if processes > 1 else {}) | (environment or {})
            output = [f"{folder}/{rank}.{name}" for name in ("out", "err")]
            children.append(
                CONTEXT.Process(target=run_program, args=([*map(str, arguments)], given, os.getcwd(), output))
            )
            children[-1].start()
        for child in children:
            child.join(seconds)
        for child in children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGABRT)  # it says where it waits
                child.join()
        codes = [child.exitcode for child in children]
        texts = [
            "".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{name}"))) for name in ("out", "err")
        ]
    crashed = bool({-signal.SIGABRT, -signal.SIGSEGV} & {*codes})
    return Ended(next((code for code in codes if code), 0), *texts, crashed)


def run_program(arguments, environment, folder, output):
    """What the new process does."""
    gc.freeze()  # what the server has read is no garbage: see tests/conftest.py
    for descriptor, path in enumerate(output, start=1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable()  # a crash of native code leaves the Python frames of all threads
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
