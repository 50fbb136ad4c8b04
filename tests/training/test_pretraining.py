import json
import logging

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertTokenizer, CamembertTokenizer, PreTrainedTokenizerFast

from fratrie import FratrieDecoderForCausalLM, FratrieEncoderForMaskedLM, FratrieSeq2SeqForConditionalGeneration
from fratrie.tokenization import (
    train_byte_level_bpe,
    train_character_tokenizer,
    train_unigram,
    train_wordpiece,
    with_sibling,
)
from fratrie.training.evaluation import ConfigSwitch
from fratrie.training.objective import Objective
from fratrie.training.pretraining import (
    SIBLING_FOR,
    Corruption,
    build_model,
    check_fit,
    new_config,
    open_model,
    open_tokenizer,
    parse_overrides,
    rows_and_collator,
)

TEXTS = ["ma sœur est gentille", "mon père est parti", "nous jouons", "l'été dernier, mes parents et moi"]
SMALL = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe(TEXTS * 3, vocab_size=340, sibling="seq2seq", show_progress=False).save_pretrained(path)
    return str(path)


def test_whole_words_are_refused_where_a_tokenizer_has_none(folder):
    characters = train_character_tokenizer(TEXTS, sibling="encoder")
    whole = Corruption(0.15, whole_words=True)
    with pytest.raises(ValueError, match="whole_words=True: the spaces are tokens"):
        rows_and_collator("mlm", characters, 16, whole)
    rows_and_collator("mlm", characters, 16, Corruption(0.15))
    rows_and_collator("mlm", AutoTokenizer.from_pretrained(folder), 16, whole)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("hidden_size=128, num_hidden_layers=4", {"hidden_size": 128, "num_hidden_layers": 4}),
        ("hidden_act=silu,norm_bias=false,attention_bias=False", {"hidden_act": "silu", "norm_bias": False}
         | {"attention_bias": False}),
        ("hidden_dropout=0.1,embedding_norm=None,final_norm=null", {"hidden_dropout": 0.1}
         | {"embedding_norm": None, "final_norm": None}),
        ('layer_types=["a", "b"],encoder={"x": [1, 2]},n=3', {"layer_types": ["a", "b"], "encoder": {"x": [1, 2]}}
         | {"n": 3}),
    ],
)  # fmt: skip
def test_overrides_are_parsed(text, values):
    assert parse_overrides(text) == values


@pytest.mark.parametrize("text", ["hidden_size", "=3", "hidden_size=1,depth"])
def test_overrides_need_field_and_value(text):
    with pytest.raises(ValueError, match="is not of the form field=value"):
        parse_overrides(text)


def test_lists_among_the_overrides_are_json():
    assert parse_overrides('mixer_types=["linear","softmax"],depth=2')["mixer_types"] == ["linear", "softmax"]
    with pytest.raises(ValueError, match=r"\['linear','softmax'\]\" is no JSON: write texts in double quotes"):
        parse_overrides("mixer_types=['linear','softmax']")


@pytest.mark.parametrize(("objective", "model_type"), [("mlm", "encoder"), ("clm", "decoder"), ("denoise", "seq2seq")])
def test_new_model_fits_its_tokenizer(folder, objective, model_type):
    tokenizer = open_tokenizer(folder, objective)
    config = new_config(model_type, SMALL, tokenizer, block_size=600)
    model = build_model(objective, config)
    check_fit(model, tokenizer, 600)
    assert model.config.model_type == f"fratrie_{model_type}"
    assert (model.config.vocab_size, model.config.pad_token_id) == (340, tokenizer.pad_token_id)


def test_template_follows_the_objective(folder):
    begun = open_tokenizer(folder, "clm")("ma").input_ids
    framed = open_tokenizer(folder, "mlm")("ma").input_ids
    ended = open_tokenizer(folder, "denoise")("ma").input_ids
    assert framed == [*begun, ended[-1]] and begun[1:] == ended[:-1]


@pytest.mark.parametrize(
    ("model_type", "overrides", "named"),
    [
        ("encoder", "hiden_size=16", "hidden_size"),
        ("seq2seq", "hiden_size=16", "hiden_size"),
        ("encoder", "hidden_size=wide", "hidden_size"),
        ("decoder", "position_type=absolute", "position_type"),
        ("encoder", "hidden_size=15", "num_attention_heads"),
        ("encodeur", "", "'encodeur' is unknown"),
    ],
)
def test_impossible_config(folder, model_type, overrides, named):
    with pytest.raises(ValueError, match=named):
        new_config(model_type, overrides, open_tokenizer(folder, "mlm"), 64)


def test_config_file_and_overrides(tmp_path, folder):
    tokenizer = open_tokenizer(folder, "mlm")
    file = tmp_path / "config.json"
    BertConfig(hidden_size=12, num_attention_heads=3, vocab_size=5).to_json_file(file)
    config = new_config("encoder", "num_hidden_layers=1", tokenizer, 64, str(file))
    assert isinstance(config, BertConfig)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (12, 1, 340)
    file.write_text("{")
    with pytest.raises(ValueError, match="is no JSON file"):
        new_config("encoder", "", tokenizer, 64, str(file))


