"""Makes `combinations` importable for the ecosystem tests, and keeps them quiet, offline and on one thread."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import datasets
import pytest
import torch
import transformers

from fratrie.tokenization import train_byte_level_bpe, with_sibling

transformers.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()

TEXTS = [
    "Je m'entends bien avec ma mère.",
    "Mon père travaille beaucoup et je ne le vois pas souvent, mais quand il est là on joue ensemble.",
    "Mes sœurs «adorent» notre chat 🐈.",
    "J'ai deux frères.",
]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # random weights whose outputs differ between texts
}


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def encoder_tokenizer():
    return train_byte_level_bpe(TEXTS * 3, vocab_size=320, model_max_length=64, show_progress=False)


@pytest.fixture(scope="session")
def decoder_tokenizer(encoder_tokenizer):
    return with_sibling(encoder_tokenizer, "decoder")


@pytest.fixture(scope="session")
def config_fields():
    """Fields of a tiny configuration that fits a tokenizer."""

    def fields(tokenizer):
        return {
            **SIZES,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }

    return fields
