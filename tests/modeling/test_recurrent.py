"""Recurrent mixers: the contract, torch's layers with the same weights, and what becomes of gradients over time."""

import pytest
import torch
from layouts import rows_of_mixer
from mixer_contract import MixerContract
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.cache_utils import DynamicCache

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderModel,
    FratrieEncoderConfig,
    FratrieEncoderModel,
)
from fratrie.modeling.mixers import MIXERS
from fratrie.modeling.recurrent import recur_as_one
from fratrie.onnx_export import export_onnx


class RecurrentContract(MixerContract):
    layer_type = "linear_attention"
    degenerate = ({}, {"num_attention_heads": 2})  # they have no heads

    def step(self, inner, state, recurrent):
        """The state `(numbers, E)` after a token, from W x + b (`inner`) and U and b (`recurrent`)."""
        raise NotImplementedError

    def plain(self, mixer, hidden, causal, angles, real):
        places = [place for place in range(len(hidden)) if real[place]]
        directions = []
        for direction, order in (("", places), ("_reverse", places[::-1]))[: 1 if causal else 2]:
            w, u, b, c = (
                getattr(mixer, f"{name}_l0{direction}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            state, outputs = hidden.new_zeros(mixer.states, mixer.size), {}
            for place in order:
                state = self.step(w @ hidden[place] + b, state, lambda h, u=u, c=c: u @ h + c)
                outputs[place] = state[0]
            zeros = hidden.new_zeros(mixer.size)
            directions.append(torch.stack([outputs.get(place, zeros) for place in range(len(hidden))]))
        return torch.cat(directions, dim=-1)


class TestRNN(RecurrentContract):
    mixer = "rnn"
    layer_type = "linear_attention"

    def step(self, inner, state, recurrent):
        return (inner + recurrent(state[0])).tanh()[None]


class TestLSTM(RecurrentContract):
    mixer = "lstm"
    layer_type = "linear_attention"
    counted_dtype = torch.float64  # torch's counter skips the fused kernel of float32

    def step(self, inner, state, recurrent):
        enter, forget, candidate, show = (inner + recurrent(state[0])).chunk(4)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * candidate.tanh()
        return torch.stack((show.sigmoid() * cell.tanh(), cell))


class TestGRU(RecurrentContract):
    mixer = "gru"
    layer_type = "linear_attention"

    def step(self, inner, state, recurrent):
        reset, update, candidate = zip(inner.chunk(3), recurrent(state[0]).chunk(3), strict=True)
        reset, update = sum(reset).sigmoid(), sum(update).sigmoid()
        new = (candidate[0] + reset * candidate[1]).tanh()
        return ((1 - update) * new + update * state[0])[None]


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
TORCH = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
NAMES = list(TORCH)


def build(name, causal=True, dtype=torch.float64, number=1, **fields):
    torch.manual_seed(0)
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    fields = {**SIZES, "position_type": "none", "num_hidden_layers": number, "mixer_types": [name] * number, **fields}
    return model_class(config_class(**fields)).to(dtype).eval()


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- torch's own layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", NAMES)
def test_is_the_layer_of_torch_with_the_same_weights(name, causal, bias):
    mixer = build(name, causal, attention_bias=bias).layers[0].mixer
    oracle = TORCH[name](16, 16 if causal else 8, batch_first=True, bidirectional=not causal, bias=bias).double()
    mixer.load_state_dict(oracle.state_dict())
    x, lengths = random(3, 7, 16).requires_grad_(), [7, 2, 5]
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    expected, _ = nn.utils.rnn.pad_packed_sequence(oracle(packed)[0], batch_first=True)
    found, _ = mixer.run(x, torch.arange(7) < torch.tensor(lengths)[:, None], None, None)
    close(found, expected)
    close(mixer.run(x, None, None, None)[0], oracle(x)[0])
    gradients, expected_gradients = (
        torch.autograd.grad(y.square().sum(), [x, *one.parameters()])
        for y, one in ((found, mixer), (expected, oracle))
    )
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_holds_the_states_of_torch_after_the_last_real_token(name, side):
    mixer = build(name).layers[0].mixer
    oracle, texts = TORCH[name](16, 16, batch_first=True).double(), [random(length, 16) for length in (4, 6)]
    oracle.load_state_dict(mixer.state_dict())
    x, mask = random(3, 8, 16), torch.zeros(3, 8, dtype=torch.long)
    for row, text in enumerate(texts):
        start = {"left": 8 - len(text), "right": 0, "both": 1}[side]
        x[row, start : start + len(text)], mask[row, start : start + len(text)] = text, 1
    cache = DynamicCache(config=mixer.config)
    mixer.run(x.flip(1)[:, :3], None, None, cache)
    before = cache.get_recurrent_state(0).clone()
    mixer.run(x, mask, None, cache)
    found = cache.get_recurrent_state(0)
    for row, text in enumerate(texts):
        start = tuple(state[None] for state in before[row])
        _, last = oracle(text, start if name == "lstm" else start[0])
        close(found[row], torch.cat(last if name == "lstm" else (last,)))
    assert torch.equal(found[2], before[2]), "a row without a token goes on from where it was"


@pytest.mark.parametrize("name", NAMES)
def test_states_are_float32_for_half_precision_and_under_autocast(name):
    half = build(name, dtype=torch.bfloat16)
    cache = DynamicCache(config=half.config)
    half(torch.arange(12)[None], cache=cache)
    assert cache.get_recurrent_state(0).dtype == torch.float32
    mixer, x = build(name, dtype=torch.float32).layers[0].mixer, random(2, 9, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = mixer.run(x, None, None, None)
    assert torch.equal(found, mixer.run(x, None, None, None)[0])


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_cache_equals_without(name):
    torch.manual_seed(0)
    config = build(name, number=2, pad_token_id=0).config
    model = FratrieDecoderForCausalLM(config).double().eval()
    for weight in model.parameters():
        weight.data.add_(0.3 * torch.randn_like(weight))
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for beams in (1, 2):
        options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False}
        outputs = [model.generate(ids, attention_mask=mask, use_cache=cached, **options) for cached in (True, False)]
        assert torch.equal(*outputs)
        assert torch.equal(outputs[0][0, 2:], model.generate(torch.tensor([[5, 6]]), **options)[0])


# --- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, causal", [("lstm", True), ("gru", False)])
def test_one_compiled_graph_trains_on_every_length(name, causal):
    torch._dynamo.reset()
    mixer, graphs = build(name, causal).layers[0].mixer, CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mixer.run, backend=graphs, dynamic=True, fullgraph=True)
    for length in (9, 2, 5, 17):
        x = random(2, length, 16).requires_grad_()
        mask = torch.arange(length) < torch.tensor([[length], [length - 1]])
        gradients = []
        for run in (compiled, mixer.run):
            output, _ = run(x, mask, None, None)
            gradients.append((output, *torch.autograd.grad(output.sin().sum(), [x, *mixer.parameters()])))
        for actual, wanted in zip(*gradients, strict=True):
            close(actual, wanted)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_operation_of_compiled_graphs_is_what_it_says_of_itself(name):
    mixer = MIXERS[name]
    shapes = [(mixer.gates * 4, 5), (mixer.gates * 4, 4), (mixer.gates * 4,), (mixer.gates * 4,)]
    weights = [random(*shape).requires_grad_() for shape in shapes]
    inputs = (name, random(2, 3, 5).requires_grad_(), random(mixer.states, 2, 4).requires_grad_(), weights)
    torch.library.opcheck(recur_as_one, inputs)


# --- gradients over time ---------------------------------------------------------------------------------------------


def reach(mixer, distance):
    """Norm of the gradient of a token's output by the input that many tokens before it, about states of zero."""
    hidden = torch.zeros(1, distance + 1, 16, dtype=torch.float64, requires_grad=True)
    output, _ = mixer(hidden, rows_of_mixer(mixer, hidden))
    (gradient,) = torch.autograd.grad(output[0, -1].sum(), hidden)
    return gradient[0, 0].norm().item()


def rnn_of_gain(gain):
    """A network whose recurrent weights make every vector this much longer."""
    mixer = build("rnn").layers[0].mixer
    nn.init.orthogonal_(mixer.weight_hh_l0, gain)
    nn.init.zeros_(mixer.bias_ih_l0)
    return mixer


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.5])
def test_the_gradient_of_an_rnn_vanishes_or_explodes_with_its_recurrent_weights(gain):
    """By the gain in each step (Bengio et al. 1994, Pascanu et al. 2013)."""
    mixer = rnn_of_gain(gain)
    near, far = reach(mixer, 10), reach(mixer, 50)
    assert 0.2 < far / near / gain**40 < 5
    assert (far / near < 1e-11) == (gain < 1) and (far / near > 1e6) == (gain > 1)


