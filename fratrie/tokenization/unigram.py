"""Unigram (Kudo, 2018) with SentencePiece's words as XLM-R and CamemBERT have them: `▁` begins each, and stays on it.

What comes back is the normalized text: NFKC, control characters and repeated white space left out, as SentencePiece's
default `nmt_nfkc` has it; a decoder's keeps the space before the first word. A character that the corpus lacks is
`<unk>`, or its bytes with `byte_fallback`, and then nothing is lost.
"""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fratrie.tokenization.byte_level import checked_texts
from fratrie.tokenization.siblings import (
    BOS,
    EOS,
    MASK,
    MOST_POSITIONS,
    MOST_TOKENS,
    PAD,
    UNK,
    Sibling,
    as_pretrained,
    check_size,
    special_tokens,
    tell_size,
)
from fratrie.tokenization.words import alphabet_of, count_words, repeated

SPACE = "▁"
Piece = tuple[str, float]


def train_unigram(
    texts: Iterable[str],
    vocab_size: int = 8000,
    *,
    byte_fallback: bool = False,
    limit_alphabet: int = 1000,
    sibling: Sibling = "encoder",
    num_sentinels: int | None = None,
    model_max_length: int = 512,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a Unigram model and returns it ready to save beside a model.

    Args:
        byte_fallback: an unknown character becomes its UTF-8 bytes, which take 256 tokens of the vocabulary.
        limit_alphabet: the most frequent characters to learn; any other one is unknown.

    Other arguments as in `train_byte_level_bpe`; vocab_size holds the alphabet.

    Raises:
        ValueError: no text, something that is not a text, or a size or sibling out of range.
    """
    specials = special_tokens(sibling, num_sentinels, names=(BOS, PAD, EOS, UNK, MASK))
    check_size("vocab_size", vocab_size, 1, MOST_TOKENS)
    check_size("model_max_length", model_max_length, 1, MOST_POSITIONS)
    backend = _untrained(byte_fallback)
    spelled = [token.content for token in specials] + [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
    words = count_words(backend, checked_texts(texts), limit_alphabet)
    # No text may be taken for a special token or a byte: their letters are pieces too, and cheaper (`_with_first`).
    letters = sorted({SPACE, *alphabet_of(words), *"".join(spelled)})
    if vocab_size < (needed := len(spelled) + len(letters)):
        raise ValueError(
            f"vocab_size={vocab_size} is too small: it takes at least {needed} ({len(letters)} characters, "
            f"{len(spelled)} special tokens and bytes); lower limit_alphabet, or give more"
        )
    learner = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(spelled), initial_alphabet=letters, show_progress=show_progress
    )
    learner.train_from_iterator(repeated(words), trainer, length=sum(words.values()))
    pieces = _settled(json.loads(learner.to_str())["model"]["vocab"])
    unknown = spelled.index(UNK)
    backend.model = models.Unigram(_with_first(spelled, pieces), unk_id=unknown, byte_fallback=byte_fallback)
    backend.add_special_tokens(specials)
    tell_size(backend, vocab_size, "no piece is left")
    return as_pretrained(backend, sibling, model_max_length)


def _settled(pieces: list[Piece]) -> list[Piece]:
    """The pieces, the likeliest first, as every training on the same texts has them.

    The trainer sums in the order of a hash map, and gives characters that it has no score for the least one and
    steps of 0.0001 more, in that order too. Rounded, and with all such characters at the least score, it is undone.
    """
    single = [piece for piece, _ in pieces if len(piece) == 1]
    least = min(score for _, score in pieces)
    band = least + 1e-4 * len(single)
    settled = [(piece, round(least if len(piece) == 1 and score < band else score, 4)) for piece, score in pieces]
    return sorted(settled, key=lambda entry: (-entry[1], entry[0]))


def _with_first(first: list[str], pieces: list[Piece]) -> list[Piece]:
    """Pieces that no text is cut into, each less likely than its letters, before those that were learnt."""
    price = min(score for _, score in pieces) * (1 + max(map(len, first)))
    return [*((piece, price) for piece in first), *pieces]


def _untrained(byte_fallback: bool) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    # Nmt makes a space of ▁, which therefore comes back as the space that it marks.
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    spaced = decoders.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([*[decoders.ByteFallback()] * byte_fallback, spaced, decoders.Fuse()])
    return backend
