"""Hugging Face's own pipelines on our checkpoints, unmodified."""

import logging

import pytest
import torch
from datasets import Dataset
from nested import assert_close
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

import fratrie
from fratrie.data import LABELS
from fratrie.tokenization import train_byte_level_bpe

TEXTS = ["Ma mère chante.", "", "Mes deux frères et ma sœur «jouent» avec le chat 🐈.", "Oui"]
GREEDY = {"do_sample": False, "max_new_tokens": 8}


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


@pytest.mark.parametrize(
    ("labels", "function"), [(torch.tensor([[1, 0, 1]]), torch.sigmoid), (torch.tensor([2]), lambda x: x.softmax(0))]
)
def test_what_a_model_was_trained_for_is_kept_where_nobody_said_it(
    build_classifier, encoder_tokenizer, tmp_path, labels, function
):
    model = build_classifier(labels=["NON", "OUI", "?"], problem_type=None)
    model(**encoder_tokenizer(TEXTS[0], return_tensors="pt"), labels=labels).loss.backward()
    model.save_pretrained(tmp_path)
    pipe = pipeline("text-classification", model=str(tmp_path), tokenizer=encoder_tokenizer)
    expected = function(logits_of(model, encoder_tokenizer, TEXTS[0])).tolist()
    assert [result["score"] for result in pipe(TEXTS[0], top_k=None)] == pytest.approx(sorted(expected)[::-1])


def test_text_classification_in_batches(family_model, encoder_tokenizer):
    pipe = pipeline("text-classification", model=family_model, tokenizer=encoder_tokenizer)
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


@pytest.fixture
def build_encoder(encoder_tokenizer):
    """Makes random encoders with a head, which read 64 tokens."""

    def build(head, **fields):
        torch.manual_seed(0)
        config = fratrie.FratrieEncoderConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, initializer_range=0.3,
            max_position_embeddings=64, vocab_size=len(encoder_tokenizer), pad_token_id=encoder_tokenizer.pad_token_id,
            **fields,
        )  # fmt: skip
        return getattr(fratrie, f"FratrieEncoder{head}")(config).eval()

    return build


@pytest.fixture
def pipes(build_encoder, encoder_tokenizer, decoder_model, decoder_tokenizer):
    """Makes a pipeline of each of Hugging Face's text tasks, and an argument list for its calls."""
    entailment = {"contradiction": 0, "neutral": 1, "entailment": 2}
    makers = {
        "text-classification": lambda: (build_encoder("ForSequenceClassification", num_labels=5), {"top_k": None}),
        "token-classification": lambda: (build_encoder("ForTokenClassification", num_labels=3), {}),
        "fill-mask": lambda: (build_encoder("ForMaskedLM"), {"top_k": 3}),
        "feature-extraction": lambda: (build_encoder("Model"), {}),
        "zero-shot-classification": lambda: (
            build_encoder("ForSequenceClassification", label2id=entailment,
                          id2label={index: label for label, index in entailment.items()}),
            {"candidate_labels": ["famille", "école"], "hypothesis_template": "On parle de {}."},
        ),
        "text-generation": lambda: (decoder_model, GREEDY),
    }  # fmt: skip

    def make(task):
        model, options = makers[task]()
        tokenizer = decoder_tokenizer if task == "text-generation" else encoder_tokenizer
        return pipeline(task, model=model, tokenizer=tokenizer, device="cpu"), options

    return make


def texts_for(task):
    texts = [text for text in TEXTS if text]
    return [text.replace(" ", " <mask> ", 1) if " " in text else f"{text} <mask>" for text in texts] \
        if task == "fill-mask" else texts  # fmt: skip


TASKS = (
    "text-classification",
    "token-classification",
    "fill-mask",
    "feature-extraction",
    "zero-shot-classification",
    "text-generation",
)


@pytest.mark.parametrize("task", TASKS)
def test_batches_generators_and_datasets_give_what_single_texts_give(task, pipes):
    pipe, options = pipes(task)
    texts = texts_for(task)
    singles = [pipe(text, **options) for text in texts]
    assert len({str(single) for single in singles}) == len(texts)
    rows = KeyDataset(Dataset.from_dict({"sentence": texts}), "sentence")
    for inputs in (texts, (text for text in texts), rows):
        batched = list(pipe(inputs, batch_size=2, **options))
        assert_close(batched, singles)


LONG = "Ma mère chante et mon père joue avec le chat. " * 8


@pytest.mark.parametrize(
    ("task", "truncate"),
    [
        ("text-classification", {"truncation": True}),
        ("fill-mask", {"tokenizer_kwargs": {"truncation": True}}),
        ("feature-extraction", {"truncation": True}),
    ],
)
def test_a_text_longer_than_the_model_is_an_error_that_says_truncation(task, truncate, pipes):
    pipe, options = pipes(task)
    text = f"<mask> {LONG}" if task == "fill-mask" else LONG
    tokens = len(pipe.tokenizer(text)["input_ids"])
    with pytest.raises(ValueError, match=rf"{tokens} tokens .* max_position_embeddings=64: .*truncation=True"):
        pipe(text, **options)
    cut = pipe.tokenizer(text, truncation=True, max_length=64)["input_ids"]
    assert_close(pipe(text, **options, **truncate), pipe(pipe.tokenizer.decode(cut[1:-1]), **options))


def test_a_prompt_longer_than_the_model_is_an_error_too(pipes):
    pipe, options = pipes("text-generation")
    tokens = len(pipe.tokenizer(LONG)["input_ids"])
    with pytest.raises(ValueError, match=rf"{tokens} tokens .* max_position_embeddings=64: .*max_new_tokens"):
        pipe(LONG, **options)
    with pytest.raises(ValueError, match=r"65 tokens .* max_position_embeddings=64: .*max_new_tokens"):
        pipe("Oui", do_sample=False, max_new_tokens=80, eos_token_id=-1)
    (result,) = pipe(LONG, handle_long_generation="hole", **options)
    assert len(pipe.tokenizer(result["generated_text"])["input_ids"]) > tokens


def test_what_hugging_face_cuts_by_itself_can_be_read_whole(pipes):
    """Token classification cuts texts at the tokenizer's limit, unless a stride lets windows walk over the text."""
    pipe, _ = pipes("token-classification")
    cut = pipe(LONG)
    assert max(token["end"] for token in cut) < len(LONG) / 2
    whole = pipe(LONG, aggregation_strategy="first", stride=16)
    assert max(group["end"] for group in whole) >= len(LONG.rstrip())


def test_decision_weighs_the_next_token(tmp_path):
    tokenizer = train_byte_level_bpe(
        ["Yes", "No"] * 9, vocab_size=270, sibling="decoder", model_max_length=256, show_progress=False
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = fratrie.FratrieDecoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, initializer_range=0.3,
        position_type="rotary", vocab_size=len(tokenizer),
    )  # fmt: skip
    model = fratrie.FratrieDecoderForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = pipeline("decision", model=tmp_path, device="cpu")
    assert type(pipe.model) is type(model)
    request = {"state": TEXTS[0], "questions": {"chante": {"type": "noul", "instructions": "Chante-t-elle ?"}}}
    ((inputs, _),) = pipe.decision_config.prepare_inputs(request, tokenizer)
    with torch.no_grad():
        logits = model(inputs["input_ids"]).logits[0, -1]
    yes, no = logits[tokenizer.convert_tokens_to_ids(["Yes", "No"])]
    assert pipe(request)["chante"]["noul"] == pytest.approx((yes - no).sigmoid().item(), abs=1e-5)
