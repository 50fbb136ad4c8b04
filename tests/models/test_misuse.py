"""What a user does by mistake is refused where it is done, with the way out, not computed silently."""

import re

import pytest
import torch
from combinations import (
    CONFIGS,
    DECODER,
    ENCODER,
    FULL,
    HEADS,
    LINEAR,
    SEQ2SEQ,
    SIBLINGS,
    SIZES,
    SLIDING,
    case_of,
    padded_inputs,
    stack_configs,
)
from transformers import EncoderDecoderConfig, EncoderDecoderModel
from transformers.models.gpt2 import GPT2Config, GPT2Model
from transformers.models.mistral import MistralConfig, MistralModel

import fratrie

CLASSES = [(sibling, head, classes[0]) for sibling in SIBLINGS for head, classes in HEADS[sibling].items()]
CLASSES.append((ENCODER, "image_classification", fratrie.FratrieEncoderForImageClassification))
WRONG = [
    pytest.param(model_class, wrong, id=f"{sibling}-{head}-{wrong}")
    for sibling, head, model_class in CLASSES
    for wrong in SIBLINGS
    if wrong != sibling
]


@pytest.mark.parametrize(("model_class", "wrong"), WRONG)
def test_a_model_refuses_the_configuration_of_another_sibling(model_class, wrong):
    config = case_of(wrong).config()
    with pytest.raises(ValueError, match=f"{model_class.__name__}.*{model_class.config_class.model_type}.*") as error:
        model_class(config)
    assert config.model_type in str(error.value)


def test_a_model_refuses_the_configuration_of_a_family_and_takes_one_that_derives_from_its_own():
    with pytest.raises(ValueError, match=r"FratrieDecoderModel.*'fratrie_decoder'.*'gpt2'"):
        fratrie.FratrieDecoderModel(GPT2Config(n_embd=8, n_head=2, n_layer=1))

    class OwnConfig(fratrie.FratrieDecoderConfig):
        model_type = "own"

    fratrie.FratrieDecoderModel(OwnConfig(**vars_of(case_of(DECODER))))


def vars_of(case):
    """The fields that a tiny configuration of this case is made of."""
    return {**SIZES, **case.combination.fields}


@pytest.mark.parametrize(("folder", "right"), [(ENCODER, DECODER), (DECODER, ENCODER), (DECODER, SEQ2SEQ)])
def test_loading_refuses_the_configuration_of_another_sibling(tmp_path, folder, right):
    model = case_of(folder).build()
    model.save_pretrained(tmp_path)
    loader = HEADS[right]["language_model"][0]
    with pytest.raises(ValueError, match=f"{loader.__name__}.*'fratrie_{right}'.*'fratrie_{folder}'"):
        loader.from_pretrained(tmp_path, config=model.config)


def cross_attending_decoder(**fields):
    return case_of(DECODER).build(add_cross_attention=True, cross_attention_hidden_size=24, **fields)


def encoder_side():
    states = torch.randn(2, 5, 24)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return {"encoder_hidden_states": states, "encoder_attention_mask": mask}


def naive_generation(forward, ids, new_tokens):
    for _ in range(new_tokens):
        ids = torch.cat([ids, forward(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


GENERATION = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "fields", [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 3}], ids=["full", "sliding"]
)
@torch.no_grad()
def test_a_decoder_with_cross_attention_generates_as_a_naive_loop_does(fields, use_cache):
    model, sources = cross_attending_decoder(**fields), encoder_side()
    ids = torch.randint(3, 71, (2, 4))
    given = naive_generation(lambda tokens: model(tokens, use_cache=False, **sources), ids, 6)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **GENERATION, **sources)
    assert torch.equal(found, given)
    other = {**sources, "encoder_attention_mask": torch.ones(2, 5, dtype=torch.long)}
    assert not torch.allclose(model(ids, **sources).logits[1], model(ids, **other).logits[1])


@torch.no_grad()
def test_beams_keep_the_encoder_states_of_their_row():
    model, sources = cross_attending_decoder(), encoder_side()
    ids = torch.randint(3, 71, (2, 4))
    options = {**GENERATION, "num_beams": 3}
    together = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **sources)
    for row in range(2):
        alone = {name: value[row : row + 1] for name, value in sources.items()}
        one = ids[row : row + 1]
        found = model.generate(one, attention_mask=torch.ones_like(one), **options, **alone)
        assert torch.equal(found[0], together[row])