def test_objective_needs_the_right_model(folder):
    config = new_config("encoder", SMALL, open_tokenizer(folder, "mlm"), 64)
    with pytest.raises(ValueError, match="no head for clm: use the model type decoder"):
        build_model("clm", config)


def test_checkpoint_is_opened_for_its_objective_only(tmp_path, folder):
    build_model("mlm", new_config("encoder", SMALL, open_tokenizer(folder, "mlm"), 64)).save_pretrained(tmp_path)
    assert type(open_model("mlm", str(tmp_path))).__name__ == "FratrieEncoderForMaskedLM"
    with pytest.raises(ValueError, match=r"cannot be opened for --objective denoise: .{,200}$"):
        open_model("denoise", str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        open_model("mlm", str(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        open_model("mlm", str(tmp_path))


def test_rows_must_fit_the_model(folder):
    tokenizer = open_tokenizer(folder, "mlm")
    config = new_config("encoder", f"{SMALL},max_position_embeddings=32", tokenizer, 64)
    model = build_model("mlm", config)
    with pytest.raises(ValueError, match="block_size=64 is more than the 32 positions"):
        check_fit(model, tokenizer, 64)
    check_fit(model, tokenizer, 32)
    model.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="the tokenizer has 340 tokens, the model embeddings for 100"):
        check_fit(model, tokenizer, 32)


@pytest.mark.parametrize(("objective", "token"), [("mlm", "mask_token"), ("clm", "eos_token"), ("clm", "pad")])
def test_missing_special_token(tmp_path, folder, objective, token):
    known = AutoTokenizer.from_pretrained(folder)
    names = {f"{name}_token": getattr(known, f"{name}_token") for name in ("bos", "eos", "pad", "mask")}
    names.pop(token if token in names else f"{token}_token")
    backend = json.loads(known.backend_tokenizer.to_str().replace("<mask>", "<other>"))
    bare = type(known.backend_tokenizer).from_str(json.dumps(backend))
    PreTrainedTokenizerFast(
        tokenizer_object=bare, **{k: v for k, v in names.items() if v != "<mask>"}
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=token):
        open_tokenizer(str(tmp_path), objective)


ELSEWHERE = {
    "clm": "and so a prompt, after which a decoder has nothing to say",
    "denoise": "learns texts that only end",
}


@pytest.mark.parametrize("objective", ELSEWHERE)
def test_a_tokenizer_from_elsewhere_with_another_template_is_refused(tmp_path, objective):
    pieces = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<s>", "</s>", "<mask>", "▁", "a"]
    foreign = CamembertTokenizer(vocab=[(piece, -1.0) for piece in pieces])
    foreign.save_pretrained(tmp_path)
    assert open_tokenizer(str(tmp_path), "mlm")("a").input_ids == foreign("a").input_ids
    sibling = SIBLING_FOR[objective]
    with pytest.raises(
        ValueError, match=rf"{ELSEWHERE[objective]}: save what .*with_sibling\(tokenizer, '{sibling}'\)"
    ):
        open_tokenizer(str(tmp_path), objective)
    with_sibling(foreign, sibling).save_pretrained(tmp_path / "way_out")
    way_out = open_tokenizer(tmp_path / "way_out", objective)
    assert way_out("a", add_special_tokens=False).input_ids == foreign("a", add_special_tokens=False).input_ids


def test_the_tokenizer_of_bert_needs_a_name_for_its_end(tmp_path):
    own = train_wordpiece(TEXTS, 300, show_progress=False)
    BertTokenizer(vocab=own.get_vocab()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"no eos_token, which clm needs: save what .*with_sibling\(tokenizer, 'decoder'\)"
    ):
        open_tokenizer(str(tmp_path), "clm")


def test_another_template_than_that_of_the_folder_is_told(folder, caplog):
    with caplog.at_level(logging.INFO, logger="fratrie"):
        open_tokenizer(folder, "clm")
    assert "what clm needs: ['<s>', 'a']" in caplog.text


@pytest.mark.parametrize("train", [train_wordpiece, train_unigram])
@pytest.mark.parametrize("objective", SIBLING_FOR)
def test_each_algorithm_serves_each_objective(tmp_path, train, objective):
    train(TEXTS, 300, num_sentinels=4, show_progress=False).save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path), objective)
    maker, collator = rows_and_collator(objective, tokenizer, 32, Corruption(share=0.3, whole_words=True))
    torch.manual_seed(0)
    batch = collator(columns_to_rows(maker({"text": TEXTS})))
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    first, last = batch["input_ids"][0], batch["input_ids"][0][batch["input_ids"][0] != tokenizer.pad_token_id]
    assert (first[0] == begin) == (objective != "denoise")
    assert last[-1] == end
    assert not (batch["input_ids"] == tokenizer.unk_token_id).any()


