"""bertviz: its views show the attention weights of all siblings."""

import json

import numpy as np
import pytest
import torch
from bertviz import head_view, model_view
from bertviz.neuron_view import get_attention
from combinations import DECODER, ENCODER, SEQ2SEQ, case_of, padded_inputs
from transformers import BertConfig, BertModel

import fratrie

pytestmark = pytest.mark.ecosystem

VIEWS = pytest.mark.parametrize("view", [head_view, model_view])


def shown(html):
    """The weights in a page of bertviz, one array `(layers, heads, queries, keys)` a filter of the page."""
    script = html.data
    start = script.index("const params = ") + len("const params = ")
    params, _ = json.JSONDecoder().raw_decode(script[start:])
    return [np.asarray(entry["attn"]) for entry in params["attention"]]


def tokens(ids):
    return [f"token{number}" for number in ids[0].tolist()]


@VIEWS
@pytest.mark.parametrize("sibling", [ENCODER, DECODER])
def test_a_view_shows_the_weights_of_a_text(view, sibling):
    model = case_of(sibling, "llama").build("base", attn_implementation="eager")
    inputs = padded_inputs(sibling, rows=slice(1))
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    (weights,) = shown(view(attentions, tokens(inputs["input_ids"]), html_action="return"))
    np.testing.assert_allclose(weights, torch.cat(attentions), atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


@VIEWS
def test_a_view_shows_the_weights_of_both_stacks(view):
    model = case_of(SEQ2SEQ).build(attn_implementation="eager")
    inputs = padded_inputs(SEQ2SEQ, rows=slice(1))
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    page = view(
        encoder_attention=outputs.encoder_attentions,
        decoder_attention=outputs.decoder_attentions,
        cross_attention=outputs.cross_attentions,
        encoder_tokens=tokens(inputs["input_ids"]),
        decoder_tokens=tokens(inputs["decoder_input_ids"]),
        html_action="return",
    )
    expected = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    for weights, attentions in zip(shown(page), expected, strict=True):
        np.testing.assert_allclose(weights, torch.cat(attentions), atol=1e-6)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(BertModel, BertConfig), (fratrie.FratrieEncoderModel, fratrie.FratrieEncoderConfig)],
)
def test_the_view_of_neurons_takes_only_bertvizs_own_copies_of_models(model_class, config_class, encoder_tokenizer):
    """It reads queries and keys from the last output; of Hugging Face's BERT, and of ours, it shows no layer."""
    config = config_class(vocab_size=len(encoder_tokenizer), attn_implementation="eager", **SMALL)
    config.output_attentions = True
    model = model_class(config)
    assert len(model(torch.tensor([[5, 6, 7]])).attentions) == 1
    assert get_attention(model, "bert", encoder_tokenizer, "Ma mère.")["all"]["attn"] == []
