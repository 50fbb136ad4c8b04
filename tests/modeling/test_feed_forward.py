"""The feed-forward against its formulas, and its place in the block."""

import pytest
import torch
from transformers.activations import ACT2FN

from fratrie import FratrieEncoderConfig
from fratrie.modeling.feed_forward import FeedForward


def build(**fields):
    config = FratrieEncoderConfig(
        **{
            "vocab_size": 20,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            **fields,
        }
    )
    torch.manual_seed(0)
    module = FeedForward(config).double().eval()
    for parameter in module.parameters():
        parameter.data.normal_()
    return module


@pytest.mark.parametrize("act", ["gelu", "relu", "silu", "gelu_new"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_formula(act, bias, gated):
    module, x = build(hidden_act=act, gated_feed_forward=gated, feed_forward_bias=bias), torch.randn(2, 3, 8).double()

    def linear(name):
        layer = getattr(module, name)
        assert (layer.bias is not None) == bias
        return x @ layer.weight.T + (layer.bias if bias else 0)

    inner = ACT2FN[act](linear("gate_proj")) * linear("up_proj") if gated else ACT2FN[act](linear("up_proj"))
    expected = inner @ module.down_proj.weight.T + (module.down_proj.bias if bias else 0)
    torch.testing.assert_close(module(x), expected)
    assert module.up_proj.weight.shape == (12, 8) and module.down_proj.weight.shape == (8, 12)


def test_width_can_be_given():
    config = FratrieEncoderConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12)
    assert FeedForward(config, 5).up_proj.weight.shape == (5, 8)


def test_dropout_acts_between_the_projections_in_training():
    module, x = build(activation_dropout=0.5), torch.randn(4, 8).double()
    torch.testing.assert_close(module(x), module(x))
    module.train()
    torch.manual_seed(1)
    dropped = module(x)
    torch.manual_seed(1)
    inner = torch.nn.functional.dropout(module.act_fn(module.up_proj(x)), 0.5)
    torch.testing.assert_close(dropped, module.down_proj(inner))


def test_each_token_stands_alone():
    module, x = build(gated_feed_forward=True), torch.randn(2, 5, 8).double()
    torch.testing.assert_close(module(x)[:, 3], module(x[:, 3]))
