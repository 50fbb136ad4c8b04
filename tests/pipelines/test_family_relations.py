import logging
import re
from itertools import count

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    pipeline,
)
from transformers.pipelines.pt_utils import KeyDataset

import fratrie
from fratrie.data import LABELS, SUBJECTS, VALENCES
from fratrie.pipelines.family_relations import PERSON_NAMES, STUDY_LABELS, VALENCE_NAMES
from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.metrics import decided_labels

SENTENCE = "Je m'entends bien avec ma mère."
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
SHORT_AND_LONG = [".", "a", "Ma sœur «m'aide» 🐈.", SENTENCE * 2, "J'ai deux frères.", "é" * 20]


def always(model, probabilities):
    """Make a model give these probabilities for every text, 0.05 for the labels that are not named."""
    labels = model.config.id2label
    chances = torch.tensor([probabilities.get(labels[i], 0.05) for i in range(len(labels))])
    with torch.no_grad():
        model.classifier.out_proj.weight.zero_()
        model.classifier.out_proj.bias.copy_(chances.logit())
    return model


@pytest.fixture
def pipe(family_model, encoder_tokenizer):
    return pipeline("family-relations", model=family_model, tokenizer=encoder_tokenizer)


def logits_of(model, tokenizer, text):
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0]


def test_labels_and_names_are_those_of_the_annotation_format():
    assert (STUDY_LABELS, tuple(VALENCE_NAMES), tuple(PERSON_NAMES)) == (LABELS, VALENCES, SUBJECTS)


def test_labels_above_their_thresholds_are_grouped_in_the_order_of_the_study(family_model, encoder_tokenizer):
    always(family_model, {"m": 0.9, "j": 0.8, "+": 0.7})
    pipe = pipeline("family-relations", model=family_model, tokenizer=encoder_tokenizer)
    expected = {
        "text": SENTENCE,
        "labels": ["+", "j", "m"],
        "persons": ["je", "mère"],
        "valence": ["positive"],
    }
    assert pipe(SENTENCE) == expected
    always(family_model, dict.fromkeys(LABELS, 0.9))
    assert pipe(SENTENCE) == {
        "text": SENTENCE,
        "labels": ["+", "-", "0", "i", "j", "f", "s", "p", "m", "a", "t"],
        "persons": ["je", "frère", "sœur", "père", "mère", "famille", "tierce personne"],
        "valence": ["positive", "négative", "neutre", "information"],
    }
    always(family_model, {})
    assert pipe(SENTENCE) == {"text": SENTENCE, "labels": [], "persons": [], "valence": []}


def test_scores_are_the_sigmoids_of_the_logits_by_label(pipe, family_model, encoder_tokenizer):
    logits = logits_of(family_model, encoder_tokenizer, SENTENCE)
    scores = pipe(SENTENCE, scores=True)["scores"]
    assert list(scores) == list(LABELS)
    for index, label in family_model.config.id2label.items():
        assert scores[label] == pytest.approx(logits[index].sigmoid().item(), abs=1e-6)
    assert "scores" not in pipe(SENTENCE)


def test_thresholds_come_from_the_config_or_else_from_the_call(build_classifier, encoder_tokenizer):
    probabilities = {"+": 0.4, "j": 0.6, "m": 0.2}
    limits = {"+": 0.3, "j": 0.7, "m": 0.25}
    columns = tuple(reversed(LABELS))
    model = build_classifier(label_thresholds=[limits.get(label, 0.5) for label in columns])
    pipe = pipeline("family-relations", model=always(model, probabilities), tokenizer=encoder_tokenizer)
    assert pipe(SENTENCE)["labels"] == ["+"]
    assert pipe(SENTENCE, threshold=0.5)["labels"] == ["j"]
    assert pipe(SENTENCE, threshold=0)["labels"] == list(LABELS)
    assert pipe(SENTENCE, threshold=1)["labels"] == []
    assert pipe(SENTENCE, threshold={"m": 0.1})["labels"] == ["+", "m"]
    model.config.label_thresholds = None
    pipe = pipeline("family-relations", model=model, tokenizer=encoder_tokenizer, threshold=0.15)
    assert pipe(SENTENCE)["labels"] == ["+", "j", "m"]
    assert pipe(SENTENCE, threshold={"m": 0.9})["labels"] == ["+", "j"]
    assert pipe(SENTENCE)["labels"] == ["+", "j", "m"]


