"""Positions against the papers' formulas and against Hugging Face's own modules."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, ModernBertConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding
from transformers.models.reformer.configuration_reformer import ReformerConfig
from transformers.models.reformer.modeling_reformer import AxialPositionEmbeddings
from transformers.models.t5.modeling_t5 import T5Attention

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling.layout import Rows
from fratrie.modeling.masks import GivenMask
from fratrie.modeling.positions import (
    AlibiPositionBias,
    FratrieRotaryEmbedding,
    LearnedPositions,
    RelativePositionBias,
    SinusoidalPositions,
    rotate,
)

TINY = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


# --- sinusoidal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal_formula(layout):
    """In float64, rounded once: far positions are as exact as near ones."""
    lines = [[0, 1, 63], [5, 2, 1_000_000]]
    encodings = SinusoidalPositions(8, layout)(torch.tensor(lines))
    assert encodings.shape == (2, 3, 8) and encodings.dtype == torch.float32
    for row, line in enumerate(lines):
        for column, position in enumerate(line):
            for i in range(4):
                angle = position / 10_000 ** (2 * i / 8)
                sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, 4 + i)
                assert encodings[row, column, sine].item() == pytest.approx(math.sin(angle), abs=6e-8)
                assert encodings[row, column, cosine].item() == pytest.approx(math.cos(angle), abs=6e-8)


@pytest.mark.parametrize("size", [8, 34])
def test_halves_equal_marians_table_to_the_bit(size):
    table = MarianSinusoidalPositionalEmbedding(1001, size).create_weight()
    assert torch.equal(SinusoidalPositions(size, "halves")(torch.arange(1001)[None])[0], table)


def test_layouts_hold_the_same_numbers():
    positions = torch.arange(40)[None]
    halves, interleaved = (SinusoidalPositions(10, layout)(positions) for layout in ("halves", "interleaved"))
    assert torch.equal(torch.cat((interleaved[..., ::2], interleaved[..., 1::2]), dim=-1), halves)


@pytest.mark.parametrize("offset", [1, 7, -3])
def test_a_shift_is_one_linear_map_of_all_sinusoidal_positions(offset):
    """The map is found on some positions and must hold on all others; it is a rotation of each pair."""
    encode = SinusoidalPositions(8)
    positions = torch.arange(5, 3000)[None]
    here, there = (encode(places)[0].double() for places in (positions, positions + offset))
    found = torch.linalg.lstsq(here[::50], there[::50]).solution
    torch.testing.assert_close(here @ found, there, rtol=0, atol=1e-3)
    angles = [offset / 10_000 ** (2 * i / 8) for i in range(4)]
    rotations = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    expected = torch.block_diag(*torch.tensor(rotations, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_product_of_sinusoidal_positions_depends_on_their_distance_alone():
    encodings = SinusoidalPositions(16)(torch.arange(50)[None])[0]
    products = encodings @ encodings.T
    for distance in range(1, 20):
        torch.testing.assert_close(
            products.diagonal(distance), products[0, distance].expand(50 - distance), rtol=0, atol=1e-4
        )


# --- learned -------------------------------------------------------------------------------------------------------


def test_learned_positions_name_the_length_that_is_too_long():
    table = LearnedPositions(6, 4)
    assert table(torch.arange(6)[None]).shape == (1, 6, 4)
    with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings=6.*truncat"):
        table(torch.tensor([[0, 8]]))


@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_an_offset_skips_the_first_rows_of_the_table(offset):
    table = LearnedPositions(6, 4, offset)
    assert table.weight.shape == (6 + offset, 4)
    positions = torch.tensor([[0, 5, 2], [3, 3, 1]])
    for row, line in zip(table(positions), positions, strict=True):
        for vector, position in zip(row, line, strict=True):
            assert torch.equal(vector, table.weight[position + offset])
    table(positions).sum().backward()
    assert not table.weight.grad[:offset].any() and table.weight.grad[offset].any()
    with pytest.raises(ValueError, match=r"7 tokens.*max_position_embeddings=6"):
        table(torch.tensor([[6]]))


@pytest.mark.parametrize("model_class", [FratrieEncoderModel, FratrieDecoderModel])
def test_a_model_with_an_offset_reads_no_row_before_it(model_class):
    torch.manual_seed(0)
    config = model_class.config_class(**TINY, position_offset=2)
    model, ids = model_class(config).eval(), torch.arange(3, 9)[None]
    weight = model.embed_positions.weight
    assert weight.shape[0] == config.max_position_embeddings + 2
    expected = model(ids).last_hidden_state
    for rows, same in ((slice(0, 2), True), (slice(8, None), True), (slice(2, 3), False)):
        kept = weight.detach().clone()
        weight.data[rows] += 1
        assert torch.equal(model(ids).last_hidden_state, expected) == same
        weight.data.copy_(kept)
    with pytest.raises(ValueError, match=r"65 tokens.*max_position_embeddings=64"):
        model(torch.ones(1, 65, dtype=torch.long))


# --- axial ---------------------------------------------------------------------------------------------------------


def test_axial_positions_equal_hugging_faces_for_a_text_of_any_length():
    """Theirs pads a text that it learns from to the whole grid."""
    config = FratrieDecoderConfig(
        **{**TINY, "max_position_embeddings": 11}, position_type="axial", axial_shape=[4, 3], axial_dims=[8, 24]
    )
    ours = FratrieDecoderModel(config).embed_positions
    theirs = AxialPositionEmbeddings(
        ReformerConfig(hidden_size=32, axial_pos_shape=[4, 3], axial_pos_embds_dim=[8, 24])
    ).eval()
    theirs.weights[0].data, theirs.weights[1].data = ours.rows.weight.data[:, None], ours.columns.weight.data[None]
    for length in (1, 3, 7, 11):
        places = torch.arange(length)[None].expand(2, -1)
        assert torch.equal(ours(places), theirs(places))
    assert len({tuple(vector.tolist()) for vector in ours(torch.arange(11)[None])[0]}) == 11
    with pytest.raises(ValueError, match=r"12 tokens.*max_position_embeddings=11.*truncat"):
        ours(torch.tensor([[0, 11]]))


@pytest.mark.parametrize("positions, side", [(1, 1), (4, 2), (64, 8), (65, 9), (512, 23)])
def test_the_grid_is_the_smallest_square_by_default(positions, side):
    config = FratrieEncoderConfig(
        **{**TINY, "hidden_size": 33, "head_dim": 4, "max_position_embeddings": positions}, position_type="axial"
    )
    table = FratrieEncoderModel(config).embed_positions
    assert table.rows.weight.shape == (side, 16) and table.columns.weight.shape == (side, 17)
    assert table(torch.arange(positions)[None]).shape == (1, positions, 33)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"axial_shape": [4, 15]}, r"axial_shape=\[4, 15\] has no place for max_position_embeddings=64"),
        ({"axial_shape": [64]}, r"axial_shape=\[64\] must be two positive numbers"),
        ({"axial_dims": [32, 0]}, r"axial_dims=\[32, 0\] must be two positive numbers"),
        ({"axial_dims": [16, 8]}, r"axial_dims=\[16, 8\] must sum to hidden_size=32"),
        ({"axial_shape": [8, 8], "position_type": "learned"}, r"axial_shape=\[8, 8\] has no use with position_type="),
        ({"hidden_size": 1, "num_attention_heads": 1}, r"hidden_size of at least 2, not 1"),
    ],
)
def test_a_grid_without_room_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        FratrieEncoderConfig(**{**TINY, "position_type": "axial", **fields})


# --- rotary --------------------------------------------------------------------------------------------------------

ROPE_TYPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


def rotary_pair(parameters):
    ours = FratrieDecoderConfig(**TINY, position_type="rotary", rope_parameters=dict(parameters))
    theirs = LlamaConfig(**TINY, rope_parameters=dict(parameters))
    return FratrieRotaryEmbedding(ours), LlamaRotaryEmbedding(theirs)


def as_llama_has_them(turns):
    """Cosines and sines `(B, T, R)` of turns `(B, 1, T, R)`, whose first sines are negative."""
    cos, sin = (part.squeeze(1) for part in turns)
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat((-first, second), dim=-1)


@pytest.mark.parametrize("name", ROPE_TYPES)
def test_rotary_equals_llama(name):
    """Also where the frequencies depend on the length: short, long, and short again."""
    ours, theirs = rotary_pair(ROPE_TYPES[name])
    query, key = torch.randn(2, 2, 3, 16, dtype=torch.float64), torch.randn(2, 1, 3, 16, dtype=torch.float64)
    for start in (0, 13, 95, 300, 2):
        places = torch.tensor([[0, 1, 2], [1, 4, 9]]) + start
        turn, expected = ours(query, places), theirs(query, places)
        for actual, wanted in zip(as_llama_has_them(turn), expected, strict=True):
            assert torch.equal(actual, wanted)
        for states, wanted in zip((query, key), apply_rotary_pos_emb(query, key, *expected), strict=True):
            torch.testing.assert_close(rotate(states, turn), wanted, rtol=1e-12, atol=1e-12)


def test_rope_types_here_are_all_that_the_library_has():
    assert set(ROPE_TYPES) - {"default"} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_scaled_rotary_differs_from_the_default(name):
    scaled, default = (
        FratrieRotaryEmbedding(FratrieDecoderConfig(**TINY, position_type="rotary", rope_parameters=parameters))
        for parameters in (dict(ROPE_TYPES[name]), {"rope_type": "default", "rope_theta": 10_000.0})
    )
    assert not torch.allclose(scaled.inv_freq, default.inv_freq)


def test_unknown_rope_type_is_refused():
    with pytest.raises(ValueError, match="yarm"):
        FratrieRotaryEmbedding(
            FratrieDecoderConfig(**TINY, position_type="rotary", rope_parameters={"rope_type": "yarm", "factor": 2.0})
        )


def test_partial_rotary_turns_the_first_part_of_a_head_only():
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    embedding = FratrieRotaryEmbedding(
        FratrieDecoderConfig(**TINY, position_type="rotary", rope_parameters=parameters)
    )
    states = torch.randn(1, 2, 5, 16)
    turn = embedding(states, torch.arange(5)[None])
    assert turn[0].shape == (1, 1, 5, 8)
    turned = rotate(states, turn)
    torch.testing.assert_close(turned[..., 8:], states[..., 8:], rtol=0, atol=0)
    half, _ = apply_rotary_pos_emb(states[..., :8], states[..., :8], *as_llama_has_them(turn))
    torch.testing.assert_close(turned[..., :8], half)
    assert not torch.allclose(turned[..., 1:, :8], states[..., 1:, :8])


def test_rotated_product_depends_on_the_distance_alone():
    config = FratrieDecoderConfig(**TINY, position_type="rotary")
    embedding = FratrieRotaryEmbedding(config)
    query, key = torch.randn(2, 16, dtype=torch.float64)

    def product(query_place, key_place):
        turned = [
            rotate(x.view(1, 1, 1, 16), embedding(x, torch.tensor([[place]])))
            for x, place in ((query, query_place), (key, key_place))
        ]
        return float((turned[0] * turned[1]).sum())

    for distance in (0, 1, 5):
        expected = product(distance, 0)
        for start in (1, 10, 40):
            assert product(start + distance, start) == pytest.approx(expected, abs=1e-4)
    assert product(5, 0) != pytest.approx(product(0, 5), abs=1e-3)
    assert product(0, 0) == pytest.approx(float(query @ key))


LAYERED = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 160_000.0, "factor": 4.0,
                       "original_max_position_embeddings": 16},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
LAYER_TYPES = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}


def layered_model(model_class=FratrieEncoderModel, **fields):
    settings = {**TINY, **LAYER_TYPES, "sliding_window": 3, "position_type": "rotary", "initializer_range": 0.3}
    torch.manual_seed(0)
    config = model_class.config_class(**{**settings, "rope_parameters": copy.deepcopy(LAYERED), **fields})
    return model_class(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_class", [FratrieEncoderModel, FratrieDecoderModel])
def test_rotary_by_layer_type_equals_modernbert(model_class, dtype, tmp_path):
    """In a new model, and in one that was saved and loaded: the frequencies are not in the file."""
    theirs = ModernBertRotaryEmbedding(ModernBertConfig(**TINY | LAYER_TYPES, rope_parameters=copy.deepcopy(LAYERED)))
    model = layered_model(model_class).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path).eval()
    assert loaded.config.rope_parameters == LAYERED
    places, states = torch.tensor([[0, 1, 2, 3], [7, 40, 900, 2]]), torch.zeros(2, 4, 32, dtype=torch.float64)
    for each in (layered_model(model_class), loaded):
        layout = Rows(shape=(2, 4), given=GivenMask(), positions=places)
        each.complete(layout, states, None)
        turns = layout.rotations
        assert set(turns) == set(LAYERED)
        for kind, turn in turns.items():
            for actual, wanted in zip(as_llama_has_them(turn), theirs(states, places, kind), strict=True):
                assert torch.equal(actual, wanted), kind
    fresh, ids = layered_model(model_class), torch.arange(1, 11)[None]
    for parameter in fresh.parameters():
        parameter.data = parameter.to(dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        loaded(ids).last_hidden_state, fresh(ids).last_hidden_state, rtol=tolerance, atol=tolerance
    )


def test_frequencies_by_layer_type_are_right_without_a_checkpoint_of_them():
    model = FratrieEncoderModel.from_pretrained(None, config=layered_model().config, state_dict={})
    buffers = dict(layered_model().named_buffers())
    assert len(buffers) == 4
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_each_layer_is_turned_by_the_frequencies_of_its_type():
    """Told apart from outside: with one set for all, the other sets give other outputs."""
    ids = torch.arange(1, 13)[None]
    outputs = [
        layered_model(rope_parameters=copy.deepcopy(parameters)).double()(ids).last_hidden_state
        for parameters in (
            LAYERED,
            LAYERED["full_attention"],
            LAYERED["sliding_attention"],
            dict(zip(LAYERED, reversed(LAYERED.values()), strict=True)),
        )
    ]
    for index, output in enumerate(outputs):
        assert all((output - other).abs().max() > 1e-4 for other in outputs[:index])
    twice = dict.fromkeys(LAYERED, LAYERED["full_attention"])
    same = layered_model(rope_parameters=copy.deepcopy(twice)).double()(ids).last_hidden_state
    assert torch.equal(same, outputs[1])


def scores(query, key):
    return query @ key.transpose(-1, -2)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_interleaved_rotation_equals_deepseek(part):
    """The heads come out in another order, the same for queries and keys: the scores are equal."""
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": part}
    config = FratrieDecoderConfig(**TINY, position_type="rotary", rope_parameters=parameters)
    query, key = torch.randn(2, 2, 2, 7, 16, dtype=torch.float64)
    turn = FratrieRotaryEmbedding(config)(query, torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 9, 1, 40, 2, 0, 5]]))
    size = int(16 * part)
    turned = apply_rotary_pos_emb_interleave(query[..., :size], key[..., :size], *as_llama_has_them(turn))
    expected = scores(*turned) + scores(query[..., size:], key[..., size:])
    actual = scores(rotate(query, turn, interleaved=True), rotate(key, turn, interleaved=True))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(actual, scores(rotate(query, turn), rotate(key, turn)))


def test_neighbouring_numbers_turn_as_a_complex_number():
    """Su et al. 2021, equation 13: x_2i + i x_2i+1 times e^(i m theta_i); read back in the order of the output."""
    config = FratrieDecoderConfig(**TINY, position_type="rotary", rope_interleaved=True)
    states, places = torch.randn(1, 1, 5, 16, dtype=torch.float64), torch.tensor([[0, 1, 2, 7, 30]])
    turned = rotate(states, FratrieRotaryEmbedding(config)(states, places), interleaved=True)
    angles = places[0, :, None].double() / 10_000 ** (torch.arange(0, 16, 2).double() / 16)
    expected = torch.view_as_complex(states.unflatten(-1, (8, 2))) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_type", ["full_attention", "linear_attention"])
def test_interleaved_pairs_are_halves_of_reordered_heads(layer_type):
    """A model of the one form is one of the other, with the rows of its query and key projections in another order."""
    settings = {**TINY, "position_type": "rotary", "layer_types": [layer_type], "initializer_range": 0.3}
    torch.manual_seed(0)
    model = FratrieDecoderModel(FratrieDecoderConfig(**settings, rope_interleaved=True)).double().eval()
    other = FratrieDecoderModel(FratrieDecoderConfig(**settings)).double().eval()
    other.load_state_dict(model.state_dict())
    ids = torch.arange(1, 9)[None]
    expected = model(ids).last_hidden_state
    assert (other(ids).last_hidden_state - expected).abs().max() > 1e-4
    order = torch.cat([head * 16 + torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2))) for head in range(2)])
    mixer = other.layers[0].mixer
    for projection in (mixer.q_proj, mixer.k_proj):
        projection.weight.data, projection.bias.data = projection.weight[order], projection.bias[order]
    torch.testing.assert_close(other(ids).last_hidden_state, expected, rtol=1e-10, atol=1e-10)


# --- relative ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 20), (6, 50)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_t5(buckets, distance, bidirectional):
    config_class = FratrieEncoderConfig if bidirectional else FratrieDecoderConfig
    config = config_class(
        **TINY, position_type="relative", relative_num_buckets=buckets, relative_max_distance=distance
    )
    distances = torch.arange(-3000, 3001).view(1, -1)
    expected = T5Attention._relative_position_bucket(distances, bidirectional, buckets, distance)
    actual = RelativePositionBias(config).bucket(distances)
    assert torch.equal(actual, expected)
    assert actual.unique().tolist() == list(range(buckets)) if not bidirectional else actual.max() == buckets - 1


def test_relative_bias_reads_its_table():
    bias = RelativePositionBias(FratrieEncoderConfig(**TINY, position_type="relative"))
    queries, keys = torch.arange(2, 5), torch.arange(6)
    values = bias(queries, keys)
    assert values.shape == (1, 2, 3, 6)
    for t, query in enumerate(queries):
        for s, key in enumerate(keys):
            row = T5Attention._relative_position_bucket((key - query).view(1, 1), True, 32, 128)
            torch.testing.assert_close(values[0, :, t, s], bias.table.weight[row.item()])


# --- ALiBi ---------------------------------------------------------------------------------------------------------


def alibi(heads, causal=True):
    config_class = FratrieDecoderConfig if causal else FratrieEncoderConfig
    return AlibiPositionBias(
        config_class(**{**TINY, "hidden_size": 96, "num_attention_heads": heads}, position_type="alibi")
    )


def test_alibi_slopes_of_the_paper():
    """Section 3: for 8 heads 1/2, 1/4 … 1/256; for 12 the 8 and every other of the 16, 2^-0.5, 2^-1.5 …"""
    eight = [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(alibi(8).slopes_H, torch.tensor(eight))
    torch.testing.assert_close(alibi(16).slopes_H, torch.tensor([2 ** (-i / 2) for i in range(1, 17)]))
    twelve = [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    torch.testing.assert_close(alibi(12).slopes_H, torch.tensor(twelve))
    torch.testing.assert_close(alibi(1).slopes_H, torch.tensor([2.0**-8]))


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_penalty_is_slope_times_distance(causal):
    values = alibi(8, causal)(torch.arange(3, 6), torch.arange(6))
    assert values.shape == (1, 8, 3, 6) and values.dtype == torch.float32
    for head in range(8):
        for t in range(3):
            for s in range(6):
                assert values[0, head, t, s].item() == pytest.approx(-abs(s - t - 3) / 2 ** (head + 1))


# --- in a model ----------------------------------------------------------------------------------------------------

POSITION_TYPES = ["learned", "axial", "sinusoidal", "rotary", "relative", "alibi"]


@pytest.mark.parametrize("position_type", ["sinusoidal", "rotary", "alibi"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_stored_is_right_after_loading(position_type, dtype, tmp_path):
    config = FratrieEncoderConfig(
        **{**TINY, "hidden_size": 96, "num_attention_heads": 12}, position_type=position_type
    )
    model = FratrieEncoderModel(config).eval()
    model.save_pretrained(tmp_path)
    loaded = FratrieEncoderModel.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    buffers = dict(model.named_buffers())
    assert set(buffers) == set(dict(loaded.named_buffers()))
    assert bool(buffers) == (position_type != "sinusoidal")
    for name, buffer in loaded.named_buffers():
        torch.testing.assert_close(buffer.float(), buffers[name], rtol=2**-7 if dtype == "bfloat16" else 0, atol=0)
    ids = torch.arange(1, 11)[None]
    tolerance = 0.05 if dtype == "bfloat16" else 0
    torch.testing.assert_close(
        loaded(ids).last_hidden_state.float(), model(ids).last_hidden_state, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("position_type", POSITION_TYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_every_kind_tells_the_order_of_tokens(position_type, causal):
    """Without positions, the last token sees a bag of words; with them it does not."""
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )

    def last(kind, ids):
        torch.manual_seed(0)
        model = model_class(config_class(**TINY, position_type=kind, initializer_range=0.3)).double().eval()
        return model(ids).last_hidden_state[0, -1]

    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 1, 2, 4]])
    torch.testing.assert_close(last("none", one), last("none", other), rtol=1e-10, atol=1e-10)
    assert (last(position_type, one) - last(position_type, other)).abs().max() > 1e-4
