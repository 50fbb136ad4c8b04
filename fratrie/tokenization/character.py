"""A character tokenizer: one token per character, numbered by code point, special tokens after the alphabet."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from fratrie.tokenization.byte_level import checked_texts
from fratrie.tokenization.siblings import MOST_POSITIONS, UNK, Sibling, as_pretrained, check_size, special_tokens


def train_character_tokenizer(
    texts: Iterable[str],
    *,
    sibling: Sibling = "decoder",
    num_sentinels: int | None = None,
    model_max_length: int = 512,
) -> PreTrainedTokenizerFast:
    """Builds a tokenizer whose alphabet is the characters of `texts` (NFC), sorted by code point.

    Texts over the alphabet come back exactly; any other character is `<unk>`. A known alphabet is a text
    like any other: `train_character_tokenizer([alphabet])`. Other arguments as in `train_byte_level_bpe`.

    Raises:
        ValueError: no text at all, something that is not a text, or an unknown sibling.
    """
    check_size("model_max_length", model_max_length, 1, MOST_POSITIONS)
    specials = special_tokens(sibling, num_sentinels, mask_takes_space=False)
    specials.append(AddedToken(UNK, normalized=False, special=True))
    normalizer = normalizers.NFC()
    alphabet: set[str] = set()
    for text in checked_texts(texts):
        alphabet.update(normalizer.normalize_str(text))
    tokens = [*sorted(alphabet), *(token.content for token in specials)]
    # A BPE without merges is the alphabet alone, and reads a text in one pass.
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], unk_token=UNK)
    backend = Tokenizer(model)
    backend.normalizer = normalizer
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(specials)
    return as_pretrained(backend, sibling, model_max_length)