def test_decides_as_the_evaluation_does(build_classifier, encoder_tokenizer):
    probabilities = dict(zip(LABELS, np.linspace(0.05, 0.95, 11), strict=True)) | {"i": 0.5}
    for thresholds in (None, [0.5] * 11, [0.25, 0.75] * 5 + [0.6]):
        model = always(build_classifier(labels=LABELS, label_thresholds=thresholds), probabilities)
        pipe = pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)
        values = logits_of(model, encoder_tokenizer, SENTENCE).double().sigmoid()[None].numpy()
        expected = decided_labels(values, "multi_label_classification", LABELS, thresholds)[0]
        assert pipe(SENTENCE)["labels"] == expected
        assert expected


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (1.5, "threshold=1.5: give a probability from 0 to 1"),
        (float("nan"), "threshold=nan"),
        ("0.5", "threshold='0.5'"),
        (True, "threshold=True: give a probability"),
        ({"m": False}, "threshold={'m': False}"),
        ({"m": -0.1}, "threshold={'m': -0.1}"),
        ({"maman": 0.5}, "threshold for the unknown label 'maman': choose from + - 0 i j f s p m a t"),
    ],
)
def test_wrong_thresholds_are_named(pipe, family_model, encoder_tokenizer, threshold, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pipe(SENTENCE, threshold=threshold)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pipeline("family-relations", model=family_model, tokenizer=encoder_tokenizer, threshold=threshold)


def test_other_labels_are_refused_with_the_task_to_use(build_classifier, encoder_tokenizer, tmp_path):
    labels = [label for label in LABELS if label not in "mt"] + ["LOVE"]
    model = build_classifier(labels=labels)
    model.save_pretrained(tmp_path / "other")
    encoder_tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="lacks m t and has LOVE besides") as error:
        pipeline("family-relations", model=str(tmp_path / "other"))
    assert "pipeline('text-classification'" in str(error.value)
    assert str(tmp_path / "other") in str(error.value)
    with pytest.raises(ValueError, match="lacks none and has anger besides"):
        model = build_classifier(labels=[*LABELS, "anger"])
        pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)
    with pytest.raises(ValueError, match=r"lacks t and has \+, \+ besides"):
        model = build_classifier(labels=[*LABELS[:-1], "+"])
        pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)
    with pytest.raises(ValueError, match="problem_type='single_label_classification'"):
        model = build_classifier(problem_type="single_label_classification")
        pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)


def bert(tokenizer, **fields):
    torch.manual_seed(3)
    names = {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: index for index, label in enumerate(LABELS)},
    }
    config = BertConfig(**SIZES, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **names, **fields)
    return BertForSequenceClassification(config).eval()


def test_foreign_classifiers_serve_too(encoder_tokenizer):
    model = bert(encoder_tokenizer, label_thresholds=[0.4] * 11)
    pipe = pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)
    expected = logits_of(model, encoder_tokenizer, SENTENCE).sigmoid()
    result = pipe(SENTENCE, scores=True)
    assert list(result["scores"].values()) == pytest.approx(expected.tolist(), abs=1e-6)
    assert result["labels"] == [label for label, p in zip(LABELS, expected, strict=True) if p > 0.4]
    model.config.label_thresholds = {"m": 0, "+": 1}
    by_name = pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)(SENTENCE)["labels"]
    assert "m" in by_name and "+" not in by_name
    model.config.label_thresholds = [0.4] * 10
    with pytest.raises(ValueError, match="label_thresholds has 10 values for 11 labels"):
        pipeline("family-relations", model=model, tokenizer=encoder_tokenizer)


def test_a_model_fresh_from_training_does_not_drop_out(encoder_tokenizer):
    model = bert(encoder_tokenizer, hidden_dropout_prob=0.5).train()
    pipe = pipeline("family-relations", model=model, tokenizer=encoder_tokenizer, scores=True)
    assert pipe(SENTENCE) == pipe(SENTENCE)


