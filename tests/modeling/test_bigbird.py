"""BigBird: under the contract of mixers, under a mask and in blocks, and what its random blocks are."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from layouts import rows_of_mixer, rows_of_stack
from mixer_contract import VOCAB, MixerContract, close, pad, texts
from plain_heads import heads_of, joined
from transformers import DynamicCache

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieEncoderModel,
)
from fratrie.modeling import bigbird
from fratrie.modeling.bigbird import BigBirdAttention


def seen_blocks(mixer, head, number, causal):
    """The blocks that each block of a text sees, written out: one number draws one of those that are left."""
    seen = []
    for block in range(number):
        if causal:
            fixed, choices = {0, block - 1, block}, list(range(1, block - 1))
        elif block in (0, number - 1):
            fixed, choices = set(range(number)), []
        else:
            fixed = {0, number - 1, block - 1, block, block + 1}
            choices = [other for other in range(1, number - 1) if abs(other - block) > 1]
        drawn = []
        for draw in mixer.draws.numbers[0, head, block % mixer.draws.numbers.shape[2]].tolist():
            if choices:
                drawn.append(choices.pop(draw * len(choices) // 2**31))
        seen.append({other for other in fixed if 0 <= other < number} | set(drawn))
    return seen


def mask_of(mixer, head, length, causal):
    """Which tokens `(T, T)` a head sees."""
    size = mixer.block_size
    seen, mask = seen_blocks(mixer, head, -(-length // size), causal), torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(length):
            mask[query, key] = key // size in seen[query // size] and not (causal and key > query)
    return mask


class BigBirdContract(MixerContract):
    mixer = "bigbird"
    layer_type = "full_attention"
    fields: ClassVar[dict[str, Any]] = {"bigbird_block_size": 1, "bigbird_random_blocks": 1}
    degenerate = (
        {"bigbird_block_size": 64},
        {"mixer_types": ["softmax"] * 2, "bigbird_block_size": None, "bigbird_random_blocks": None},
    )

    def plain(self, mixer, hidden, causal, angles, real):
        kept = [place for place, is_real in enumerate(real) if is_real]
        query, key, value = (x[:, kept] for x in heads_of(mixer, hidden, angles))
        mask = torch.stack([mask_of(mixer, head, len(kept), causal) for head in range(len(query))])
        scores = (query @ key.transpose(1, 2) * mixer.scaling).masked_fill(~mask, -torch.inf)
        mixed = torch.zeros_like(hidden).unflatten(-1, (len(query), -1)).transpose(0, 1).contiguous()
        return joined(mixer, mixed.index_copy(1, torch.tensor(kept), scores.softmax(-1) @ value))

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)

    def test_a_token_sees_just_what_it_may(self, causal, variant):
        """By gradient, in a stack of one layer: what one of its heads sees."""
        model = self.build(causal, variant, num_hidden_layers=1)
        mixer, embeds = model.layers[0].mixer, torch.randn(1, 11, 16, dtype=torch.float64, requires_grad=True)
        states = model(inputs_embeds=embeds, **({"use_cache": False} if causal else {})).last_hidden_state
        seen = torch.stack([mask_of(mixer, head, 11, causal) for head in range(4)]).any(0)
        assert not seen.all() and seen.diagonal().all()
        for query in range(11):
            (grad,) = torch.autograd.grad(states[0, query] @ torch.randn(16).double(), embeds, retain_graph=True)
            assert torch.equal(grad[0].any(-1), seen[query]), query


class TestUnderAMask(BigBirdContract):
    implementations: ClassVar[list[str]] = ["eager", "sdpa"]
    variants: ClassVar[list[dict[str, Any]]] = [
        {"num_key_value_heads": 2, "position_type": "rotary", "bigbird_block_size": 2}
    ]

    @pytest.fixture(autouse=True)
    def always_under_a_mask(self, monkeypatch):
        monkeypatch.setattr(bigbird, "_DENSE_UP_TO", 100)

    def test_compiles_into_one_graph_for_all_lengths(self):
        super().test_compiles_into_one_graph_for_all_lengths(causal=True)


class TestInBlocks(BigBirdContract):
    """Rows of any length computed so."""

    @pytest.fixture(autouse=True)
    def always_in_blocks(self, monkeypatch):
        monkeypatch.setattr(bigbird, "_DENSE_UP_TO", 0)

    def test_compiles_into_one_graph_for_all_lengths(self):
        super().test_compiles_into_one_graph_for_all_lengths(causal=False)


SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 24, "position_type": "none", "initializer_range": 0.4}  # fmt: skip
BIGBIRD = {"mixer_types": ["bigbird"] * 2, "bigbird_block_size": 3, "bigbird_random_blocks": 2}


def build(causal=False, **fields):
    torch.manual_seed(0)
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderForCausalLM)
        if causal
        else (FratrieEncoderConfig, FratrieEncoderForMaskedLM)
    )
    return model_class(config_class(**{**SIZES, **BIGBIRD, **fields})).double().eval()


@pytest.mark.parametrize("plan", ["drawn", "first", "causal"])
@pytest.mark.parametrize("length", [30, 31, 32, 60])
def test_both_ways_of_computing_are_equal(plan, length, monkeypatch):
    """Of texts of unlike lengths, padded on either side, with their gradients."""
    causal = plan == "causal"
    mixer = build(causal, bigbird_random_plan="drawn" if causal else plan).base_model.layers[0].mixer
    hidden, results = torch.randn(4, length, 16, dtype=torch.float64, requires_grad=True), []
    mask = torch.zeros(4, length, dtype=torch.long)
    mask[0], mask[1, 5:], mask[2, : length - 7], mask[3, 9:20] = 1, 1, 1, 1
    for limit in (0, 100):
        monkeypatch.setattr(bigbird, "_DENSE_UP_TO", limit)
        assert mixer.is_dense(length) == (limit > 0)
        outputs, _ = mixer(hidden, rows_of_mixer(mixer, hidden, mask))
        real = outputs[mask.bool()]
        results.append((real, *torch.autograd.grad(real.square().sum(), [hidden, *mixer.parameters()])))
    for one, other in zip(*results, strict=True):
        close(one, other, 1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_a_long_row_is_computed_in_blocks_by_itself(causal):
    mixer = build(causal).base_model.layers[0].mixer
    longest = (5 if causal else 7) * 3
    assert mixer.is_dense(longest) and not mixer.is_dense(longest + 1)
    assert mixer.flops(2000) < 2.1 * mixer.flops(1000)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 200])
def test_no_block_is_drawn_twice_or_without_need(causal, number):
    """As many as there are, up to what was asked for; of every text of these blocks the same."""
    mixer = build(causal).base_model.layers[0].mixer
    blocks, exists = mixer._drawn(torch.tensor([number]), number + 2)
    for head in range(4):
        for block in range(number):
            drawn = blocks[0, head, block][exists[0, head if exists.shape[1] > 1 else 0, block]].tolist()
            if causal:
                choices = set(range(1, block - 1))
            else:
                choices = {other for other in range(1, number - 1) if abs(other - block) > 1}
            assert set(drawn) <= choices and len(set(drawn)) == len(drawn) == min(2, len(choices))


def test_random_blocks_are_spread_evenly():
    """Over heads and blocks every choice is about as frequent as every other."""
    mixer = BigBirdAttention(build(num_attention_heads=16, head_dim=1, max_position_embeddings=3 * 400).config, 0)
    blocks, _ = mixer._drawn(torch.tensor([400]), 400)
    number = blocks[0, :, 1:-1].flatten().bincount(minlength=400)[1:-1].double()
    assert number.sum() == 16 * 398 * 2
    # The square of the distance from the mean, in variances, is one on the average.
    assert 0.8 < ((number - number.mean()) ** 2 / number.mean()).mean() < 1.2


def test_the_plan_is_that_of_seed_layer_and_head_and_touches_no_generator(tmp_path):
    torch.manual_seed(5), np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, same = (BigBirdAttention(build().config, 0).draws.numbers for _ in range(2))
    torch.set_rng_state(before[0])
    mixer = BigBirdAttention(build().config, 0)
    state = torch.get_rng_state()
    mixer(torch.randn(1, 90, 16), rows_of_mixer(mixer, torch.randn(1, 90, 16)))
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state) and (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(one, same)
    others = [BigBirdAttention(build(**fields).config, layer).draws.numbers
              for fields, layer in (({}, 1), ({"bigbird_seed": 1}, 0))]  # fmt: skip
    assert not any(torch.equal(one, other) for other in others)
    assert not torch.equal(one[:, 0], one[:, 1])
    model = build(max_position_embeddings=200)
    ids = torch.stack(texts(90, 90))
    expected = model(ids).logits
    close(model.train()(ids).logits, expected)  # without dropout
    model.eval().base_model.layers[0].mixer.draws.numbers.zero_()
    assert not torch.allclose(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    back = FratrieEncoderForMaskedLM.from_pretrained(tmp_path).eval()
    close(back(ids).logits, model(ids).logits)
    assert not back.base_model.layers[0].mixer.draws.numbers.any()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_first_block_counts_for_the_random_ones_as_well(implementation):
    """The plan of Hugging Face's evaluation, written out; short texts see all."""
    model = build(bigbird_random_plan="first", bigbird_block_size=2, bigbird_random_blocks=1,
                  attn_implementation=implementation).base_model  # fmt: skip
    mixer, place = model.layers[0].mixer, torch.arange(19)
    for length in (14, 15, 19):
        hidden, block = torch.randn(1, length, 16, dtype=torch.float64), place[:length] // 2
        query, key, value = heads_of(mixer, hidden[0], None)
        last = int(block[-1])
        near = (block[:, None] - block).abs() <= 1
        edge = (block == 0) | (block == last)
        times = (near | edge | edge[:, None]).double()
        times[:, :2] += ((block > 0) & (block < last)).double()[:, None]
        if length == 14:  # (5 + 2 · 1) · 2
            times = torch.ones_like(times)
        weights = times * (query @ key.transpose(1, 2) * mixer.scaling).exp()
        expected = joined(mixer, weights / weights.sum(-1, keepdim=True) @ value)
        close(mixer(hidden, rows_of_stack(model, hidden))[0][0], expected)


