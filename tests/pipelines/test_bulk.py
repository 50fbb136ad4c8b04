"""Our pipelines in bulk beside Hugging Face's own, one text at a time."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nested import assert_close
from transformers import BertConfig, BertForSequenceClassification, ByT5Tokenizer, pipeline, pipelines
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset, PipelineIterator

import fratrie
from fratrie.pipelines import bulk, sentence_tasks
from fratrie.tokenization import train_byte_level_bpe

TEXTS = ["Ma mère chante.", "", "Mes deux frères et ma sœur «jouent» avec le chat 🐈.", "Oui", "Mon père lit.", "Non"]
LONG = "Ma mère chante et mon père joue avec le chat. " * 8
PAIRS = [{"text": text, "text_pair": pair} for text, pair in zip(TEXTS, TEXTS[::-1], strict=True)]
HEADS = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "feature-extraction": "Model",
}
THEIRS = {
    "text-classification": pipelines.TextClassificationPipeline,
    "token-classification": pipelines.TokenClassificationPipeline,
    "feature-extraction": pipelines.FeatureExtractionPipeline,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS * 3, vocab_size=320, model_max_length=64, show_progress=False)


def build(head, vocabulary, **fields):
    torch.manual_seed(0)
    config = fratrie.FratrieEncoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, initializer_range=0.5,
        max_position_embeddings=64, vocab_size=vocabulary, num_labels=4, **fields,
    )  # fmt: skip
    return getattr(fratrie, f"FratrieEncoder{head}")(config).eval()


@pytest.fixture(scope="module")
def both(tokenizer):
    """Makes the pipeline of a task, and Hugging Face's with the same model."""
    models = {head: build(head, len(tokenizer), pad_token_id=tokenizer.pad_token_id) for head in HEADS.values()}

    def make(task, head=None, words=tokenizer, **options):
        parts = {"model": models[head or HEADS[task]], "tokenizer": words, "device": "cpu", **options}
        return pipeline(task, **parts), THEIRS[task](task=task, **parts)

    return make


@pytest.fixture(autouse=True, params=["right", "left"])
def padding_side(request, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "padding_side", request.param)
    monkeypatch.setattr(bulk, "TOKENS_PER_BATCH_ON_CPU", 60)  # several batches of several texts
    monkeypatch.setattr(bulk, "WINDOW", 5)


def column():
    return KeyDataset(Dataset.from_dict({"sentence": TEXTS}), "sentence")


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (TEXTS, {}),
        (TEXTS, {"batch_size": 3, "top_k": None}),
        (TEXTS, {"top_k": 2, "function_to_apply": "sigmoid"}),
        ([*TEXTS, LONG], {"truncation": True, "max_length": 20, "function_to_apply": "none"}),
        ([*TEXTS, LONG], {"truncation": True, "padding": "max_length", "max_length": 30, "top_k": 4}),
        (TEXTS, {"return_attention_mask": False, "top_k": None}),
        ([*PAIRS, TEXTS[0], {"text": "Oui"}], {"top_k": None}),
        ([*PAIRS[:2], {"text": "Oui", "return_attention_mask": False}], {"top_k": None}),
        (PAIRS, {"top_k": None}),
        ([pair for pair in PAIRS if pair["text_pair"]], {"top_k": None}),
        (PAIRS[0], {}),
        (TEXTS[2], {}),
        ([[["Oui", "Non"]]], {}),
        (lambda: (text for text in TEXTS), {"top_k": None, "batch_size": 4}),
        (column, {"top_k": None}),
    ],
)
def test_text_classification(both, inputs, options):
    assert_same_results(*both("text-classification"), inputs, options)


