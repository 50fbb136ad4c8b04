"""Hugging Face's own pipelines on our checkpoints, unmodified."""

import logging

import pytest
import torch
from transformers import pipeline

from fratrie.data import LABELS

TEXTS = ["Ma mère chante.", "", "Mes deux frères et ma sœur «jouent» avec le chat 🐈.", "Oui"]


@pytest.fixture(autouse=True)
def no_complaint(hugging_face_log):
    hugging_face_log.set_level(logging.ERROR)
    yield
    assert not [record for record in hugging_face_log.get_records("call") if record.levelno >= logging.ERROR]


def logits_of(model, tokenizer, text):
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0]


def test_text_classification_gives_sigmoids_for_several_labels(family_model, encoder_tokenizer):
    pipe = pipeline("text-classification", model=family_model, tokenizer=encoder_tokenizer)
    for text in TEXTS:
        expected = logits_of(family_model, encoder_tokenizer, text).sigmoid()
        results = pipe(text, top_k=None)
        assert {result["label"] for result in results} == set(LABELS)
        for result in results:
            column = family_model.config.label2id[result["label"]]
            assert result["score"] == pytest.approx(expected[column].item(), abs=1e-6)
        descending = sorted(expected.tolist(), reverse=True)
        assert [result["score"] for result in results] == pytest.approx(descending, abs=1e-6)
        assert pipe(text) == results[:1]


def test_text_classification_gives_softmax_for_one_label(build_classifier, encoder_tokenizer):
    model = build_classifier(labels=["NON", "OUI", "?"], problem_type="single_label_classification")
    results = pipeline("text-classification", model=model, tokenizer=encoder_tokenizer)(TEXTS[0], top_k=None)
    expected = logits_of(model, encoder_tokenizer, TEXTS[0]).softmax(0)
    for result in results:
        column = model.config.label2id[result["label"]]
        assert result["score"] == pytest.approx(expected[column].item(), abs=1e-6)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_text_classification_in_batches(family_model, encoder_tokenizer, tmp_path, padding_side):
    encoder_tokenizer.save_pretrained(tmp_path)
    tokenizer = type(encoder_tokenizer).from_pretrained(tmp_path, padding_side=padding_side)
    pipe = pipeline("text-classification", model=family_model, tokenizer=tokenizer)
    batched = pipe(TEXTS, batch_size=3, top_k=None)
    singles = [pipe(text, top_k=None) for text in TEXTS]
    for result, single in zip(batched, singles, strict=True):
        scores = {entry["label"]: entry["score"] for entry in single}
        assert {entry["label"]: entry["score"] for entry in result} == pytest.approx(scores, abs=1e-5)


def test_text_generation(decoder_model, decoder_tokenizer):
    pipe = pipeline("text-generation", model=decoder_model, tokenizer=decoder_tokenizer)
    greedy = {"do_sample": False, "max_new_tokens": 8}
    singles = []
    for text in TEXTS:
        ids = decoder_tokenizer(text, return_tensors="pt")
        assert ids.input_ids[0, 0] == decoder_tokenizer.bos_token_id
        output = decoder_model.generate(**ids, **greedy)[0, ids.input_ids.shape[1] :]
        expected = text + decoder_tokenizer.decode(output, skip_special_tokens=True)
        singles.append([{"generated_text": expected}])
        assert pipe(text, **greedy) == singles[-1]
    assert pipe(TEXTS, batch_size=3, **greedy) == singles
    assert all(single[0]["generated_text"] != text for single, text in zip(singles, TEXTS, strict=True))
