"""What WordPiece and Unigram learn from: the words of a corpus, counted, in an order that never changes.

The trainers of `tokenizers` go through their words in the order of a hash map that every run seeds anew, and what
they learn depends on it. Counted beforehand, the words also say which characters are too rare to learn.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from fratrie.tokenization.siblings import MOST_TOKENS, check_size

Words = dict[str, int]


def count_words(backend: Tokenizer, texts: Iterable[str], limit_alphabet: int) -> Words:
    """How often each word occurs, sorted, without the words that hold a rare character.

    Args:
        backend: whose normalizer and pre-tokenizer make the words.
        texts: read once.
        limit_alphabet: the most frequent characters to keep; the others will be unknown.

    Raises:
        ValueError: there is no such word.
    """
    check_size("limit_alphabet", limit_alphabet, 1, MOST_TOKENS)
    counts: Counter[str] = Counter()
    for text in texts:
        pieces = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
        counts.update(piece for piece, _ in pieces)
    letters: Counter[str] = Counter()
    for word, count in counts.items():
        letters.update(dict.fromkeys(word, count))
    kept = set(sorted(letters, key=lambda letter: (-letters[letter], letter))[:limit_alphabet])
    if words := {word: counts[word] for word in sorted(counts) if kept.issuperset(word)}:
        return words
    raise ValueError(f"no word is spelled with the {len(kept)} most frequent characters: give more text")


def alphabet_of(words: Words) -> list[str]:
    """The characters of the words, sorted."""
    return sorted(set().union(*words))


def repeated(words: Words) -> Iterator[str]:
    """Each word as often as it occurs."""
    return itertools.chain.from_iterable(itertools.repeat(word, count) for word, count in words.items())
