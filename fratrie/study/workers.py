"""Work side by side in processes of one thread each, which never outlive the process that asked for it."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from tqdm.auto import tqdm

from fratrie.training.stopping import leave_signals_to_the_main_process

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

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
        ended: SimpleQueue[Future[Result]] = SimpleQueue()
        waiting: dict[Future[Result], Key] = {}
        for key, arguments in calls.items():
            future = self._pool.submit(function, *arguments)
            waiting[future] = key
            future.add_done_callback(ended.put)
        while waiting:
            try:
                future = ended.get(timeout=_SECONDS_BETWEEN_LOOKS)
                yield waiting.pop(future), future.result()
            except Empty:
                pass
            except BrokenProcessPool as error:
                raise ValueError(
                    "a worker process was killed, as systems do that run out of memory: take fewer workers"
                ) from error
            look()


@contextmanager
def open_workers(
    number: int, prepare: Callable[..., None], *arguments: Any, shared: tuple[Any, ...] = ()
) -> Iterator[Workers]:
    """Open processes for a context; `prepare(*arguments, *shared)` is called in each of them first.

    An exception in the context, Ctrl-C among them, ends them at once; so does the end of this process, however it
    comes.

    Args:
        number: of processes, which are started as calls come.
        prepare: of a module.
        arguments: for it, of any size.
        shared: what only a process that is being started can be given, such as a `multiprocessing.Value`.
    """
    context = multiprocessing.get_context("spawn")
    # Nobody writes into this pipe: a process reads its end when the last process that could has closed it.
    lifeline, held = context.Pipe(duplex=False)
    # What is given to a process at its start must fit into a pipe, or this one would wait until it has imported all.
    payloads: Queue[tuple[Any, ...]] = context.Queue()
    payloads.cancel_join_thread()  # perhaps not all of the processes will be started
    for _ in range(number):
        payloads.put(arguments)
    with _environment(_ENVIRONMENT):
        pool = ProcessPoolExecutor(number, context, _begin, (lifeline, payloads, prepare, shared))
        try:
            yield Workers(pool)
        except BaseException:
            held.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            held.close()
            lifeline.close()
            payloads.close()


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


def _begin(
    lifeline: Connection, payloads: "Queue[tuple[Any, ...]]", prepare: Callable[..., None], shared: tuple[Any, ...]
) -> None:
    leave_signals_to_the_main_process()
    tqdm.set_lock(threading.RLock())  # by default it is the system's, which a process that is ended leaves behind
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    prepare(*payloads.get(), *shared)


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except EOFError:
        os._exit(1)
