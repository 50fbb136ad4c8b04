"""Words that a tokenizer cuts into letters, which a pruned vocabulary does to those that it was not pruned for."""

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SHARE = "fragmented_words"  # in tokenizer_config.json, of the texts for which the vocabulary was pruned
_LONG_WORD = re.compile(r"[^\W\d_]{5,}")
_FEWEST, _MORE = 3, 0.1  # such words, and their share above that of the texts the vocabulary was pruned for
_MOST_TEXTS = 1000  # to look at


class Fragments(NamedTuple):
    """Long words that are unknown or cut into pieces of fewer than two letters on average, and the number of all."""

    words: list[str]
    total: int

    @property
    def share(self) -> float:
        """The share of the long words."""
        return len(self.words) / self.total if self.total else 0.0


def fragments(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Fragments:
    """Look at the words of five letters or more, in an even sample of the texts (one or more) where these are many.

    Scripts without upper and lower case are left out: most of them have short words, or no spaces between them.
    """
    texts = texts[:: -(-len(texts) // _MOST_TEXTS)]
    encoded: Any = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    words, total = [], 0
    for text, offsets, ids in zip(texts, encoded["offset_mapping"], encoded["input_ids"], strict=True):
        pieces = [-1] * len(text)
        for piece, (start, end) in enumerate(offsets):
            pieces[start:end] = [piece] * (end - start)
        unknown = {piece for piece, token in enumerate(ids) if token == tokenizer.unk_token_id}
        for word in _LONG_WORD.finditer(text):
            if word[0].lower() == word[0].upper():
                continue
            total += 1
            used = set(pieces[word.start() : word.end()])
            if used & unknown or 2 * len(used) > len(word[0]):
                words.append(word[0])
    return Fragments(words, total)


def tell_fragments(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], name: str) -> None:
    """Warn where a pruned vocabulary cuts the words of these texts much finer than those that it was pruned for.

    Args:
        tokenizer: one that was not pruned is no matter.
        texts: as the model will get them.
        name: what to call them.
    """
    usual = tokenizer.init_kwargs.get(SHARE)
    if not isinstance(usual, float) or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    found = fragments(tokenizer, texts)
    if len(found.words) >= _FEWEST and found.share > usual + _MORE:
        logger.warning(
            "%.0f %% of the longer words of %s are cut into letters or nearly so, such as %s, of which the model "
            "understands little (%.1f %% in the texts that its vocabulary was pruned for): convert the unpruned model "
            "again, for these texts too or with its whole vocabulary (fratrie convert), and fine-tune that",
            100 * found.share,
            name,
            " and ".join(map(repr, list(dict.fromkeys(found.words))[:2])),
            100 * usual,
        )
