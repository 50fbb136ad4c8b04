"""Byte-level BPE (Radford et al., 2019) with word borders that respect French elision.

Every text comes back: encode then decode gives its NFC form, whatever its characters. The one exception
is a text that holds a special token literally: `<mask>` in a text is the mask token (and takes the spaces
before it), which is what fill-mask needs; `tokenizer(text, split_special_tokens=True)` reads it as text.

`tokenizer.add_tokens` turns words into whole tokens, but the byte-level decoder of `tokenizers` takes the accented
letters of such a token for bytes: «beau-père» comes back damaged, with any byte-level tokenizer. `add_words` adds
them correctly.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fratrie.tokenization.siblings import (
    MOST_POSITIONS,
    MOST_TOKENS,
    Sibling,
    as_pretrained,
    check_size,
    is_byte_level,
    special_tokens,
    tell_size,
)

# GPT-2's word borders with French elision (l', qu’, aujourd') instead of the English contractions,
# which would cut «j'mange» into j, 'm, ange. {numbers} is the one part that an option changes.
_WORDS = r" ?[\p{L}\p{M}]+(?:['’](?=\p{L}))?|{numbers}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


def train_byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int = 8000,
    *,
    min_frequency: int = 2,
    split_digits: bool = False,
    sibling: Sibling = "encoder",
    num_sentinels: int | None = None,
    model_max_length: int = 512,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE and returns it ready to save beside a model.

    Args:
        texts: the training texts, read once; any iterable, a stream included.
        vocab_size: tokens in all, special tokens and the 256 bytes included. A small corpus may give fewer.
        min_frequency: a pair of tokens is merged only if it occurs this often.
        split_digits: each digit is a token of its own.
        sibling: "encoder" `<s> A </s>`, "decoder" `<s> A` (padded on the left) or "seq2seq" `A </s>`.
        num_sentinels: span-corruption tokens `<extra_id_0>`, …; None: 32 for "seq2seq", else none.
        model_max_length: tokens that a model takes, saved with the tokenizer.
        show_progress: progress bars of the trainer.

    Raises:
        ValueError: no text, something that is not a text, or a size, frequency or sibling out of range.
    """
    specials = special_tokens(sibling, num_sentinels)
    needed = 256 + len(specials)
    if vocab_size < needed:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: it takes at least {needed} "
            f"(256 bytes and {len(specials)} special tokens)"
        )
    check_size("vocab_size", vocab_size, needed, MOST_TOKENS)
    check_size("min_frequency", min_frequency, 1, 2**31)
    check_size("model_max_length", model_max_length, 1, MOST_POSITIONS)
    backend = _untrained(split_digits)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    length = len(texts) if isinstance(texts, Sized) else None
    backend.train_from_iterator(checked_texts(texts), trainer, length=length)
    tell_size(backend, vocab_size, f"no pair is left that occurs {min_frequency} times")
    return as_pretrained(backend, sibling, model_max_length)


def add_words(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> int:
    """Turn words into whole tokens, in place, that come back whole from a byte-level tokenizer, accents and all.

    Args:
        tokenizer: of any origin, with the byte-level decoder.
        words: matched wherever they stand in a text.

    Returns:
        The number of new tokens, for which a model needs new embeddings (`resize_token_embeddings`).

    Raises:
        ValueError: a tokenizer of another kind, or a word whose letters stand for other bytes in the vocabulary.
    """
    backend = tokenizer.backend_tokenizer
    if not is_byte_level(backend):
        raise ValueError(f"the decoder of the tokenizer is {backend.decoder}, not byte-level: use its add_tokens")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [normalizers.NFC().normalize_str(word) for word in words]
    spelled = {word: "".join(piece for piece, _ in bytes_of.pre_tokenize_str(word)) for word in words}
    damaged = [word for word in words if backend.decoder.decode([word]) != word]
    own = tokenizer.get_vocab().keys() - tokenizer.added_tokens_encoder.keys()
    for word in damaged:
        if holder := next((token for token in own if word in token), None):
            raise ValueError(f"the word {word!r} is spelled like bytes in the token {holder!r}: leave it out")
    # Replaced by the letters of its bytes, a word is a token like any other to what comes behind.
    steps = [decoders.Replace(word, spelled[word]) for word in sorted(damaged, key=len, reverse=True)]
    added = tokenizer.add_tokens(words)
    backend.decoder = decoders.Sequence([*steps, backend.decoder])
    return added


def checked_texts(texts: Iterable[str]) -> Iterator[str]:
    """Passes the texts on.

    Raises:
        ValueError: one of them is not a text, or there is nothing but white space in all of them.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be an iterable of texts, not one text: put it in a list")
    empty = True
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise ValueError(f"text {number} is {text!r}, not a text: leave missing values out")
        empty = empty and not text.strip()
        yield text
    if empty:
        raise ValueError("the corpus is empty: a tokenizer needs at least one text that is not white space")


def _untrained(split_digits: bool) -> Tokenizer:
    pattern = _WORDS.replace("{numbers}", r"\p{N}" if split_digits else r" ?\p{N}+")
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
