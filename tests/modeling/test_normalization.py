"""The norms of the slots against their formulas."""

import pytest
import torch

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


def test_no_norm_is_the_identity_without_weights():
    norm, x = build_norm(None, 8, 0.1), states()
    assert norm(x) is x and not list(norm.parameters())


def test_unknown_norm_is_an_invariant_of_the_configuration():
    with pytest.raises(AssertionError, match="batch_norm"):
        build_norm("batch_norm", 8, 0.1)
