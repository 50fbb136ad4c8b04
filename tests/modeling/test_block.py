"""The four norm slots of a block: pre-norm, post-norm and sandwich norm against their formulas."""

import pytest
import torch
from layouts import rows_of_mixer

from fratrie import FratrieDecoderConfig, norm_slots
from fratrie.modeling.block import Block


def build(**fields):
    config = FratrieDecoderConfig(
        **{
            "vocab_size": 20,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            "attn_implementation": "sdpa",
            "add_cross_attention": True,
            **fields,
        }
    )
    torch.manual_seed(0)
    block = Block(config, 0).double().eval()
    for parameter in block.parameters():
        parameter.data.normal_()
    return block


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("position", ["pre", "post", "sandwich", "none"])
def test_layouts(position, norm):
    slots = (
        norm_slots(position, norm)
        if position != "none"
        else {"mixer_input_norm": None, "feed_forward_input_norm": None, "final_norm": None}
    )
    block = build(**slots)
    x, states = torch.randn(2, 3, 8).double(), torch.randn(2, 4, 8).double()
    layout = rows_of_mixer(block.mixer, x)

    def branch(x, function, before, after):
        match position:
            case "pre":
                return x + function(before(x))
            case "post":
                return after(x + function(x))
            case "sandwich":
                return x + after(function(before(x)))
            case "none":
                return x + function(x)

    expected = branch(x, lambda y: block.mixer(y, layout)[0], block.mixer_input_norm, block.mixer_output_norm)
    expected = branch(
        expected,
        lambda y: block.cross_attention(y, states, layout)[0],
        block.cross_attention_input_norm,
        block.cross_attention_output_norm,
    )
    expected = branch(expected, block.feed_forward, block.feed_forward_input_norm, block.feed_forward_output_norm)
    torch.testing.assert_close(block(x, states, layout=layout), expected)


def test_slots_can_be_filled_one_by_one():
    block = build(mixer_input_norm=None, mixer_output_norm="rms_norm", feed_forward_input_norm=None)
    kinds = [
        type(getattr(block, name)).__name__
        for name in ("mixer_input_norm", "mixer_output_norm", "feed_forward_input_norm", "feed_forward_output_norm")
    ]
    assert kinds == ["NoNorm", "RMSNorm", "NoNorm", "NoNorm"]
    x = torch.randn(2, 3, 8).double()
    layout = rows_of_mixer(block.mixer, x)
    expected = x + block.mixer_output_norm(block.mixer(x, layout)[0])
    torch.testing.assert_close(block(x, layout=layout), expected + block.feed_forward(expected))


def test_residual_dropout_acts_on_each_branch_in_training():
    block, x = build(hidden_dropout=0.5), torch.randn(2, 3, 8).double()
    layout = rows_of_mixer(block.mixer, x)
    torch.testing.assert_close(block(x, layout=layout), block(x, layout=layout))
    block.train()
    torch.manual_seed(3)
    dropped = block(x, layout=layout)
    torch.manual_seed(3)
    drop = torch.nn.functional.dropout
    expected = x + drop(block.mixer(block.mixer_input_norm(x), layout)[0], 0.5)
    expected = expected + drop(block.feed_forward(block.feed_forward_input_norm(expected)), 0.5)
    torch.testing.assert_close(dropped, expected)


def test_cross_attention_is_left_out_without_the_encoders_states():
    """A decoder that could attend an encoder is then one of text alone."""
    block, x = build(), torch.randn(2, 3, 8).double()
    layout = rows_of_mixer(block.mixer, x)
    alone, with_states = block(x, layout=layout), block(x, torch.randn(2, 4, 8).double(), layout=layout)
    block.cross_attention = None
    assert torch.equal(alone, block(x, layout=layout))
    assert (with_states - alone).abs().min() > 0
