import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from fratrie.tokenization import add_words, train_byte_level_bpe, train_character_tokenizer, with_sibling

FRENCH = [
    "Ma mère est là, à l'hôtel ; aujourd’hui j'mange «chez elle».",
    "À l'eure où j'écris, mon père et ma mère s'aiment encore.",
    "J'ai 18 ans, ma sœur en a 25 et mon frère 1800 jours.",
    "On s'entend bien, ma mère et moi, depuis 2017.",
]
SPECIALS = ["<s>", "<pad>", "</s>", "<mask>", "<extra_id_0>"]


def train(texts=FRENCH, vocab_size=400, **options):
    return train_byte_level_bpe(texts, vocab_size, **{"min_frequency": 1, "show_progress": False, **options})


@pytest.fixture(scope="module", params=[False, True], ids=["numbers", "digits"])
def tokenizer(request):
    return train(split_digits=request.param, num_sentinels=1)


def nfc(text):
    # Not unicodedata: Python's Unicode version may be older and order the newest combining marks otherwise.
    return normalizers.NFC().normalize_str(text)


@settings(max_examples=500, deadline=None)
@given(text=st.text())
@example(text=" ")
@example(text="\x00\t\r\n\x85\u2028 \u200b\ufeff")
@example(text="l'eure aujourd’hui «là» e\u0301 Å \u1112\u1161 👩‍👧‍👦 \U0010ffff")
@example(text="a ,b . c 's n't  do not")
def test_any_unicode_text_comes_back_in_its_nfc_form(tokenizer, text):
    assume(not any(token in text for token in SPECIALS))
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == nfc(text)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.sampled_from([*SPECIALS, " ", "\u0338", "é", "mask"]) | st.text(max_size=3)))
def test_special_tokens_read_as_text_come_back_too(tokenizer, pieces):
    text = "".join(pieces)
    ids = tokenizer(text, split_special_tokens=True, add_special_tokens=False).input_ids
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == nfc(text)


@pytest.mark.parametrize("text", [*FRENCH, "Dis-lui : « l'été, ça m'a plu… » — d’accord ?", "c 'est  là\n\nœuf"])
def test_french_comes_back_as_written_and_composed(tokenizer, text):
    for form in ("NFC", "NFD"):
        ids = tokenizer(unicodedata.normalize(form, text)).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFC", text)


def test_no_byte_is_lost_in_any_character(tokenizer):
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(characters[start : start + 4096]) for start in range(0, len(characters), 4096)]
    for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False).input_ids, strict=True):
        assert tokenizer.decode(ids) == nfc(text)


def test_a_special_token_in_a_text_is_that_token_and_the_mask_takes_the_space_before_it():
    tokenizer = train()
    ids = tokenizer("Ma <mask> est là</s>", add_special_tokens=False).input_ids
    assert ids.count(tokenizer.mask_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "Ma<mask> est là</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Ma est là"


@pytest.mark.parametrize("apostrophe", ["'", "’"])
def test_elided_words_keep_their_apostrophe(apostrophe):
    elisions = [f"j{apostrophe}mange", f"l{apostrophe}eure", f"aujourd{apostrophe}hui", f"d{apostrophe}deux"]
    tokenizer = train(elisions * 2, 400)
    for text in elisions:
        first, second = text.split(apostrophe)
        words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in words] == [first + apostrophe, second]
        assert tokenizer.tokenize(text)[-1] == second


def test_a_closing_quote_is_not_an_elision():
    words = train().backend_tokenizer.pre_tokenizer.pre_tokenize_str("un 'mot' de")
    assert ["un 'mot' de"[start:end] for _, (start, end) in words] == ["un", " '", "mot", "'", " de"]


def test_each_digit_is_a_token_of_its_own_on_request():
    texts = ["en 2017 ou 2018", "le 2017-2018"] * 4
    digits, numbers = train(texts, 300, split_digits=True), train(texts, 300)
    assert digits.tokenize("2017 2018") == [*"2017", "Ġ", *"2018"]
    assert len(numbers.tokenize(" 2017")) == 1
    learned = [token for token in digits.get_vocab() if token not in digits.all_special_tokens]
    assert not [token for token in learned if len(token) > 1 and any(c.isdigit() for c in token)]


def test_vocabulary_size_and_minimum_frequency_are_kept():
    texts = ["papa papa papa maman"]
    assert len(train(texts, 262)) == 262
    rare, frequent = train(texts, 400).get_vocab(), train(texts, 400, min_frequency=2).get_vocab()
    assert "Ġmaman" in rare and "Ġpapa" in rare
    assert "Ġmaman" not in frequent and "Ġpapa" in frequent


