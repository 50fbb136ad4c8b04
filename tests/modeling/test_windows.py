"""Sliding windows in blocks: equal to a mask of all scores, which long rows do without."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.cache_utils import DynamicCache, StaticCache

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling import attention, masks, windows
from fratrie.modeling.windows import Window, attend_in_blocks, block_shape, pays, scores_in_blocks

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "position_type": "rotary",
    "initializer_range": 0.4,
}


def build(causal, **fields):
    torch.manual_seed(0)
    model = FratrieDecoderModel if causal else FratrieEncoderModel
    config = FratrieDecoderConfig if causal else FratrieEncoderConfig
    return model(config(**{**SIZES, **fields})).double().eval()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two tokens, for rows of any length."""
    monkeypatch.setattr(windows, "_SMALLEST_BLOCK", 2)
    monkeypatch.setattr(windows, "_LONG", 0)


@pytest.fixture
def runs(monkeypatch, small_blocks):
    """Lengths of the rows that were computed in blocks."""
    lengths = []

    def spy(attend, states, window, *args):
        lengths.append(states[0].shape[2])
        return attend_in_blocks(attend, states, window, *args)

    monkeypatch.setattr(attention, "attend_in_blocks", spy)
    return lengths


IDS = torch.arange(1, 37).reshape(3, 12)
PADDED = {
    "none": torch.ones(3, 12, dtype=torch.long),
    "right": (torch.arange(12) < torch.tensor([[12], [7], [1]])).long(),
    "left": (torch.arange(12) >= torch.tensor([[0], [5], [11]])).long(),
    "holes": torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]]).expand(3, -1),
}


@pytest.mark.parametrize("before, after", [(2, 0), (0, 0), (5, 0), (3, 3), (1, 1), (8, 8), (1, 4)])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 13])
def test_blocks_equal_a_mask_with_gradients(before, after, length, small_blocks):
    states = [torch.randn(2, 3, length, 4).double().requires_grad_() for _ in range(3)]
    seen = torch.rand(2, length) > 0.2
    distance = torch.arange(length) - torch.arange(length)[:, None]
    mask = (distance >= -before) & (distance <= after) & seen[:, None, None, :]

    def attend(query, key, value, mask):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2), None

    expected, _ = attend(*states, mask)
    actual = attend_in_blocks(attend, tuple(states), Window(before, after, seen))
    close(actual, expected)
    weights = torch.randn_like(expected)
    gradients, wanted = (torch.autograd.grad((x * weights).sum(), states) for x in (actual, expected))
    for gradient, other in zip(gradients, wanted, strict=True):
        close(gradient, other)
    size, *around = block_shape(before, after)
    assert scores_in_blocks(length, before, after) == -(-(length + 1) // size) * size * size * (sum(around) + 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
def test_models_give_the_same_by_blocks_and_by_masks(causal, padding, unpad, runs):
    mask, options = PADDED[padding], {"use_cache": False} if causal else {}
    by_blocks, by_mask = build(causal, unpad_inputs=unpad), build(causal, unpad_inputs=unpad)
    by_mask.set_attn_implementation("eager")
    states = by_blocks(IDS, attention_mask=mask, **options).last_hidden_state
    assert runs
    runs.clear()
    close(states[mask.bool()], by_mask(IDS, attention_mask=mask, **options).last_hidden_state[mask.bool()])
    assert not runs


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_equal_separate_ones(causal, runs):
    model = build(causal)
    parts = IDS.flatten()[:24].split([12, 3, 9])
    place = torch.cat([torch.arange(len(part)) for part in parts])[None]
    states = model(torch.cat(parts)[None], position_ids=place).last_hidden_state[0]
    assert runs == [12, 3] or sorted(runs) == [3, 12]
    for actual, part in zip(states.split([12, 3, 9]), parts, strict=True):
        close(actual, model(part[None]).last_hidden_state[0])


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_prompt_runs_in_blocks_and_what_follows_by_its_cache(padding, runs):
    model, mask = build(True), PADDED[padding]
    expected = model(IDS, attention_mask=mask, use_cache=False).last_hidden_state
    runs.clear()
    cache, states = DynamicCache(config=model.config), []
    for start, end in ((0, 8), (8, 11), (11, 12)):
        states.append(model(IDS[:, start:end], attention_mask=mask[:, :end], cache=cache).last_hidden_state)
    assert runs == [8]
    close(torch.cat(states, dim=1)[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize(
    "fields",
    [{"position_type": "alibi"}, {"position_type": "relative"}, {"attn_implementation": "eager"}],
    ids=lambda fields: next(iter(fields.values())),
)
def test_biases_and_weights_keep_the_mask(fields, runs):
    model = build(False, **fields)
    model(IDS)
    assert not runs and isinstance(_mask_of(model), torch.Tensor)


def _mask_of(model, **given):
    kind = ("scores", "sliding_attention")
    return masks.build_mask(model.config, kind, torch.empty(3, 12, 16), masks.GivenMask(**given))


def test_ready_masks_and_static_caches_keep_the_mask(runs):
    model = build(True)
    expected = model(IDS, use_cache=False).last_hidden_state
    runs.clear()
    cache = StaticCache(config=model.config, max_cache_len=16)
    close(model(IDS, cache=cache).last_hidden_state, expected)
    ready = torch.ones(12, 12, dtype=torch.bool).tril().triu(-2)[None, None].expand(3, -1, -1, -1)
    full = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(3, -1, -1, -1)
    by_type = {"sliding_attention": ready, "full_attention": full}
    close(model(IDS, attention_mask=by_type, use_cache=False).last_hidden_state, expected)
    assert not runs and isinstance(_mask_of(model, ready=ready), torch.Tensor)


def test_rows_are_cut_into_blocks_once_that_is_faster():
    """Beyond twice the keys that a block looks at; what is short has the mask that it always had."""
    assert block_shape(255, 0) == (128, 2, 0) and block_shape(256, 256) == (128, 2, 2) and block_shape(3, 3)[0] == 64
    assert not pays(1280, 256, 256) and pays(1281, 256, 256)
    assert isinstance(_mask_of(build(False)), torch.Tensor)


@pytest.mark.parametrize("causal", [True, False])
def test_one_compiled_graph_serves_all_long_rows(causal, small_blocks, monkeypatch):
    monkeypatch.setattr(windows, "_LONG", 1)
    torch._dynamo.reset()
    model = build(causal, num_hidden_layers=1, layer_types=["sliding_attention"])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    options = {"use_cache": False} if causal else {}
    for length in (17, 12, 19, 16):  # rows that fill their last block, and others
        ids = torch.arange(2 * length).reshape(2, length) % 40
        close(compiled(ids, **options).last_hidden_state, model(ids, **options).last_hidden_state)
    assert counter.frame_count == 1 and any("unflatten" in str(node) for node in counter.graphs[0].graph.nodes)
