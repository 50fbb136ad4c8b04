"""Attention by hashing: the contract of mixers, and what a hash could let through."""

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import rows_of_mixer, rows_of_stack
from mixer_contract import MixerContract, close, turn
from torch._dynamo.testing import CompileCounter
from transformers.models.reformer.configuration_reformer import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, FratrieEncoderConfig, FratrieEncoderForMaskedLM


def unit(vector):
    return vector / torch.sqrt((vector * vector).mean() + 1e-6) / len(vector) ** 0.5


class TestReformer(MixerContract):
    mixer = "reformer"
    layer_type = "full_attention"
    variants: ClassVar[list[dict[str, Any]]] = [
        {"reformer_num_buckets": 4, "reformer_num_hashes": 2, "reformer_window": 2},
        # Without a hash, so that rounding moves no token to another bucket.
        {"reformer_num_buckets": 1, "reformer_num_hashes": 1, "reformer_window": 3, "position_type": "rotary"},
    ]
    # One bucket and a window as long as the text are full attention, in whichever way it is computed.
    degenerate = (
        {"reformer_num_buckets": 1, "reformer_num_hashes": 3, "reformer_window": 10},
        {"reformer_num_buckets": 1, "reformer_num_hashes": 1, "reformer_window": 50},
    )

    def seen(self, mixer, vectors, causal, real):
        """The places that each query sees: of every round the nearest of its bucket, itself where there are none."""
        window, found = mixer.window, [set() for _ in vectors]
        for index in range(mixer.num_hashes):
            directions = mixer.rotations[:, index]
            buckets = [int(torch.cat((v @ directions, -(v @ directions))).argmax()) if len(directions[0]) else 0
                       for v in vectors]  # fmt: skip
            for query in range(len(vectors)):
                same = [p for p in range(len(vectors)) if real[p] and buckets[p] == buckets[query]]
                found[query] |= set([p for p in same if p < query][-window:])
                if not causal:
                    found[query] |= set([p for p in same if p > query][:window])
        return [places or {query} for query, places in enumerate(found)]

    def plain(self, mixer, hidden, causal, angles, real):
        heads = []
        for rows in torch.arange(mixer.config.num_attention_heads * mixer.head_dim).split(mixer.head_dim):
            queries = hidden @ mixer.qk_proj.weight[rows].T + mixer.qk_proj.bias[rows]
            values = hidden @ mixer.v_proj.weight[rows].T + mixer.v_proj.bias[rows]
            if angles is not None:
                queries = turn(queries, angles)
            mixed = []
            for query, places in enumerate(self.seen(mixer, queries.detach(), causal, real)):
                places = sorted(places)
                scores = torch.stack([queries[query] @ unit(queries[place]) for place in places])
                mixed.append(scores.softmax(0) @ values[places])
            heads.append(torch.stack(mixed))
        return torch.cat(heads, dim=-1) @ mixer.o_proj.weight.T + mixer.o_proj.bias

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)

    def test_a_token_sees_just_what_it_may(self, causal, variant):
        """By gradient of the values, which reach every query that sees their token in some head."""
        model = self.build(causal, variant)
        mixer, hidden = model.layers[0].mixer, torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
        mixer.qk_proj.weight.requires_grad_(False)
        queries = mixer.split_heads(mixer.qk_proj(hidden))[0].transpose(0, 1)
        layout = rows_of_stack(model, hidden)
        if layout.rotations:
            queries = mixer.turn(queries[None], layout.rotations[self.layer_type])[0]
        seen = [self.seen(mixer, head, causal, [True] * 8) for head in queries.detach()]
        values = torch.randn(1, 4, 8, 4, dtype=torch.float64, requires_grad=True)
        states = (queries[None].detach(), mixer.hashed_keys(queries[None].detach()), values)
        outputs, _ = mixer.attend(*states, None, None)
        for query in range(8):
            (grad,) = torch.autograd.grad(outputs[0, query].sum(), values, retain_graph=True)
            for head in range(4):
                assert set(grad[0, head].any(-1).nonzero().flatten().tolist()) == seen[head][query]


def build(causal=True, **fields):
    shared = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
        "mixer_types": ["reformer"] * 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if causal:
        return FratrieDecoderForCausalLM(FratrieDecoderConfig(**{**shared, **fields})).double().eval()
    return FratrieEncoderForMaskedLM(FratrieEncoderConfig(**{**shared, **fields})).double().eval()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_with_one_chunk_equals_hugging_faces_layer(causal):
    """Theirs does not hash either where a chunk holds the text; its softmax runs in float64 with the weights."""
    mixer = build(causal, reformer_num_buckets=1, reformer_window=4).base_model.layers[0].mixer
    config = ReformerConfig(
        hidden_size=16, num_attention_heads=4, attention_head_size=4, lsh_attn_chunk_length=16, is_decoder=causal
    )
    theirs = LSHSelfAttention(config).double().eval()
    for bias in (mixer.qk_proj.bias, mixer.v_proj.bias, mixer.o_proj.bias):
        bias.data.zero_()  # theirs has none
    theirs.query_key.weight.data, theirs.value.weight.data = mixer.qk_proj.weight.data, mixer.v_proj.weight.data
    hidden = torch.randn(2, 12, 16, dtype=torch.float64)
    mixed = theirs(hidden).hidden_states
    mixer.window = 12  # the whole text, by all scores at once
    close(mixer(hidden, rows_of_mixer(mixer, hidden))[0], mixed @ mixer.o_proj.weight.T)
    mixer.window = 11  # and in blocks
    close(mixer(hidden, rows_of_mixer(mixer, hidden))[0], mixed @ mixer.o_proj.weight.T)