@torch.no_grad()
def test_encoder_and_decoder_work_in_hugging_faces_encoder_decoder_model(tmp_path):
    encoder, decoder = case_of(ENCODER).build("base"), case_of(DECODER).build(add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder.config, decoder.config)
    model = EncoderDecoderModel(config=config, encoder=encoder, decoder=decoder).eval()
    inputs = padded_inputs(ENCODER)
    start = torch.full((len(inputs["input_ids"]), 1), 1)
    given = naive_generation(lambda tokens: model(**inputs, decoder_input_ids=tokens, use_cache=False), start, 6)
    options = {**GENERATION, "decoder_start_token_id": 1, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, **options), given)
    model.save_pretrained(tmp_path)
    assert torch.equal(EncoderDecoderModel.from_pretrained(tmp_path).eval().generate(**inputs, **options), given)


@pytest.mark.parametrize(("sibling", "head"), [(sibling, head) for sibling, head, _ in CLASSES[:-1]
                                               if sibling != SEQ2SEQ])  # fmt: skip
def test_encoder_states_are_refused_without_cross_attention(sibling, head):
    model = case_of(sibling).build(head)
    with pytest.raises(ValueError, match="add_cross_attention=True"):
        model(**padded_inputs(sibling), encoder_hidden_states=torch.randn(3, 5, 32))


def test_hugging_faces_gpt2_refuses_encoder_states_as_well():
    with pytest.raises(ValueError, match="cross-attention"):
        GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=1))(
            torch.ones(1, 2, dtype=torch.long), encoder_hidden_states=torch.randn(1, 3, 8)
        )


@pytest.mark.parametrize("sibling", [DECODER, SEQ2SEQ])
def test_a_causal_window_of_one_token_is_refused(sibling):
    fields = {"layer_types": [SLIDING, FULL], "sliding_window": 1}
    message = "sliding_window=1 would let a token see itself alone, for which no cache is made: set it to at least 2."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CONFIGS[sibling](**vars_of(case_of(sibling)), **({"decoder": fields} if sibling == SEQ2SEQ else fields))
    assert case_of(ENCODER).config(**fields).sliding_window == 1


@torch.no_grad()
def test_hugging_faces_mistral_computes_otherwise_with_a_cache_for_a_window_of_one_token():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MistralModel(MistralConfig(vocab_size=9, num_key_value_heads=2, sliding_window=1, **sizes)).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    cache = model(ids[:, :4], use_cache=True).cache
    cached = model(ids[:, 4:], cache=cache).last_hidden_state
    assert not torch.allclose(cached, model(ids, use_cache=False).last_hidden_state[:, 4:], atol=1e-5)


@pytest.mark.parametrize("window", [2, 3])
@torch.no_grad()
def test_the_smallest_causal_windows_generate_alike_with_a_cache_and_without(window):
    model = case_of(DECODER).build(layer_types=[SLIDING, SLIDING], sliding_window=window)
    ids = torch.randint(3, 71, (2, 6))
    found = [model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **GENERATION)
             for use_cache in (True, False)]  # fmt: skip
    assert torch.equal(*found)


EDITS = {
    "num_hidden_layers": (3, r"layer_types or mixer_types has 2 entries for num_hidden_layers=3"),
    "position_type": ("rotary", r"rope_parameters.*rope_theta"),
    "num_experts": (4, r"num_experts=4.*mlp_layer_types"),
    "layer_types": ([FULL], r"layer_types or mixer_types has 1 entries"),
    "mlp_layer_types": (["sparse", "dense"], r"num_experts=0: set num_experts"),
    "num_key_value_heads": (3, r"num_key_value_heads=3"),
    "eos_token_id": (500, r"eos_token_id=500"),
}


@pytest.mark.parametrize("sibling", SIBLINGS)
@pytest.mark.parametrize("head", ["base", "language_model"])
@pytest.mark.parametrize("field", EDITS)
def test_a_configuration_that_was_edited_into_a_contradiction_builds_no_model(sibling, head, field):
    config = case_of(sibling).config()
    value, message = EDITS[field]
    setattr(config.decoder if sibling == SEQ2SEQ else config, field, value)
    with pytest.raises(ValueError, match=message):
        HEADS[sibling][head][0](config)


