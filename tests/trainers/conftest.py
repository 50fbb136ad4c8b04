"""Tokenizers for the tests of Hugging Face's trainers and server."""

import pytest
from trainer_texts import TEXTS

from fratrie.tokenization import train_byte_level_bpe, with_sibling


@pytest.fixture(scope="session")
def tokenizers():
    """A tokenizer for each sibling, padded on the right, of one vocabulary."""
    encoder = train_byte_level_bpe(TEXTS, vocab_size=300, model_max_length=64, show_progress=False)
    siblings = {sibling: with_sibling(encoder, sibling) for sibling in ("encoder", "decoder", "seq2seq")}
    siblings["decoder"].padding_side = "right"
    return siblings
