"""Attention by blocks: equal to the plain softmax for any block size, with memory that grows with the length alone."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from fratrie.modeling.blockwise import (
    Call,
    PairMask,
    blockwise_attention,
    blockwise_attention_forward,
    blockwise_mask,
)

ROWS, HEADS, GROUPS, QUERIES, KEYS, SIZE = 2, 4, 2, 7, 9, 5
MASKS = ("none", "padding", "per head", "added", "added and learned", "learned")


def operands(**kwargs):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True} | kwargs
    query = torch.randn(ROWS, HEADS, QUERIES, SIZE, **options)
    key = torch.randn(ROWS, GROUPS, KEYS, SIZE, **options)
    return query, key, torch.randn(ROWS, GROUPS, KEYS, SIZE + 1, **options)


def masks(kind):
    """A mask and a bias."""
    seen = torch.ones(ROWS, 1, 1, KEYS, dtype=torch.bool)
    seen[1, ..., 4:] = False
    learned = torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    added = torch.zeros(ROWS, 1, QUERIES, KEYS, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    per_head = torch.rand(ROWS, HEADS, QUERIES, KEYS) < 0.6
    per_head[0, 1, 2] = False  # a query without keys
    return {
        "none": (None, None),
        "padding": (seen, None),
        "per head": (per_head, None),
        "added": (added, None),
        "added and learned": (added, learned),
        "learned": (None, learned),
    }[kind]


def plain(query, key, value, mask=None, bias=None, factor=1.0):
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask == 0
        scores = scores.masked_fill(~mask, -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True).clamp_min(-1e9)).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-300)
    return weights * factor @ value


def assert_close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("block_size", [1, 4, 100])
def test_it_is_the_softmax_for_any_block_size(kind, block_size):
    inputs, (mask, bias) = operands(), masks(kind)
    # As our models and Hugging Face's hand it over.
    given = bias if bias is None else bias.expand(ROWS, -1, -1, -1)
    actual = blockwise_attention(*inputs, mask, bias=given, block_size=block_size)
    expected = plain(*inputs, mask, bias)
    assert_close(actual, expected, 1e-12)
    direction, learned = torch.randn_like(actual), [bias] if bias is not None else []
    grads = (torch.autograd.grad((x * direction).sum(), [*inputs, *learned]) for x in (actual, expected))
    assert_close(*grads, 1e-10)


def test_queries_without_keys_are_zero_and_have_no_gradient():
    query, key, value = operands()
    lowest = torch.finfo(torch.float64).min
    for mask in (torch.zeros(1, 1, 1, KEYS, dtype=torch.bool), torch.full((1, 1, 1, KEYS), lowest, dtype=query.dtype)):
        mixed = blockwise_attention(query, key, value, mask, block_size=4)
        assert not mixed.any()
        assert not any(grad.any() for grad in torch.autograd.grad(mixed.sum(), (query, key, value)))


def test_scores_of_any_size_overflow_nothing():
    query, key, value = operands(dtype=torch.float32)
    mixed = blockwise_attention(query * 1e6, key * 1e6, value, block_size=2)
    assert_close(mixed, plain(query * 1e6, key * 1e6, value), 1e-5)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(mixed.sum(), (query, key, value)))


# --- masks that hold no pairs --------------------------------------------------------------------------------------

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1]])
RULES = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "window to both sides": sliding_window_bidirectional_mask_function(2),
    "chunks": chunked_causal_mask_function(4, torch.tensor([0, 1])),
    "packed": and_masks(causal_mask_function, packed_sequence_mask_function(DOCUMENTS)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("past", [0, 5, 8])
@pytest.mark.parametrize("rule", RULES)
def test_the_blocks_of_a_mask_are_those_of_hugging_faces_table(rule, past, padded):
    padding = None
    if padded:
        padding = torch.ones(2, 9, dtype=torch.bool)
        padding[1, :4] = False
    sizes = {"batch_size": 2, "q_length": 9 - past, "kv_length": 9, "q_offset": past}
    arguments = sizes | {"mask_function": RULES[rule], "attention_mask": padding}
    table = sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = blockwise_mask(**arguments)
    assert (mask is None) == (rule == "bidirectional" and not padded)
    call = Call(scale=1.0, mask=mask or PairMask(), block_size=4)
    found = torch.zeros(2, 1, 9 - past, 9, dtype=torch.bool)
    for queries, keys, seen in call.blocks(9 - past, 9, table.device):
        part = found[..., queries.start : queries.stop, keys.start : keys.stop]
        part.copy_(torch.ones_like(part) if seen is None else seen)
        assert part.any(), "a block that nobody sees"
    assert torch.equal(found, table)


def test_causal_blocks_that_nobody_sees_are_left_out_on_every_device():
    mask = PairMask(is_causal=True, query_offset=8)  # after a past
    blocks = [
        (queries, keys)
        for queries in (range(0, 4), range(4, 8))
        for keys in (range(start, start + 4) for start in range(0, 16, 4))
        if not mask.hides(queries, keys)
    ]
    assert len(blocks) == 3 + 4
    call = Call(scale=1.0, mask=PairMask(is_causal=True), block_size=2)
    found = [seen is None for _, _, seen in call.blocks(8, 8, torch.device("meta"))]
    assert len(found) == 10 and sum(found) == 6, "and those that are seen whole need no mask"


def test_a_mask_that_is_ready_passes_through():
    mask = PairMask(is_causal=True, shape=(1, 1, 5, 5))
    assert blockwise_mask(1, 5, 5, attention_mask=mask) is mask
    assert mask.ndim == len(mask.shape) == 4


def test_a_static_cache_and_rules_of_single_indices_get_a_table():
    static = {"q_offset": torch.tensor(2), "allow_is_causal_skip": False}
    assert torch.equal(blockwise_mask(1, 1, 5, **static), sdpa_mask(1, 1, 5, **static))
    part = torch.tensor([0, 1, 1])
    single = {"use_vmap": True, "allow_is_causal_skip": False, "mask_function": lambda b, h, q, k: part[q] == part[k]}
    assert torch.equal(blockwise_mask(1, 3, 3, **single), sdpa_mask(1, 3, 3, **single))


# --- memory, precision, dropout ------------------------------------------------------------------------------------


def bytes_kept(length):
    """What the backward pass is left, in bytes."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = [torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3)]
    padding = torch.ones(1, length, dtype=torch.bool)
    padding[:, :3] = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        blockwise_attention(*inputs, blockwise_mask(1, length, length, attention_mask=padding), block_size=16)
    return sum(kept.values())


