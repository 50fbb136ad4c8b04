"""A peer's virtual environment, and one run of a program in it: its seconds and its memory."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil

HERE = Path(__file__).parent
# Libraries that would reach for the network are told not to.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
_BETWEEN = 0.2  # seconds between two looks at the memory


@dataclass(frozen=True)
class Run:
    """What a program took.

    Attributes:
        seconds: from its start to its end, the imports included.
        peak: bytes of memory of the program and those that it started, at their most (proportional set size).
    """

    seconds: float
    peak: int


def environment(peer: str, folder: str | Path) -> Path:
    """The interpreter of a peer's virtual environment, which is made where it is missing or of other versions.

    Args:
        peer: a file of `requirements` by its name, such as `setfit`.
        folder: of all environments; each is a folder below it.

    Raises:
        subprocess.CalledProcessError: pip has said why.
    """
    requirements = HERE / "requirements" / f"{peer}.txt"
    home = Path(folder).resolve() / peer
    python, made_of = home / "bin" / "python", home / "requirements.txt"
    if not made_of.exists() or made_of.read_text(encoding="utf-8") != requirements.read_text(encoding="utf-8"):
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        install = ["-m", "pip", "install", "--quiet", "--use-pep517", "--requirement", requirements]
        subprocess.run([python, *install], cwd=HERE.parents[1], check=True)
        made_of.write_text(requirements.read_text(encoding="utf-8"), encoding="utf-8")  # last: it is whole
    return python


def run_program(command: Sequence[object], log: str | Path) -> Run:
    """Run a program to its end, without a network, and write what it says to a file.

    Args:
        command: the program and its arguments, such as `[environment("setfit", …), HERE / "setfit_labels.py", …]`.
        log: a file, to which the output is added.

    Raises:
        ValueError: the program failed; says where its output stands.
    """
    words = [str(word) for word in command]
    start = time.perf_counter()
    with (
        Path(log).open("a", encoding="utf-8") as output,
        subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | OFFLINE) as program,
        _watched(program.pid) as peak,
    ):
        code = program.wait()
        seconds = time.perf_counter() - start
    if code:
        raise ValueError(f"{' '.join(words)} ended with code {code}; what it said stands in {log}")
    return Run(seconds, max(peak))


@contextmanager
def _watched(pid: int) -> Iterator[list[int]]:
    """A list that fills with the bytes of a process and its children as long as the block runs."""
    seen, done = [0], Event()

    def watch() -> None:
        while not done.wait(_BETWEEN):
            seen.append(_memory(pid))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _memory(pid: int) -> int:
    """Bytes of a process and its children now; pages that several share count once."""
    try:
        parent = psutil.Process(pid)
        return sum(_own_memory(process) for process in [parent, *parent.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def _own_memory(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return 0  # it has ended meanwhile