def assert_same_results(ours, theirs, inputs, options):
    alone = {name: value for name, value in options.items() if name != "batch_size"}
    lazy = callable(inputs)
    found, expected = ours(inputs() if lazy else inputs, **options), theirs(inputs() if lazy else inputs, **alone)
    assert isinstance(found, bulk.BulkResults) == lazy
    assert_close(*(list(found), list(expected)) if lazy else (found, expected))


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (TEXTS, {}),
        (TEXTS[2], {"aggregation_strategy": "simple"}),
        ([*TEXTS, LONG], {"aggregation_strategy": "simple", "stride": 9, "batch_size": 2}),
        ([text.split() for text in TEXTS if text], {"is_split_into_words": True, "aggregation_strategy": "first"}),
        (TEXTS[2].split(), {"is_split_into_words": True}),
        (TEXTS, {"ignore_labels": ["LABEL_0", "LABEL_1"]}),
        (lambda: (text for text in TEXTS), {"batch_size": 4}),
        (column, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_token_classification(both, inputs, options):
    assert_same_results(*both("token-classification"), inputs, options)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("tokens", [None, 4])
def test_features_hold_no_padding(both, head, tokens):
    # There are four logits, too: not everything as long as the tokens is one of tokens.
    limits = {} if tokens is None else {"truncation": True, "max_length": tokens}
    ours, theirs = both("feature-extraction", head)
    assert_close(ours(TEXTS, tokenize_kwargs=limits), theirs(TEXTS, tokenize_kwargs=limits))
    options = {"return_tensors": True, "tokenize_kwargs": limits}
    for found, expected in zip(ours(column(), **options), theirs(column(), **options), strict=True):
        torch.testing.assert_close(found, expected)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=9), batch_size=st.integers(1, 5))
def test_any_texts_get_what_they_get_alone_in_their_order(both, texts, batch_size):
    ours, theirs = both("text-classification", function_to_apply="none", top_k=None)
    assert_close(ours(texts, batch_size=batch_size), theirs(texts))


def test_a_tokenizer_in_python(both):
    words = ByT5Tokenizer(model_max_length=64)
    model = build("ForTokenClassification", len(words), pad_token_id=0)
    ours, theirs = both("token-classification", words=words, model=model)
    assert not words.is_fast and isinstance(ours(column()), bulk.BulkResults)
    assert_close(ours(TEXTS), theirs(TEXTS))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_generator_is_read_only_as_far_as_the_batch(both, batch_size):
    read = []
    results = both("text-classification")[0]((read.append(text) or text for text in TEXTS), batch_size=batch_size)
    iterator = iter(results)
    for place in range(len(TEXTS)):
        next(iterator)
        assert len(read) == min(len(TEXTS), (place // batch_size + 1) * batch_size)
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(TypeError):
        len(results)


def test_only_the_batch_of_a_result_is_run(both, monkeypatch):
    pipe = both("text-classification")[0]
    sizes = []
    forward = pipe.forward
    monkeypatch.setattr(pipe, "forward", lambda inputs: sizes.append(len(inputs["input_ids"])) or forward(inputs))
    results = pipe(column())
    assert len(results) == len(TEXTS) and not sizes
    first = iter(results)
    next(first)
    assert len(sizes) == 1
    assert sum(sizes) < len(list(results)) == len(TEXTS)  # from the start again


def test_results_before_a_mistake_come_first(both):
    pipe = both("text-classification")[0]
    for mistake, error in ((["Oui", "Non"], ValueError), ("Oui \udc80", Exception)):
        with pytest.raises(error):
            pipe([*TEXTS, mistake])
        results = iter(pipe((one for one in [*TEXTS[:3], mistake, *TEXTS]), batch_size=9))
        assert_close([next(results) for _ in range(3)], [pipe(text)[0] for text in TEXTS[:3]])
        with pytest.raises(error):
            next(results)


def test_workers_read_the_inputs(both):
    ours, theirs = both("text-classification")
    assert_close(list(ours(column(), num_workers=1)), list(theirs(column())))


def test_models_of_others_are_served_by_hugging_face(both, tokenizer):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    ours, theirs = both("text-classification", model=BertForSequenceClassification(config).eval())
    assert type(ours(column())) is PipelineIterator
    assert ours(TEXTS, batch_size=2, top_k=None) == theirs(TEXTS, batch_size=2, top_k=None)


def test_a_tokenizer_that_cannot_pad_makes_no_batches(both, tokenizer, monkeypatch):
    words = copy.deepcopy(tokenizer)
    ours, theirs = both("text-classification", words=words)
    with monkeypatch.context() as change:
        change.setattr(ours.model.config, "vocab_size", tokenizer.pad_token_id)
        assert type(ours(column())) is PipelineIterator  # the model has no embedding for the padding
    words.pad_token = None
    assert ours(TEXTS, top_k=None) == theirs(TEXTS, top_k=None)
    with pytest.raises(ValueError, match="without pad_token cannot do batching"):
        ours(TEXTS, batch_size=2)


def test_outputs_without_names_are_left_to_hugging_face(both, monkeypatch):
    ours, theirs = both("feature-extraction")
    monkeypatch.setattr(ours.model.config, "return_dict", False)
    assert ours(TEXTS) == theirs(TEXTS)


def test_the_tasks_keep_their_names_and_defaults(both, tmp_path):
    for alias, task in (("sentiment-analysis", "text-classification"), ("ner", "token-classification")):
        name, entry, _ = PIPELINE_REGISTRY.check_task(alias)
        assert name == task and entry["default"]["model"] and entry["type"] == "text"
        ours = both(task)[0]
        assert type(ours) is type(pipeline(alias, model=ours.model, tokenizer=ours.tokenizer))
        assert type(ours).__module__ == sentence_tasks.__name__ and isinstance(ours, THEIRS[task])
        ours.save_pretrained(tmp_path)  # as Hugging Face's: without code of a pipeline
        assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 9))
