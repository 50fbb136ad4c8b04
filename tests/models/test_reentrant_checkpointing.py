"""Re-entrant checkpointing, the old kind, which sees no gradient of what a layer is given by name."""

import pytest
import torch
from combinations import DECODER, ENCODER, SEQ2SEQ, case_of, training_inputs


def gradients(model, inputs):
    model.train()(**inputs).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("sibling", "name"),
    [(SEQ2SEQ, "default"), (SEQ2SEQ, "t5"), (SEQ2SEQ, "unequal_stacks"), (DECODER, "t5"), (ENCODER, "t5")],
)
def test_gradients_pass_through_encoder_states_and_position_biases(sibling, name):
    case, inputs = case_of(sibling, name), training_inputs(sibling)
    expected = gradients(case.build(), inputs)
    model = case.build()
    model.activation_checkpointing_enable({"use_reentrant": True})
    actual = gradients(model, inputs)
    assert actual.keys() == expected.keys()
    for weight, gradient in expected.items():
        torch.testing.assert_close(actual[weight], gradient, atol=1e-5, rtol=1e-5, msg=weight)
