"""Tokenizers: byte-level BPE and characters, one vocabulary for three siblings, and a teaching reference."""

from fratrie.tokenization.byte_level import add_words, train_byte_level_bpe
from fratrie.tokenization.character import train_character_tokenizer
from fratrie.tokenization.reference import train_reference_bpe
from fratrie.tokenization.siblings import SIBLINGS, Sibling, sentinel_token_ids, with_sibling

__all__ = [
    "SIBLINGS",
    "Sibling",
    "add_words",
    "sentinel_token_ids",
    "train_byte_level_bpe",
    "train_character_tokenizer",
    "train_reference_bpe",
    "with_sibling",
]
