"""Reversible layers against their formula and against ordinary backpropagation."""

import pytest
import torch
from layouts import rows_of_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers.distributed import DistributedConfig
from transformers.modeling_outputs import BaseModelOutput

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
    norm_slots,
)
from fratrie.accounting import activation_bytes, forward_flops, training_flops
from fratrie.modeling.parallel import check_parallelism
from fratrie.modeling.reversible import ReversibleLayers
from fratrie.training.frozen_states import frozen_depth

MODELS = {
    FratrieEncoderConfig: FratrieEncoderForMaskedLM,
    FratrieDecoderConfig: FratrieDecoderForCausalLM,
    FratrieSeq2SeqConfig: FratrieSeq2SeqForConditionalGeneration,
}
IDS = torch.tensor([[0, 0, 5, 6, 9, 3, 7], [7, 8, 9, 10, 11, 12, 13]])
MASK = (IDS > 0).long()
DROPOUTS = {"embedding_dropout": 0.1, "hidden_dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}


def build(config_class=FratrieDecoderConfig, dtype=torch.float64, **fields):
    shared = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "reversible": True,
        **norm_slots("pre"),
    }
    torch.manual_seed(0)
    return MODELS[config_class](config_class(**{**shared, **fields})).to(dtype).train()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def step(model, ids=IDS, mask=MASK, **options):
    """Loss, gradients of the parameters that learn, and what the generator gives next."""
    torch.manual_seed(3)
    model.zero_grad()
    # Padding as an input of a decoder would be zeros, and a norm of zeros enlarges every rounding.
    loss = model(ids, attention_mask=mask, labels=ids.clamp_min(2), **options).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad), torch.rand(1)]


@pytest.fixture
def ordinary(monkeypatch):
    """A step by ordinary backpropagation."""

    def run(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(ReversibleLayers, "_recomputes", lambda _: False)
            return step(*args, **kwargs)

    return run


def test_equals_its_formula():
    model = build(mixer_output_norm="rms_norm").eval().model
    hidden = torch.randn(2, 7, 16, dtype=torch.float64)
    layout = rows_of_stack(model, hidden, MASK)
    first = second = hidden
    for layer in model.layers:
        mixed, _ = layer.mixer(layer.mixer_input_norm(second), layout)
        first = first + layer.mixer_output_norm(mixed)
        second = second + layer.feed_forward(layer.feed_forward_input_norm(first))
    close(model.pass_blocks(hidden, layout).last_hidden_state, model.norm((first + second) / 2))


def test_the_streams_come_back_as_they_were():
    """What the branches read in the backward pass is what they read before, in the other order."""
    model, seen = build(num_hidden_layers=12), []
    for layer in model.model.layers:
        for norm in (layer.mixer_input_norm, layer.feed_forward_input_norm):
            norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    model(IDS, labels=IDS).loss.backward()
    assert len(seen) == 2 * 2 * 12
    for before, after in zip(seen[:24], reversed(seen[24:]), strict=True):
        close(after, before, 1e-12)


@pytest.mark.parametrize(
    "config_class, fields",
    [
        (FratrieDecoderConfig, {}),
        (FratrieDecoderConfig, {"position_type": "relative", **norm_slots("sandwich", "rms_norm")}),
        (FratrieDecoderConfig, {"mixer_types": ["linear", "reformer", "softmax"], "position_type": "rotary"}),
        (FratrieEncoderConfig, {"unpad_inputs": False, "position_type": "alibi"}),
        (FratrieSeq2SeqConfig, {"position_type": "relative"}),
        (FratrieDecoderConfig, DROPOUTS),
        (FratrieSeq2SeqConfig, DROPOUTS),
    ],
    ids=["plain", "relative", "mixers", "padded encoder", "encoder-decoder", "dropouts", "dropouts of both"],
)
def test_gradients_equal_ordinary_backpropagation(config_class, fields, ordinary):
    model = build(config_class, **fields)
    for found, expected in zip(step(model), ordinary(model), strict=True):
        close(found, expected)


def test_gradients_of_packed_documents_and_of_embeddings(ordinary):
    model = build()
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0]])
    packed = {"position_ids": places, "mask": None}
    for found, expected in zip(step(model, **packed), ordinary(model, **packed), strict=True):
        close(found, expected)
    embeds = torch.randn(1, 7, 16, dtype=torch.float64, requires_grad=True)

    def output(states):
        return model(inputs_embeds=states, position_ids=places[:1]).logits

    torch.autograd.gradcheck(output, embeds, fast_mode=True, atol=1e-6)
    (gradient,) = torch.autograd.grad(output(embeds)[0, 3:].square().sum(), embeds)
    assert not gradient[0, :3].any() and gradient[0, 3:].any(-1).all()


def test_frozen_layers_pass_gradients_on(ordinary):
    model = build()
    for name, weight in model.named_parameters():
        weight.requires_grad_(".1.mixer" in name or "embed_positions" in name or "2.feed_forward.up_proj.bias" in name)
    found, expected = step(model), ordinary(model)
    assert len(found) == 2 + 10 + 2, "loss and number; mixer and its norm; positions and a bias"
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    for reversible in (True, False):
        model = build(reversible=reversible).requires_grad_(False)
        model.model.layers[2].requires_grad_(True)
        assert frozen_depth(model) == (0 if reversible else 2), "one state is no input of the layers above"


