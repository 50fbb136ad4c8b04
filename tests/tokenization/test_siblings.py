import json
import os
import subprocess
import sys

import pytest

from fratrie.tokenization import (
    SIBLINGS,
    sentinel_token_ids,
    train_byte_level_bpe,
    train_character_tokenizer,
    train_unigram,
    train_wordpiece,
    with_sibling,
)

TEXTS = ["ma mère et mon père", "j'ai une sœur et l'autre est là", "A AB B ,."] * 2
TEMPLATES = {
    "encoder": ("<s> A </s>", "<s> A </s> </s> B </s>", "right"),
    "decoder": ("<s> A", "<s> A <s> B", "left"),
    "seq2seq": ("A </s>", "A </s> B </s>", "right"),
}
KINDS = {
    "bpe": lambda sibling: train_byte_level_bpe(TEXTS, 320, sibling=sibling, show_progress=False),
    "character": lambda sibling: train_character_tokenizer([*TEXTS, "AB"], sibling=sibling),
    "wordpiece": lambda sibling: train_wordpiece(TEXTS, 320, sibling=sibling, show_progress=False),
    "unigram": lambda sibling: train_unigram(TEXTS, 320, sibling=sibling, show_progress=False),
}
BERT = {"[CLS]": "<s>", "[SEP]": "</s>"}
TEXT = "j'ai une mère, <mask> [MASK] e\u0301 là"
PLAIN_LOAD = """
import json, sys
from transformers import AutoTokenizer

def describe(tokenizer):
    batch = tokenizer([sys.argv[1], "là"], padding=True)
    return {
        "batch": dict(batch),
        "pair": tokenizer("là", "et").input_ids,
        "decoded": tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True),
        "side": tokenizer.padding_side,
        "length": tokenizer.model_max_length,
        "names": tokenizer.special_tokens_map,
        "specials": tokenizer.all_special_tokens,
        "clean": tokenizer.clean_up_tokenization_spaces,
        "vocabulary": tokenizer.get_vocab(),
    }

print(json.dumps([describe(AutoTokenizer.from_pretrained(folder)) for folder in sys.argv[2:]]))
assert "fratrie" not in sys.modules
"""


def describe(tokenizer):
    ids = [tokenizer(text).input_ids for text in (TEXT, "là")]
    padding = [tokenizer.pad_token_id] * (len(ids[0]) - len(ids[1]))
    left = TEMPLATES[sibling_of(tokenizer)][2] == "left"
    ids[1] = padding + ids[1] if left else ids[1] + padding
    mask = [[int(index != tokenizer.pad_token_id) for index in row] for row in ids]
    return {
        "batch": {"input_ids": ids, "attention_mask": mask},
        "pair": tokenizer("là", "et").input_ids,
        "decoded": tokenizer.decode(ids[0], skip_special_tokens=True),
        "side": "left" if left else "right",
        "length": 77,
        "names": tokenizer.special_tokens_map,
        "specials": tokenizer.all_special_tokens,
        "clean": False,
        "vocabulary": tokenizer.get_vocab(),
    }


def shown(encoding):
    """Its tokens as RoBERTa would write them."""
    return [BERT.get(token, token.lstrip("▁")) for token in encoding.tokens() if token != "▁"]


