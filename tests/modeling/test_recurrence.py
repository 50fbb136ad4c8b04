"""The state equation of the gated recurrences against a loop over the tokens and against transformers' functions.

Its forms: decays by head or by channel, with the delta rule or without it.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode
from transformers import MiniMaxConfig
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from fratrie import FratrieDecoderConfig, FratrieDecoderModel
from fratrie.modeling.recurrence import recurrence, recurrence_flops

HEADS, KEY, VALUE = 3, 5, 4
every_form = [
    pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"]),
    pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"]),
]


def in_every_form(test):
    for mark in every_form:
        test = mark(test)
    return test


def draw(length, by_channel, delta, dtype=torch.float64, strength=2.0, batch=2):
    """Query, key, value, log decay and rate."""
    generator = torch.Generator().manual_seed(length)

    def normal(size):
        return torch.randn(batch, HEADS, length, size, generator=generator, dtype=dtype)

    key = torch.nn.functional.normalize(normal(KEY), dim=-1)
    decay = -strength * normal(KEY if by_channel else 1).abs()
    return normal(KEY), key, normal(VALUE), decay, normal(1).sigmoid() if delta else None


def token_by_token(query, key, value, log_decay, rate=None, state=None):
    """The equation, a loop over the tokens."""
    state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]) if state is None else state
    outputs = []
    for place in range(query.shape[2]):
        q, k, v, decay = (x[:, :, place] for x in (query, key, value, log_decay))
        state = decay.exp()[..., None] * state
        if rate is not None:
            v = rate[:, :, place] * (v - torch.einsum("bhcv,bhc->bhv", state, k))
        state = state + torch.einsum("bhc,bhv->bhcv", k, v)
        outputs.append(torch.einsum("bhcv,bhc->bhv", state, q))
    return torch.stack(outputs, 2), state


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@in_every_form
@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 21), chunk=st.integers(1, 24), starts=st.booleans())
def test_any_chunk_size_equals_the_equation(by_channel, delta, length, chunk, starts):
    tokens = draw(length, by_channel, delta)
    state = torch.randn(2, HEADS, KEY, VALUE, dtype=torch.float64) if starts else None
    close(recurrence(*tokens, state, chunk), token_by_token(*tokens, state))


@in_every_form
@pytest.mark.parametrize("length", [1, 11])
def test_gradients_equal_those_of_the_equation(by_channel, delta, length):
    state = torch.randn(2, HEADS, KEY, VALUE, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*draw(length, by_channel, delta), state) if x is not None]
    found, expected = (
        run(*inputs[:4], inputs[4] if delta else None, inputs[-1]) for run in (in_chunks_of_four, token_by_token)
    )
    weights = [torch.randn_like(x) for x in found]
    found, expected = (torch.autograd.grad(outputs, inputs, weights) for outputs in (found, expected))
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)


def in_chunks_of_four(*tokens):
    return recurrence(*tokens, chunk_size=4)


@in_every_form
@pytest.mark.parametrize("pieces", [[4, 1, 8], [1, 1, 11]], ids=str)
def test_pieces_that_hand_their_state_on_equal_one_pass(by_channel, delta, pieces):
    tokens = draw(13, by_channel, delta)
    state, outputs = None, []
    for parts in zip(*(x.split(pieces, dim=2) if x is not None else [None] * 3 for x in tokens), strict=True):
        output, state = recurrence(*parts, state, chunk_size=3)
        outputs.append(output)
    expected, last = recurrence(*tokens)
    close((torch.cat(outputs, dim=2), state), (expected, last))


@in_every_form
def test_tokens_that_neither_decay_nor_write_are_as_if_they_were_not_there(by_channel, delta):
    tokens = draw(12, by_channel, delta)
    real = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    hidden = [x if x is None else x * real[:, None] for x in tokens[1:]]
    output, state = recurrence(tokens[0], *hidden, chunk_size=5)
    expected, last = recurrence(*(x if x is None else x[:, :, real] for x in tokens), chunk_size=5)
    close((output[:, :, real], state), (expected, last))


# --- transformers' functions, which compute in float32 ---------------------------------------------------------------


def in_their_order(tokens):
    query, key, value, decay, rate = (x.transpose(1, 2) for x in tokens)
    return query, key, value, decay, rate.squeeze(-1)


@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("length", [1, 37])
def test_equals_the_gated_delta_rule_of_qwen3_next(theirs, length):
    tokens, state = draw(length, False, True, torch.float32), torch.randn(2, HEADS, KEY, VALUE)
    query, key, value, decay, rate = in_their_order(tokens)
    expected, last = theirs(
        query, key, value, decay.squeeze(-1), rate, chunk_size=16, initial_state=state, output_final_state=True
    )
    output, found = recurrence(tokens[0] * KEY**-0.5, *tokens[1:], state, chunk_size=10)
    close((output.transpose(1, 2), found), (expected, last), 1e-5)


def test_equals_the_delta_attention_of_kimi_linear():
    tokens, state = draw(37, True, True, torch.float32), torch.randn(2, HEADS, KEY, VALUE)
    expected, last = chunk_kimi_delta_attention(
        *in_their_order(tokens), chunk_size=16, initial_state=state, output_final_state=True
    )
    output, found = recurrence(tokens[0] * KEY**-0.5, *tokens[1:], state, chunk_size=8)
    close((output.transpose(1, 2), found), (expected, last), 1e-5)


def test_a_decay_that_stays_the_same_is_that_of_minimax():
    config = MiniMaxConfig(
        hidden_size=12, num_attention_heads=HEADS, num_hidden_layers=2, block_size=8, hidden_act="silu"
    )
    layer = MiniMaxLightningAttention(config, layer_idx=0).double()
    torch.nn.init.eye_(layer.out_proj.weight)
    layer.norm = torch.nn.Identity()
    hidden = torch.randn(2, 21, 12, dtype=torch.float64)
    expected, last = layer(hidden, None, None)
    states = torch.nn.functional.silu(layer.qkv_proj(hidden)).unflatten(-1, (HEADS, 12)).transpose(1, 2)
    decay = -layer.slope_rate.expand(2, HEADS, 21, 1)
    output, found = recurrence(*states.split(4, dim=-1), decay, chunk_size=5)
    gate = layer.output_gate(hidden).sigmoid()
    close((gate * output.transpose(1, 2).flatten(2), found), (expected, last), 1e-6)  # slopes in float32


# --- precision, compilation, cost ------------------------------------------------------------------------------------


@in_every_form
@pytest.mark.parametrize("strength", [30.0, 3000.0])
def test_a_strong_decay_gives_no_infinite_number(by_channel, delta, strength):
    """exp of what decays within a chunk is zero, and exp of its opposite infinite, in float32."""
    tokens = [x if x is None else x.requires_grad_() for x in draw(64, by_channel, delta, torch.float32, strength)]
    exact, _ = token_by_token(*(x if x is None else x.detach().double() for x in tokens))
    output, state = recurrence(*tokens)
    close(output.double(), exact, 1e-4)
    (output.sum() + state.sum()).backward()
    assert all(x.grad.isfinite().all() for x in tokens if x is not None)


@in_every_form
@torch.no_grad()
def test_half_precision_and_autocast_leave_the_state_in_float32(by_channel, delta):
    tokens = [x if x is None else x.bfloat16() for x in draw(40, by_channel, delta)]
    expected = recurrence(*(x if x is None else x.float() for x in tokens), chunk_size=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = recurrence(*tokens, chunk_size=8)
    assert all(map(torch.equal, found, expected))


def test_one_compiled_graph_serves_every_length():
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(recurrence, backend=graphs, dynamic=True, fullgraph=True)
    for length in (9, 2, 3, 4, 8, 30):  # fewer than a chunk, whole chunks, and a rest
        tokens = draw(
            length, by_channel=True, delta=True, batch=7
        )  # of another size than all else: equal ones become one
        close(compiled(*tokens, None, 4), recurrence(*tokens, None, 4))
    assert graphs.frame_count == 1


@in_every_form
@pytest.mark.parametrize("length, chunk", [(1, 8), (3, 8), (20, 8), (20, 64)])
def test_its_operations_are_those_that_torch_counts(by_channel, delta, length, chunk):
    tokens = draw(length, by_channel, delta)
    with FlopCounterMode(display=False) as counter:
        recurrence(*tokens, None, chunk)
    counted = 2 * HEADS * recurrence_flops(length, chunk, KEY, VALUE, by_channel, delta)
    assert counted == counter.get_total_flops()


class Rounded(torch.autograd.Function):
    """To bfloat16 and back, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


