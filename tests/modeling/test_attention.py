"""Softmax attention beyond the mixers' contract: what its options do, cross-attention, facts of the literature."""

import copy

import pytest
import torch
from layouts import rows_of_mixer, rows_of_stack
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling import attention
from fratrie.modeling.attention import CrossAttention, SoftmaxAttention
from fratrie.modeling.layout import Rows
from fratrie.modeling.masks import GivenMask

implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def config(causal=False, **fields):
    config_class = FratrieDecoderConfig if causal else FratrieEncoderConfig
    shared = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "position_type": "none",
    }
    return config_class(**{**shared, **fields})


def fill(module):
    """Weights and biases large enough that every term shows."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.4)
    return module.double().eval()


def build(causal=False, **fields):
    model_class = FratrieDecoderModel if causal else FratrieEncoderModel
    return fill(model_class(config(causal, **fields)))


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- facts ---------------------------------------------------------------------------------------------------------

# Rows are keys, columns queries, as drawn on the slides; what masking hides is set to a number that would show.
SCORES = torch.tensor(
    [
        [+3.53, +0.80, +1.96, +4.48, +3.74, -1.95],
        [99.0, -0.30, -0.21, +0.82, +0.29, +2.91],
        [99.0, 99.0, +0.89, +0.67, +2.99, -0.41],
        [99.0, 99.0, 99.0, +1.31, +1.73, -1.48],
        [99.0, 99.0, 99.0, 99.0, +3.07, +2.94],
        [99.0, 99.0, 99.0, 99.0, 99.0, +0.31],
    ],
    dtype=torch.float64,
)
PATTERN = torch.tensor(
    [
        [1.00, 0.75, 0.69, 0.92, 0.46, 0.00],
        [0.00, 0.25, 0.08, 0.02, 0.01, 0.46],
        [0.00, 0.00, 0.24, 0.02, 0.22, 0.02],
        [0.00, 0.00, 0.00, 0.04, 0.06, 0.01],
        [0.00, 0.00, 0.00, 0.00, 0.24, 0.48],
        [0.00, 0.00, 0.00, 0.00, 0.00, 0.03],
    ],
    dtype=torch.float64,
)


@implementations
def test_masked_pattern_of_the_slides(implementation):
    model = build(True, head_dim=6, num_attention_heads=1, attention_scale=1.0, attn_implementation=implementation)
    mixer, identity = model.layers[0].mixer, torch.eye(6, dtype=torch.float64)[None, None]
    mask = rows_of_mixer(mixer, torch.empty(1, 6, 16, dtype=torch.float64)).masks["scores", "full_attention"]
    mixed, weights = mixer.attend(SCORES.T[None, None], identity, identity, mask, None)
    # With the identity for values, the output is the pattern itself.
    torch.testing.assert_close(mixed[0, :, 0].T, PATTERN, rtol=0, atol=6e-3)
    assert not mixed[0, :, 0].triu(1).any()
    if implementation == "eager":
        close(weights[0, 0], mixed[0, :, 0])


@implementations
def test_gaussian_kernel_attention_is_the_nadaraya_watson_estimator(implementation):
    """softmax(-(x - xᵢ)²/2) yᵢ: with q = (x, 1) and k = (xᵢ, -xᵢ²/2) the scores differ from it by x²/2 alone."""
    model = build(head_dim=2, num_attention_heads=1, attention_scale=1.0, attn_implementation=implementation)
    x, seen, y = torch.randn(5).double(), torch.randn(9).double(), torch.randn(9, 2).double()
    query = torch.stack((x, torch.ones(5).double()), -1)[None, None]
    key = torch.stack((seen, -(seen**2) / 2), -1)[None, None]
    mixed, _ = model.layers[0].mixer.attend(query, key, y[None, None], None, None)
    kernel = torch.exp(-0.5 * (x[:, None] - seen[None, :]) ** 2)
    close(mixed[0, :, 0], (kernel[:, :, None] * y).sum(1) / kernel.sum(1, keepdim=True))


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position_type", ["none", "rotary", "relative", "alibi"])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_eager_equals_sdpa(causal, position_type, kind):
    fields = {"layer_types": [kind] * 2, "sliding_window": 3} if kind == "sliding_attention" else {}
    ids, mask = torch.randint(1, 30, (2, 7)), torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    states = [
        build(causal, position_type=position_type, attn_implementation=name, **fields)(ids, attention_mask=mask)[0]
        for name in ("eager", "sdpa")
    ]
    close(states[0][mask.bool()], states[1][mask.bool()])


@implementations
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_equal_repeated_ones(implementation, groups):
    grouped = build(True, num_key_value_heads=groups, attn_implementation=implementation)
    full = build(True, attn_implementation=implementation)
    states = grouped.state_dict()
    for name in list(states):
        if ".k_proj." in name or ".v_proj." in name:
            by_head = states[name].unflatten(0, (groups, 4))
            states[name] = by_head.repeat_interleave(4 // groups, 0).flatten(0, 1)
    full.load_state_dict(states)
    ids = torch.randint(1, 30, (2, 6))
    close(grouped(ids).last_hidden_state, full(ids).last_hidden_state)


@implementations
def test_scale_multiplies_the_scores(implementation):
    doubled, plain = (build(attention_scale=scale, attn_implementation=implementation) for scale in (1.0, None))
    mixer, reference = doubled.layers[0].mixer, plain.layers[0].mixer
    assert mixer.scaling == 1.0 and reference.scaling == 4**-0.5
    reference.q_proj.weight.data.mul_(2)
    reference.q_proj.bias.data.mul_(2)
    hidden = torch.randn(1, 5, 16).double()
    layout = rows_of_mixer(mixer, hidden)
    close(mixer(hidden, layout)[0], reference(hidden, layout)[0])


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_query_key_norm_acts_on_each_head_before_the_rotation(norm):
    model = build(True, query_key_norm=norm, position_type="rotary")
    mixer, hidden = model.layers[0].mixer, torch.randn(1, 5, 16).double()
    scaled = copy.deepcopy(mixer)
    for name in ("q_proj", "k_proj"):  # heads of any size are normed away
        factors = torch.tensor([1.0, 3.0, 0.5, 10.0]).double().repeat_interleave(4)
        getattr(scaled, name).weight.data.mul_(factors[:, None])
        getattr(scaled, name).bias.data.mul_(factors)
    layout = rows_of_stack(model, hidden)
    close(scaled(hidden, layout)[0], mixer(hidden, layout)[0], 1e-3)  # epsilon aside
    query = mixer.split_heads(mixer.q_proj(hidden))
    deviation = query - query.mean(-1, keepdim=True) if norm == "layer_norm" else query
    normed = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.query_norm.weight
    normed = normed + mixer.query_norm.bias if norm == "layer_norm" else normed
    close(mixer.project_query(hidden), normed.transpose(1, 2))


@implementations
@pytest.mark.parametrize("causal", [True, False])
def test_output_gate_weighs_each_mixed_number_before_the_projection(causal, implementation):
    gated = build(causal, attention_output_gate=True, num_key_value_heads=2, attn_implementation=implementation)
    plain = build(causal, num_key_value_heads=2, attn_implementation=implementation)
    mixer, reference = gated.layers[0].mixer, plain.layers[0].mixer
    states = mixer.state_dict()
    gate = [states.pop(f"gate_proj.{kind}") for kind in ("weight", "bias")]
    reference.load_state_dict(states)
    mixed = []
    reference.o_proj.register_forward_pre_hook(lambda _, arguments: mixed.append(arguments[0]))
    hidden = torch.randn(2, 5, 16).double()
    layout = rows_of_mixer(mixer, hidden, torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]))
    reference(hidden, layout)
    factors = 1 / (1 + (-(hidden @ gate[0].T + gate[1])).exp())
    close(mixer(hidden, layout)[0], (factors * mixed[0]) @ mixer.o_proj.weight.T + mixer.o_proj.bias)


def test_the_gate_is_one_of_softmax_self_attention_alone():
    model = build(True, attention_output_gate=True, add_cross_attention=True, layer_types=["full_attention"] * 2,
                  mixer_types=["softmax", "longformer"])  # fmt: skip
    gates = {name for name, _ in model.named_modules() if name.endswith("gate_proj")}
    assert gates == {"layers.0.mixer.gate_proj"}
    assert {name for name in model.tp_plan if "gate_proj" in name} == {"layers.*.mixer.gate_proj"}
    sizes = [attention.SoftmaxAttention.projection_numbers(config(attention_output_gate=on)) for on in (True, False)]
    assert sizes[0] - sizes[1] == 2 * 16, "what the backward pass keeps of a token"
    assert config().attention_output_gate is False and config(kv_lora_rank=4).attention_output_gate is None
    for fields in ({"kv_lora_rank": 4}, {"mixer_types": ["linear", "longformer"]}):
        with pytest.raises(ValueError, match=r"attention_output_gate=True has no use without .* is 'softmax'"):
            config(attention_output_gate=True, **fields)


@pytest.mark.parametrize("head_dim, heads, groups", [(6, 3, 1), (8, 4, 2), (2, 4, 4)])
def test_head_size_is_free(head_dim, heads, groups):
    model = build(True, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=groups)
    mixer = model.layers[0].mixer
    assert mixer.q_proj.weight.shape == (head_dim * heads, 16)
    assert mixer.k_proj.weight.shape == mixer.v_proj.weight.shape == (head_dim * groups, 16)
    assert mixer.o_proj.weight.shape == (16, head_dim * heads)
    assert model(torch.arange(1, 6)[None]).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("inner, outer", [(True, False), (False, True)])
def test_biases(inner, outer):
    mixer = build(attention_bias=inner, attention_output_bias=outer).layers[0].mixer
    assert [layer.bias is not None for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj)] == [inner] * 3
    assert (mixer.o_proj.bias is not None) == outer


@implementations
def test_attention_dropout_acts_in_training_only(implementation):
    mixer = build(attention_dropout=0.5, attn_implementation=implementation).layers[0].mixer
    hidden = torch.randn(1, 6, 16).double()
    layout = rows_of_mixer(mixer, hidden)
    close(mixer(hidden, layout)[0], mixer(hidden, layout)[0])
    mixer.train()
    assert not torch.allclose(mixer(hidden, layout)[0], mixer(hidden, layout)[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position_type", ["none", "alibi"])
@torch.no_grad()
def test_weights_sum_to_one_and_obey_the_mask(causal, position_type):
    model = build(
        causal,
        position_type=position_type,
        attn_implementation="eager",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=2,
    )
    ids, mask = torch.randint(1, 30, (2, 6)), torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    options = {"use_cache": False} if causal else {}
    full, sliding = model(ids, attention_mask=mask, output_attentions=True, **options).attentions
    for weights in (full, sliding):
        assert weights.shape == (2, 4, 6, 6)
        close(weights.sum(-1), mask[:, None].double().expand(2, 4, 6))
    distance = torch.arange(6)[None, :] - torch.arange(6)[:, None]
    near = (distance > -2) if causal else (distance.abs() <= 2)
    allowed = mask.bool()[:, None, None, :] & mask.bool()[:, None, :, None]
    allowed = allowed & (distance <= 0) if causal else allowed
    assert torch.equal(full > 0, allowed.expand_as(full))
    assert torch.equal(sliding > 0, (allowed & near).expand_as(sliding))


def test_eager_gradients_stay_finite_in_float16_with_bias_and_empty_rows():
    """The smallest number of float16 plus a penalty is -inf: a row of nothing else has no softmax."""
    model = build(True, position_type="alibi", attn_implementation="eager").half()
    hidden = torch.randn(2, 40, 16).half().requires_grad_()
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :35] = 0
    layout = rows_of_stack(model, hidden, mask)
    outputs, _ = model.layers[0].mixer(hidden, layout, layout.biases["full_attention"] * 100)
    assert outputs.isfinite().all()
    outputs.float().sum().backward()
    assert hidden.grad.isfinite().all()


# --- cross-attention -----------------------------------------------------------------------------------------------


def cross(implementation, **fields):
    return fill(
        CrossAttention(config(True, add_cross_attention=True, attn_implementation=implementation, **fields), 0)
    )


@implementations
@pytest.mark.parametrize("groups", [4, 2])
def test_cross_attention_equals_its_formula(implementation, groups):
    mixer = cross(implementation, cross_attention_hidden_size=10, num_key_value_heads=groups)
    hidden = torch.randn(2, 3, 16).double().requires_grad_()
    states = torch.randn(2, 5, 10).double().requires_grad_()
    expected = []
    for row in range(2):
        query = mixer.q_proj(hidden[row]).view(3, 4, 4)
        key, value = mixer.k_proj(states[row]).view(5, groups, 4), mixer.v_proj(states[row]).view(5, groups, 4)
        heads = []
        for head in range(4):
            shared = head * groups // 4
            scores = query[:, head] @ key[:, shared].T / 2
            heads.append(scores.softmax(-1) @ value[:, shared])
        expected.append(mixer.o_proj(torch.cat(heads, -1)))
    expected = torch.stack(expected)
    outputs, _ = mixer(hidden, states, Rows(shape=(2, 3), given=GivenMask()))
    close(outputs, expected)
    inputs, weights = [hidden, states, *mixer.parameters()], torch.randn_like(outputs)
    gradients, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (outputs, expected))
    for gradient, other in zip(gradients, wanted, strict=True):
        close(gradient, other)


@implementations
@pytest.mark.parametrize("position_type", ["none", "rotary", "relative", "alibi"])
def test_decoder_ignores_the_padding_of_the_encoder(implementation, position_type):
    model = build(True, add_cross_attention=True, position_type=position_type, attn_implementation=implementation)
    ids, states = torch.randint(1, 30, (2, 4)), torch.randn(2, 6, 16).double()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    outputs = model(ids, encoder_hidden_states=states, encoder_attention_mask=mask).last_hidden_state
    for row in range(2):
        real = states[row][mask[row].bool()][None]
        close(outputs[row], model(ids[row][None], encoder_hidden_states=real).last_hidden_state[0])


@implementations
def test_an_encoder_text_of_padding_alone_gives_zeros(implementation):
    model = build(True, add_cross_attention=True, attn_implementation=implementation)
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    states = torch.randn(2, 3, 16).double().requires_grad_()
    ids = torch.randint(1, 30, (2, 4))
    outputs = model(ids, encoder_hidden_states=states, encoder_attention_mask=mask).last_hidden_state
    assert outputs.isfinite().all()
    (gradient,) = torch.autograd.grad(outputs.square().sum(), states)
    assert not gradient[0].any() and gradient[1].any() and gradient.isfinite().all()


@pytest.mark.parametrize(
    "kinds",
    [["full_attention"] * 2, ["sliding_attention", "linear_attention"], ["linear_attention"] * 2],
    ids=str,
)
def test_cached_cross_attention_equals_uncached(kinds):
    """The encoder's states are projected once, and kept whole also where the decoder's own layers forget."""
    fields = {"sliding_window": 2} if "sliding_attention" in kinds else {}
    model = build(True, add_cross_attention=True, layer_types=kinds, position_type="rotary", **fields)
    ids, states = torch.randint(1, 30, (2, 7)), torch.randn(2, 6, 16).double()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    expected = model(ids, encoder_hidden_states=states, encoder_attention_mask=mask, use_cache=False)[0]
    projections = []
    model.layers[0].cross_attention.k_proj.register_forward_hook(lambda *_: projections.append(1))
    cache, pieces = None, []
    for start, piece in zip((0, 3, 4, 5, 6), ids.split([3, 1, 1, 1, 1], 1), strict=True):
        outputs = model(
            piece,
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            cache=cache,
            use_cache=True,
            position_ids=torch.arange(start, start + piece.shape[1])[None],
        )
        cache = outputs.cache
        pieces.append(outputs.last_hidden_state)
    close(torch.cat(pieces, 1), expected)
    assert isinstance(cache, EncoderDecoderCache) and len(projections) == 1


def test_cross_attentions_are_returned():
    model = build(True, add_cross_attention=True, attn_implementation="eager")
    ids, states = torch.randint(1, 30, (2, 4)), torch.randn(2, 6, 16).double()
    outputs = model(ids, encoder_hidden_states=states, output_attentions=True)
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 4, 4)] * 2
    assert [weights.shape for weights in outputs.cross_attentions] == [(2, 4, 4, 6)] * 2
    close(outputs.cross_attentions[0].sum(-1), torch.ones(2, 4, 4).double())


def test_packed_rows_cannot_attend_an_encoder():
    model = build(True, add_cross_attention=True)
    with pytest.raises(ValueError, match="several documents cannot attend"):
        model(
            torch.arange(1, 7)[None],
            position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]),
            encoder_hidden_states=torch.randn(1, 3, 16).double(),
        )


def test_sliding_concerns_self_attention_alone():
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2}
    assert cross("sdpa", **fields).sliding_window is None
    assert SoftmaxAttention(config(True, **fields), 0).sliding_window == 2


def test_the_implementation_can_be_changed_after_construction():
    model = build(attn_implementation="eager")
    hidden = torch.randn(1, 4, 16).double()
    layout = rows_of_stack(model, hidden)
    with_weights, weights = model.layers[0].mixer(hidden, layout)
    assert weights is not None
    model.set_attn_implementation("sdpa")
    without_weights, weights = model.layers[0].mixer(hidden, rows_of_stack(model, hidden))
    assert weights is None
    close(with_weights, without_weights)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("position_type", ["none", "alibi"])
def test_short_training_in_half_precision_runs_its_kernel_in_float32_on_a_cpu(position_type, autocast, monkeypatch):
    """Where it is faster: not beyond some length, nor in evaluation, whose numbers are those of published models."""
    seen, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(module, query, key, *args, **kwargs):
        seen.append(query.dtype)
        return sdpa(module, query, key, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", recording)
    monkeypatch.setattr(attention, "_SHORT_ON_CPU", 6)
    model = FratrieEncoderModel(config(position_type=position_type, unpad_inputs=False))
    model = model if autocast else model.to(torch.bfloat16)
    for length, training, expected in (
        (6, True, torch.float32),
        (7, True, torch.bfloat16),
        (6, False, torch.bfloat16),
    ):
        ids, mask = torch.randint(3, 30, (2, length)), torch.ones(2, length).long()
        mask[1, 4:] = 0
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = model.train(training)(ids, attention_mask=mask).last_hidden_state
        states.float().sum().backward()
        assert set(seen) == {expected}, length
        assert autocast or states.dtype == torch.bfloat16
        seen.clear()