def test_clipping_bounds_the_gradient_that_explodes():
    mixer = rnn_of_gain(1.5)
    hidden = 1e-9 * random(1, 60, 16)
    output, _ = mixer(hidden, rows_of_mixer(mixer, hidden))
    output[0, -1].sum().backward()
    parameters = [weight for weight in mixer.parameters() if weight.grad is not None]
    before = [weight.grad.clone() for weight in parameters]
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    assert norm > 1e6
    clipped = torch.cat([weight.grad.flatten() for weight in parameters])
    close(clipped.norm(), torch.ones((), dtype=torch.float64), 1e-5)
    close(clipped * norm, torch.cat([gradient.flatten() for gradient in before]), 1e-5 * norm.item())


def test_a_gate_that_is_open_carries_the_gradient_and_attention_needs_no_steps():
    lstm = build("lstm").layers[0].mixer
    nn.init.zeros_(lstm.weight_hh_l0)
    lstm.bias_ih_l0.data[16:32] = 20.0  # the forget gate
    assert reach(lstm, 50) / reach(lstm, 10) > 0.99
    lstm.bias_ih_l0.data[16:32] = 0.0
    assert reach(lstm, 50) / reach(lstm, 10) < 1e-11  # it halves in each step
    attention = build("softmax").layers[0].mixer
    close(reach(attention, 50) / reach(attention, 10), 11 / 51)  # a share among the tokens