INCOMPLETE = "must name a rope_type, such as 'default', and a rope_theta, such as 10000.0."
ROPES = [
    ({"rope_theta": 100.0}, "must be one set, or one for each of the layer types ['full_attention']; a set is"),
    ({"rope_type": "default"}, INCOMPLETE),
    ({FULL: {"rope_theta": 100.0}}, INCOMPLETE),
    ({FULL: {"rope_type": "default"}}, INCOMPLETE),
    ({FULL: 3}, INCOMPLETE),
]


@pytest.mark.parametrize(("parameters", "message"), ROPES)
def test_rotary_parameters_that_were_edited_into_an_incomplete_set_build_no_model(parameters, message):
    config = case_of(DECODER, "llama").config()
    config.rope_parameters = parameters
    with pytest.raises(ValueError, match=f"^{re.escape(f'rope_parameters={parameters} {message}')}"):
        fratrie.FratrieDecoderModel(config)


def test_a_configuration_that_was_edited_in_full_builds_a_model():
    config = case_of(DECODER).config()
    config.num_experts, config.mlp_layer_types = 4, ["sparse", "dense"]
    config.position_type, config.rope_parameters = "rotary", {"rope_type": "default", "rope_theta": 100.0}
    model = fratrie.FratrieDecoderForCausalLM(config)
    assert model.model.layers[0].feed_forward.router is not None and model.model.rotary_emb is not None


SPECIAL = [(sibling, name) for sibling in SIBLINGS for name in ("pad_token_id", "bos_token_id", "eos_token_id")]


@pytest.mark.parametrize(("sibling", "name"), [*SPECIAL, (SEQ2SEQ, "decoder_start_token_id")])
def test_resizing_below_a_special_token_is_refused_and_changes_nothing(sibling, name, tmp_path):
    model = case_of(sibling).build(**{name: 40})
    with pytest.raises(ValueError, match=f"{name}=40"):
        model.resize_token_embeddings(40)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 71
    model.resize_token_embeddings(41)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.vocab_size == 41


def test_resizing_counts_the_size_after_padding_and_every_end_token():
    model = case_of(DECODER).build(eos_token_id=[2, 41])
    with pytest.raises(ValueError, match="eos_token_id=41"):
        model.resize_token_embeddings(33, pad_to_multiple_of=8)
    assert model.resize_token_embeddings(41, pad_to_multiple_of=8).weight.shape[0] == 48
    assert model.resize_token_embeddings(None).weight.shape[0] == 48
    assert model.resize_token_embeddings(pad_to_multiple_of=32).weight.shape[0] == 64


@pytest.mark.parametrize("sibling", SIBLINGS)
@pytest.mark.parametrize("combination", ["default", "rotary_by_layer_type", "shared_experts"])
def test_fewer_layers_asked_for_at_loading_are_the_first_ones(sibling, combination, tmp_path):
    sparse_first = {"mlp_layer_types": ["sparse", "dense"]} if combination == "shared_experts" else {}
    whole = case_of(sibling, combination).build(**sparse_first)
    whole.save_pretrained(tmp_path)
    model = type(whole).from_pretrained(tmp_path, num_hidden_layers=1)
    for part, full in zip(stack_configs(model.config), stack_configs(whole.config), strict=True):
        assert part.num_hidden_layers == 1
        assert (part.layer_types, part.mlp_layer_types) == (full.layer_types[:1], full.mlp_layer_types[:1])
    weights = whole.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    model.save_pretrained(tmp_path / "again")
    assert type(whole).from_pretrained(tmp_path / "again").config.num_hidden_layers == 1


