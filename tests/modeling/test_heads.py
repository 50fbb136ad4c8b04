"""Pooling of sentences and the classification head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from fratrie import (
    FratrieDecoderForSequenceClassification,
    FratrieEncoderConfig,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
)
from fratrie.modeling.heads import ClassificationHead, find_real_tokens, pool

POOLINGS = ("first", "mean", "last")
TINY = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "num_labels": 3,
}


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_pooling_of_any_mask(rows):
    states, real = torch.randn(len(rows), 5, 3).double(), torch.tensor(rows)
    pooled = {name: pool(states, real, name) for name in POOLINGS}
    for row, mask in enumerate(rows):
        tokens = states[row][real[row]]
        if any(mask):
            close(pooled["first"][row], tokens[0])
            close(pooled["mean"][row], tokens.mean(0))
            close(pooled["last"][row], tokens[-1])
        else:
            assert not pooled["mean"][row].any()
            assert pooled["first"][row].isfinite().all() and pooled["last"][row].isfinite().all()


def test_real_tokens_are_those_of_the_mask_then_those_that_are_no_padding():
    states, ids = torch.zeros(2, 3, 4), torch.tensor([[5, 0, 0], [0, 6, 7]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert find_real_tokens(states, ids, mask, 0).tolist() == mask.bool().tolist()
    assert find_real_tokens(states, ids, None, 0).tolist() == [[True, False, False], [False, True, True]]
    assert find_real_tokens(states, ids, None, None).all()
    assert find_real_tokens(states, None, None, 0).all()
    with pytest.raises(ValueError, match=r"\(batch, length\), not \(2, 1, 3, 3\)"):
        find_real_tokens(states, ids, torch.ones(2, 1, 3, 3), 0)


@pytest.mark.parametrize("sizes", [None, [8], [12, 5]], ids=str)
@pytest.mark.parametrize("act", ["tanh", "relu"])
def test_dense_layers_before_the_output(sizes, act):
    config = FratrieEncoderConfig(**TINY, classifier_hidden_sizes=sizes, classifier_activation=act)
    head, x = ClassificationHead(config).double().eval(), torch.randn(2, 16).double()
    linears = [module for module in head.modules() if isinstance(module, torch.nn.Linear)]
    shapes = [16, *(sizes or []), 3]
    assert [tuple(layer.weight.shape) for layer in linears] == list(zip(shapes[1:], shapes[:-1], strict=True))
    expected = x
    for layer in linears[:-1]:
        expected = ACT2FN[act](expected @ layer.weight.T + layer.bias)
    close(head(x), expected @ linears[-1].weight.T + linears[-1].bias)
    assert head(torch.randn(2, 7, 16).double()).shape == (2, 7, 3)


@pytest.mark.parametrize("norm", [None, "layer_norm", "rms_norm"])
@pytest.mark.parametrize("bias, output_bias", [(True, False), (False, True), (False, False)])
def test_norms_and_biases_of_the_head(norm, bias, output_bias):
    """Each dense layer, its activation, then its norm; no norm on the labels' scores."""
    fields = {"classifier_norm": norm, "classifier_bias": bias, "classifier_output_bias": output_bias}
    config = FratrieEncoderConfig(**TINY, classifier_hidden_sizes=[12, 5], norm_eps=1e-3, **fields)
    head, x = ClassificationHead(config).double().eval(), torch.randn(2, 7, 16).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    state = head.state_dict()
    assert {name for name in state if name.startswith("dense") and name.endswith("bias")} == (
        {"dense.0.bias", "dense.1.bias"} if bias else set()
    )
    assert ("out_proj.bias" in state) == output_bias
    assert sum("norms" in name for name in state) == {None: 0, "layer_norm": 4, "rms_norm": 2}[norm]
    expected = x
    for index in (0, 1):
        expected = expected @ state[f"dense.{index}.weight"].T + state.get(f"dense.{index}.bias", 0.0)
        expected = expected.tanh()
        if norm == "layer_norm":
            centred = expected - expected.mean(-1, keepdim=True)
            expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            expected = expected * state[f"norms.{index}.weight"] + state[f"norms.{index}.bias"]
        elif norm == "rms_norm":
            expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            expected = expected * state[f"norms.{index}.weight"]
    close(head(x), expected @ state["out_proj.weight"].T + state.get("out_proj.bias", 0.0))


def test_dropout_acts_before_each_layer_in_training():
    config = FratrieEncoderConfig(**TINY, classifier_hidden_sizes=[8], classifier_dropout=0.5)
    head, x = ClassificationHead(config).double(), torch.randn(2, 16).double()
    drop = torch.nn.functional.dropout
    torch.manual_seed(0)
    actual = head(x)
    torch.manual_seed(0)
    close(actual, head.out_proj(drop(torch.tanh(head.dense[0](drop(x))))))
    close(head.eval()(x), head.out_proj(torch.tanh(head.dense[0](x))))


def build(model_class, **fields):
    torch.manual_seed(0)
    return model_class(model_class.config_class(**{**TINY, **fields})).double().eval()


@pytest.mark.parametrize(
    "model_class", [FratrieEncoderForSequenceClassification, FratrieDecoderForSequenceClassification]
)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("unpad", [True, False])
def test_padding_changes_no_score(model_class, pooling, side, unpad):
    model = build(model_class, classifier_pooling=pooling, unpad_inputs=unpad, position_type="rotary")
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = model(ids).logits
    states = model.model(ids).last_hidden_state
    pooled = {"first": states[:, 0], "mean": states.mean(1), "last": states[:, -1]}[pooling]
    close(expected, model.classifier(pooled))
    widths = (3, 0) if side == "left" else (0, 3)
    padded, mask = (torch.nn.functional.pad(x, widths) for x in (ids, torch.ones_like(ids)))
    close(model(padded, attention_mask=mask).logits, expected)


def test_defaults_fit_the_direction():
    assert build(FratrieEncoderForSequenceClassification).config.classifier_pooling == "mean"
    assert build(FratrieDecoderForSequenceClassification).config.classifier_pooling == "last"


def test_tokens_are_labelled_one_by_one():
    model, ids = build(FratrieEncoderForTokenClassification), torch.tensor([[5, 6, 7], [8, 9, 10]])
    logits = model(ids).logits
    assert logits.shape == (2, 3, 3)
    close(logits, model.classifier(model.model(ids).last_hidden_state))
