from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from hypothesis import given, settings

from fratrie import FratrieEncoderConfig, FratrieEncoderForSequenceClassification, norm_slots
from fratrie.study.words import _by_word, _integrate, word_attributions, words_for_labels
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.baselines import Sentences
from fratrie.training.encoding import encode
from fratrie.training.metrics import MULTI_LABEL, SINGLE_LABEL
from fratrie.training.tasks import Task

TEXTS = [
    "Avec mon beau-père, c'est ni bien ni mal.",
    "Ma mère est gentille et je l’aime.",
    "Mes sœurs «adorent» notre chat 🐈 !",
]
MULTI, SINGLE = Task(MULTI_LABEL, ["m", "p", "+"]), Task(SINGLE_LABEL, ["m", "p", "+"])


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS * 3, vocab_size=330, model_max_length=64, show_progress=False)


def classifier(tokenizer, **fields):
    config = FratrieEncoderConfig(
        **{
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "num_labels": 3,
        }
        | fields
    )
    return FratrieEncoderForSequenceClassification(config).eval()


def log_odds(model, ids, label, task):
    with torch.no_grad():
        logits = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits.double()[0]
    return float(logits[label] if task is MULTI else torch.logit(logits.softmax(0)[label]))


@pytest.mark.parametrize("task", [MULTI, SINGLE])
def test_the_shares_add_up_to_the_difference_of_the_log_odds(tokenizer, task):
    model = classifier(tokenizer)
    for text in TEXTS:
        (row,) = encode([text], model, tokenizer)
        first, *between, last = row["input_ids"]
        masked = [first, *[tokenizer.mask_token_id] * len(between), last]
        difference = log_odds(model, row["input_ids"], 1, task) - log_odds(model, masked, 1, task)
        pieces = word_attributions(model, tokenizer, text, task, 1)
        assert "".join(word for word, _ in pieces) == text
        assert abs(difference) > 0.1
        assert sum(share for _, share in pieces) == pytest.approx(difference, abs=0.1, rel=0.1)
    assert [word for word, _ in word_attributions(model, tokenizer, TEXTS[0], task, 1)][:5] == [
        "Avec ",
        "mon ",
        "beau-père",
        ", ",
        "c'",
    ]


def test_the_shares_of_a_linear_model_are_its_terms(tokenizer):
    """With layers that add nothing, the head weighs the mean of the embeddings."""
    norms = norm_slots("pre", "layer_norm") | {"embedding_norm": None, "final_norm": None}
    model = classifier(tokenizer, position_type="none", classifier_pooling="mean", **norms)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.zero_()
    text = "Ma mère est gentille"
    encoded = tokenizer(text, return_offsets_mapping=True)
    table = model.model.embed_tokens.weight
    terms = (table[encoded["input_ids"]] - table[tokenizer.mask_token_id]) @ model.classifier.out_proj.weight[2]
    expected = np.zeros(4)
    for (start, end), term in zip(encoded["offset_mapping"], terms.tolist(), strict=True):
        if start < end:
            expected[text[:end].count(" ")] += term / len(terms)
    pieces = word_attributions(model, tokenizer, text, MULTI, 2)
    assert [word for word, _ in pieces] == ["Ma ", "mère ", "est ", "gentille"]
    np.testing.assert_allclose([share for _, share in pieces], expected, atol=1e-5)


def test_a_sudden_change_gets_finer_steps():
    method = IntegratedGradients(lambda x: torch.sigmoid(100 * (x[:, 0, 0] - 0.3)) + 2 * x[:, 1, 0])
    shares = _integrate(method, torch.zeros(1, 2, 1), torch.ones(1, 2, 1), tolerance=0.01)
    torch.testing.assert_close(shares.flatten(), torch.tensor([1.0, 2.0]), atol=0.01, rtol=0)


