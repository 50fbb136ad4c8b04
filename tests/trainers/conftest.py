"""Makes the tiny models of the model tests importable, and keeps Hugging Face offline and quiet."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import pytest
import torch
import transformers
from trainer_texts import TEXTS

from fratrie.tokenization import train_byte_level_bpe, with_sibling

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizers():
    """A tokenizer for each sibling, padded on the right, of one vocabulary."""
    encoder = train_byte_level_bpe(TEXTS, vocab_size=300, model_max_length=64, show_progress=False)
    siblings = {sibling: with_sibling(encoder, sibling) for sibling in ("encoder", "decoder", "seq2seq")}
    siblings["decoder"].padding_side = "right"
    return siblings