def test_training_again_gives_the_same_vocabulary():
    assert train().get_vocab() == train(iter(FRENCH)).get_vocab()


def test_progress_is_shown_on_request(capfd):
    train(show_progress=False)
    assert not capfd.readouterr().out
    train(show_progress=True)
    assert capfd.readouterr().out


def test_a_corpus_too_small_for_the_vocabulary_is_reported(caplog):
    tokenizer = train(["papa"], 4000)
    assert f"{len(tokenizer)} tokens of the 4000 asked for" in caplog.text


def test_offsets_leave_out_the_space_that_a_token_carries():
    text = "ma  mère là"
    encoding = train([text] * 2)(text, return_offsets_mapping=True, add_special_tokens=False)
    assert encoding.tokens() == ["ma", "Ġ", "ĠmÃ¨re", "ĠlÃł"]
    assert [text[start:end] for start, end in encoding.offset_mapping] == ["ma", "", "mère", "là"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": []}, "corpus is empty"),
        ({"texts": ["", " \n"]}, "corpus is empty"),
        ({"texts": "papa"}, "put it in a list"),
        ({"texts": ["papa", None]}, "text 2 is None"),
        ({"vocab_size": 259}, "vocab_size=259 is too small: it takes at least 260"),
        ({"vocab_size": 259, "sibling": "seq2seq"}, "at least 292"),
        ({"vocab_size": 262, "num_sentinels": 3}, "at least 263"),
        ({"min_frequency": 0}, "min_frequency=0"),
        ({"num_sentinels": -1}, "num_sentinels=-1"),
        ({"sibling": "cousin"}, "'cousin' is unknown: choose one of encoder, decoder, seq2seq"),
    ],
)
def test_what_cannot_be_trained_is_a_named_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        train(**arguments)


def test_the_smallest_vocabulary_still_reads_everything():
    tokenizer = train(vocab_size=260)
    assert len(tokenizer) == 260
    assert tokenizer.decode(tokenizer("«là» 👍").input_ids, skip_special_tokens=True) == "«là» 👍"


def test_with_sibling_keeps_the_round_trip():
    text = "À l'eure où j'écris"
    for sibling in ("encoder", "decoder", "seq2seq"):
        other = with_sibling(train(), sibling)
        assert other.decode(other(text).input_ids, skip_special_tokens=True) == text


WORDS = ["beau-père", "père", "œil", "naïve", "fiancé", "grand-mère à nous", "papa", "雪"]


def test_added_words_come_back_whole(tmp_path):
    plain, own = train(), train()
    plain.add_tokens(["beau-père"])
    assert plain.decode(plain("beau-père", add_special_tokens=False).input_ids) != "beau-père", "tokenizers' own fault"
    assert add_words(own, WORDS) == len(WORDS)
    own.save_pretrained(tmp_path)
    for tokenizer in (own, AutoTokenizer.from_pretrained(tmp_path), with_sibling(own, "decoder")):
        vocabulary = tokenizer.get_vocab()
        for text in (*WORDS, *FRENCH, "mon beau-père et sa fiancée (œil naïve), 雪! là-bas"):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert tokenizer.decode(ids) == text
        assert all(tokenizer(word, add_special_tokens=False).input_ids == [vocabulary[word]] for word in WORDS)
    offsets = with_sibling(own, "encoder")("on dit", return_offsets_mapping=True)["offset_mapping"]
    assert offsets == train()("on dit", return_offsets_mapping=True)["offset_mapping"]
    for word in ("tête-à-tête", "aïeul"):
        assert add_words(own, [word]) == 1
    text = "père, tête-à-tête, aïeul"
    assert own.decode(own(text, add_special_tokens=False).input_ids) == text


def test_a_plain_byte_level_tokenizer_damages_added_words():
    """What `add_words` mends is not of this project's making."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    plain.add_tokens(["beau-père"])
    assert plain.decode(plain.encode("mon beau-père").ids) == "mon beau-p\ufffdre"


@pytest.mark.parametrize("word", ["é", "Ã©"])
def test_words_that_are_spelled_like_bytes_are_refused(word):
    with pytest.raises(ValueError, match=f"the word '{word}' is spelled like bytes in the token"):
        add_words(train(), [word])


def test_words_are_added_so_to_byte_level_tokenizers_alone():
    with pytest.raises(ValueError, match="not byte-level: use its add_tokens"):
        add_words(train_character_tokenizer(["mère"]), ["père"])
