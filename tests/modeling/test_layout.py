"""Padded and packed batches are two forms of the same documents: properties of `find_groups`, then of the models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderModel,
    FratrieEncoderConfig,
    FratrieEncoderModel,
)
from fratrie.modeling.layout import Groups, Rows, find_groups
from fratrie.modeling.masks import GivenMask
from fratrie.modeling.stack import FratrieStack

VOCAB = 30


# --- reading the documents -----------------------------------------------------------------------------------------


@st.composite
def padded(draw):
    """A mask with holes anywhere, and of each document its cells."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 8)))
    bits = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    mask = torch.tensor(bits).view(shape).long()
    documents = [row.nonzero().flatten().tolist() for row in mask]
    cells = [[row * shape[1] + place for place in places] for row, places in enumerate(documents) if places]
    return shape, mask, None, None, cells


@st.composite
def packed(draw):
    """Rows of several documents, told apart by restarting positions, perhaps with padding after them."""
    lengths = draw(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4))
    width = max(1, max(sum(row) for row in lengths) + draw(st.integers(0, 2)))
    mask, positions = torch.zeros(len(lengths), width).long(), torch.zeros(len(lengths), width).long()
    cells = []
    for row, sizes in enumerate(lengths):
        place = 0
        for size in sizes:
            mask[row, place : place + size] = 1
            positions[row, place : place + size] = torch.arange(size)
            cells.append([row * width + cell for cell in range(place, place + size)])
            place += size
    return mask.shape, mask, positions, None, cells


