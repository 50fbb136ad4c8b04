import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fratrie.tokenization import train_character_tokenizer

SHAKESPEARE = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
IDS = {"hii there": [46, 47, 47, 1, 58, 46, 43, 56, 43], "First Cit": [18, 47, 56, 57, 58, 1, 15, 47, 58]}


@pytest.fixture(scope="module")
def tokenizer():
    return train_character_tokenizer([SHAKESPEARE])


@pytest.mark.parametrize("text", IDS)
def test_known_ids_of_the_shakespeare_alphabet(tokenizer, text):
    assert tokenizer(text, add_special_tokens=False).input_ids == IDS[text]
    assert tokenizer.decode(IDS[text]) == text


def test_special_tokens_come_after_the_alphabet(tokenizer):
    assert len(SHAKESPEARE) == 65
    assert tokenizer.convert_ids_to_tokens(list(range(65))) == sorted(SHAKESPEARE)
    assert tokenizer.convert_ids_to_tokens(range(65, 70)) == ["<s>", "<pad>", "</s>", "<mask>", "<unk>"]
    assert len(tokenizer) == 70


@given(text=st.text(alphabet=SHAKESPEARE))
def test_every_text_over_the_alphabet_comes_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_other_characters_are_unknown_one_by_one(tokenizer):
    assert tokenizer("éé3", add_special_tokens=False).input_ids == [tokenizer.unk_token_id] * 2 + [9]


def test_the_mask_stands_for_one_character_and_leaves_the_space_before_it():
    tokenizer = train_character_tokenizer(["ma mère"], sibling="encoder")
    assert tokenizer("ma <mask>ère").tokens() == ["<s>", "m", "a", " ", "<mask>", "è", "r", "e", "</s>"]


def test_decomposed_and_composed_accents_are_one_character():
    tokenizer = train_character_tokenizer(["me\u0300re"])
    assert tokenizer("me\u0300re").input_ids == tokenizer("mère").input_ids
    assert tokenizer.unk_token_id not in tokenizer("mère").input_ids


@pytest.mark.parametrize("texts", [[], [" "], "papa", [None]])
def test_no_text_is_an_error(texts):
    with pytest.raises(ValueError, match=r"corpus is empty|put it in a list|not a text"):
        train_character_tokenizer(texts)
