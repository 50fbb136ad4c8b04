"""States that enter a stack at a layer go on as they do in the whole pass."""

import pytest
import torch
from combinations import DECODER, ENCODER, IMAGE, case_of, cases, spread

LENGTH = 7
FORMS = {
    "full": {},
    "right": {"attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5])},
    "left": {"attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] * 5 + [1] * 2])},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 3)},
}


def ids():
    return torch.randint(3, 71, (3, LENGTH), generator=torch.Generator().manual_seed(3))


def options(case):
    return {"use_cache": False} if case.sibling == DECODER else {}


ENTERED = [case for case in spread(cases(ENCODER, DECODER)) if not case.config().reversible]


@pytest.mark.parametrize("case", ENTERED, ids=str)
@torch.no_grad()
def test_states_go_on_as_in_the_whole_pass(case):
    model = case.build("base")
    for name, form in FORMS.items():
        given = {**form, **options(case)}
        whole = model(ids(), output_hidden_states=True, **given)
        upper = model(inputs_embeds=whole.hidden_states[1], first_layer=1, output_hidden_states=True, **given)
        torch.testing.assert_close(upper.last_hidden_state, whole.last_hidden_state, atol=1e-6, rtol=1e-5, msg=name)
        assert len(upper.hidden_states) == len(whole.hidden_states) - 1
        # Above the last layer only the norm is left.
        given |= {"inputs_embeds": whole.hidden_states[1], "first_layer": len(model.layers)}
        end = model(output_hidden_states=True, **given)
        real = form.get("attention_mask", torch.ones(3, LENGTH))[..., None]
        torch.testing.assert_close(end.last_hidden_state, model.norm(whole.hidden_states[1]) * real, msg=name)
        assert end.hidden_states == ()


def test_the_layers_above_get_the_gradients_of_the_whole_pass():
    case = case_of(ENCODER)
    model = case.build("sequence_classification").train()
    model.activation_checkpointing_enable()
    labels = torch.tensor([0, 1, 0])
    states = model(ids(), **FORMS["right"], output_hidden_states=True).hidden_states[1].detach()
    gradients = []
    for inputs in ({"input_ids": ids()}, {"inputs_embeds": states, "first_layer": 1}):
        model.zero_grad()
        model(**inputs, **FORMS["right"], labels=labels).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    whole, upper = gradients
    assert set(upper) == {name for name in whole if "layers.1." in name or not name.startswith("model.")} != set(whole)
    for name, gradient in upper.items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("sibling", "inputs", "message"),
    [
        (ENCODER, {"first_layer": 3}, "first_layer=3: give 0 to 2"),
        (ENCODER, {"first_layer": -1}, "first_layer=-1: give 0 to 2"),
        (ENCODER, {"first_layer": 1, "input_ids": ids(), "inputs_embeds": None}, "as inputs_embeds"),
        (ENCODER, {"first_layer": 1, "token_type_ids": torch.zeros_like(ids())}, "without token_type_ids"),
        (DECODER, {"first_layer": 1, "use_cache": True}, "use_cache=False"),
        (IMAGE, {"first_layer": 1, "pixel_values": torch.zeros(3, 3, 12, 12), "inputs_embeds": None}, "pixel_values"),
    ],
)
def test_what_does_not_go_with_states_is_refused(sibling, inputs, message):
    model = case_of(sibling).build("base")
    with pytest.raises(ValueError, match=message):
        model(**{"inputs_embeds": torch.zeros(3, LENGTH, 32), **inputs})