def test_vectors_share_a_bucket_the_more_often_the_smaller_their_angle():
    mixer = build(head_dim=8, reformer_num_buckets=8, reformer_num_hashes=4000).model.layers[0].mixer
    first, other = torch.linalg.qr(torch.randn(8, 2, dtype=torch.float64)).Q.T
    shares = []
    for cosine in (1.0, 0.9, 0.5, 0.0, -0.5, -1.0):
        second = cosine * first + (1 - cosine**2) ** 0.5 * other
        buckets = mixer.hash(torch.stack((first, 3 * second)).view(1, 1, 2, 8))[0, 0]
        assert buckets.unique().tolist() == list(range(1, 9)), "every bucket is in use"
        shares.append((buckets[0] == buckets[1]).double().mean().item())
    assert shares == sorted(shares, reverse=True) and shares[0] == 1 and shares[-1] == 0
    assert abs(shares[3] - 1 / 8) < 0.02, "at a right angle as by chance"


@settings(max_examples=40, deadline=None)
@given(length=st.integers(2, 40), window=st.integers(1, 9), rounds=st.integers(1, 3), data=st.data())
def test_a_later_token_of_a_long_text_changes_nothing_before_it(length, window, rounds, data):
    """By the sorted blocks: a grid over the sorted tokens would shift with the buckets of later ones."""
    model = build(reformer_num_buckets=4, reformer_num_hashes=rounds, reformer_window=window).model
    place = data.draw(st.integers(0, length - 1))
    ids = torch.randint(1, 40, (1, length), generator=torch.Generator().manual_seed(length))
    other = torch.cat((ids[:, :place], ids[:, place:].roll(1) + 1), dim=1) % 40
    states, changed = (model(x, use_cache=False).last_hidden_state[:, :place] for x in (ids, other))
    close(changed, states)
    cached = model(ids[:, : place + 1]).last_hidden_state[:, :place]
    close(cached, states)


def test_the_directions_come_from_the_seed_alone():
    layers = [build(reformer_seed=seed).model.layers for seed in (3, 3, 14)]
    (first, second), again, other = ([layer.mixer.rotations for layer in stack] for stack in layers)
    assert torch.equal(first, again[0]) and not torch.equal(first, other[0]) and not torch.equal(first, second)
    with torch.device("meta"):
        empty = FratrieDecoderForCausalLM(build(reformer_seed=3).config)
    filled = empty.to_empty(device="cpu")
    filled.model.layers[0].mixer.rotations.fill_(torch.nan)
    filled.init_weights()
    assert torch.equal(filled.model.layers[0].mixer.rotations.double(), first)
    state = torch.random.get_rng_state()
    filled.model.layers[0].mixer.draw_rotations()
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


@pytest.mark.parametrize("kind", [None, "static"])
def test_generation_from_a_cache_equals_that_without(kind):
    model = build(position_type="rotary", reformer_num_buckets=4, reformer_window=3)
    ids = torch.tensor([[0, 0, 5, 6, 9, 3, 7, 12], [7, 8, 9, 10, 11, 12, 13, 14]])
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 12, "do_sample": False, "num_beams": 2}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, cache_implementation=kind, **options), expected)
    options["attention_mask"] = None
    assert torch.equal(model.generate(ids[:1, 2:], **options)[0], expected[0, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_scores_and_hash_in_float32(dtype):
    mixer = build(reformer_num_buckets=256, reformer_window=4).model.layers[0].mixer.float()
    query, value = torch.randn(2, 1, 4, 300, 4, dtype=dtype)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            key = mixer.hashed_keys(query)
            found.append((key, mixer.attend(query, key, value, None, None)[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert torch.equal(key[..., 4:].long(), mixer.hash(key[..., :4])), "numbers of buckets are exact in any dtype"


def test_weights_are_dropped_in_training_alone():
    fields = {"reformer_num_buckets": 1, "attention_dropout": 0.5}
    for window in (3, 30):
        mixer = build(**fields, reformer_window=window).model.layers[0].mixer
        hidden = torch.randn(1, 12, 16, dtype=torch.float64)
        layout = rows_of_mixer(mixer, hidden)
        assert torch.equal(mixer(hidden, layout)[0], mixer(hidden, layout)[0])
        mixer.train()
        assert not torch.allclose(mixer(hidden, layout)[0], mixer(hidden, layout)[0])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"reformer_num_buckets": 5}, "reformer_num_buckets=5 must be 1, or an even number up to 256"),
        ({"reformer_num_buckets": 258}, "reformer_num_buckets=258 must be 1, or an even number up to 256"),
        ({"reformer_window": 0}, "reformer_window=0 must be at least 1"),
        ({"reformer_num_hashes": 0}, "reformer_num_hashes=0 must be at least 1"),
        ({"num_key_value_heads": 2}, "leave out num_key_value_heads=2"),
        ({"query_key_norm": "rms_norm"}, "query_key_norm=rms_norm"),
        ({"mixer_types": ["softmax"] * 2, "reformer_window": 3}, "reformer_window=3 has no use without"),
    ],
)
def test_what_no_hash_can_serve_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        build(**fields)


def test_one_compiled_graph_serves_every_length():
    torch._dynamo.reset()
    mixer = build(reformer_num_buckets=4, reformer_num_hashes=2, reformer_window=3).model.layers[0].mixer
    graphs = CompileCounter()
    compiled = torch.compile(mixer.attend, backend=graphs, dynamic=True, fullgraph=True)
    for length in (10, 2, 12):  # a rest, less than a block, and whole blocks
        query, value = torch.randn(2, 2, 4, length, 4, dtype=torch.float64)
        states = (query, mixer.hashed_keys(query), value)
        close(compiled(*states, None, None)[0], mixer.attend(*states, None, None)[0])
    assert graphs.frame_count == 1
