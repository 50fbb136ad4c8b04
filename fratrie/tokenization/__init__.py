"""Tokenizers: byte-level BPE, WordPiece, Unigram, characters; one vocabulary for three siblings; a reference."""

from fratrie.tokenization.byte_level import add_words, train_byte_level_bpe
from fratrie.tokenization.character import train_character_tokenizer
from fratrie.tokenization.reference import train_reference_bpe
from fratrie.tokenization.siblings import SIBLINGS, Sibling, knows_templates, sentinel_token_ids, with_sibling
from fratrie.tokenization.unigram import train_unigram
from fratrie.tokenization.wordpiece import train_wordpiece

__all__ = [
    "SIBLINGS",
    "Sibling",
    "add_words",
    "knows_templates",
    "sentinel_token_ids",
    "train_byte_level_bpe",
    "train_character_tokenizer",
    "train_reference_bpe",
    "train_unigram",
    "train_wordpiece",
    "with_sibling",
]
