"""Byte-pair encoding (Sennrich et al., 2016) merge by merge, to be read and taught rather than used.

Words are counted, cut into an alphabet, and the most frequent pair of neighbours becomes a new token until
the vocabulary is full. Among equally frequent pairs the first one met wins; `tokenizers` takes the one with
the lowest token ids instead, so both learn equally frequent merges but not always the same ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fratrie.tokenization.byte_level import checked_texts

END_OF_TEXT = "<|endoftext|>"

Pair = tuple[str, str]
Symbols = tuple[str, ...]


@dataclass(frozen=True)
class MergeStep:
    """One merge: the pair, how often it occurred, and the new split of every word that it changed."""

    pair: Pair
    count: int
    splits: dict[str, Symbols]

    @property
    def token(self) -> str:
        """The new token."""
        return "".join(self.pair)


@dataclass(frozen=True)
class ReferenceBPE:
    """A vocabulary (special token, alphabet, merged tokens) and the steps that led to it."""

    vocabulary: Symbols
    steps: tuple[MergeStep, ...]

    @cached_property
    def _ranks(self) -> dict[Pair, int]:
        return {step.pair: rank for rank, step in enumerate(self.steps)}

    def tokenize(self, text: str) -> list[str]:
        """Tokens of `text`: in each word, the pair that was merged first in training is merged first.

        A symbol that the vocabulary lacks becomes the special token, as GPT-2 has it.
        """
        return [token for word in split_words(text) for token in self._tokenize_word(word)]

    def _tokenize_word(self, word: str) -> list[str]:
        symbols = [symbol if symbol in self.vocabulary else self.vocabulary[0] for symbol in word]
        while len(symbols) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(symbols)]
            if (lowest := min(ranks)) == len(self._ranks):
                break
            first = ranks.index(lowest)
            symbols[first : first + 2] = ["".join(symbols[first : first + 2])]
        return symbols

    def to_tokenizers(self) -> Tokenizer:
        """The same tokenizer as a `tokenizers.Tokenizer`, which also knows the special token in a text."""
        special = self.vocabulary[0]
        vocabulary = {token: index for index, token in enumerate(self.vocabulary)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(self._ranks), unk_token=special))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([special])
        return tokenizer


def train_reference_bpe(texts: Iterable[str], vocab_size: int, special_token: str = END_OF_TEXT) -> ReferenceBPE:
    """Learns merges until the vocabulary has `vocab_size` tokens or every word is one token.

    Raises:
        ValueError: no text, something that is not a text, or `vocab_size` has no room for the alphabet.
    """
    word_counts = count_words(checked_texts(texts))
    vocabulary = [special_token, *sorted({symbol for word in word_counts for symbol in word})]
    if vocab_size < len(vocabulary):
        raise ValueError(
            f"vocab_size={vocab_size} is too small: the alphabet and the special token take {len(vocabulary)}"
        )
    splits: dict[str, Symbols] = {word: tuple(word) for word in word_counts}
    steps: list[MergeStep] = []
    while len(vocabulary) < vocab_size and (pair_counts := count_pairs(splits, word_counts)):
        pair = max(pair_counts, key=pair_counts.__getitem__)
        merged = {word: merge_pair(symbols, pair) for word, symbols in splits.items()}
        changed = {word: symbols for word, symbols in merged.items() if symbols != splits[word]}
        splits = merged
        steps.append(MergeStep(pair, pair_counts[pair], changed))
        vocabulary.append(steps[-1].token)
    return ReferenceBPE(tuple(vocabulary), tuple(steps))


def split_words(text: str) -> list[str]:
    """GPT-2's words; each byte is one printable character, a space is `Ġ` and stays with its word."""
    return [word for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]


def count_words(texts: Iterable[str]) -> dict[str, int]:
    """How often each word occurs, in the order of first meeting."""
    counts: dict[str, int] = {}
    for text in texts:
        for word in split_words(text):
            counts[word] = counts.get(word, 0) + 1
    return counts


def count_pairs(splits: dict[str, Symbols], word_counts: dict[str, int]) -> dict[Pair, int]:
    """How often each pair of neighbouring symbols occurs, in the order of first meeting."""
    counts: dict[Pair, int] = {}
    for word, symbols in splits.items():
        for pair in pairwise(symbols):
            counts[pair] = counts.get(pair, 0) + word_counts[word]
    return counts


def merge_pair(symbols: Symbols, pair: Pair) -> Symbols:
    """`symbols` with every occurrence of `pair`, from left to right, joined into one symbol."""
    merged: list[str] = []
    position = 0
    while position < len(symbols):
        width = 2 if symbols[position : position + 2] == pair else 1
        merged.append("".join(symbols[position : position + width]))
        position += width
    return tuple(merged)
