"""The causal convolution: torch's own, padding anywhere, a cache in pieces of any size, tokens taken back."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.cache_utils import DynamicCache

from fratrie import FratrieDecoderConfig
from fratrie.modeling.convolution import CausalConvolution

CONFIG = FratrieDecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, layer_types=["conv"])


def build(taps=4, activation="silu"):
    torch.manual_seed(0)
    return CausalConvolution(3, taps, bias=True, activation=activation).double()


def tokens(*shape):
    return torch.randn(*shape, 3, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_equals_the_convolution_of_torch(taps):
    ours = build(taps, activation=None)
    theirs = nn.Conv1d(3, 3, taps, groups=3, padding=taps - 1).double()
    theirs.load_state_dict(ours.state_dict())
    for length in (1, 2, 9):
        x = tokens(2, length)
        close(ours(x), theirs(x.transpose(1, 2))[..., :length].transpose(1, 2))


@settings(max_examples=40, deadline=None)
@given(
    real=st.lists(st.booleans(), min_size=1, max_size=10),
    cuts=st.sets(st.integers(1, 9)),
    taps=st.integers(1, 5),
)
def test_padding_anywhere_and_pieces_of_any_size_change_nothing(real, cuts, taps):
    """A row with padding beside one without, then two more tokens of each, from the cache."""
    convolution, x = build(taps), tokens(2, len(real) + 2)
    mask = torch.tensor([[*real, True, True], [True] * len(x[0])])
    bounds = [0, *sorted(cut for cut in cuts if cut < len(real)), len(real), len(x[0])]
    cache, parts = DynamicCache(config=CONFIG), []
    for start, end in pairwise(bounds):
        if end > start:
            parts.append(convolution(x[:, start:end], mask[:, start:end], cache))
    for row, mixed in enumerate(torch.cat(parts, dim=1)):
        close(mixed[mask[row]], convolution(x[row : row + 1, mask[row]])[0])
        assert not mixed[~mask[row]].any()


@pytest.mark.parametrize("padding", [0, 2])
def test_tokens_that_are_taken_back_leave_no_trace(padding):
    """As in assisted generation, where the cache keeps what it may have to give back; padding stands on the left."""
    convolution, x = build(), tokens(1, 9)
    cache, mask = DynamicCache(config=CONFIG), (torch.arange(4) >= padding)[None]
    cache.activate_past_recording()
    convolution(x[:, :4], mask, cache)
    convolution(tokens(1, 3), torch.ones(1, 3), cache)
    cache.crop(-3)
    close(convolution(x[:, 4:], torch.ones(1, 5), cache), convolution(x[:, padding:])[:, 4 - padding :])


def test_a_state_in_half_precision_is_kept_as_it_came():
    convolution, cache = build().to(torch.bfloat16), DynamicCache(config=CONFIG)
    x = tokens(2, 6).to(torch.bfloat16)
    pieces = [convolution(x[:, :2], None, cache), convolution(x[:, 2:], torch.ones(2, 4), cache)]
    assert torch.equal(torch.cat(pieces, dim=1), convolution(x))
    assert cache.get_conv_state(0).dtype == torch.bfloat16


def test_gradients_with_padding_equal_finite_differences():
    convolution, mask = build(), torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    x = tokens(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda states: convolution(states, mask), x)
