"""WordPiece: greedy longest match, BERT's own tokenizer, what comes back, and the same vocabulary every time."""

import json
import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_byte_level import FRENCH
from tokenizers import pre_tokenizers
from transformers import BertTokenizer

from fratrie.tokenization import train_wordpiece

LETTERS = sorted({*"".join(FRENCH)})
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORD_TEXT = st.text(alphabet=[*LETTERS, "É", "ẽ", "#", "\n", "\u00a0", "日"], max_size=40)


def train(texts=FRENCH, vocab_size=300, **options):
    return train_wordpiece(texts, vocab_size, **{"min_frequency": 1, "show_progress": False, **options})


@pytest.fixture(scope="module")
def tokenizer():
    return train()


def greedy(word, vocabulary):
    """The longest piece of the vocabulary, then the longest of the rest, and so on."""
    pieces, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        ends = [end for end in range(start + 1, len(word) + 1) if prefix + word[start:end] in vocabulary]
        if not ends:
            return ["[UNK]"]
        pieces.append(prefix + word[start : ends[-1]])
        start = ends[-1]
    return pieces


@settings(max_examples=100, deadline=None)
@given(text=WORD_TEXT)
def test_tokens_are_those_of_greedy_longest_match(tokenizer, text):
    normalized = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalized)]
    vocabulary = tokenizer.get_vocab()
    assert tokenizer.tokenize(text) == [piece for word in words for piece in greedy(word, vocabulary)]


@pytest.mark.parametrize("options", [{}, {"lowercase": True}, {"lowercase": True, "strip_accents": True}], ids=str)
def test_the_same_ids_as_the_tokenizer_of_bert(options):
    ours = train(**options)
    keys = {"do_lower_case": options.get("lowercase", False), "strip_accents": options.get("strip_accents", False)}
    theirs = BertTokenizer(vocab=ours.get_vocab(), **keys)
    texts = [*FRENCH, "L'ÉTÉ [MASK] , 3,5 beau-père\t(œuf)", "日本 a", "x" * 101, ""]
    assert ours(texts).input_ids == theirs(texts).input_ids
    pair = {"text": FRENCH[0], "text_pair": "Là [MASK]"}
    both = [dict(each(**pair, return_token_type_ids=True)) for each in (ours, theirs)]
    assert both[0] == both[1] and set(both[0]["token_type_ids"]) == {0, 1}


@settings(max_examples=100, deadline=None)
@given(text=WORD_TEXT)
@example(text="l'été , j ' ai 'mal' .")
@example(text="do not ## n't")
def test_decoded_words_give_the_same_tokens_and_lose_nothing_but_spaces(tokenizer, text):
    ids = tokenizer(text).input_ids
    assume(tokenizer.unk_token_id not in ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer(decoded).input_ids == ids
    normalized = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
    assert "".join(decoded.split()) == "".join(normalized.split())


def test_words_are_joined_again_by_their_apostrophe(tokenizer):
    ids = tokenizer(FRENCH[1]).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == FRENCH[1]


def test_no_word_of_known_characters_is_unknown(tokenizer):
    vocabulary = tokenizer.get_vocab()
    letters = [letter for letter in LETTERS if letter != " "]
    assert vocabulary.keys() >= {*letters, *(f"##{letter}" for letter in letters)}
    assert tokenizer("»".join(letters)).input_ids.count(tokenizer.unk_token_id) == 0


def test_accents_are_kept_unless_they_are_not_wanted():
    for text in ("père", unicodedata.normalize("NFD", "père")):
        assert train().tokenize(text) == ["père"]
        assert train(lowercase=True).tokenize(text.upper()) == ["père"]
        assert train(strip_accents=True).tokenize(text) == ["pere"]


def test_the_special_tokens_of_bert_come_first(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(5)) == SPECIALS
    ids = tokenizer("[CLS] [MASK] là", split_special_tokens=True, add_special_tokens=False).input_ids
    assert not set(ids) & {0, 2, 3, 4}
    assert tokenizer.mask_token_id in tokenizer("[MASK]").input_ids


def test_every_training_gives_the_same_file():
    """The trainer itself does not: it numbers `##a` in the order of a hash map."""
    first, again = (train(texts).backend_tokenizer.to_str() for texts in (FRENCH, iter(FRENCH[::-1])))
    assert first == again


def test_rare_characters_are_unknown():
    tokenizer = train(["papa papa dit", "papa 日"], limit_alphabet=2)
    assert tokenizer.tokenize("papa p 日 dit") == ["papa", "p", "[UNK]", "[UNK]"]
    assert not {"d", "##日"} & tokenizer.get_vocab().keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": []}, "corpus is empty"),
        ({"texts": "papa"}, "put it in a list"),
        ({"texts": ["\x00"]}, "no word is spelled with the 0 most frequent characters"),
        ({"vocab_size": 20}, r"vocab_size=20 is too small: it takes at least \d+ \(twice 43 characters and 5 special"),
        ({"min_frequency": 0}, "min_frequency=0"),
        ({"limit_alphabet": 0}, "limit_alphabet=0"),
        ({"sibling": "cousin"}, "'cousin' is unknown"),
    ],
)
def test_what_cannot_be_trained_is_a_named_error(options, message):
    with pytest.raises(ValueError, match=message):
        train(**options)


def test_vocabulary_size_and_minimum_frequency_are_kept(caplog):
    assert len(train(vocab_size=140)) == 140 and not caplog.messages
    frequent = train(min_frequency=2)
    assert "mère" in frequent.get_vocab() and "sœur" not in frequent.get_vocab()
    assert f"The corpus gave {len(frequent)} tokens of the 300 asked for: no pair is left that occurs" in caplog.text
    model = json.loads(frequent.backend_tokenizer.to_str())["model"]
    assert (model["continuing_subword_prefix"], model["unk_token"], model["max_input_chars_per_word"]) == (
        "##",
        "[UNK]",
        100,
    )