def test_batches_hold_each_row_once_within_their_budget(lengths, max_rows):
    for most in (None, max_rows):
        batches = bulk.plan_batches(lengths, most)
        assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
        for batch in batches:
            own = [lengths[place] for place in batch]
            assert len(own) == 1 or (max(own) * len(own) <= bulk.TOKENS_PER_BATCH and min(own) > 0)
            assert len(own) <= (most or len(own))


def test_a_batch_that_fails_loses_no_other_result(both, tokenizer, monkeypatch):
    """A text that is too long for the model is found alone, and after the results before it."""
    ours, _ = both("text-classification")
    longest = len(tokenizer(LONG)["input_ids"])
    assert longest > 64
    monkeypatch.setattr(bulk, "TOKENS_PER_BATCH_ON_CPU", 4096)  # all in one batch
    params = ({}, {}, {"top_k": 1, "_legacy": False})
    found, stream = [], iter(bulk.BulkResults(ours, [TEXTS[0], LONG, TEXTS[4]], 0, 1, params))
    found.append(next(stream))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        next(stream)
    assert_close(found, [ours(TEXTS[0], top_k=1)])


@pytest.mark.parametrize("batch_size", [0, -1, 2.0])
def test_a_batch_holds_some_texts(both, batch_size):
    for inputs in (TEXTS, (text for text in TEXTS)):
        with pytest.raises(ValueError, match="must be a positive integer"):
            list(both("text-classification")[0](inputs, batch_size=batch_size))


def test_inputs_of_several_rows_go_alone(both):
    ours, theirs = both("feature-extraction")
    inputs = [["Oui", "Non"], "Oui", ["Non", "Oui"]]
    assert_close(ours(inputs), theirs(inputs))


def test_what_a_subclass_changes_holds_for_many_texts(both):
    class Loud(sentence_tasks.TextClassificationPipeline):
        def preprocess(self, inputs, **params):
            return super().preprocess(inputs.upper(), **params)

        def _forward(self, model_inputs):
            return {**super()._forward(model_inputs), "number": 3}

        def postprocess(self, model_outputs, **params):
            return model_outputs["number"], super().postprocess(model_outputs, **params)

    ours, _ = both("text-classification")
    loud = Loud(model=ours.model, tokenizer=ours.tokenizer)
    assert_close(loud(TEXTS), [(3, result) for result in ours([text.upper() for text in TEXTS])])