def test_what_the_backward_pass_keeps_grows_with_the_length():
    assert bytes_kept(64) == 64 * 2 * 4 * (3 * 4 + 4 + 1)
    assert bytes_kept(256) == 4 * bytes_kept(64)


def test_half_precision_has_scores_and_sums_in_float32():
    query, key, value = operands(dtype=torch.bfloat16)
    mixed = blockwise_attention(query, key, value, block_size=2)
    expected = plain(query.double(), key.double(), value.double())
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, expected.bfloat16())
    grads = (torch.autograd.grad(x.sum(), (query, key, value)) for x in (mixed, expected))
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)


def test_autocast_changes_nothing():
    query, key, value = operands(dtype=torch.float32)
    plainly = blockwise_attention(query, key, value)
    grads = torch.autograd.grad(plainly.sum(), (query, key, value))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = blockwise_attention(query, key, value)
        assert torch.equal(mixed, plainly)
        for grad, expected in zip(torch.autograd.grad(mixed.sum(), (query, key, value)), grads, strict=True):
            assert torch.equal(grad, expected)


def test_dropout_drops_the_same_weights_in_both_passes(monkeypatch):
    factors = {}
    kept = Call.kept

    def note(self, rows, columns, weights):
        factor = kept(self, rows, columns, weights)
        assert torch.equal(factors.setdefault((rows, columns), factor), factor)
        return factor

    monkeypatch.setattr(Call, "kept", note)
    inputs = operands()
    actual = blockwise_attention(*inputs, block_size=4, dropout=0.4)
    factor = torch.zeros(ROWS, GROUPS, HEADS // GROUPS, QUERIES, KEYS, dtype=torch.float64)
    for (rows, columns), block in factors.items():
        factor[..., rows.start : rows.stop, columns.start : columns.stop] = block
    assert factor.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert (factor == 0).double().mean() == pytest.approx(0.4, abs=0.1)
    expected = plain(*inputs, factor=factor.flatten(1, 2))
    assert_close(actual, expected, 1e-12)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (actual, expected))
    assert_close(*grads, 1e-10)


def test_dropout_follows_the_seed():
    inputs = operands(requires_grad=False)
    torch.manual_seed(3)
    first, second = (blockwise_attention(*inputs, dropout=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(blockwise_attention(*inputs, dropout=0.5), first)
    assert not torch.equal(first, second)


# --- as an implementation of Hugging Face's ------------------------------------------------------------------------


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 1


def padding_of(length):
    return torch.arange(length) < torch.tensor([[length], [3]])


def attend_with(x, padding):
    length = x.shape[2]
    mask = None if padding is None else blockwise_mask(2, length, length, attention_mask=padding)
    return blockwise_attention_forward(Module(), x, x, x, mask, block_size=4)[0]


@pytest.mark.parametrize("padded", [False, True])
def test_one_graph_serves_all_lengths(padded):
    """There SDPA computes the same."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend_with, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 7, 8):
        x, padding = torch.randn(2, 2, length, 4), padding_of(length) if padded else None
        torch.testing.assert_close(compiled(x, padding), attend_with(x, padding), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1


def test_a_graph_reads_the_table_of_a_mask_that_was_made_outside():
    x, mask = torch.randn(2, 2, 7, 4), blockwise_mask(2, 7, 7, attention_mask=padding_of(7))
    attend = partial(blockwise_attention_forward, Module())
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert_close(compiled(x, x, x, mask)[0], attend(x, x, x, mask)[0], 1e-5)


def test_what_it_cannot_do_is_refused_by_name():
    query, key, value = operands()
    with pytest.raises(ValueError, match=r"block_size=0: give 1 or more"):
        blockwise_attention(query, key, value, block_size=0)
    for name in ("softcap", "s_aux"):
        with pytest.raises(ValueError, match=f"does not know {name}: use attn_implementation='eager'"):
            blockwise_attention_forward(Module(), query, key, value, None, **{name: 1.0})
    with pytest.raises(ValueError, match=r"create_graph=True: .* no second derivatives"):
        torch.autograd.grad(blockwise_attention(query, key, value).sum(), query, create_graph=True)


def test_without_a_mask_the_module_tells_whether_it_is_causal():
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    attend = partial(blockwise_attention_forward, Module(), x, x, x, None, block_size=4)
    for options, causal in (({}, True), ({"is_causal": False}, False)):
        expected = scaled_dot_product_attention(x, x, x, is_causal=causal).transpose(1, 2)
        assert_close(attend(**options)[0], expected, 1e-12)
    one = x[:, :, -1:]
    expected = scaled_dot_product_attention(one, x, x).transpose(1, 2)
    assert_close(blockwise_attention_forward(Module(), one, x, x, None)[0], expected, 1e-12)
