"""Packed linear layers: the same outputs within what their precision rounds, and nothing lost silently."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieEncoderConfig,
    FratrieEncoderForTokenClassification,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.inference import FEW_TOKENS, TOKENS_AT_ONCE, PackedLinear, pack, place

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
# How far the outputs may move, as a share of their size.
ROUNDING = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 7e-2, "int8_weights": 7e-2}
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def decoder(**fields):
    torch.manual_seed(0)
    config = FratrieDecoderConfig(**TINY, position_type="rotary", eos_token_id=None, **fields)
    return FratrieDecoderForCausalLM(config).eval()


MODELS = {
    "decoder": decoder,
    "experts": lambda: decoder(num_experts=4, num_experts_per_tok=2, gated_feed_forward=True),
    "encoder": lambda: FratrieEncoderForTokenClassification(FratrieEncoderConfig(**TINY, num_labels=5)).eval(),
    "seq2seq": lambda: FratrieSeq2SeqForConditionalGeneration(
        FratrieSeq2SeqConfig(encoder=TINY, decoder=TINY, decoder_start_token_id=1)
    ).eval(),
    "bert": lambda: BertForSequenceClassification(BertConfig(**TINY)).eval(),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)).eval(),  # asks for the dtype of a weight
}


def precision_here(precision):
    if precision in ("bfloat16", "int8_weights") and not HAS_BFLOAT16:
        with pytest.raises(ValueError, match="no products of bfloat16"):
            pack(decoder(), precision)
        return False
    return True


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_outputs_are_those_of_the_model_within_rounding(name, precision):
    if not precision_here(precision):
        return
    torch.manual_seed(1)
    model = MODELS[name]()
    for weight in model.parameters():
        weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 7])
    inputs = {"input_ids": torch.randint(3, 50, (3, 7)), "attention_mask": mask}
    if name in ("seq2seq", "t5"):
        inputs["decoder_input_ids"] = torch.randint(3, 50, (3, 5))
    expected = model(**inputs).logits
    packed = pack(copy.deepcopy(model), precision)
    kinds = [type(module) for module in packed.modules()]
    assert PackedLinear in kinds and nn.Linear not in kinds
    actual = packed(**inputs).logits
    assert actual.dtype == expected.dtype
    difference = (actual - expected).norm() / expected.norm()
    assert difference < ROUNDING[precision]
    assert precision == "float32" or difference > 1e-5, "nothing was rounded"


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_maps_any_shape(bias, precision):
    if not precision_here(precision):
        return
    layer = nn.Linear(16, 6, bias=bias)
    packed = pack(_Wrapped(layer), precision).layer
    for shape in ((16,), (1, 16), (2, 3, 16), (0, 16), (2, 0, 3, 16)):
        x = torch.randn(shape)
        expected = layer(x)
        assert packed(x).shape == expected.shape
        torch.testing.assert_close(packed(x), expected, rtol=0.1, atol=0.1)
    x = torch.randn(16, 5).T  # not contiguous
    torch.testing.assert_close(packed(x), layer(x), rtol=0.1, atol=0.1)


class _Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = copy.deepcopy(layer)


@torch.no_grad()
def test_float32_writes_the_same_texts():
    model, ids = decoder(), torch.randint(3, 50, (2, 4))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(pack(model).generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_a_half_precision_model_keeps_its_dtype():
    model = pack(decoder().to(torch.bfloat16), "int8")
    assert model(torch.tensor([[3, 4]])).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_a_text_gets_the_same_integers_in_a_batch_and_alone():
    layer = pack(_Wrapped(nn.Linear(16, 6)), "int8").layer
    x = torch.randn(5, 16) * torch.tensor([[1e-3], [1.0], [1e3], [0.0], [5.0]])
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, TOKENS_AT_ONCE, TOKENS_AT_ONCE + 1, 515])
@pytest.mark.parametrize("sizes", [(64, 23), (67, 24)])
@pytest.mark.parametrize("precision", ["int8", "int8_weights"])
@torch.no_grad()
def test_products_of_8_bits_are_those_of_the_rounded_numbers_however_many_tokens(precision, sizes, tokens, dtype):
    if not precision_here(precision):
        return
    linear, x = nn.Linear(*sizes), torch.randn(tokens, sizes[0]).to(dtype)

    def rounded(rows):
        steps = rows.abs().amax(1, keepdim=True) / 127
        return (rows / steps).round() * steps

    inputs = rounded(x.double()) if precision == "int8" else x.bfloat16().double()
    expected = inputs @ rounded(linear.weight.double()).T + linear.bias.double()
    # Of 8 bits each, in sums of 32: only what is said in bfloat16 is rounded again.
    error = 1e-6 if precision == "int8" and dtype == torch.float32 else 2**-8
    actual = pack(_Wrapped(linear), precision).layer(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=2 * error, atol=2 * error)
    # As channels that lie side by side, as convolutions leave them.
    torch.testing.assert_close(pack(_Wrapped(linear), precision).layer(x.T.contiguous().T), actual)


def test_a_packed_model_is_not_saved(tmp_path):
    model = copy.deepcopy(pack(decoder()))
    for save in (lambda: model.save_pretrained(tmp_path / "model"), model.state_dict):
        with pytest.raises(ValueError, match="cannot be saved"):
            save()
    assert not list(tmp_path.iterdir())
    assert "precision='float32'" in str(model)


def test_a_packed_model_does_not_learn():
    model = pack(decoder())
    assert not any(weight.requires_grad for weight in model.parameters())
    with pytest.raises(ValueError, match="cannot learn"):
        model.train()(torch.tensor([[3, 4]]))


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"precision='int4': choose from 'float32', .*'int8_weights'"):
        pack(decoder(), "int4")
    with pytest.raises(ValueError, match="weights are on meta"):
        pack(decoder().to("meta"))
    with pytest.raises(ValueError, match="is packed already"):
        pack(pack(decoder(), "int8"))
    with pytest.raises(ValueError, match="no linear layers"):
        pack(nn.LayerNorm(4))


def test_a_model_is_placed_as_its_device_allows():
    model, cpu, elsewhere = decoder(), torch.device("cpu"), torch.device("meta")
    assert place(model, cpu) is model and type(model.lm_head) is nn.Linear
    assert type(place(model, cpu, "int8").lm_head) is PackedLinear
    moved = place(decoder(), elsewhere, "bfloat16")
    assert moved.device == elsewhere and moved.dtype == torch.bfloat16 and type(moved.lm_head) is nn.Linear
    for precision in ("int8", "int8_weights"):
        with pytest.raises(ValueError, match=f"'{precision}' is for a CPU, not for meta"):
            place(decoder(), elsewhere, precision)


def test_layers_with_hooks_stay_as_they_are():
    model, ids = decoder(), torch.tensor([[3, 4]])
    plain = pack(copy.deepcopy(model))(ids).logits
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + 100)
    packed = pack(model)
    assert type(packed.lm_head) is nn.Linear and type(packed.model.layers[0].mixer.q_proj) is PackedLinear
    torch.testing.assert_close(packed(ids).logits, plain + 100)


@pytest.mark.parametrize(
    ("saved", "fields"),
    [
        (3, {"gated_feed_forward": True}),  # of q, k, v and of gate, up
        (2, {"mixer_types": ["linear"] * 2, "attention_bias": False}),
        (1, {"kv_lora_rank": 8}),
        (1, {"kv_lora_rank": 8, "q_lora_rank": 12}),
        (3, {"num_experts": 4, "num_shared_experts": 1, "gated_feed_forward": True}),
    ],
)
@torch.no_grad()
def test_layers_that_read_the_same_input_are_one_product_and_the_same_integers(saved, fields, monkeypatch):
    model, ids = decoder(**fields), torch.randint(3, 50, (2, 5))
    for weight in model.parameters():
        weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    together = pack(copy.deepcopy(model), "int8")
    products, counted = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *args: products.append(1) or counted(*args))
    together(ids)
    joint = len(products)
    for module in model.modules():
        if hasattr(module, "joint_maps"):
            monkeypatch.setattr(type(module), "joint_maps", ())
    apart = pack(model, "int8")
    products.clear()
    apart(ids)
    assert len(products) == sum(type(module) is PackedLinear for module in apart.modules())
    assert joint == len(products) - 2 * saved
    for one, other in zip(together.modules(), apart.modules(), strict=True):
        if isinstance(one, PackedLinear):
            x = torch.randn(3, one.in_features)
            assert torch.equal(one(x), other(x))


def test_a_hook_on_one_of_the_layers_of_an_input_is_called():
    model, ids, called = decoder(), torch.tensor([[3, 4]]), []
    first, second = (layer.mixer for layer in model.model.layers)
    first.k_proj.register_forward_hook(lambda *_: called.append("before"))
    packed = pack(model)
    assert type(first.k_proj) is nn.Linear and type(first.q_proj) is type(second.k_proj) is PackedLinear
    expected = packed(ids).logits
    second.k_proj.register_forward_hook(lambda module, args, output: called.append("after"))
    torch.testing.assert_close(packed(ids).logits, expected)
    assert called == ["before", "before", "after"]


def test_a_model_of_several_dtypes_keeps_them_unless_a_precision_is_asked_for():
    for precision in (None, "int8"):
        model = decoder().to(torch.bfloat16)
        model.model.norm.float()  # as families keep some weights in half precision
        placed = place(model, torch.device("cpu"), precision)
        assert placed.dtype == torch.bfloat16 and placed.model.norm.weight.dtype == torch.float32
