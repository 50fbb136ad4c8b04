"""Tokenizers and tiny configurations for the tests of other tools."""

import datasets
import pytest

from fratrie.tokenization import train_byte_level_bpe, with_sibling

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