def sibling_of(tokenizer):
    tokens = shown(tokenizer("A"))
    return next(name for name, (single, _, _) in TEMPLATES.items() if single.split() == tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sibling", SIBLINGS)
def test_each_sibling_has_its_template_and_padding_side(kind, sibling):
    tokenizer = KINDS[kind](sibling)
    single, pair, side = TEMPLATES[sibling]
    if kind == "wordpiece":
        pair = pair.replace("</s> </s>", "</s>")
    assert shown(tokenizer("A")) == single.split()
    assert shown(tokenizer("A", "B")) == pair.split()
    assert tokenizer.padding_side == side
    batch = tokenizer(["A", "AB A"], padding=True)
    padding = 0 if side == "left" else len(tokenizer("A").input_ids)
    assert batch["input_ids"][0].index(tokenizer.pad_token_id) == padding
    assert list(batch) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sibling", SIBLINGS)
@pytest.mark.parametrize("first", SIBLINGS)
def test_one_vocabulary_serves_every_sibling(kind, first, sibling):
    tokenizer = KINDS[kind](first)
    tokenizer(["A", "AB A"], padding=True, truncation=True, max_length=3)
    other, fresh = with_sibling(tokenizer, sibling), KINDS[kind](sibling)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.backend_tokenizer.padding is other.backend_tokenizer.truncation is None
    assert sorted(other.all_special_ids) == sorted(tokenizer.all_special_ids)
    assert other("A B A", "B").tokens() == fresh("A B A", "B").tokens()
    assert other.padding_side == TEMPLATES[sibling][2]
    assert other.special_tokens_map == fresh.special_tokens_map
    assert sibling_of(tokenizer) == first


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_what_a_decoder_goes_on_with_begins_with_its_space(kind):
    encoder = KINDS[kind]("encoder")
    decoder, text = with_sibling(encoder, "decoder"), "ma mère et mon père, une sœur."
    ids = decoder(text, add_special_tokens=False).input_ids
    assert decoder.decode(ids).removeprefix(" ") == encoder.decode(ids) == text
    for cut in range(1, len(ids)):
        assert decoder.decode(ids[:cut]) + decoder.decode(ids[cut:]) == decoder.decode(ids)
    back = with_sibling(decoder, "encoder")
    assert back.backend_tokenizer.to_str() == encoder.backend_tokenizer.to_str()


def test_with_sibling_keeps_length_and_chat_template():
    tokenizer = train_byte_level_bpe(TEXTS, 300, model_max_length=77, show_progress=False)
    tokenizer.chat_template = "{{ messages[0].content }}"
    other = with_sibling(tokenizer, "decoder")
    assert (other.model_max_length, other.chat_template) == (77, tokenizer.chat_template)


def test_sentinels_are_special_tokens_in_order():
    tokenizer = train_byte_level_bpe(TEXTS, 400, sibling="seq2seq", show_progress=False)
    assert tokenizer.convert_ids_to_tokens(sentinel_token_ids(tokenizer)) == [
        f"<extra_id_{index}>" for index in range(32)
    ]
    ids = tokenizer("ma <extra_id_0> et <extra_id_31>").input_ids
    assert set(ids) >= {sentinel_token_ids(tokenizer)[0], sentinel_token_ids(tokenizer)[31]}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ma  et "
    for kind in ("wordpiece", "unigram"):
        assert len(sentinel_token_ids(KINDS[kind]("seq2seq"))) == 32
    for other in (tokenizer, with_sibling(tokenizer, "encoder")):
        assert set(sentinel_token_ids(tokenizer)) < set(other.all_special_ids)


@pytest.mark.parametrize(("sibling", "asked", "number"), [("encoder", None, 0), ("decoder", 3, 3), ("seq2seq", 0, 0)])
def test_the_number_of_sentinels_is_a_choice(sibling, asked, number):
    bpe = train_byte_level_bpe(TEXTS, 300, sibling=sibling, num_sentinels=asked, show_progress=False)
    characters = train_character_tokenizer(TEXTS, sibling=sibling, num_sentinels=asked)
    assert len(sentinel_token_ids(bpe)) == len(sentinel_token_ids(characters)) == number


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_the_special_tokens(kind):
    tokenizer = KINDS[kind]("encoder")
    begin, end = ("[CLS]", "[SEP]") if kind == "wordpiece" else ("<s>", "</s>")
    for each in (tokenizer, with_sibling(with_sibling(tokenizer, "seq2seq"), "encoder")):
        assert (each.cls_token, each.sep_token, each.bos_token, each.eos_token) == (begin, end, begin, end)
        assert each.convert_tokens_to_ids(each.all_special_tokens) == each.all_special_ids
    assert with_sibling(tokenizer, "decoder").cls_token is None
    mask = tokenizer.added_tokens_decoder[tokenizer.mask_token_id]
    assert mask.lstrip == (kind in ("bpe", "unigram")), "only where words carry the space before them"
    types = tokenizer("A", "B", return_token_type_ids=True).token_type_ids
    assert (types[0], types[-1]) == (0, 1)


def test_a_tokenizer_without_the_special_tokens_is_refused():
    from transformers import PreTrainedTokenizerFast

    from fratrie.tokenization import train_reference_bpe

    foreign = PreTrainedTokenizerFast(tokenizer_object=train_reference_bpe(["ma mère"], 30).to_tokenizers())
    with pytest.raises(ValueError, match="lacks <s>, <pad>, </s>, <mask>, which the decoder template needs"):
        with_sibling(foreign, "decoder")
    with pytest.raises(ValueError, match="'cousin' is unknown"):
        with_sibling(foreign, "cousin")


@pytest.mark.slow
def test_plain_auto_tokenizer_loads_it_in_a_process_without_this_package(tmp_path):
    tokenizers = {}
    for kind, make in KINDS.items():
        for sibling in SIBLINGS:
            folder = tmp_path / kind / sibling
            tokenizers[str(folder)] = tokenizer = make(sibling)
            tokenizer.model_max_length = 77
            tokenizer.save_pretrained(folder)
            config = {"model_type": f"fratrie_{sibling}", "vocab_size": len(tokenizer)}
            # With and without a model beside it: the configuration's type is unknown to that process.
            if kind == "bpe":
                (folder / "config.json").write_text(json.dumps(config))
    loaded = load_elsewhere(tmp_path, list(tokenizers))
    assert loaded == [describe(tokenizer) for tokenizer in tokenizers.values()]


def test_what_each_version_of_transformers_has_another_default_for_is_saved(tmp_path):
    with_sibling(KINDS["bpe"]("encoder"), "decoder").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["model_input_names"] == ["input_ids", "attention_mask"]
    assert (saved["padding_side"], saved["clean_up_tokenization_spaces"]) == ("left", False)


def load_elsewhere(cwd, folders):
    process = subprocess.run(
        [sys.executable, "-c", PLAIN_LOAD, TEXT, *folders],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