# --- how it begins, and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_weights_begin_as_those_of_torch_and_the_forget_gate_open(name):
    mixer = build(name, hidden_size=64, initializer_range=0.001).layers[0].mixer
    for key, weight in mixer.named_parameters():
        if key.startswith("weight"):
            assert 0.95 / 8 < weight.abs().max() <= 1 / 8
    opened = torch.zeros(4, 64, dtype=torch.float64)
    opened[1] = 1.0
    total = mixer.bias_ih_l0 + mixer.bias_hh_l0
    assert torch.equal(total, opened.flatten() if name == "lstm" else torch.zeros_like(total))


def test_two_directions_of_an_odd_width_are_refused():
    with pytest.raises(ValueError, match="hidden_size=15 is odd"):
        build("gru", False, hidden_size=15, num_attention_heads=3)
    build("gru", True, hidden_size=15, num_attention_heads=3)


def test_an_encoder_is_exported_for_every_length_but_not_to_onnx(tmp_path):
    model = build("gru", False, torch.float32)
    with pytest.raises(ValueError, match=r"mixer_types=\['gru'\].*torch\.export"):
        export_onnx(model, tmp_path / "model.onnx")
    sizes = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    inputs = {"input_ids": torch.ones(2, 6, dtype=torch.long)}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=sizes, strict=False).module()
    for length in (2, 19):
        ids = torch.arange(3 * length).view(3, length) % 29 + 1
        close(exported(input_ids=ids).last_hidden_state, model(ids).last_hidden_state, 1e-5)
