"""Linear attention beyond the mixers' contract: its feature map, its chunks, its state of constant size."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from transformers.cache_utils import DynamicCache

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, FratrieDecoderModel
from fratrie.modeling.linear_attention import feature_map


def build(model_class=FratrieDecoderModel, dtype=torch.float64, **fields):
    shared = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "layer_types": ["linear_attention"] * 2,
        "initializer_range": 0.4,
    }
    torch.manual_seed(0)
    return model_class(FratrieDecoderConfig(**{**shared, **fields})).to(dtype).eval()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_feature_map_is_elu_plus_one_to_the_last_digits(dtype):
    numbers = [-80.0, -17.0, -14.0, -1.0, -1e-8, 0.0, 2.5, 1e3, 1e30]
    x = torch.tensor(numbers, dtype=dtype, requires_grad=True)
    found = feature_map(x)
    found.sum().backward()
    exact = torch.tensor([math.exp(number) if number < 0 else number + 1 for number in numbers], dtype=dtype)
    slope = torch.tensor([math.exp(min(number, 0)) for number in numbers], dtype=dtype)
    torch.testing.assert_close(found, exact, rtol=4 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(x.grad, slope, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_one_compiled_graph_serves_every_length():
    torch._dynamo.reset()
    mixer, graphs = build(dtype=torch.float32, linear_chunk_size=4).layers[0].mixer, CompileCounter()
    compiled = torch.compile(mixer.attend, backend=graphs, dynamic=True, fullgraph=True)
    for length in (9, 2, 3, 4, 8, 12, 30):  # fewer than a chunk, whole chunks, and a rest
        inputs = [torch.randn(2, heads, length, 4) for heads in (4, 2, 2)]
        close(compiled(*inputs, None, None)[0], mixer.attend(*inputs, None, None)[0], 1e-6)
    assert graphs.frame_count == 1


@torch.no_grad()
def test_an_exported_graph_takes_every_length():
    model = build(dtype=torch.float32, linear_chunk_size=4, num_hidden_layers=1, layer_types=["linear_attention"])
    ids, sizes = torch.ones(2, 6, dtype=torch.long), {"batch": torch.export.Dim.AUTO, "length": torch.export.Dim.AUTO}
    shapes = {"input_ids": {0: sizes["batch"], 1: sizes["length"]}, "use_cache": None}
    inputs = {"input_ids": ids, "use_cache": False}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    for length in (2, 4, 19):
        inputs["input_ids"] = torch.arange(3 * length).view(3, length) % 29 + 1
        close(exported(**inputs).last_hidden_state, model(**inputs).last_hidden_state, 1e-5)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 20), chunk=st.integers(1, 25), start=st.integers(0, 20))
def test_any_chunk_size_and_any_split_with_a_cache_give_equal_outputs(length, chunk, start):
    ids = torch.arange(length)[None] + 1
    expected = build(linear_chunk_size=64)(ids, use_cache=False).last_hidden_state
    model = build(linear_chunk_size=chunk)
    close(model(ids, use_cache=False).last_hidden_state, expected)
    cache, states = DynamicCache(config=model.config), []
    for place, piece in ((0, ids[:, :start]), (start, ids[:, start:])):
        if piece.numel():
            places = torch.arange(place, place + piece.shape[1])[None]
            states.append(model(piece, cache=cache, position_ids=places).last_hidden_state)
    close(torch.cat(states, 1), expected)


def test_state_has_a_constant_size():
    model = build()
    cache, sizes = DynamicCache(config=model.config), []
    for length in (1, 5, 30):
        model(torch.ones(2, length, dtype=torch.long), cache=cache, position_ids=torch.arange(length)[None])
        sizes.append([tuple(layer.recurrent_states[0].shape) for layer in cache.layers])
    assert sizes == [[(2, 4, 4, 5)] * 2] * 3  # batch, heads, head size, values and their ones


def test_state_is_kept_in_float32_for_half_precision():
    model = build(dtype=torch.bfloat16)
    ids = torch.arange(1, 13)[None]
    cache = DynamicCache(config=model.config)
    pieces = [
        model(ids[:, place : place + 1], cache=cache, position_ids=torch.tensor([[place]])).last_hidden_state
        for place in range(12)
    ]
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32
    expected = model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0.1, atol=0.1)


@torch.no_grad()
def test_autocast_leaves_the_sums_in_float32():
    model = build(dtype=torch.float32).train()
    inputs = [torch.randn(1, heads, 40, 4, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    cache, mixer = DynamicCache(config=model.config), model.layers[0].mixer
    expected = mixer.attend(*inputs, None, None)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mixer.attend(*inputs, None, None, cache=cache)[0]
    assert torch.equal(found, expected)
    assert cache.get_recurrent_state(0).dtype == torch.float32


def test_beams_reorder_the_state():
    model = build()
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model(ids, cache=cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    states = model(torch.tensor([[7], [7]]), cache=cache, position_ids=torch.tensor([[3]])).last_hidden_state
    expected = model(torch.tensor([[4, 5, 6, 7]]), use_cache=False).last_hidden_state[:, -1:]
    close(states, expected.expand(2, -1, -1))


def test_a_state_alone_does_not_know_its_length():
    model = build()
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(ValueError, match=r"position_ids.*attention_mask"):
        model(torch.tensor([[4]]), cache=cache)


@pytest.mark.parametrize("position_type", ["learned", "rotary", "none"])
@pytest.mark.parametrize("kinds", [["linear_attention"] * 2, ["full_attention", "linear_attention"]], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_with_cache_equals_without(position_type, kinds, beams):
    model = build(FratrieDecoderForCausalLM, position_type=position_type, layer_types=kinds, pad_token_id=0)
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    outputs = [
        model.generate(
            ids, attention_mask=mask, max_new_tokens=5, num_beams=beams, do_sample=False, use_cache=use_cache
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*outputs)
    alone = model.generate(torch.tensor([[5, 6]]), max_new_tokens=5, num_beams=beams, do_sample=False)
    assert torch.equal(outputs[0][0, 2:], alone[0])


# --- other feature maps ----------------------------------------------------------------------------------------------

MAPS = {"elu": feature_map, "relu": torch.relu, "exp": torch.exp}


def mixed_by_formula(phi, query, key, value, causal):
    """φ(q)·φ(k) as the weight of each pair written out, zeros for rows whose weights are all zero."""
    weights = torch.einsum("bhtc,bhsc->bhts", phi(query), phi(key).repeat_interleave(2, dim=1))
    weights = weights.tril() if causal else weights
    weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
    return (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_every_feature_map_weighs_by_the_product_of_its_features(name, causal):
    mixer = build(linear_feature_map=name, linear_chunk_size=4).layers[0].mixer
    mixer.is_causal = causal
    query, key, value = (torch.randn(2, heads, 11, 4, dtype=torch.float64) for heads in (4, 2, 2))
    query[0, 0, 3] = -1.0  # under "relu" no feature of this query is above zero
    cache = DynamicCache(config=mixer.config) if causal else None
    pieces = [slice(0, 5), slice(5, 6), slice(6, 11)] if causal else [slice(None)]
    found = [
        mixer.attend(query[:, :, piece], key[:, :, piece], value[:, :, piece], None, None, cache=cache)[0]
        for piece in pieces
    ]
    close(torch.cat(found, dim=1), mixed_by_formula(MAPS[name], query, key, value, causal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_exponentials_overflow_nowhere_and_know_neither_batch_nor_future(dtype):
    mixer = build(dtype=dtype, linear_feature_map="exp", linear_chunk_size=4).layers[0].mixer
    query, key = (200 * torch.randn(2, heads, 9, 4, dtype=dtype) for heads in (4, 2))
    value = 1e3 * torch.randn(2, 2, 9, 4, dtype=dtype)
    query.requires_grad_(), key.requires_grad_()
    found, _ = mixer.attend(query, key, value, None, None)
    found.sum().backward()
    assert found.isfinite().all() and query.grad.isfinite().all() and key.grad.isfinite().all()
    assert found.detach().abs().sum(-1).gt(0).all(), "every row has a weight"
    alone, _ = mixer.attend(query[:1, :, :5], key[:1, :, :5], value[:1, :, :5], None, None)
    torch.testing.assert_close(alone, found[:1, :5])
