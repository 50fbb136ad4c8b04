"""WordPiece (Wu et al., 2016) with BERT's words and special tokens (Devlin et al., 2019).

What comes back is not the text but its words, one space between them, a few signs joined again («j ' ai» as «j'ai»);
encoded anew they give the same tokens. What a decoder writes begins with the space that belongs there. A word with a
character that the corpus lacks, or of more than 100 characters, is `[UNK]` as a whole.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fratrie.tokenization.byte_level import checked_texts
from fratrie.tokenization.siblings import (
    MOST_POSITIONS,
    MOST_TOKENS,
    Sibling,
    as_pretrained,
    check_size,
    special_tokens,
    tell_size,
)
from fratrie.tokenization.words import alphabet_of, count_words, repeated

UNKNOWN, PREFIX = "[UNK]", "##"


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int = 8000,
    *,
    min_frequency: int = 2,
    lowercase: bool = False,
    strip_accents: bool = False,
    limit_alphabet: int = 1000,
    sibling: Sibling = "encoder",
    num_sentinels: int | None = None,
    model_max_length: int = 512,
    show_progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Trains a WordPiece and returns it ready to save beside a model.

    Args:
        lowercase: capitals become small letters.
        strip_accents: «pêche» becomes «peche». BERT drops accents with the capitals; here they stay unless this is
            said, since French tells words apart by them (a, à; pêche, péché).
        limit_alphabet: the most frequent characters to learn; a word with another one is unknown.

    Other arguments as in `train_byte_level_bpe`, but sibling: "encoder" `[CLS] A [SEP]`, "decoder" `[CLS] A` or
    "seq2seq" `A [SEP]`, and vocab_size holds the alphabet twice, at the beginning of a word and in it (`##a`).

    Raises:
        ValueError: no text, something that is not a text, or a size, frequency or sibling out of range.
    """
    specials = special_tokens(sibling, num_sentinels, names=("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]"))
    check_size("vocab_size", vocab_size, 1, MOST_TOKENS)
    check_size("min_frequency", min_frequency, 1, 2**31)
    check_size("model_max_length", model_max_length, 1, MOST_POSITIONS)
    backend = _untrained(lowercase, strip_accents)
    words = count_words(backend, checked_texts(texts), limit_alphabet)
    letters = alphabet_of(words)
    # In both forms, no known character makes a word unknown. Given as special tokens, their ids, by which the
    # trainer chooses among equally frequent pairs, do not depend on the order in which it meets the words.
    first = [*(token.content for token in specials), *letters, *(PREFIX + letter for letter in letters)]
    if vocab_size < len(first):
        raise ValueError(
            f"vocab_size={vocab_size} is too small: it takes at least {len(first)} (twice {len(letters)} characters "
            f"and {len(specials)} special tokens); lower limit_alphabet, or give more"
        )
    learner = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=first, show_progress=show_progress
    )
    learner.train_from_iterator(repeated(words), trainer, length=sum(words.values()))
    backend.model = models.WordPiece(learner.get_vocab(), unk_token=UNKNOWN, continuing_subword_prefix=PREFIX)
    backend.add_special_tokens(specials)
    tell_size(backend, vocab_size, f"no pair is left that occurs {min_frequency} times")
    return as_pretrained(backend, sibling, model_max_length)


def _untrained(lowercase: bool, strip_accents: bool) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    # BertNormalizer composes nothing where it keeps accents: without NFC «é» in two characters is another word.
    bert = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), bert])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # What decoders.WordPiece does, and yet right for the first of some tokens in the middle of a text.
    spaced = decoders.Replace(Regex(f"^(?!{PREFIX}|[.,!?]$)"), " ")
    bare = decoders.Replace(Regex(f"^{PREFIX}"), "")
    joined = [decoders.Replace(f" {apostrophe} ", apostrophe) for apostrophe in "'’"]
    backend.decoder = decoders.Sequence([spaced, bare, decoders.Fuse(), *joined])
    return backend
