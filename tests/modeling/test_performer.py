"""Performer: the contract, and that its features estimate softmax attention without bias."""

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from mixer_contract import MixerContract, turn

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling.performer import draw_features


class TestPerformer(MixerContract):
    mixer = "performer"
    layer_type = "linear_attention"
    fields: ClassVar[dict[str, Any]] = {"linear_chunk_size": 3}
    variants: ClassVar[list[dict[str, Any]]] = [
        {"num_key_value_heads": 2, "position_type": "rotary", "performer_num_features": 6}
    ]
    degenerate = ({"linear_chunk_size": 50}, {"linear_chunk_size": 2})

    def plain(self, mixer, hidden, causal, angles, real):
        size = mixer.head_dim

        def state(layer, index, x):
            rows = slice(index * size, (index + 1) * size)
            return layer.weight[rows] @ x + layer.bias[rows]

        def phi(vectors, x):
            x = x / size**0.25
            return (vectors @ x - x @ x / 2).exp() / len(vectors) ** 0.5

        outputs = []
        for place in range(len(hidden)):
            seen = [other for other in range(place + 1 if causal else len(hidden)) if real[other]]
            mixed = []
            for head in range(4):
                group = head // 2
                vectors = mixer.random_features.vectors_KCF[group].T
                query = phi(vectors, turn(state(mixer.q_proj, head, hidden[place]), angles[place]))
                keys = [turn(state(mixer.k_proj, group, hidden[at]), angles[at]) for at in seen]
                weights = [query @ phi(vectors, key) for key in keys]
                values = [state(mixer.v_proj, group, hidden[at]) for at in seen]
                total = sum(w * v for w, v in zip(weights, values, strict=True))
                mixed.append(total / sum(weights) if seen else hidden.new_zeros(size))
            outputs.append(mixer.o_proj(torch.cat(mixed)))
        return torch.stack(outputs)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)


SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


def build(causal=True, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    fields = {**SIZES, "mixer_types": ["performer"] * 2, "initializer_range": 0.3, **fields}
    return model_class(config_class(**fields)).to(dtype).eval()


def features(model):
    return [layer.mixer.random_features.vectors_KCF for layer in model.layers]


def softmax_attention(query, key, value, causal):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)


# --- that it estimates softmax attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_the_mean_over_all_features_is_softmax_attention(causal):
    """Gauss-Hermite quadrature takes the mean over N(0, I) to the last digits."""
    mixer = build(causal, num_attention_heads=8, performer_num_features=40**2, linear_chunk_size=3).layers[0].mixer
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(40))
    mixer.random_features.vectors_KCF[:] = torch.cartesian_prod(nodes, nodes).T
    weights, original = torch.cartesian_prod(weights, weights).prod(-1), mixer.map_queries
    mixer.map_queries = lambda query: original(query) * weights
    query, key, value = torch.randn(3, 2, 8, 7, 2, dtype=torch.float64)
    found, _ = mixer.attend(query, key, value, None, None)
    torch.testing.assert_close(found, softmax_attention(query, key, value, causal), rtol=1e-11, atol=1e-11)


def estimates(vectors_KCF, query, key):
    """exp(q·k) as the features of each head estimate it."""
    exponents = (query + key) @ vectors_KCF - (query @ query + key @ key) / 2
    return exponents.exp().mean(-1)


@pytest.mark.parametrize("place", [0, 7])
def test_orthogonal_features_have_no_bias_and_vary_less(place):
    """Vectors as they come out of QR are too small by a tenth in the first place, and too large in the last."""
    generator, size, heads = torch.Generator().manual_seed(0), 8, 20_000
    query = torch.zeros(size, dtype=torch.float64)
    query[place] = 0.7
    exact = math.exp(query @ query)
    found = estimates(draw_features(heads, size, size, generator), query, query)
    assert abs(found.mean() - exact) < 4 * found.std() / heads**0.5
    independent = torch.randn(heads, size, size, dtype=torch.float64, generator=generator)
    independent = estimates(independent, query, query)
    assert (found - exact).square().mean() < 0.95 * (independent - exact).square().mean()


def test_features_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    vectors = draw_features(500, 10, 4, torch.Generator().manual_seed(0))
    products = vectors.transpose(1, 2) @ vectors
    for block in (slice(0, 4), slice(4, 8), slice(8, 10)):
        within = products[:, block, block]
        assert (within - torch.diag_embed(within.diagonal(dim1=1, dim2=2))).abs().max() < 1e-12
    assert products[:, 0, 4].abs().min() > 0
    lengths = products.diagonal(dim1=1, dim2=2)
    assert abs(lengths.mean() - 4) < 0.15 and abs(lengths.var() - 8) < 1.2  # chi square of four


