"""Keeps all tests offline, quiet, on one thread and with the same random numbers; picks those of the quick round."""

import gc
import hashlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
import transformers

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def cheap_garbage_collections():
    """Hide from the collector what has outlived the earlier files.

    Accelerate collects all garbage after each training and transformers after each batch that it serves: among the
    millions of objects of the libraries and of the collected tests this takes a second each time.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="run every test of a second or less, for one case a sibling")


def pytest_collection_modifyitems(config, items):
    """With `--quick`, leave out tests with a mark, and run the others once for each sibling or family that they name.

    Which of its cases stands for a family is drawn by the names of the tests, so the round meets most cases.
    """
    if not config.getoption("quick"):
        return
    chosen = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "distributed", "ecosystem")):
            chosen.setdefault((item.path, item.originalname, group_of(item)), []).append(item)
    kept = {min(each, key=lambda item: hashlib.md5(item.nodeid.encode()).digest()) for each in chosen.values()}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def group_of(item):
    """The sibling or family of a test's parameters."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    for value in given.values():
        for name in ("model_type", "sibling"):
            if isinstance(getattr(value, name, None), str):
                return getattr(value, name)
    return next((given[name] for name in ("sibling", "model_type") if name in given), None)