def test_decoders_that_classify_serve_too(decoder_tokenizer):
    torch.manual_seed(4)
    config = fratrie.FratrieDecoderConfig(
        **SIZES,
        vocab_size=len(decoder_tokenizer),
        pad_token_id=decoder_tokenizer.pad_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = fratrie.FratrieDecoderForSequenceClassification(config).eval()
    pipe = pipeline("family-relations", model=model, tokenizer=decoder_tokenizer, scores=True)
    assert_equal_results(pipe(SHORT_AND_LONG, batch_size=3), [pipe(text) for text in SHORT_AND_LONG], LABELS, 0.5)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return len(SHORT_AND_LONG)

    def __getitem__(self, index):
        return SHORT_AND_LONG[index]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_takes_texts_in_every_form(pipe, batch_size):
    expected = [pipe(text) for text in SHORT_AND_LONG]
    rows = Dataset.from_dict({"text": SHORT_AND_LONG, "respondent": list(range(len(SHORT_AND_LONG)))})
    for inputs in (
        SHORT_AND_LONG,
        tuple(SHORT_AND_LONG),
        np.array(SHORT_AND_LONG),
        [{"text": text} for text in SHORT_AND_LONG],
        rows,
        rows["text"],
        pd.Series(SHORT_AND_LONG),
        pd.Series(SHORT_AND_LONG, index=SHORT_AND_LONG),
        pd.DataFrame({"text": SHORT_AND_LONG})["text"],
    ):
        assert pipe(inputs, batch_size=batch_size) == expected
    for inputs in (
        (text for text in SHORT_AND_LONG),
        iter(SHORT_AND_LONG),
        KeyDataset(rows, "text"),
        Texts(),
        rows.to_iterable_dataset(),
    ):
        results = pipe(inputs, batch_size=batch_size)
        assert not isinstance(results, list)
        assert list(results) == expected
    assert pipe({"text": SHORT_AND_LONG[1]}) == expected[1]


class Columns:
    """A table whose iteration gives the names of its columns, and which is no `Mapping`."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns)

    def __iter__(self):
        return iter(self.columns)

    def __getitem__(self, name):
        return self.columns[name]

    def keys(self):
        return self.columns.keys()


@pytest.mark.parametrize(
    "table",
    [
        pd.DataFrame({"text": SHORT_AND_LONG, "respondent": 1}),
        pd.DataFrame({"text": []}),
        pd.DataFrame(),
        Columns(phrase=SHORT_AND_LONG),
    ],
)
def test_a_table_is_refused_with_the_column_to_pass(pipe, table):
    with pytest.raises(ValueError, match=r"pass the column of texts, such as table\['text'\]"):
        pipe(table)


def test_generators_are_read_as_they_go(pipe):
    results = iter(pipe(f"Frère {number}" for number in count()))
    assert [next(results)["text"] for _ in range(3)] == ["Frère 0", "Frère 1", "Frère 2"]


def test_nothing_gives_nothing(pipe):
    assert pipe([]) == []
    assert pipe(()) == []
    assert list(pipe(text for text in ())) == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "The input is None"),
        (3, "The input is 3"),
        ([SENTENCE, None], "The input is None, expected a text"),
        (b"octets", "The input is b'octets', expected a text"),
        (b"", "The input is b'', expected a text"),
        (bytearray(b"a"), r"The input is bytearray\(b'a'\), expected a text"),
        (memoryview(b"a"), "The input is <memory at .*>, expected a text"),
        ({"phrase": SENTENCE, "id": 1}, r"has the fields \['id', 'phrase'\], but no text in a field 'text'"),
        ("", "The text '' is blank, and tells of nobody: leave it out"),
        ([SENTENCE, " \n\t"], r"The text ' \\n\\t' is blank"),
        ("ma \ud800 mère", "holds half a character"),
        ([[SENTENCE]], "expected a text"),
        (float("nan"), "The input is nan"),
        ({"text": [SENTENCE]}, r"no text in a field 'text': .* a column of texts"),
    ],
)
def test_what_is_no_text_is_refused(pipe, inputs, message):
    with pytest.raises(ValueError, match=message):
        pipe(inputs)


def test_an_unknown_parameter_is_refused(pipe):
    message = "'family-relations' has no parameter top_k: it has threshold, scores, batch_size and num_workers"
    with pytest.raises(TypeError, match=message):
        pipe(SENTENCE, top_k=None)
    with pytest.raises(TypeError, match=message):
        pipeline("family-relations", model=pipe.model, tokenizer=pipe.tokenizer, top_k=2)


def test_truncation_is_said(pipe, family_model, encoder_tokenizer, caplog):
    ends = len(encoder_tokenizer("").input_ids)
    fitting = "a" + "\n" * (63 - ends)
    assert len(encoder_tokenizer(fitting).input_ids) <= 64
    caplog.set_level(logging.WARNING)
    pipe(fitting)
    assert not caplog.records
    text = "Ma mère est gentille. " * 2_500
    length = len(encoder_tokenizer(text, verbose=False).input_ids)
    scores = pipe(text, scores=True)["scores"]
    assert [record.getMessage() for record in caplog.records] == [
        f"A text of {length} tokens is cut to the 64 that are read: "
        "'Ma mère est gentille. Ma mère est gentille. Ma mère est gen…'"
    ]
    with torch.no_grad():
        logits = family_model(**encoder_tokenizer(text, truncation=True, max_length=64, return_tensors="pt")).logits[0]
    assert scores["+"] == pytest.approx(logits[family_model.config.label2id["+"]].sigmoid().item(), abs=1e-6)


def test_positions_of_the_model_bound_the_length_too(encoder_tokenizer, caplog):
    tokenizer = train_byte_level_bpe([SENTENCE] * 3, vocab_size=270, show_progress=False)
    tokenizer.model_max_length = int(1e30)
    fields = {**SIZES, "vocab_size": len(tokenizer), "id2label": dict(enumerate(LABELS))}
    models = {
        20: BertForSequenceClassification(BertConfig(**fields, max_position_embeddings=20)),
        18: RobertaForSequenceClassification(RobertaConfig(**fields, max_position_embeddings=20, pad_token_id=1)),
    }
    for limit, model in models.items():
        caplog.clear()
        pipeline("family-relations", model=model.eval(), tokenizer=tokenizer)(SENTENCE * 5)
        assert f"is cut to the {limit} that are read" in caplog.text


def test_a_missing_padding_token_is_named(family_model, encoder_tokenizer, tmp_path):
    encoder_tokenizer.save_pretrained(tmp_path)
    tokenizer = type(encoder_tokenizer).from_pretrained(tmp_path)
    tokenizer.pad_token = None
    pipe = pipeline("family-relations", model=family_model, tokenizer=tokenizer)
    assert pipe(SHORT_AND_LONG) == [pipe(text) for text in SHORT_AND_LONG]
    with pytest.raises(ValueError, match="without pad_token cannot do batching"):
        pipe(SHORT_AND_LONG, batch_size=2)


def test_a_text_without_tokens_is_named(family_model, encoder_tokenizer, tmp_path):
    encoder_tokenizer.save_pretrained(tmp_path)
    tokenizer = type(encoder_tokenizer).from_pretrained(tmp_path)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("."), "")
    pipe = pipeline("family-relations", model=family_model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="The text 'a' has no token"):
        pipe("a")


def test_a_tokenizer_of_another_model_is_named(family_model, encoder_tokenizer, tmp_path):
    encoder_tokenizer.save_pretrained(tmp_path)
    tokenizer = type(encoder_tokenizer).from_pretrained(tmp_path)
    tokenizer.add_tokens(["zut"])
    pipe = pipeline("family-relations", model=family_model, tokenizer=tokenizer)
    size = family_model.config.vocab_size
    assert pipe("a")["text"] == "a"
    with pytest.raises(ValueError, match=f"gives the token {size}, but the model has embeddings for {size}"):
        pipe("zut")


@pytest.mark.parametrize("text", ["a\0b", "x" * 5000, "<mask></s>", "👩\u200d👧🎉", "\u202eabc", "\ufeff."])
def test_odd_texts_are_labelled(pipe, text):
    assert pipe(text)["text"] == text


def assert_equal_results(results, expected, labels, threshold):
    assert len(results) == len(expected)
    for result, single in zip(results, expected, strict=True):
        assert result["text"] == single["text"]
        assert result["scores"] == pytest.approx(single["scores"], abs=1e-5)
        certain = [label for label in labels if abs(single["scores"][label] - threshold) > 1e-5]
        for label in certain:
            assert (label in result["labels"]) == (label in single["labels"])


@pytest.fixture(scope="module")
def scoring_pipe():
    """A pipeline for texts of any characters."""
    corpus = [SENTENCE, *SHORT_AND_LONG] * 3
    tokenizer = train_byte_level_bpe(corpus, vocab_size=300, model_max_length=64, show_progress=False)
    torch.manual_seed(0)
    config = fratrie.FratrieEncoderConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=64,
        id2label=dict(enumerate(LABELS)),
    )
    model = fratrie.FratrieEncoderForSequenceClassification(config).eval()
    return pipeline("family-relations", model=model, tokenizer=tokenizer, scores=True)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30).filter(str.strip) | st.sampled_from(SHORT_AND_LONG), min_size=1, max_size=7),
    batch_size=st.integers(2, 8),
)
def test_batched_equals_one_by_one(scoring_pipe, texts, batch_size):
    one_by_one = [scoring_pipe(text) for text in texts]
    assert_equal_results(scoring_pipe(texts, batch_size=batch_size), one_by_one, LABELS, 0.5)