@pytest.mark.parametrize("name", ["retention", "kimi_delta", "gated_delta", "ssd"])
def test_under_autocast_gradients_are_as_exact_as_linear_maps_in_bfloat16_let_them_be(name):
    """What they lack, a stack in float64 lacks as well whose linear maps alone are rounded."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 40}
    torch.manual_seed(0)
    model = FratrieDecoderModel(FratrieDecoderConfig(**sizes, mixer_types=[name] * 2, position_type="none")).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.3)
    exact, rounded = (copy.deepcopy(model).double() for _ in range(2))
    for module in rounded.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.bfloat16().double()
            module.register_forward_pre_hook(lambda _, inputs: (Rounded.apply(inputs[0]),))
            module.register_forward_hook(lambda _, inputs, output: Rounded.apply(output))
    ids, weights = torch.randint(1, 40, (2, 24)), torch.randn(2, 24, 16)

    def gradients(of, autocast=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = of(ids, use_cache=False).last_hidden_state
        (states.double() * weights).mean().backward()
        return torch.cat([weight.grad.double().flatten() for weight in of.parameters() if weight.grad is not None])

    expected = gradients(exact)
    errors = [(found - expected).norm() for found in (gradients(model, autocast=True), gradients(rounded))]
    assert errors[0] < 1.2 * errors[1] < 0.3 * expected.norm()