def test_a_decoder_continues_with_a_cache_of_fixed_size():
    model = build(causal=True, bigbird_block_size=2, bigbird_random_blocks=1, max_position_embeddings=64)
    ids, mask = pad(texts(21, 30), "left")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
    static = model.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    assert torch.equal(static, expected)


def test_a_long_text_goes_on_from_its_cache():
    """First in blocks, then under a mask."""
    model = build(causal=True).base_model
    (document,) = texts(70)
    cache, states = DynamicCache(config=model.config), []
    for piece in document[None].split([50, 1, 19], dim=1):
        states.append(model(piece, cache=cache).last_hidden_state)
    close(torch.cat(states, dim=1), model(document[None], use_cache=False).last_hidden_state)


@pytest.mark.parametrize("fields, message", [
    ({"bigbird_block_size": 0}, "bigbird_block_size=0 must be at least 1"),
    ({"bigbird_random_blocks": -1}, "bigbird_random_blocks=-1 must be at least 0"),
    ({"bigbird_seed": -1}, "bigbird_seed=-1 must lie in"),
    ({"bigbird_random_plan": "first"}, "bigbird_random_plan='first' .* but the stack is causal"),
])  # fmt: skip
def test_blocks_that_cannot_be_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        FratrieDecoderConfig(**{**SIZES, **BIGBIRD, **fields})


def test_it_builds_without_further_fields():
    model = FratrieEncoderModel(FratrieEncoderConfig(**SIZES, mixer_types=["bigbird"] * 2))
    mixer = model.layers[0].mixer
    assert (mixer.block_size, mixer.random_blocks, mixer.draws.numbers.shape) == (64, 3, (1, 4, 8, 3))


def test_a_padded_batch_is_exported_for_every_size():
    model = build(causal=False).base_model.float()
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    ids, mask = pad(texts(9, 6), "left")
    inputs, shapes = {"input_ids": ids, "attention_mask": mask}, {"input_ids": sizes, "attention_mask": sizes}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    ids, mask = pad(texts(14, 9, 3), "left")
    states, expected = (run(input_ids=ids, attention_mask=mask).last_hidden_state for run in (exported, model))
    close(states[mask.bool()], expected[mask.bool()], 1e-5)
