"""Keeps all tests offline, quiet, on one thread and with the same random numbers."""

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