def test_fields_given_at_loading_get_their_defaults_as_at_construction(tmp_path):
    whole = case_of(DECODER).build()
    whole.save_pretrained(tmp_path)
    config, unused = type(whole.config).from_pretrained(
        tmp_path, position_type="rotary", id2label={0: "a"}, layer_types=None, return_unused_kwargs=True, other=1
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config.layer_types == [FULL, FULL] and config.num_labels == 1 and unused == {"other": 1}
    with pytest.raises(ValueError, match="layer_types or mixer_types has 2 entries for num_hidden_layers=3"):
        type(whole).from_pretrained(tmp_path, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"num_experts=4.*mlp_layer_types"):
        type(whole).from_pretrained(tmp_path, num_experts=4)


@pytest.mark.parametrize("sibling", SIBLINGS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("combination", ["default", "linear"])
def test_a_batch_without_tokens_is_refused(sibling, shape, combination):
    for head in HEADS[sibling]:
        model, ids = case_of(sibling, combination).build(head), torch.zeros(shape, dtype=torch.long)
        given = {"decoder_input_ids": ids} if sibling == SEQ2SEQ else {}
        with pytest.raises(ValueError, match=re.escape(f"{shape} hold no token")):
            model(ids, attention_mask=ids, **given)


@pytest.mark.parametrize("combination", ["default", "linear", "linear_full"])
@pytest.mark.parametrize("positions", [None, torch.tensor([[6, 7, 8]])])
@torch.no_grad()
def test_a_mask_that_does_not_fit_beside_a_cache_is_refused(combination, positions):
    model, ids = case_of(DECODER, combination).build(), torch.randint(3, 71, (2, 9))
    for shape in [(2, 2), (1, 9)] + ([] if combination == "linear" else [(2, 4), (2, 12)]):
        cache = model(ids[:, :6], use_cache=True).cache
        with pytest.raises(ValueError, match=r"attention_mask of shape .* does not fit inputs of shape \(2, 3\)"):
            model(ids[:, 6:], cache=cache, attention_mask=torch.ones(shape, dtype=torch.long), position_ids=positions)
    cache = model(ids[:, :6], use_cache=True).cache
    given = {"attention_mask": torch.ones(2, 9, dtype=torch.long), "position_ids": positions}
    found = model(ids[:, 6:], cache=cache, **given).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 6:], rtol=1e-4, atol=1e-4)


def test_masks_by_layer_type_that_lack_one_are_refused():
    with pytest.raises(ValueError, match=r"\['full_attention'\], but no mask of 'linear_attention'"):
        case_of(DECODER, "linear_full").build()(torch.ones(1, 3, dtype=torch.long), attention_mask={FULL: None})


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "blockwise"])
def test_masks_by_layer_type_of_another_form_are_refused(implementation):
    """Padding in the place of scores would spread over them, and let a token see the ones behind it."""
    model = case_of(DECODER, "linear_full").build(attn_implementation=implementation)
    padding = torch.ones(1, 3, dtype=torch.bool)
    scores, ids = padding.expand(1, 1, 3, 3).tril(), torch.ones(1, 3, dtype=torch.long)
    for masks, refused in [({FULL: padding}, FULL), ({FULL: scores, LINEAR: scores}, LINEAR)]:
        with pytest.raises(ValueError, match=rf"attention_mask\['{refused}'\] has the shape .* these layers take"):
            model(ids, attention_mask={LINEAR: padding, **masks}, use_cache=False)
    found = model(ids, attention_mask={FULL: scores, LINEAR: padding}, use_cache=False).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits)


FOREIGN = {
    **dict.fromkeys(("bool_masked_pos", "head_mask", "global_attention_mask", "past_key_value"), SIBLINGS),
    **dict.fromkeys(("attention_masks", "position_id", "inputs_embed", "label", "lables"), SIBLINGS),
    "token_type_ids": (DECODER,),
    "decoder_input_ids": (ENCODER, DECODER),
    "cache": (ENCODER,),
    "encoder_outputs": (ENCODER, DECODER),
}


@pytest.mark.parametrize("sibling", SIBLINGS)
@torch.no_grad()
def test_arguments_of_other_models_and_misspelt_ones_are_refused_by_name(sibling):
    inputs = padded_inputs(sibling)
    for head in HEADS[sibling]:
        model = case_of(sibling).build(head)
        expected = model(**inputs)[0]
        for name in (name for name, siblings in FOREIGN.items() if sibling in siblings):
            with pytest.raises(ValueError, match=rf"^\w+ takes no {name}: (leave it out\.|did you mean \w+\?)$"):
                model(**inputs, **{name: inputs["attention_mask"]})
            assert torch.equal(model(**inputs, **{name: None})[0], expected)
        for name in ("num_items_in_batch", "return_loss", "of_my_kernel", "write_index", "logits_indices"):
            assert torch.equal(model(**inputs, **{name: 1})[0], expected)


@torch.no_grad()
def test_token_types_of_an_encoder_decoder_are_the_encoders():
    model, inputs = case_of(SEQ2SEQ, "unequal_stacks").build(), padded_inputs(SEQ2SEQ)
    types = torch.ones_like(inputs["input_ids"])
    encoded = model.get_encoder()(inputs["input_ids"], inputs["attention_mask"], token_type_ids=types)
    expected = model(**inputs, encoder_outputs=encoded).logits
    assert torch.equal(model(**inputs, token_type_ids=types).logits, expected)
    assert not torch.allclose(model(**inputs).logits, expected)