@pytest.mark.parametrize("train", [train_wordpiece, train_unigram])
def test_whole_words_of_every_algorithm_are_masked_together(tmp_path, train):
    text = "ma grandmère habite là"
    train([text, "mon père", "m h g l"], 300, sibling="encoder", show_progress=False).save_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path), "mlm")
    maker, collator = rows_and_collator("mlm", tokenizer, 64, Corruption(share=0.5, whole_words=True))
    rows = columns_to_rows(maker({"text": [text]}))
    assert len(rows[0]["input_ids"]) > 8, "several tokens a word"
    words = tokenizer(text).word_ids()
    torch.manual_seed(0)
    for _ in range(10):
        masked = collator([dict(rows[0])])["labels"][0] != -100
        states = {(word, bool(hidden)) for word, hidden in zip(words, masked, strict=True)}
        assert len(states) == len(set(words))


def test_denoising_needs_sentinels(tmp_path):
    train_byte_level_bpe(TEXTS, vocab_size=300, sibling="decoder", show_progress=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="0 sentinels"):
        rows_and_collator("denoise", open_tokenizer(str(tmp_path), "denoise"), 64, Corruption())


def test_mask_share_out_of_range(folder):
    with pytest.raises(ValueError, match=r"mask_probability=1\.5"):
        rows_and_collator("mlm", open_tokenizer(folder, "mlm"), 64, Corruption(share=1.5))


def columns_to_rows(columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_packed_loss_is_that_of_separate_documents(folder):
    """No document sees another, nor is predicted from it."""
    tokenizer = open_tokenizer(folder, "clm")
    model = build_model("clm", new_config("decoder", f"{SMALL},use_cache=false", tokenizer, 64)).eval()
    maker, collator = rows_and_collator("clm", tokenizer, 64, Corruption())
    objective = Objective(model)

    def loss(batch):
        count = objective.count(batch)
        with torch.no_grad():
            return float(objective.share(model, batch, count, count)) * count, count

    rows = columns_to_rows(maker({"text": TEXTS}))
    assert len(rows) < len(TEXTS), "several documents share a row"
    packed = loss(collator(rows))
    parts = [loss(collator(columns_to_rows(maker({"text": [text]})))) for text in TEXTS]
    assert packed[1] == sum(count for _, count in parts)
    assert packed[0] == pytest.approx(sum(value for value, _ in parts), rel=1e-5)


class Storyteller(FratrieDecoderForCausalLM):
    """A user's own class: neither its name nor its forward says what it learns."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Corrector(FratrieEncoderForMaskedLM):
    pass


class Summarizer(FratrieSeq2SeqForConditionalGeneration):
    pass


@pytest.mark.parametrize(
    ("objective", "model_type", "own_class"),
    [("mlm", "encoder", Corrector), ("clm", "decoder", Storyteller), ("denoise", "seq2seq", Summarizer)],
)
def test_a_class_of_the_user_counts_its_targets_as_the_one_below_it(folder, objective, model_type, own_class):
    tokenizer = open_tokenizer(folder, objective)
    model = build_model(objective, new_config(model_type, SMALL, tokenizer, 64)).eval()
    own = own_class(model.config).eval()
    own.load_state_dict(model.state_dict())
    ids = torch.randint(5, 300, (2, 6))
    batch = {"input_ids": ids, "labels": ids.clone()}
    counts = [Objective(each).count(batch) for each in (model, own)]
    assert counts == [10, 10] if objective == "clm" else counts == [12, 12]
    with torch.no_grad():
        shares = [Objective(each).share(each, batch, counts[0], 3 * counts[0]) for each in (model, own)]
    torch.testing.assert_close(*shares)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_first_token_behind_padding_is_no_target(folder, side):
    """The padding before it predicts nothing, and what the loss leaves out must not be counted."""
    model = build_model("clm", new_config("decoder", SMALL, open_tokenizer(folder, "clm"), 64)).eval()
    ids = torch.randint(5, 300, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    mask = mask if side == "left" else mask.flip(1)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    count = Objective(model).count(batch)
    assert count == 3 + 5
    with torch.no_grad():
        share = Objective(model).share(model, batch, count, count)
        torch.testing.assert_close(share, model(**batch).loss)


@pytest.mark.parametrize("objective", ["mlm", "denoise"])
def test_batches_run_through_the_model(folder, objective):
    tokenizer = open_tokenizer(folder, objective)
    model_type = {"mlm": "encoder", "denoise": "seq2seq"}[objective]
    model = build_model(objective, new_config(model_type, SMALL, tokenizer, 32))
    maker, collator = rows_and_collator(objective, tokenizer, 32, Corruption(share=0.3))
    torch.manual_seed(0)
    batch = collator(columns_to_rows(maker({"text": TEXTS})))
    count = Objective(model).count(batch)
    with ConfigSwitch(model).on():
        told = Objective(model).share(model.train(), batch, count, 2 * count).detach()
        assert float(told) == pytest.approx(float(model(**batch).loss.detach()) / 2, rel=1e-5)
        assert float(told) * 2 == pytest.approx(float(model.eval()(**batch).loss.detach()), rel=1e-5)
        assert model.train()(**batch).logits is None, "no logits are kept"
        model.config.chunked_loss = False
        if objective == "mlm":
            assert model(**batch).logits.shape == (count, 340), "only masked rows go through the head"
    assert model.train()(**batch).logits.shape[:2] == batch["labels"].shape