@st.composite
def flat(draw):
    """One row of documents told apart by their cumulative lengths."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    cells = [list(range(start, end)) for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    return (1, sum(lengths)), None, None, bounds.int(), cells


batches = st.one_of(padded(), packed(), flat())


def documents_of(layout):
    """The cells of each document, as the groups lay them out."""
    return [
        layout.cells_N[index[mask]].tolist()
        for group in layout.groups
        for index, mask in zip(group.index_GL, group.mask_GL, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(batch=batches, one_group=st.booleans())
def test_finds_the_documents(batch, one_group):
    shape, mask, positions, bounds, documents = batch
    layout = find_groups(shape, mask, positions, bounds, one_group)
    whole_rows = len(documents) == shape[0] and all(len(cells) == shape[1] for cells in documents)
    assert (layout is None) == (whole_rows or not documents)
    if layout is None:
        return
    assert layout.shape == shape
    assert layout.cells_N.tolist() == [cell for cells in documents for cell in cells]
    assert layout.positions[0].tolist() == [place for cells in documents for place in range(len(cells))]
    assert sorted(documents_of(layout)) == sorted(documents)
    rows = [cells[0] // shape[1] for cells in documents]
    assert layout.has_packed_rows == (len(set(rows)) < len(rows))
    if one_group:
        assert len(layout.groups) == 1 and documents_of(layout) == documents


@settings(max_examples=100, deadline=None)
@given(batch=batches, one_group=st.booleans())
def test_groups_hold_each_token_once_and_little_padding(batch, one_group):
    layout = find_groups(*batch[:4], one_group)
    if layout is None:
        return
    tokens = torch.cat([group.index_GL[group.mask_GL] for group in layout.groups])
    assert sorted(tokens.tolist()) == list(range(len(layout.cells_N)))
    for group in layout.groups:
        lengths = group.mask_GL.sum(1)
        assert lengths.max() == group.mask_GL.shape[1]  # no column of padding
        assert torch.equal(group.mask_GL, torch.arange(len(group.mask_GL[0])) < lengths[:, None])
        assert one_group or lengths.min() >= lengths.max() * 0.6
        assert group.index_GL.min() >= 0 and group.index_GL.max() < len(layout.cells_N)


@settings(max_examples=100, deadline=None)
@given(batch=batches, one_group=st.booleans(), trailing=st.sampled_from([(), (3,), (2, 2)]))
def test_every_form_comes_back(batch, one_group, trailing):
    layout = find_groups(*batch[:4], one_group)
    if layout is None:
        return
    x = torch.randn(*layout.shape, *trailing)
    tokens = layout.pack(x)
    assert tokens.shape == (1, len(layout.cells_N), *trailing)
    real = torch.zeros(layout.shape).flatten().index_fill(0, layout.cells_N, 1).view(layout.shape).bool()
    back = layout.unpack(tokens)
    assert torch.equal(back[real], x[real]) and not back[~real].any()
    assert torch.equal(layout.gather([tokens[0][group.index_GL] for group in layout.groups]), tokens)
    layout.masks["padding", "any"] = [group.mask_GL for group in layout.groups]
    for token_dim in (1, 2):
        states = tokens.unsqueeze(-1).transpose(1, token_dim)
        added, _ = layout.run(
            lambda a, b, mask, bias, dim=token_dim: ((a + b).transpose(1, dim), None),
            [states, 2 * states],
            ("padding", "any"),
            token_dim=token_dim,
        )
        torch.testing.assert_close(added, 3 * tokens.unsqueeze(-1))


def test_one_row_of_values_serves_all_rows():
    layout = find_groups((2, 3), torch.tensor([[1, 1, 0], [0, 1, 1]]), None)
    assert layout.pack(torch.arange(3)[None]).tolist() == [[0, 1, 1, 2]]


@pytest.mark.parametrize(
    "mask, positions",
    [
        (None, None),
        (torch.ones(2, 4), None),
        (None, torch.arange(4)[None]),
        (torch.ones(2, 4), torch.tensor([[0, 1, 2, 3], [5, 6, 8, 9]])),
        (torch.zeros(2, 4), None),
    ],
    ids=["nothing", "ones", "rising", "gaps", "no token"],
)
def test_nothing_to_pack(mask, positions):
    assert find_groups((2, 4), mask, positions) is None


def test_given_positions_are_kept():
    positions = torch.tensor([[3, 4, 6, 2, 3]])
    layout = find_groups((1, 5), None, positions)
    assert layout.positions[0].tolist() == [3, 4, 6, 2, 3]
    assert [int(group.mask_GL.sum()) for group in layout.groups] == [5] and len(layout.groups[0].mask_GL) == 2


def test_positions_of_padding_do_not_count():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    layout = find_groups((2, 5), mask, positions)
    assert not layout.has_packed_rows and layout.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@settings(max_examples=50, deadline=None)
@given(batch=batches, one_group=st.booleans())
def test_a_layout_moves_to_another_device_whole(batch, one_group):
    """As accelerate moves what a layer is called with, before a layer that lies elsewhere."""
    shape, mask = batch[:2]
    layout = find_groups(*batch[:4], one_group) or Rows(shape=shape, given=GivenMask.read(mask))
    layout.masks["scores", "full_attention"] = [torch.ones(1), None]
    layout.rotations["full_attention"] = (torch.ones(1), torch.ones(1))
    moved = layout.to(torch.device("meta"))
    assert type(moved) is type(layout) and moved.shape == layout.shape
    for value in vars(moved).values():
        assert all(leaf.is_meta for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def test_a_causal_mixer_sees_the_room_after_a_document_only_where_it_asks_for_lengths():
    groups, states = find_groups((2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]), None), torch.zeros(1, 5, 4)
    fields = {"hidden_size": 16, "attn_implementation": "sdpa"}
    causal, both_ways = FratrieDecoderConfig(**fields), FratrieEncoderConfig(**fields)
    masks = [group.mask_GL for group in groups.groups]
    assert groups.build_mask(causal, ("padding", "linear_attention"), states) == [None] * len(masks)
    for config, form in ((causal, "lengths"), (both_ways, "lengths"), (both_ways, "padding")):
        found = groups.build_mask(config, (form, "linear_attention"), states)
        assert all(torch.equal(mask, wanted) for mask, wanted in zip(found, masks, strict=True))


# --- models --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "learned": {"position_type": "learned"},
    "sinusoidal": {"position_type": "sinusoidal"},
    "rotary": {"position_type": "rotary", "num_key_value_heads": 2},
    "relative": {"position_type": "relative"},
    "alibi sliding": {
        "position_type": "alibi",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2,
    },
    "linear": {"position_type": "rotary", "layer_types": ["linear_attention", "full_attention"]},
    "experts": {"position_type": "rotary", "num_experts": 4, "moe_intermediate_size": 8},
    "token types": {"position_type": "learned", "type_vocab_size": 3},
}
CASES = [(causal, name) for causal in (False, True) for name in LAYOUTS if not (causal and name == "token types")]
cases = pytest.mark.parametrize("causal, name", CASES)


def build(causal, name="rotary", model_class=None, **fields):
    config_class = FratrieDecoderConfig if causal else FratrieEncoderConfig
    model_class = model_class or (FratrieDecoderModel if causal else FratrieEncoderModel)
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        **LAYOUTS[name],
    }
    torch.manual_seed(0)
    return model_class(config_class(**{**shared, **fields})).double().eval()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def forms(documents):
    """The same documents padded left, padded right, and packed into one row: ids and arguments of each form."""
    width = max(map(len, documents)) + 1
    for side in ("left", "right"):
        ids, mask = torch.full((len(documents), width), 3), torch.zeros(len(documents), width, dtype=torch.long)
        for row, document in enumerate(documents):
            start = 0 if side == "right" else width - len(document)
            ids[row, start : start + len(document)] = document
            mask[row, start : start + len(document)] = 1
        yield ids, {"attention_mask": mask}, mask.bool()
    ids = torch.cat(documents)[None]
    place = torch.cat([torch.arange(len(document)) for document in documents])[None]
    real = torch.ones_like(ids).bool()
    yield ids, {"position_ids": place}, real
    yield ids, {"position_ids": place, "attention_mask": torch.ones_like(ids)}, real
    if len(documents) > 1:
        bounds = torch.tensor([0, *map(len, documents)]).cumsum(0).int()
        hints = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": width, "max_length_k": width}
        yield ids, hints, real


@cases
@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_every_form_of_the_documents_gives_equal_outputs(causal, name, lengths, seed):
    model, generator = build(causal, name), torch.Generator().manual_seed(seed)
    documents = [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]
    types = name == "token types"
    expected = torch.cat(
        [
            model(document[None], **({"token_type_ids": document[None] % 3} if types else {}))[0][0]
            for document in documents
        ]
    )
    for ids, arguments, real in forms(documents):
        if types:
            arguments["token_type_ids"] = ids % 3
        close(model(ids, **arguments).last_hidden_state[real], expected)


@pytest.fixture
def packed_passes(monkeypatch):
    taken, original = [], FratrieStack.run

    def spy(self, inputs, layout, *args, **kwargs):
        if isinstance(layout, Groups):
            taken.append(len(layout.cells_N))
        return original(self, inputs, layout, *args, **kwargs)

    monkeypatch.setattr(FratrieStack, "run", spy)
    return taken


@pytest.mark.parametrize("causal", [False, True])
def test_which_batches_are_unpadded(causal, packed_passes):
    ids, mask = torch.randint(1, VOCAB, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
    place = torch.tensor([[0, 1, 0, 1, 2]])
    options = {"use_cache": False} if causal else {}
    model, rows = build(causal), build(causal, unpad_inputs=False)

    def passes(model, **kwargs):
        packed_passes.clear()
        model(ids, **options, **kwargs)
        return packed_passes

    assert passes(model, attention_mask=mask) == [8]
    assert passes(rows, attention_mask=mask) == []
    assert passes(model) == passes(model, attention_mask=torch.ones_like(mask)) == []
    assert passes(model, position_ids=place) == [10]
    assert passes(rows, position_ids=place) == [10]  # packed rows must be told apart whatever is unpadded
    sdpa = build(causal, attn_implementation="sdpa")
    assert passes(sdpa, attention_mask=mask[:, None, None].expand(2, 1, 5, 5).bool()) == []


def test_a_decoder_in_training_is_unpadded_and_gives_no_cache(packed_passes):
    model = build(True).train()
    outputs = model(torch.ones(2, 3, dtype=torch.long), attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert packed_passes == [5] and outputs.cache is None


@cases
@pytest.mark.parametrize("form", ["positions", "positions and ones", "cumulative lengths"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_no_gradient_leaks_between_packed_documents(causal, name, form, training):
    """With every default of the model, the cache's among them."""
    model = build(causal, name).train(training)
    embeds = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    place = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    arguments = {
        "positions": {"position_ids": place},
        "positions and ones": {"position_ids": place, "attention_mask": torch.ones(1, 9, dtype=torch.long)},
        "cumulative lengths": {"cu_seq_lens_q": torch.tensor([0, 4, 9])},
    }[form]
    states = model(inputs_embeds=embeds, **arguments).last_hidden_state
    weights = torch.randn_like(states)
    for inside, outside in ((slice(0, 4), slice(4, 9)), (slice(4, 9), slice(0, 4))):
        scalar = (states[:, inside] * weights[:, inside]).sum()
        (gradient,) = torch.autograd.grad(scalar, embeds, retain_graph=True)
        assert not gradient[:, outside].any() and gradient[:, inside].abs().sum(-1).gt(0).all()