def test_more_features_come_nearer():
    query, key, value = (
        torch.randn(3, 1, 4, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    )
    expected, errors = softmax_attention(query, key, value, True), []
    for number in (32, 512, 8192):
        found, _ = build(performer_num_features=number).layers[0].mixer.attend(query, key, value, None, None)
        errors.append((found - expected).norm() / expected.norm())
    assert errors[0] > 2.5 * errors[1] > 2.5**2 * errors[2]  # four times, as the square root of the number
    assert errors[2] < 0.03


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_scale_of_scores_is_that_of_softmax_attention(scale):
    query, key, value = torch.randn(3, 1, 4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    mixer = build(False, performer_num_features=20_000, attention_scale=scale).layers[0].mixer
    expected = softmax_attention(query * scale * 2, key, value, False)  # its own scale is a half
    found, _ = mixer.attend(query, key, value, None, None)
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("size", [64, 256])
def test_long_keys_and_wide_heads_neither_vanish_nor_overflow(size):
    """Equal values come out as they are, as long as a row has any weight."""
    generator = torch.Generator().manual_seed(0)
    fields = {"num_attention_heads": 1, "head_dim": size, "performer_num_features": size, "linear_chunk_size": 8}
    mixer = build(dtype=torch.float32, **fields).layers[0].mixer
    for length in (1.0, 3.0, 6.0, 1e3):
        query, key = (x.requires_grad_() for x in length * torch.randn(2, 1, 1, 20, size, generator=generator))
        found, _ = mixer.attend(query, key, torch.full_like(key, 3.0), None, None)
        (found.sum() * 2.0**16).backward()
        assert query.grad.isfinite().all() and key.grad.isfinite().all()
        kept = found.detach().abs().sum(-1) > 1e-20
        torch.testing.assert_close(found[kept], torch.full_like(found[kept], 3.0))
        assert kept.all() or length > 3


def test_a_key_that_is_a_feature_does_not_overflow():
    """Its exponent is half of its squared length, 128 in a head of 256."""
    mixer = build(dtype=torch.float32, num_attention_heads=1, head_dim=256, performer_num_features=256).layers[0].mixer
    query, key = torch.zeros(2, 1, 1, 4, 256)
    key[0, 0, 2] = mixer.random_features.vectors_KCF[0, :, 5] * 4  # the fourth root of 256
    found, _ = mixer.attend(query, key, torch.full_like(key, 3.0), None, None)
    torch.testing.assert_close(found, torch.full_like(found, 3.0))


# --- where the features come from ------------------------------------------------------------------------------------


def test_layers_heads_and_seeds_have_features_of_their_own():
    state = torch.get_rng_state()
    config = FratrieDecoderConfig(**SIZES, mixer_types=["performer"] * 2)
    before = torch.randn(1)
    torch.set_rng_state(state)
    drawn = [x for seed in (None, 1) for x in features(build(performer_seed=seed))]
    heads = torch.cat(drawn).flatten(1)
    assert len(heads) == 16 and len(heads.unique(dim=0)) == 16
    assert all(torch.equal(a, b) for a, b in zip(features(build(performer_seed=0)), drawn, strict=False))
    assert config.performer_num_features is None and drawn[0].shape == (4, 4, 8)  # two blocks: ln 4 is above one
    torch.set_rng_state(state)
    draw_features(2, 8, 4, torch.Generator().manual_seed(0))
    assert torch.equal(torch.randn(1), before), "the global generator was used"


def test_features_are_drawn_where_memory_was_not():
    with torch.device("meta"):
        empty = FratrieDecoderModel(FratrieDecoderConfig(**SIZES, mixer_types=["performer"] * 2))
    filled = empty.to_empty(device="cpu")
    filled.init_weights()
    assert all(
        torch.equal(a.double(), b)
        for a, b in zip(features(filled), features(build(dtype=torch.float32).double()), strict=True)
    )


def test_training_leaves_the_features_and_redrawing_replaces_them(tmp_path):
    model = build(dtype=torch.float32).train()
    before, ids = [x.clone() for x in features(model)], torch.arange(12)[None]
    model(ids).last_hidden_state.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(features(model), before, strict=True))
    drawn = []
    for seed in (3, 3, 4):
        generator = torch.Generator().manual_seed(seed)
        for layer in model.layers:
            layer.mixer.redraw(generator)
        drawn.append(torch.cat([x.clone() for x in features(model)]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    model.save_pretrained(tmp_path)
    back = FratrieDecoderModel.from_pretrained(tmp_path)
    assert torch.equal(back(ids).last_hidden_state, model.eval()(ids).last_hidden_state)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"performer_num_features": 0}, "performer_num_features=0 must be at least 1"),
        ({"performer_seed": -1}, "performer_seed=-1 must lie in"),
        ({"performer_seed": 1, "mixer_types": ["linear"] * 2}, "performer_seed=1 has no use without a"),
    ],
)
def test_what_has_no_features_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        FratrieDecoderConfig(**{**SIZES, "mixer_types": ["performer"] * 2, **fields})
