"""Work side by side in processes of one thread each, which never outlive the process that asked for it."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil
from tqdm.auto import tqdm

from fratrie.training.stopping import leave_signals_to_the_main_process

Key = TypeVar("Key")
Result = TypeVar("Result")

_SECONDS_BETWEEN_LOOKS = 1.0
_BYTES_OF_LIBRARIES = 10**9
# glibc would give the memory of every gradient back to the system, and fetch it again in the next step.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}


def number_of_workers(bytes_each: int) -> int:
    """As many as this process has cores and the free memory has room for, at least one.

    Args:
        bytes_each: what the work takes in each of them, beside the libraries.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, psutil.virtual_memory().available // (bytes_each + _BYTES_OF_LIBRARIES)))


class Workers:
    """Processes that take calls, as `with` opens them.

    Each call's result depends on its arguments alone, so that their number changes nothing but the time.
    """

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def results(
        self,
        function: Callable[..., Result],
        calls: Mapping[Key, tuple[Any, ...]],
        look: Callable[[], object] = lambda: None,
    ) -> Iterator[tuple[Key, Result]]:
        """Results of `function(*arguments)` by key, each as soon as it is there.

        Args:
            function: of a module, since its name is what travels to the processes.
            calls: the arguments by key, in the order in which the calls begin.
            look: called about once a second meanwhile.

        Raises:
            ValueError: a process was killed.
            Exception: what a call raised.
        """
        waiting: dict[Future[Result], Key] = {
            self._pool.submit(function, *arguments): key for key, arguments in calls.items()
        }
        while waiting:
            done, _ = wait(waiting, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            for future in done:
                try:
                    yield waiting.pop(future), future.result()
                except BrokenProcessPool as error:
                    raise ValueError(
                        "a worker process was killed, as systems do that run out of memory: take fewer workers"
                    ) from error
            look()


@contextmanager
def open_workers(number: int, prepare: Callable[..., None], *arguments: Any) -> Iterator[Workers]:
    """Open processes for a context; `prepare(*arguments)` is called in each of them first.

    An exception in the context, Ctrl-C among them, ends them at once; so does the end of this process, however it
    comes.
    """
    context = multiprocessing.get_context("spawn")
    # Nobody writes into this pipe: a process reads its end when the last process that could has closed it.
    lifeline, held = context.Pipe(duplex=False)
    with _environment(_ENVIRONMENT):
        pool = ProcessPoolExecutor(number, context, _begin, (lifeline, prepare, arguments))
        try:
            yield Workers(pool)
        except BaseException:
            held.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            held.close()
            lifeline.close()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes inherit when they are started inside of the context."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _begin(lifeline: Connection, prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    leave_signals_to_the_main_process()
    tqdm.set_lock(threading.RLock())  # by default it is the system's, which a process that is ended leaves behind
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    prepare(*arguments)


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except EOFError:
        os._exit(1)
