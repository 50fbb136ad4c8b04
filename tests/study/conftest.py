"""What the tests of the study share."""

import logging
from contextlib import contextmanager

import pytest
from accelerate.state import AcceleratorState, GradientState

from fratrie.study import classical, finetuning


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs what is meant for other processes here, where nothing has to be imported again."""

    @contextmanager
    def open_workers(number, prepare, *arguments, shared=()):
        prepare(*arguments, *shared)
        yield Here()

    class Here:
        def results(self, function, calls, look=lambda: None):
            for key, arguments in calls.items():
                yield key, function(*arguments)
                look()

    AcceleratorState._reset_state(True)
    for module in (classical, finetuning):
        monkeypatch.setattr(module, "open_workers", open_workers)
    level = logging.getLogger("fratrie").level
    yield
    logging.getLogger("fratrie").setLevel(level)  # which preparing a process has raised
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