def kept_bytes(model, **inputs):
    """What a forward pass keeps, weights left out."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in weights)


def test_memory_does_not_grow_with_the_number_of_layers(monkeypatch):
    inputs = {"input_ids": torch.arange(24).view(1, 24) + 2, "labels": torch.arange(24).view(1, 24)}
    models = [build(num_hidden_layers=number, dtype=torch.float32) for number in (2, 8)]
    few, many = (kept_bytes(model, **inputs) for model in models)
    assert few == many
    said = [activation_bytes(model.config, 1, 24, torch.float32) for model in models]
    assert said[0] == said[1] and 0.8 < said[0] / few < 1.25
    monkeypatch.setattr(ReversibleLayers, "_recomputes", lambda _: False)
    few, many = (kept_bytes(model, **inputs) for model in models)
    assert many > 3 * few


@pytest.mark.parametrize("config_class", MODELS)
def test_a_step_costs_one_pass_through_the_layers_more(config_class):
    model = build(config_class, attn_implementation="eager")
    source = 7 if config_class is FratrieSeq2SeqConfig else None
    ids = torch.where(IDS > 0, IDS, 2)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    assert training_flops(model.config, 2, 7, source) == counter.get_total_flops()
    assert training_flops(model.config, 2, 7, source) > 3 * forward_flops(model.config, 2, 7, source)


def test_recorded_states_are_means_and_get_their_gradients():
    model = build(dtype=torch.bfloat16)
    with torch.no_grad():
        states = model(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states
    assert [state.shape for state in states] == [(2, 7, 16)] * 4 and {state.dtype for state in states} == {
        torch.bfloat16
    }
    model = build()
    embeds = torch.randn(1, 7, 16, dtype=torch.float64, requires_grad=True)
    states = model(inputs_embeds=embeds, output_hidden_states=True).hidden_states
    assert all(torch.autograd.grad(state.square().sum(), embeds, retain_graph=True)[0].any() for state in states)
    weightless = build(num_hidden_layers=1)
    for weight in (weightless.model.layers[0].mixer.o_proj, weightless.model.layers[0].feed_forward.down_proj):
        weight.weight.data.zero_()
        weight.bias.data.zero_()
    states = weightless.model.eval()(IDS, output_hidden_states=True).hidden_states
    close(states[1], weightless.model.norm(states[0]))


def test_autocast_is_the_same_in_both_passes(monkeypatch):
    model = build(dtype=torch.float32, **DROPOUTS)

    def run():
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(IDS, attention_mask=MASK, labels=IDS).loss
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    found = run()
    monkeypatch.setattr(ReversibleLayers, "_recomputes", lambda _: False)
    for one, other in zip(found, run(), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_in_half_precision_rounding_does_not_add_up(ordinary):
    """The streams stay in float32, so what comes back is what went in, rounded where it went in."""
    model = build(dtype=torch.bfloat16, num_hidden_layers=12, initializer_range=0.1)
    for one, other in zip(step(model), ordinary(model), strict=True):
        assert (one - other).float().norm() <= 0.01 * other.float().norm()


def test_generates_from_a_cache_and_learns_from_a_past():
    model = build().eval()
    options = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))
    cache = model(IDS[:, :4]).cache
    model(IDS[:, 4:], cache=cache, labels=IDS[:, 4:]).loss.backward()
    assert cache.get_seq_length() == 7, "the backward pass adds nothing"


def test_an_encoders_states_get_their_gradient():
    model, labels = build(FratrieSeq2SeqConfig), IDS.clamp_min(2)
    states = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)

    def loss(states):
        return model(encoder_outputs=BaseModelOutput(states), labels=labels).loss

    torch.autograd.gradcheck(loss, states, fast_mode=True, atol=1e-6)
    assert torch.autograd.grad(loss(states), states)[0].any(-1).all()


def test_checkpointing_leaves_its_layers_out(ordinary):
    model = build(**DROPOUTS)
    expected = ordinary(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    for found, wanted in zip(step(model), expected, strict=True):
        close(found, wanted)


def test_has_the_weights_of_other_stacks_and_comes_back_from_a_folder(tmp_path):
    model = build().eval()
    assert model.state_dict().keys() == build(reversible=False).state_dict().keys()
    model.save_pretrained(tmp_path)
    back = FratrieDecoderForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(back(IDS).logits, model(IDS).logits)


def test_compiles_into_one_graph():
    torch._dynamo.reset()
    model = build(num_hidden_layers=1, position_type="none").eval()
    compiled = torch.compile(model.model, backend="eager", fullgraph=True, dynamic=True)
    found = compiled(IDS, use_cache=False).last_hidden_state
    close(found, model.model(IDS, use_cache=False).last_hidden_state)
    found.sum().backward()
    assert model.model.embed_tokens.weight.grad.any()


@pytest.mark.parametrize(
    "fields, message",
    [
        (norm_slots("post"), "norm_after_residual=True norms the sum: use norm_slots"),
        ({"num_experts": 4}, "lose their gradient: leave out num_experts=4"),
    ],
)
def test_what_cannot_be_computed_anew_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        build(**fields)


def test_two_streams_are_not_entered_nor_handed_on():
    model = build().eval()
    with pytest.raises(ValueError, match="first_layer=1: what enters a layer of a reversible stack are two streams"):
        model.model(inputs_embeds=torch.randn(1, 3, 16, dtype=torch.float64), first_layer=1, use_cache=False)
    with pytest.raises(ValueError, match="pp_size=2: the stages of a pipeline hand on one stream"):
        check_parallelism(model, DistributedConfig(pp_size=2), (model.config,))
    assert model.config.base_model_pp_plan is None