def test_the_halves_of_the_way_are_integrated_as_each_alone(tokenizer, monkeypatch):
    """By captum's formula in plain autograd: Gauss-Legendre between points that halve where the sum misses most."""
    monkeypatch.setattr("fratrie.study.words._TOLERANCE", 1e-3)
    model, text = classifier(tokenizer), TEXTS[0]
    ids = torch.tensor([encode([text], model, tokenizer)[0]["input_ids"]])
    special = torch.tensor([[True, *[False] * (ids.shape[1] - 2), True]])
    embed = model.get_input_embeddings()
    start, end = (embed(each).detach() for each in (ids.where(special, torch.tensor(tokenizer.mask_token_id)), ids))

    def logit(point):
        return model(inputs_embeds=point, attention_mask=torch.ones_like(ids)).logits[0, 1]

    def part(first, last):
        shares = torch.zeros_like(first)
        for place, weight in zip(*np.polynomial.legendre.leggauss(8), strict=True):
            point = (first + (1 + place) / 2 * (last - first)).requires_grad_()
            shares += weight / 2 * torch.autograd.grad(logit(point), point)[0] * (last - first)
        with torch.no_grad():
            return abs(float(shares.sum() - logit(last) + logit(first))), first, last, shares

    parts = [part(start, end)]
    tolerance = 1e-3 * max(1, abs((logit(end) - logit(start)).item()))
    while sum(error for error, *_ in parts) > tolerance and len(parts) < 8:
        _, first, last, _ = parts.pop(max(range(len(parts)), key=lambda place: parts[place][0]))
        parts += [part(first, (first + last) / 2), part((first + last) / 2, last)]
    assert len(parts) > 1
    shares = sum(shares for *_, shares in parts).sum(-1)[0]
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    expected = _by_word(text, spans, shares.tolist())
    found = word_attributions(model, tokenizer, text, MULTI, 1)
    assert [word for word, _ in found] == [word for word, _ in expected]
    np.testing.assert_allclose([share for _, share in found], [share for _, share in expected], atol=1e-4)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_a_text_beyond_the_positions_is_explained_as_far_as_it_is_read(tokenizer):
    model = classifier(tokenizer, max_position_embeddings=12)
    pieces = word_attributions(model, tokenizer, TEXTS[0], MULTI, 0)
    assert "".join(word for word, _ in pieces) == TEXTS[0]
    assert pieces[0][1] and not any(share for _, share in pieces[-3:])


@given(st.text(max_size=40) | st.lists(st.sampled_from("aé '’-.🐈 \n"), max_size=30).map("".join))
@settings(max_examples=40, deadline=None)
def test_pieces_make_up_the_text_and_no_token_is_cut(tokenizer, text):
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    spans, shares = encoded["offset_mapping"], [float(2**i % 97) for i in range(len(encoded["input_ids"]))]
    pieces = _by_word(text, spans, shares)
    assert "".join(piece for piece, _ in pieces) == text
    assert sum(share for _, share in pieces) == sum(shares)
    bounds = set(accumulate(len(piece) for piece, _ in pieces[:-1]))
    for start, end in spans:
        letters = end - len(text[start:end].lstrip())
        assert not bounds & set(range(letters + 1, end))


def test_words_a_token_spans_stay_together():
    assert _by_word("j'ai vu", [(0, 3), (3, 4), (4, 7)], [1.0, 2.0, 4.0]) == [["j'ai ", 3.0], ["vu", 4.0]]
    assert _by_word(" a  b ", [(0, 2), (2, 3), (3, 5), (5, 6)], [1.0, 2.0, 4.0, 8.0]) == [[" a  ", 3.0], ["b ", 12.0]]


def test_sentences_are_the_most_probable_right_ones_of_different_respondents(tokenizer):
    texts = [f"{text} {i}" for i, text in enumerate(TEXTS * 2)]
    truth = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0]])
    predictions = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]])
    probabilities = np.array([0.7, 0.9, 0.2, 0.95, 0.6, 0.8])[:, None] * [1, 0.5, 0]
    model, sentences = classifier(tokenizer), Sentences(texts, truth, ["r", "r", "s", "t", "u", "v"])
    given = (model, tokenizer, sentences, MULTI, probabilities, predictions)
    known, told = {}, []

    def step(name, find):
        return known[name] if name in known else known.setdefault(name, find())

    found = words_for_labels(*given, per_label=3, step=step, progress=lambda *done: told.append(done))
    assert list(known) == ["0_1", "0_5", "0_4", "1_3"] and told == [(done, 4) for done in range(1, 5)]
    known["0_5"] = "known"
    assert words_for_labels(*given, per_label=2, step=step)["m"][1]["pieces"] == "known"
    assert [each["text"] for each in found["m"]] == [texts[1], texts[5], texts[4]]
    assert [each["probability"] for each in found["m"]] == [0.9, 0.8, 0.6]
    assert [each["text"] for each in found["p"]] == [texts[3]] and found["+"] == []
    assert found["p"][0]["pieces"] == word_attributions(model, tokenizer, texts[3], MULTI, 1)


def test_what_is_missing_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr("fratrie.study.packages.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package captum: pip install 'fratrie\[study\]'"):
        word_attributions(classifier(tokenizer), tokenizer, TEXTS[0], MULTI, 0)