def test_packed_rows_make_no_cache():
    model, ids, place = build(True), torch.arange(1, 6)[None], torch.tensor([[0, 1, 0, 1, 2]])
    assert model(ids, position_ids=place).cache is None
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids, position_ids=place, use_cache=True)


def test_packed_rows_into_a_given_cache_are_refused():
    """A prefill of several documents would let them see each other, and leave nothing that could be continued."""
    model = build(True)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(
            torch.arange(1, 6)[None],
            position_ids=torch.tensor([[0, 1, 0, 1, 2]]),
            cache=DynamicCache(config=model.config),
        )


@cases
@torch.no_grad()
def test_all_outputs_return_in_the_callers_form(causal, name):
    """Hidden states, attention weights and router logits of a padded batch, unpadded or not.

    Without gradients: with them, rows are kept as they are where states are recorded.
    """
    ids, mask = torch.randint(1, VOCAB, (3, 6)), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 1, 0, 0, 0]])
    options = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    if causal:
        options["use_cache"] = False
    unpadded, rows = (
        build(causal, name, unpad_inputs=unpad)(ids, attention_mask=mask, **options) for unpad in (True, False)
    )
    real = mask.bool()
    assert list(unpadded.keys()) == list(rows.keys())
    close(unpadded.last_hidden_state[real], rows.last_hidden_state[real])
    assert len(unpadded.hidden_states) == len(rows.hidden_states) == 3
    for ours, theirs in zip(unpadded.hidden_states, rows.hidden_states, strict=True):
        assert ours.shape == (3, 6, 16)
        close(ours[real], theirs[real])
    softmax_layers = 1 if name == "linear" else 2
    assert len(unpadded.attentions) == len(rows.attentions) == softmax_layers
    for ours, theirs in zip(unpadded.attentions, rows.attentions, strict=True):
        assert ours.shape == (3, 4, 6, 6)
        pairs = (real[:, :, None] & real[:, None, :])[:, None].expand_as(ours)
        close(ours[pairs], theirs[pairs])
        assert not ours[~pairs].any()
    if name == "experts":
        for ours, theirs in zip(unpadded.router_logits, rows.router_logits, strict=True):
            assert ours.shape == (18, 4)
            close(ours[real.flatten()], theirs[real.flatten()])


