"""Unigram: the likeliest split by a naive Viterbi, what comes back, and the same vocabulary every time."""

import json
import math
import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_byte_level import FRENCH

from fratrie.data.corpus import load_family_relations
from fratrie.tokenization import train_unigram

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
CORPUS = [*FRENCH, *load_family_relations()["train"]["text"][:200]]
LETTERS = sorted({*"".join(CORPUS)})


def train(texts=CORPUS, vocab_size=300, **options):
    return train_unigram(texts, vocab_size, **{"show_progress": False, **options})


@pytest.fixture(scope="module")
def tokenizer():
    return train()


@pytest.fixture(scope="module")
def with_bytes():
    return train(vocab_size=560, byte_fallback=True, num_sentinels=1)


def scores_of(tokenizer):
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    return {piece: score for piece, score in vocabulary if piece not in SPECIALS}


def best_score(word, scores):
    """The highest sum of scores over all splits of a word into pieces."""
    best = [0.0] + [-math.inf] * len(word)
    for end in range(1, len(word) + 1):
        pieces = ((start, scores.get(word[start:end], -math.inf)) for start in range(end))
        best[end] = max(best[start] + score for start, score in pieces)
    return best[-1]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=LETTERS, max_size=30))
def test_tokens_are_the_likeliest_ones(tokenizer, text):
    scores = scores_of(tokenizer)
    words = ["▁" + word for word in unicodedata.normalize("NFKC", text).split()]
    tokens = tokenizer.tokenize(text)
    assert "".join(tokens) == "".join(words)
    total = sum(scores[token] for token in tokens)
    assert total == pytest.approx(sum(best_score(word, scores) for word in words), abs=1e-9)


def normalized(tokenizer, text):
    return " ".join(tokenizer.backend_tokenizer.normalizer.normalize_str(text).split())


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=[*LETTERS, "\n", "\u00a0", "▁", "\u2026"], max_size=40))
@example(text="▁▁ 25▁ ans")
def test_a_text_of_known_characters_comes_back_normalized(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == normalized(tokenizer, text)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
@example(text="<0x41> <0xé1> <0x0A>")
@example(text="日本 👩‍👧 \x00 \x01")
def test_with_bytes_any_text_comes_back_normalized(with_bytes, text):
    assume(not any(token in normalized(with_bytes, text) or token in text for token in [*SPECIALS, "<extra_id_0>"]))
    ids = with_bytes(text).input_ids
    assert with_bytes.unk_token_id not in ids
    assert with_bytes.decode(ids, skip_special_tokens=True) == normalized(with_bytes, text)


def test_french_is_normalized_as_sentencepiece_does():
    tokenizer = train()
    assert normalized(tokenizer, "\tŒuf\u00a0: 1½ ﬁn…  l’e\u0301té\n") == "Œuf : 11⁄2 fin... l’été"


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from([*SPECIALS, "<extra_id_0>", "<0x41>", "papa", " ", "<", "é"])))
def test_special_tokens_and_bytes_read_as_text_are_text(with_bytes, pieces):
    text = "".join(pieces)
    ids = with_bytes(text, split_special_tokens=True, add_special_tokens=False).input_ids
    assert not set(ids) & set(with_bytes.all_special_ids)
    assert with_bytes.decode(ids) == normalized(with_bytes, text)


def test_the_special_tokens_of_xlm_r_come_first_and_the_mask_takes_its_space(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(5)) == SPECIALS
    ids = tokenizer("mon <mask> est").input_ids
    assert ids.count(tokenizer.mask_token_id) == 1
    assert tokenizer.decode(ids) == "<s> mon<mask> est</s>"
    assert tokenizer("mon <mask>").input_ids == tokenizer("mon<mask>").input_ids


def test_an_unknown_character_is_unknown_or_its_bytes(tokenizer, with_bytes):
    assert tokenizer.tokenize("a 日") == ["▁a", "▁", "日"]
    assert tokenizer("a 日", add_special_tokens=False).input_ids[-1] == tokenizer.unk_token_id
    assert with_bytes.tokenize("日") == ["▁", "<0xE6>", "<0x97>", "<0xA5>"]


@pytest.mark.parametrize("size", [120, 4000])
def test_every_training_gives_the_same_file(size):
    """The trainer itself does not: its sums, and what it gives to rare characters, follow the order of a hash map."""
    files = {train(texts, size).backend_tokenizer.to_str() for texts in (CORPUS, iter(CORPUS[::-1]), CORPUS)}
    assert len(files) == 1


def test_rare_characters_are_left_out():
    tokenizer = train(["papa papa dit", "papa 日"], limit_alphabet=3)
    assert "日" not in tokenizer.get_vocab() and tokenizer("日 papa").input_ids.count(tokenizer.unk_token_id) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": []}, "corpus is empty"),
        ({"texts": ["papa", None]}, "text 2 is None"),
        ({"texts": ["▁"]}, "no word is spelled"),
        ({"vocab_size": 40}, r"vocab_size=40 is too small: it takes at least \d+ \(\d+ characters, 5 special tokens"),
        ({"vocab_size": 310, "byte_fallback": True}, r"261 special tokens and bytes\)"),
        ({"limit_alphabet": 0}, "limit_alphabet=0"),
        ({"sibling": "cousin"}, "'cousin' is unknown"),
    ],
)
def test_what_cannot_be_trained_is_a_named_error(options, message):
    with pytest.raises(ValueError, match=message):
        train(**options)


def test_vocabulary_size_is_kept(caplog):
    assert len(train()) == 300 and not caplog.messages
    small = train(vocab_size=4000)
    assert f"The corpus gave {len(small)} tokens of the 4000 asked for: no piece is left." in caplog.text
