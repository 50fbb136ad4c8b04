"""The norms of the slots against their formulas."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, norm_slots
from fratrie.modeling.normalization import build_norm


def states():
    return torch.randn(3, 4, 8, dtype=torch.float64) * 5 + 2


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias):
    norm, x = build_norm("layer_norm", 8, 0.1, bias).double(), states()
    assert {name for name, _ in norm.named_parameters()} == ({"weight", "bias"} if bias else {"weight"})
    for parameter in norm.parameters():
        parameter.data.normal_()
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected + norm.bias if bias else expected)


@pytest.mark.parametrize("bias", [True, False])
def test_rms_norm_has_no_bias_and_no_mean(bias):
    norm, x = build_norm("rms_norm", 8, 0.1, bias).double(), states()
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    norm.weight.data.normal_()
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_rounds_as_published_models_do(dtype):
    """To the bit: Llama's and T5's formula, which in float32 is torch's."""
    norm, x = build_norm("rms_norm", 64, 1e-6).to(dtype), torch.randn(50, 64).to(dtype)
    norm.weight.data.normal_()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert isinstance(norm, nn.RMSNorm) and norm(x).dtype == dtype
    assert torch.equal(norm(x), normed.to(dtype) * norm.weight)
    torchs = nn.functional.rms_norm(x, (64,), norm.weight, 1e-6)
    assert torch.equal(norm(x), torchs) == (dtype == torch.float32)


def test_rms_norm_of_other_dtypes_than_its_weights():
    """A residual stream in float32 comes back to half precision; weights in float32 lead to float32, as in Llama."""
    x = torch.randn(50, 64)
    norm = build_norm("rms_norm", 64, 1e-6)
    norm.weight.data.normal_()
    assert torch.equal(norm(x.half()), nn.functional.rms_norm(x.half(), (64,), eps=1e-6) * norm.weight)
    norm.half()
    assert torch.equal(norm(x), nn.functional.rms_norm(x, (64,), eps=1e-6).half() * norm.weight)


def test_rms_norm_plus_one_is_a_plain_norm_until_it_is_trained():
    norm, x = build_norm("rms_norm_plus_one", 8, 0.1).double(), states()
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(norm(x), expected)
    norm.weight.data.normal_()
    torch.testing.assert_close(norm(x), expected * (1 + norm.weight))
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = FratrieDecoderModel(FratrieDecoderConfig(**sizes, **norm_slots("pre", "rms_norm_plus_one")))
    model.to_empty(device="cpu").init_weights()
    assert not model.norm.weight.any() and not model.layers[0].mixer_input_norm.weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_plus_one_rounds_as_that_of_qwen3_next(dtype):
    """To the bit: once, behind the weights; a residual stream in float32 comes back to weights in half precision."""
    norm, theirs = build_norm("rms_norm_plus_one", 64, 1e-6).to(dtype), Qwen3NextRMSNorm(64).to(dtype)
    theirs.weight.data = norm.weight.data.normal_(0, 0.3)
    x = torch.randn(50, 64)
    assert norm(x.to(dtype)).dtype == dtype and torch.equal(norm(x.to(dtype)), theirs(x.to(dtype)))
    assert torch.equal(norm(x), theirs(x).to(dtype))


def test_no_norm_is_the_identity_without_weights():
    norm, x = build_norm(None, 8, 0.1), states()
    assert norm(x) is x and not list(norm.parameters())


def test_unknown_norm_is_an_invariant_of_the_configuration():
    with pytest.raises(AssertionError, match="batch_norm"):
        build_norm("batch_norm", 8, 0.1)