def test_attention_weights_of_packed_rows_are_block_diagonal():
    model = build(False)
    lengths = [2, 3, 1]
    place = torch.cat([torch.arange(length) for length in lengths])[None]
    (first, _) = model(torch.arange(1, 7)[None], position_ids=place, output_attentions=True).attentions
    blocks = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    assert torch.equal(first[0].bool(), blocks.expand(4, 6, 6))
    close(first.sum(-1), torch.ones(1, 4, 6).double())


def test_selected_hidden_states_stay_selected():
    ids, mask = torch.randint(1, VOCAB, (2, 4)), torch.tensor([[1, 1, 0, 0], [1] * 4])
    states = build(False)(ids, attention_mask=mask, output_hidden_states=[1]).hidden_states
    assert [None if state is None else tuple(state.shape) for state in states] == [None, (2, 4, 16), None]


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_unpadded_and_padded_rows_are_equal(causal):
    ids, mask = torch.randint(1, VOCAB, (3, 6)), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 1, 0, 0, 0]])
    weights, gradients = torch.randn(3, 6, 16).double() * mask[..., None], []
    for unpad in (True, False):
        model = build(causal, "linear", unpad_inputs=unpad).train()
        (model(ids, attention_mask=mask).last_hidden_state * weights).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        close(gradient, gradients[1][name], 1e-9)


def test_a_hole_in_a_text_is_closed_where_positions_are_counted():
    """Positions count real tokens: with rotary ones, the text reads as if a masked token within it were not there.

    A window or a position bias goes by the distance of places, which a hole keeps (tested with the models).
    """
    model = build(False, "rotary")
    ids, mask = torch.tensor([[4, 5, 9, 6, 7]]), torch.tensor([[1, 1, 0, 1, 1]])
    close(
        model(ids, attention_mask=mask).last_hidden_state[mask.bool()],
        model(torch.tensor([[4, 5, 6, 7]])).last_hidden_state[0],
    )


def test_a_batch_of_padding_alone_is_finite():
    for unpad in (True, False):
        states = build(False, unpad_inputs=unpad)(
            torch.ones(2, 3).long(), attention_mask=torch.zeros(2, 3).long()
        ).last_hidden_state
        assert states.shape == (2, 3, 16) and states.isfinite().all()


def test_packed_language_modelling_loss_is_that_of_the_documents():
    model = build(True, model_class=FratrieDecoderForCausalLM)
    documents = [torch.randint(1, VOCAB, (length,)) for length in (5, 2, 7)]
    total = sum(model(document[None], labels=document[None]).loss * (len(document) - 1) for document in documents)
    ids = torch.cat(documents)[None]
    place = torch.cat([torch.arange(len(document)) for document in documents])[None]
    close(model(ids, position_ids=place, labels=ids).loss, total / (4 + 1 + 6))
