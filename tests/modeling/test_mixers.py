"""The contract that every mixer of the registry keeps: padding, packing, cache, causality, reference, degenerate case.

A new mixer is one line in `CASES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers.cache_utils import DynamicCache

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling.attention import SoftmaxAttention
from fratrie.modeling.mixers import MIXERS
from fratrie.modeling.stack import FratrieStack

WINDOW = 3
VOCAB = 40


def softmax_reference(query, keys, values, scale):
    """One query of one head: softmax of its scores times the values."""
    scores = torch.stack([query @ key for key in keys]) * scale
    exponentials = (scores - scores.max().detach()).exp()
    return sum(weight * value for weight, value in zip(exponentials / exponentials.sum(), values, strict=True))


def linear_reference(query, keys, values, scale):
    """One query of one head: φ(q)·φ(k) in the place of the exponential; there is no scale."""

    def phi(x):
        return torch.where(x > 0, x + 1, x.clamp_max(0).exp())

    weights = [phi(query) @ phi(key) for key in keys]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


@dataclass
class Case:
    """What the contract needs to know of a mixer.

    Attributes:
        reference: output of one query given the keys and values that it sees.
        fields: config fields that the mixer needs.
        sees: whether a query at distance `key - query` sees a key, before causality.
        degenerate: two sets of config fields (they may name another mixer) that must give equal outputs.
    """

    reference: Callable
    degenerate: tuple[dict, dict]
    fields: dict = field(default_factory=dict)
    sees: Callable = lambda distance, causal: True


def within_window(distance, causal):
    """Causal: the last WINDOW tokens, the query among them; bidirectional: WINDOW to each side."""
    return distance > -WINDOW if causal else abs(distance) <= WINDOW


CASES = {
    "full_attention": Case(softmax_reference, ({"attention_scale": 0.5}, {})),  # head size 4: 4 ** -0.5
    "sliding_attention": Case(
        softmax_reference,
        ({"sliding_window": 50}, {"layer_types": ["full_attention"] * 2, "sliding_window": None}),
        {"sliding_window": WINDOW},
        within_window,
    ),
    "linear_attention": Case(
        linear_reference, ({"linear_chunk_size": 50}, {"linear_chunk_size": 2}), {"linear_chunk_size": 3}
    ),
}


def test_every_mixer_has_a_case():
    assert set(CASES) == set(MIXERS)


mixers = pytest.mark.parametrize("kind", CASES)
directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
heads = pytest.mark.parametrize("key_value_heads", [4, 2], ids=["multi-head", "grouped"])
positions = pytest.mark.parametrize("position_type", ["none", "rotary"])
kernels = pytest.mark.parametrize(
    "kind, implementation",
    [
        (kind, implementation)
        for kind in CASES
        for implementation in (["eager", "sdpa"] if issubclass(MIXERS[kind], SoftmaxAttention) else ["sdpa"])
    ],
)


def contract(test):
    """Run a test for every mixer, direction, grouping of heads and of two kinds of positions."""
    for mark in (mixers, directions, heads, positions):
        test = mark(test)
    return test


def build(kind, causal, key_value_heads=4, position_type="none", dtype=torch.float64, **fields) -> FratrieStack:
    """A stack of two layers with weights large enough that every term of a formula shows."""
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": key_value_heads,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
            "position_type": position_type,
            "layer_types": [kind] * 2,
            **CASES[kind].fields,
            **fields,
        }
    )
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


def texts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


def pad(documents, side):
    """Padded ids and mask; the padding is a token like any other, so that only the mask can hide it."""
    width = max(map(len, documents)) + 1
    ids = torch.full((len(documents), width), 7)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        start = 0 if side == "right" else width - len(document)
        ids[row, start : start + len(document)] = document
        mask[row, start : start + len(document)] = 1
    return ids, mask


def alone(model, document, **kwargs):
    return model(document[None], **kwargs).last_hidden_state[0]


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def passes(monkeypatch):
    """The names of the passes that stacks take: `run_packed`, over real tokens alone, or `run_rows`."""
    taken = []
    for name in ("run_packed", "run_rows"):
        original = getattr(FratrieStack, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            taken.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(FratrieStack, name, spy)
    return taken


# --- padding and packing -------------------------------------------------------------------------------------------


@contract
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
def test_padding_on_either_side_changes_nothing(kind, causal, key_value_heads, position_type, side, unpad, passes):
    model = build(kind, causal, key_value_heads, position_type, unpad_inputs=unpad)
    documents = texts(5, 8, 1, 6)
    ids, mask = pad(documents, side)
    options = {"use_cache": False} if causal else {}
    states = model(ids, attention_mask=mask, **options).last_hidden_state
    assert passes == ["run_packed" if unpad else "run_rows"]
    for row, document in enumerate(documents):
        close(states[row][mask[row].bool()], alone(model, document))


@mixers
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_where_a_cache_is_made(kind, side, passes):
    model = build(kind, causal=True, position_type="rotary")
    documents = texts(5, 8, 1)
    ids, mask = pad(documents, side)
    outputs = model(ids, attention_mask=mask)
    assert passes == ["run_rows"] and outputs.cache is not None
    for row, document in enumerate(documents):
        close(outputs.last_hidden_state[row][mask[row].bool()], alone(model, document))


@contract
@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens"])
def test_packed_documents_equal_separate_ones(kind, causal, key_value_heads, position_type, form, passes):
    model = build(kind, causal, key_value_heads, position_type)
    documents = texts(5, 1, 7, 4)
    lengths = [len(document) for document in documents]
    if form == "position_ids":
        hints = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    else:
        hints = {"cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int()}
    states = model(torch.cat(documents)[None], **hints).last_hidden_state
    assert passes == ["run_packed"]
    for part, document in zip(states[0].split(lengths), documents, strict=True):
        close(part, alone(model, document))


@contract
def test_gradients_stay_within_a_packed_document(kind, causal, key_value_heads, position_type):
    model = build(kind, causal, key_value_heads, position_type)
    embeds = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    place = torch.cat([torch.arange(4), torch.arange(5)])[None]
    states = model(inputs_embeds=embeds, position_ids=place).last_hidden_state
    (grad,) = torch.autograd.grad(states[0, 4:].square().sum(), embeds)
    assert not grad[0, :4].any()
    assert grad[0, 4:].abs().sum(-1).gt(0).all()


# --- cache and causality -------------------------------------------------------------------------------------------


@mixers
@heads
@positions
@pytest.mark.parametrize("pieces", [[1] * 9, [3, 1, 5], [9], [8, 1]], ids=str)
@pytest.mark.parametrize("mask_given", [True, False], ids=["mask", "no mask"])
def test_cached_pieces_equal_one_pass(kind, key_value_heads, position_type, pieces, mask_given):
    model = build(kind, True, key_value_heads, position_type)
    ids = torch.stack(texts(9, 9))
    expected = model(ids, use_cache=False).last_hidden_state
    cache, states, seen = DynamicCache(config=model.config), [], 0
    for piece in ids.split(pieces, dim=1):
        seen += piece.shape[1]
        options = {"attention_mask": torch.ones(2, seen, dtype=torch.long)} if mask_given else {}
        if position_type == "rotary" and not mask_given:
            options["position_ids"] = torch.arange(seen - piece.shape[1], seen)[None]
        states.append(model(piece, cache=cache, **options).last_hidden_state)
    close(torch.cat(states, dim=1), expected)


@mixers
@pytest.mark.parametrize("pieces", [[9], [4, 5], [1] * 9], ids=str)
def test_cached_pieces_of_a_left_padded_batch_equal_one_pass(kind, pieces):
    model = build(kind, True, position_type="rotary")
    documents = texts(5, 8)
    ids, mask = pad(documents, "left")
    cache, states, seen = DynamicCache(config=model.config), [], 0
    for piece in ids.split(pieces, dim=1):
        seen += piece.shape[1]
        states.append(model(piece, attention_mask=mask[:, :seen], cache=cache).last_hidden_state)
    for row, document in enumerate(documents):
        close(torch.cat(states, dim=1)[row][mask[row].bool()], alone(model, document))


@contract
def test_a_token_sees_just_what_it_may(kind, causal, key_value_heads, position_type):
    """By gradient, in a stack of one layer: the exact pattern; the mixer may reach what the case says it sees."""
    model = build(kind, causal, key_value_heads, position_type, num_hidden_layers=1, layer_types=[kind])
    embeds = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    states = (
        model(inputs_embeds=embeds, use_cache=False).last_hidden_state if causal else model(inputs_embeds=embeds)[0]
    )
    for query in range(8):
        weights = torch.randn(16, dtype=torch.float64)
        (grad,) = torch.autograd.grad(states[0, query] @ weights, embeds, retain_graph=True)
        for key in range(8):
            visible = CASES[kind].sees(key - query, causal) and not (causal and key > query)
            assert bool(grad[0, key].any()) == visible, (query, key)


# --- reference -----------------------------------------------------------------------------------------------------


def angles(position, size, theta=10_000.0):
    return torch.tensor([position * theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)


def naive_rotation(x, position):
    """Turn the pairs (i, i + C/2) of a head by their angles, as complex numbers."""
    half = x.shape[-1] // 2
    turn = torch.polar(torch.ones(half, dtype=torch.float64), angles(position, x.shape[-1]))
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def naive_mixer(mixer, hidden, kind, causal, rotary, real):
    """The mixer on `(T, D)` by loops over queries, heads and keys; `real` tells which keys are no padding."""
    config, case = mixer.config, CASES[kind]
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    order = [sum(real[:place]) for place in range(len(real))]

    def project(layer, head, place, turned):
        rows = slice(head * size, (head + 1) * size)
        projected = layer.weight[rows] @ hidden[place] + layer.bias[rows]
        return naive_rotation(projected, order[place]) if turned else projected

    outputs = []
    for query_place in range(len(hidden)):
        seen = [
            place
            for place in range(len(hidden))
            if real[place] and case.sees(place - query_place, causal) and not (causal and place > query_place)
        ]
        mixed = []
        for head in range(config.num_attention_heads):
            query = project(mixer.q_proj, head, query_place, rotary)
            keys = [project(mixer.k_proj, head // group, place, rotary) for place in seen]
            values = [project(mixer.v_proj, head // group, place, False) for place in seen]
            mixed.append(case.reference(query, keys, values, size**-0.5) if seen else torch.zeros_like(query))
        outputs.append(mixer.o_proj.weight @ torch.cat(mixed) + mixer.o_proj.bias)
    return torch.stack(outputs)


@kernels
@directions
@heads
@positions
def test_equals_its_plain_reference_with_gradients(kind, implementation, causal, key_value_heads, position_type):
    model = build(kind, causal, key_value_heads, position_type, attn_implementation=implementation)
    mixer, rotary, turn = model.layers[0].mixer, position_type == "rotary", None
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1] * 5, [0, 1, 1, 1, 1]])
    if rotary:
        order = [range(5), [0, 0, 1, 2, 3]]
        turned = torch.stack([torch.stack([angles(position, 4).repeat(2) for position in row]) for row in order])
        turn = (turned.cos(), turned.sin())
    outputs, _ = mixer(hidden, turn, model.build_mask(kind, hidden, mask))
    expected = torch.stack(
        [naive_mixer(mixer, hidden[row], kind, causal, rotary, mask[row].tolist()) for row in range(2)]
    )
    close(outputs, expected)
    inputs = [hidden, *mixer.parameters()]
    weights = torch.randn_like(outputs) * mask[..., None]  # what padding gives has no meaning
    gradients, expected_gradients = (
        torch.autograd.grad((states * weights).sum(), inputs) for states in (outputs, expected)
    )
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        close(actual, wanted, 1e-9)


@mixers
@directions
def test_degenerate_case(kind, causal):
    ids = torch.stack(texts(11, 11))
    first, second = (build(kind, causal, **fields)(ids).last_hidden_state for fields in CASES[kind].degenerate)
    close(first, second)


# --- empty rows and half precision ---------------------------------------------------------------------------------


@directions
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "kind, position_type",
    [
        (kind, position_type)
        for kind in CASES
        for position_type in (["none", "alibi", "relative"] if MIXERS[kind].supports_position_bias else ["none"])
    ],
)
def test_fully_masked_rows_give_zeros_and_no_gradient(kind, position_type, implementation, causal):
    model = build(kind, causal, 2, position_type, attn_implementation=implementation)
    mixer = model.layers[0].mixer
    hidden = torch.randn(3, 6, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1] * 6, [0] * 6, [0, 0, 1, 1, 1, 1]])
    bias = model.build_bias(kind, 6, hidden.device)
    outputs, _ = mixer(hidden, None, model.build_mask(kind, hidden, mask), position_bias=bias)
    close(outputs[1], mixer.o_proj.bias.expand(6, 16))
    if causal:
        close(outputs[2, :2], mixer.o_proj.bias.expand(2, 16))
    # As large as the gradients under the loss scale of a mixed-precision run.
    gradients = torch.autograd.grad(outputs.sum() * 2.0**16, [hidden, *mixer.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][1].any()


@kernels
@directions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
def test_runs_in_every_precision(kind, implementation, causal, dtype, unpad):
    options = {"attn_implementation": implementation, "unpad_inputs": unpad}
    model = build(kind, causal, 2, "rotary", dtype, **options)
    exact = build(kind, causal, 2, "rotary", torch.float64, **options)
    ids, mask = pad(texts(5, 8, 1), "left")
    mask[2] = 0
    states = model(ids, attention_mask=mask).last_hidden_state
    assert states.dtype == dtype and states.isfinite().all()
    real = mask.bool()
    expected = exact(ids, attention_mask=mask).last_hidden_state
    error = (states[real].double() - expected[real]).norm() / expected[real].norm()
    assert error < 30 * torch.finfo(dtype).eps
    loss = states[real].square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@mixers
def test_large_states_stay_finite_in_float16(kind):
    """Sums over forty tokens pass 65504, the largest number of float16."""
    model = build(kind, True, dtype=torch.float16)
    mixer = model.layers[0].mixer
    hidden = torch.randn(2, 40, 16, dtype=torch.float16) * 10
    outputs, _ = mixer(hidden, None, model.build_mask(kind, hidden, None))
    assert outputs.isfinite().all()
