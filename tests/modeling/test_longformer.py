"""The longformer mixer: the contract of all mixers, and what concerns its global tokens and its blocks."""

from typing import Any, ClassVar

import pytest
import torch
from layouts import rows_of_stack
from mixer_contract import MixerContract, alone, angles, close, pad, texts, turn
from transformers.cache_utils import DynamicCache, StaticCache

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieEncoderConfig,
    FratrieEncoderForImageClassification,
    FratrieEncoderForSequenceClassification,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.modeling import windows
from fratrie.modeling.global_tokens import GlobalsInBlocks
from fratrie.modeling.window_cache import give_own_layers

WINDOW = 3
ROTARY = {"position_type": "rotary", "num_key_value_heads": 2}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two tokens, for rows of any length."""
    monkeypatch.setattr(windows, "_SMALLEST_BLOCK", 2)
    monkeypatch.setattr(windows, "_LONG", 0)


def head_of(layer, state, head, angle, size):
    rows = slice(head * size, (head + 1) * size)
    numbers = layer.weight[rows] @ state + layer.bias[rows]
    return numbers if angle is None else turn(numbers, angle)


def plain_longformer(mixer, hidden, causal, angles, real, global_places=()):
    """One token after another: the softmax over its window and the global tokens, or of a global one over all."""
    config, size, outputs = mixer.config, mixer.head_dim, []
    ordinary = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    of_globals = (mixer.q_global_proj, mixer.k_global_proj, mixer.v_global_proj)
    for query_place in range(len(hidden)):
        is_global = query_place in global_places
        seen = [
            place
            for place in range(len(hidden))
            if real[place]
            and not (causal and place > query_place)
            and (is_global or place in global_places or sees(place - query_place, causal))
        ]
        mixed = []
        for head in range(config.num_attention_heads):
            to_query, to_key, to_value = of_globals if is_global else ordinary
            of_keys = head // mixer.num_key_value_groups
            angle = [None] * len(hidden) if angles is None else angles
            query = head_of(to_query, hidden[query_place], head, angle[query_place], size)
            keys = [head_of(to_key, hidden[place], of_keys, angle[place], size) for place in seen]
            values = [head_of(to_value, hidden[place], of_keys, None, size) for place in seen]
            weights = torch.stack([query @ key for key in keys] or [query.sum()]).mul(mixer.scaling).softmax(0)
            mixed.append(sum(weight * value for weight, value in zip(weights, values, strict=False)))
            if not seen:
                mixed[-1] = torch.zeros_like(query)
        outputs.append(mixer.o_proj.weight @ torch.cat(mixed) + mixer.o_proj.bias)
    nothing = sum(weight.sum() for layer in of_globals for weight in layer.parameters()) * 0.0
    return torch.stack(outputs) + nothing


def sees(distance, causal):
    """Causal: the last WINDOW tokens, the query among them; bidirectional: WINDOW to each side."""
    return -WINDOW < distance <= 0 if causal else abs(distance) <= WINDOW


@pytest.mark.usefixtures("small_blocks")
class TestLongformer(MixerContract):
    mixer = "longformer"
    layer_type = "full_attention"
    fields: ClassVar[dict[str, Any]] = {"sliding_window": WINDOW}
    variants: ClassVar[list[dict[str, Any]]] = [{}, ROTARY]
    implementations: ClassVar[list[str]] = ["eager", "sdpa"]
    sides = ("left",)  # a window counts the places of a row, those of padding between its tokens as well
    degenerate = ({"sliding_window": 50}, {"sliding_window": 11})

    def sees(self, distance, causal):
        return sees(distance, causal)

    def plain(self, mixer, hidden, causal, angles, real):
        return plain_longformer(mixer, hidden, causal, angles, real)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)


# --- global tokens -------------------------------------------------------------------------------------------------


def build(causal=False, head=None, **fields):
    contract = TestLongformer()
    if head is None:
        return contract.build(causal, fields)
    torch.manual_seed(0)
    model = head(contract.config(causal, **fields))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model.double().eval()


def marks(places, *shape):
    """A mask of ones at these places of every row."""
    mask = torch.zeros(*shape, dtype=torch.long)
    mask[..., list(places)] = 1
    return mask


@pytest.mark.parametrize("fields", [{}, ROTARY], ids=["plain", "rotary"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("path", ["blocks", "dense", "eager"])
def test_global_tokens_equal_their_plain_form_with_gradients(path, causal, fields, request):
    if path == "blocks":
        request.getfixturevalue("small_blocks")
    model = build(causal, **fields, attn_implementation="eager" if path == "eager" else "sdpa")
    mixer, hidden = model.layers[0].mixer, torch.randn(2, 9, 16).double().requires_grad_()
    real = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1]])
    tokens = torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0, 0, 0, 0]])  # one of them is padding
    layout = rows_of_stack(model, hidden, real)
    layout.masks.clear()
    layout.set_global_tokens(tokens, None, causal)
    model.complete(layout, hidden, None)
    assert isinstance(layout.masks["globals", "full_attention"], GlobalsInBlocks) == (path == "blocks")
    turned = [None, None]
    if fields:  # in float64, as the plain form has them
        turned = [angles(places, 4) for places in (real.cumsum(1) - 1).clamp_min(0)]
        cos, sin = (part(torch.stack(turned)).unsqueeze(1) for part in (torch.cos, torch.sin))
        layout.rotations["full_attention"] = (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    outputs, _ = mixer(hidden, layout)
    expected = torch.stack(
        [
            plain_longformer(mixer, hidden[row], causal, turned[row], real[row], tokens[row].nonzero().flatten())
            for row in range(2)
        ]
    )
    close(outputs[real.bool()], expected[real.bool()])
    inputs, weights = [hidden, *mixer.parameters()], torch.randn_like(outputs) * real[..., None]
    gradients, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (outputs, expected))
    for actual, other in zip(gradients, wanted, strict=True):
        close(actual, other, 1e-9)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("unpad", [True, False], ids=["unpadded", "rows"])
def test_padding_and_packing_keep_global_tokens_in_their_documents(causal, unpad):
    model, options = build(causal, **ROTARY, unpad_inputs=unpad), {"use_cache": False} if causal else {}
    documents, places = texts(5, 8, 1, 6), ([1], [0, 5], [], [2, 3, 5])
    masks = [marks(chosen, len(document)) for chosen, document in zip(places, documents, strict=True)]
    expected = [
        alone(model, document, global_attention_mask=mask[None], **options)
        for document, mask in zip(documents, masks, strict=True)
    ]
    assert not torch.allclose(expected[1], alone(model, documents[1], **options))
    for side in ("left", "right"):
        ids, mask = pad(documents, side)
        tokens = torch.ones_like(ids)  # at padding they mean nothing
        tokens[mask.bool()] = torch.cat(masks)
        states = model(ids, attention_mask=mask, global_attention_mask=tokens, **options).last_hidden_state
        for row in range(4):
            close(states[row][mask[row].bool()], expected[row])
    bounds = torch.tensor([0, 5, 13, 14, 20]).int()
    packed = model(torch.cat(documents)[None], cu_seq_lens_q=bounds, global_attention_mask=torch.cat(masks)[None])
    for part, wanted in zip(packed.last_hidden_state[0].split([5, 8, 1, 6]), expected, strict=True):
        close(part, wanted)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("path", ["blocks", "dense"])
def test_a_global_token_sees_its_document_and_is_seen_by_it(path, causal, request):
    if path == "blocks":
        request.getfixturevalue("small_blocks")
    model = build(causal, num_hidden_layers=1)
    embeds = torch.randn(1, 11, 16).double().requires_grad_()
    states = model(inputs_embeds=embeds, global_attention_mask=marks([1, 6], 1, 11)).last_hidden_state
    for query in range(11):
        (grad,) = torch.autograd.grad(states[0, query] @ torch.randn(16).double(), embeds, retain_graph=True)
        for key in range(11):
            near = sees(key - query, causal) or 1 in (key, query) or 6 in (key, query)
            assert bool(grad[0, key].any()) == (near and not (causal and key > query)), (query, key)


def in_pieces(model, ids, pieces, cache, tokens, mask=None, change=None):
    """The states of all tokens; `change` is done to the cache after each piece."""
    states, seen = [], 0
    for piece in ids.split(pieces, dim=1):
        seen += piece.shape[1]
        given = {"attention_mask": None if mask is None else mask[:, :seen], "cache": cache}
        states.append(model(piece, **given, global_attention_mask=tokens[:, :seen]).last_hidden_state)
        if change is not None:
            change(cache)
    return torch.cat(states, dim=1)


@pytest.mark.parametrize("path", ["blocks", "dense", "eager"])
@pytest.mark.parametrize("pieces", [[12], [5, 7], [4] + [1] * 8, [5, 2, 1, 4]], ids=str)
def test_the_cache_keeps_a_window_and_global_tokens_however_far_back(pieces, path, request):
    if path == "blocks":
        request.getfixturevalue("small_blocks")
    model = build(True, **ROTARY, attn_implementation="eager" if path == "eager" else "sdpa")
    ids, tokens = torch.stack(texts(12, 12, 9)[:2]), marks([0, 3], 2, 12)
    tokens[1, 0] = 0
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    cache = DynamicCache(config=model.config)
    states = in_pieces(model, ids, pieces, cache, tokens, mask)
    expected = model(ids, attention_mask=mask, global_attention_mask=tokens, use_cache=False).last_hidden_state
    close(states[mask.bool()], expected[mask.bool()])
    layer = cache.layers[0]
    assert layer.keys.shape == layer.global_keys.shape == (2, 2, WINDOW - 1, 4), "by one projection, at any length"


@pytest.mark.parametrize("cache", ["static", "plain"])
def test_a_cache_of_all_tokens_takes_later_global_ones(cache):
    model, ids, tokens = build(True, **ROTARY), torch.stack(texts(9, 9)), marks([0, 2, 7], 2, 9)
    tokens[1, 2] = 0
    past = DynamicCache() if cache == "plain" else StaticCache(model.config, 9)
    states = in_pieces(model, ids, [4, 1, 4], past, tokens)
    close(states, model(ids, global_attention_mask=tokens, use_cache=False).last_hidden_state)
    assert past.layers[0].keys.shape == (2, 4, 9, 4), "those of both projections"
    with pytest.raises(ValueError, match=r"global tokens after a past, .* give all global tokens in the first pass"):
        in_pieces(model, ids, [4, 1, 4], DynamicCache(config=model.config), tokens)


def test_a_cache_whose_rows_change_takes_its_global_tokens_along():
    """As beam search does, and generation of several texts from one prompt."""
    model, ids, tokens = build(True), torch.stack(texts(9, 9, 9)), torch.eye(3, 9).long()
    expected = model(ids, global_attention_mask=tokens, use_cache=False).last_hidden_state
    order = torch.tensor([2, 0, 0])
    for change in ("reorder_cache", "batch_select_indices"):
        cache = DynamicCache(config=model.config)
        model(ids[:, :7], global_attention_mask=tokens[:, :7], cache=cache)
        getattr(cache, change)(order)
        states = model(ids[order, 7:], global_attention_mask=tokens[order, :7], cache=cache).last_hidden_state
        close(states, expected[order, 7:])
    cache.batch_repeat_interleave(2)
    assert cache.layers[1].global_keys.shape[0] == cache.layers[1].global_places.shape[0] == 6
    cache.reset()
    close(model(ids, global_attention_mask=tokens, cache=cache).last_hidden_state, expected)


@pytest.mark.parametrize("removed", [2, 4])
def test_a_recorded_past_is_cropped_with_its_global_tokens(removed):
    model, (document,) = build(True), texts(12)
    ids, tokens = document[None], marks([1, 5], 1, 6)
    cache = DynamicCache(config=model.config)
    give_own_layers(cache, model.config, model.mixers)
    cache.activate_past_recording()
    model(ids[:, [0, 1, 7, 3, 9, 8]], global_attention_mask=tokens, cache=cache)
    model(ids[:, :4], global_attention_mask=tokens, cache=cache)
    cache.crop(-4 - removed)
    kept = 6 - removed
    before = torch.cat((ids[:, [0, 1, 7, 3, 9, 8]][:, :kept], ids[:, :6]), dim=1)
    tokens = tokens[:, :kept]
    states = model(ids[:, :6], global_attention_mask=tokens, cache=cache).last_hidden_state
    close(states, model(before, global_attention_mask=tokens, use_cache=False).last_hidden_state[:, kept:])


def test_a_cache_of_which_nothing_is_left_begins_anew():
    model, (document,) = build(True), texts(9)
    cache = DynamicCache(config=model.config)
    model(document[None, :2], global_attention_mask=marks([0], 1, 2), cache=cache)
    cache.crop(-2)
    tokens = marks([1, 5], 1, 9)
    states = model(document[None], global_attention_mask=tokens, cache=cache).last_hidden_state
    close(states, model(document[None], global_attention_mask=tokens, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("place", [0, 4, 7])
def test_drafts_of_an_assistant_are_taken_back_into_a_prompt_with_a_global_token(place):
    model, prompt = build(True, FratrieDecoderForCausalLM), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    assistant = build(True, FratrieDecoderForCausalLM, num_hidden_layers=1)
    options = {"max_new_tokens": 8, "do_sample": False, "global_attention_mask": marks([place], 1, 8)}
    expected = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, assistant_model=assistant, **options), expected)


def test_an_encoder_decoder_takes_back_what_it_guessed_wrong():
    config = FratrieSeq2SeqConfig(
        **{"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24},
        encoder={"num_hidden_layers": 1},
        decoder={"num_hidden_layers": 2, "mixer_types": ["longformer"] * 2, "sliding_window": WINDOW},
        **{"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None},
    )
    torch.manual_seed(0)
    model = FratrieSeq2SeqForConditionalGeneration(config).eval()
    prompt = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    options = {"max_new_tokens": 14, "do_sample": False}
    written = model.generate(prompt, prompt_lookup_num_tokens=2, **options)
    assert torch.equal(written, model.generate(prompt, use_cache=False, **options))


def test_assisted_generation_takes_back_what_it_guessed_wrong():
    model, prompt = build(True, FratrieDecoderForCausalLM), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    options = {"max_new_tokens": 8, "do_sample": False, "global_attention_mask": marks([0, 2], 1, 8)}
    written = model.generate(prompt, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(written, model.generate(prompt, **options))
    assistant = build(True, FratrieDecoderForCausalLM, num_hidden_layers=1)
    written = model.generate(prompt, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert torch.equal(written, model.generate(prompt, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generation_goes_on_with_the_global_tokens_of_its_prompt(kind, beams):
    model, prompt = build(True, FratrieDecoderForCausalLM), torch.stack(texts(8, 8))

    def logits(**given):
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "output_logits": True}
        return torch.stack(model.generate(prompt, **options, **given, return_dict_in_generate=True).logits)

    tokens = marks([0, 2], 2, 8)
    written = logits(global_attention_mask=tokens, cache_implementation=kind)
    close(written, logits(global_attention_mask=tokens, use_cache=False), 1e-5)  # logits are kept in float32
    assert not torch.allclose(written, logits())


def test_a_padded_prompt_goes_on_as_its_texts_alone():
    model, documents = build(True, FratrieDecoderForCausalLM), texts(8, 5)
    ids, mask = pad(documents, "left")
    tokens = torch.zeros_like(mask)
    tokens[0, 2], tokens[1, 5] = 1, 1  # the second word of each
    options = {"max_new_tokens": 5, "do_sample": False}
    written = model.generate(ids, attention_mask=mask, global_attention_mask=tokens, **options)[:, ids.shape[1] :]
    for row, document in enumerate(documents):
        single = model.generate(document[None], global_attention_mask=marks([1], 1, len(document)), **options)
        assert torch.equal(written[row], single[0, len(document) :])


@pytest.mark.parametrize("first, second", [(None, [0]), ([0], None)])
def test_a_cache_that_knows_no_global_tokens_is_not_continued_with_some(first, second):
    model, ids = build(True), torch.stack(texts(6))
    given = [None if places is None else marks(places, 1, 6) for places in (first, second)]
    cache = model(ids[:, :4], global_attention_mask=None if given[0] is None else given[0][:, :4]).cache
    with pytest.raises(ValueError, match="give global_attention_mask, of all tokens from the first on, in every call"):
        model(ids[:, 4:], cache=cache, global_attention_mask=given[1])


@pytest.mark.parametrize("shape", [(1, 7), (2, 6), (2, 8), (14,)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"global_attention_mask of shape .* does not fit inputs of shape \(2, 7\)"):
        build()(torch.stack(texts(7, 7)), global_attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match="after a past of 7"):
        cache = build(True)(torch.stack(texts(7, 7))).cache
        build(True)(torch.stack(texts(2, 2)), cache=cache, global_attention_mask=torch.ones(2, 10))


@pytest.mark.usefixtures("small_blocks")
def test_later_tokens_that_a_decoders_mask_leaves_out_are_local():
    model, ids = build(True), torch.stack(texts(9, 9))
    expected = model(ids, global_attention_mask=marks([1], 2, 9), use_cache=False).last_hidden_state
    close(model(ids, global_attention_mask=marks([1], 2, 4), use_cache=False).last_hidden_state, expected)


def test_all_tokens_global_with_equal_weights_are_full_attention():
    model, full = build(), build(mixer_types=["softmax"] * 2)
    weights = full.state_dict()
    for name in list(weights):
        if ".mixer." in name and "o_proj" not in name:
            weights[name.replace("_proj", "_global_proj")] = weights[name]
    model.load_state_dict(weights)
    ids = torch.stack(texts(9, 9))
    expected = full(ids).last_hidden_state
    close(model(ids, global_attention_mask=torch.ones(2, 9)).last_hidden_state, expected)
    wide = build(sliding_window=8)
    wide.load_state_dict(weights)
    close(wide(ids).last_hidden_state, expected)


def test_attention_weights_are_those_of_both_kinds():
    model = build(attn_implementation="eager")
    outputs = model(torch.stack(texts(9)), global_attention_mask=marks([4], 1, 9), output_attentions=True)
    weights = outputs.attentions[0]
    close(weights.sum(-1), torch.ones(1, 4, 9).double())
    assert weights[0, 0, 4].gt(0).all() and weights[0, 0, :, 4].gt(0).all() and not weights[0, 0, 0, 5:].any()


@pytest.mark.parametrize("form", ["booleans", "numbers"])
def test_a_ready_mask_is_seen_by_both_kinds_of_queries(form):
    model, ids = build(), torch.stack(texts(7, 7))
    padding, tokens = torch.tensor([[1] * 7, [1] * 5 + [0] * 2]), marks([1], 2, 7)
    ready = padding.bool()[:, None, None, :].expand(2, 1, 7, 7)
    if form == "numbers":
        ready = torch.where(ready, torch.zeros(()).double(), torch.finfo(torch.float64).min)
    states = model(ids, attention_mask=ready, global_attention_mask=tokens).last_hidden_state
    expected = model(ids, attention_mask=padding, global_attention_mask=tokens).last_hidden_state
    close(states[padding.bool()], expected[padding.bool()])


# --- what heads take for global ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_a_classifier_makes_the_token_global_that_stands_for_the_text(causal, pooling):
    head = FratrieDecoderForSequenceClassification if causal else FratrieEncoderForSequenceClassification
    model, (ids, mask) = build(causal, head, classifier_pooling=pooling), pad(texts(5, 8), "left")
    place = [8, 8] if pooling == "last" else [4, 1]
    given = torch.nn.functional.one_hot(torch.tensor(place), 9)
    logits = model(ids, attention_mask=mask).logits
    close(model(ids, attention_mask=mask, global_attention_mask=given).logits, logits)
    none = torch.zeros_like(ids)
    assert not torch.allclose(model(ids, attention_mask=mask, global_attention_mask=none).logits, logits)
    embeds = model.model.embed_tokens(ids)
    close(model(inputs_embeds=embeds, attention_mask=mask).logits, logits)


def test_a_classifier_of_images_makes_their_vector_global():
    fields = {"patch_size": 2, "image_size": 6, "sliding_window": 1}
    model = build(False, FratrieEncoderForImageClassification, **fields)
    pixels = torch.randn(2, 3, 6, 6).double()
    given = torch.nn.functional.one_hot(torch.zeros(2).long(), 10)
    states = model.model(pixel_values=pixels, global_attention_mask=given).last_hidden_state
    close(model(pixels).logits, model.classifier(states.mean(1)))


def test_an_encoder_of_an_encoder_decoder_takes_them_and_generation_hands_them_on():
    config = FratrieSeq2SeqConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        mixer_types=["longformer"], sliding_window=2, decoder={"mixer_types": ["softmax"], "sliding_window": None},
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = FratrieSeq2SeqForConditionalGeneration(config).eval()
    ids, tokens = torch.stack(texts(9, 9)), marks([0], 2, 9)
    states = model.model.encoder(ids, global_attention_mask=tokens)
    options = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False, "output_logits": True}
    written = model.generate(ids, global_attention_mask=tokens, return_dict_in_generate=True, **options)
    expected = model.generate(encoder_outputs=states, return_dict_in_generate=True, **options)
    close(torch.stack(written.logits), torch.stack(expected.logits))
    other = model(ids, labels=ids[:, :4]).loss
    assert not torch.allclose(model(ids, labels=ids[:, :4], global_attention_mask=tokens).loss, other)


def test_models_without_such_a_mixer_refuse_the_mask_by_name():
    model = build(mixer_types=["softmax"] * 2)
    with pytest.raises(ValueError, match="FratrieEncoderModel takes no global_attention_mask"):
        model(torch.stack(texts(4)), global_attention_mask=torch.ones(1, 4))


# --- configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [FratrieEncoderConfig, FratrieDecoderConfig])
def test_it_builds_with_no_further_field(config_class):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = config_class(**sizes, mixer_types=["longformer"])
    assert config.sliding_window == 256
    assert {f"layers.*.mixer.{letter}_global_proj" for letter in "qkv"} <= config.base_model_tp_plan.keys()
    with pytest.raises(ValueError, match="sliding_window=0: set it"):
        config_class(**sizes, mixer_types=["longformer"], sliding_window=0)
    if config_class is FratrieDecoderConfig:
        with pytest.raises(ValueError, match="sliding_window=1 would let a token see itself and global ones alone"):
            config_class(**sizes, mixer_types=["longformer"], sliding_window=1)
    with pytest.raises(ValueError, match="sliding_window=3 has no use without"):
        config_class(**sizes, mixer_types=["softmax"], sliding_window=3)


def test_weights_of_global_tokens_get_a_gradient_of_zero_where_there_are_none():
    """Data-parallel training waits for a gradient of every weight."""
    model = build()
    model(torch.stack(texts(5))).last_hidden_state.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not model.layers[0].mixer.k_global_proj.weight.grad.any()
