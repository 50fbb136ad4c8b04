"""captum: integrated gradients say which words speak for a label of a multi-label classifier."""

import pytest
import torch
from captum.attr import LayerIntegratedGradients
from combinations import ENCODER, case_of, padded_inputs

pytestmark = pytest.mark.ecosystem

LABEL, NEUTRAL = 2, 3
NAMES = pytest.mark.parametrize("name", ["default", "llama"])


def classifier(name, **overrides):
    fields = {"num_labels": 5, "problem_type": "multi_label_classification", **overrides}
    return case_of(ENCODER, name).build("sequence_classification", **fields)


def attributions(model, layer, input_ids, attention_mask):
    """Attributions of the label `(B, T, D)`, and the logits that they have to explain `(B,)`."""

    def logits(ids, mask):
        return model(ids, attention_mask=mask).logits

    baselines = torch.where(attention_mask.bool(), NEUTRAL, input_ids)
    values = LayerIntegratedGradients(logits, layer).attribute(
        input_ids, baselines, target=LABEL, additional_forward_args=(attention_mask,), n_steps=64
    )
    with torch.no_grad():
        difference = logits(input_ids, attention_mask) - logits(baselines, attention_mask)
    return values.detach(), difference[:, LABEL]


@NAMES
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_attributions_of_a_padded_batch_add_up_and_spare_the_padding(name, side):
    model, inputs = classifier(name), padded_inputs(ENCODER, side)
    assert model.config.unpad_inputs
    values, difference = attributions(model, model.model.embed_tokens, **inputs)
    assert values.shape == (3, 9, 32)
    assert difference.abs().min() > 1e-3
    torch.testing.assert_close(values.sum((1, 2)), difference, atol=1e-4, rtol=1e-3)
    assert not values[inputs["attention_mask"] == 0].any()
    assert values[inputs["attention_mask"] == 1].abs().sum(-1).min() > 0


@NAMES
def test_a_padded_batch_is_explained_like_each_of_its_texts_alone(name):
    model, inputs = classifier(name), padded_inputs(ENCODER)
    together, _ = attributions(model, model.model.embed_tokens, **inputs)
    for row, mask in enumerate(inputs["attention_mask"]):
        text = {"input_ids": inputs["input_ids"][row : row + 1, : mask.sum()]}
        text["attention_mask"] = torch.ones_like(text["input_ids"])
        alone, _ = attributions(model, model.model.embed_tokens, **text)
        torch.testing.assert_close(together[row, : mask.sum()], alone[0], atol=1e-5, rtol=1e-4)


def test_a_layer_is_explained_when_padding_is_kept():
    """captum wants the batch as a layer's first dimension, which the layers of an unpadded pass do not have."""
    model, inputs = classifier("default", unpad_inputs=False), padded_inputs(ENCODER)
    values, difference = attributions(model, model.model.layers[0], **inputs)
    torch.testing.assert_close(values.sum((1, 2)), difference, atol=1e-4, rtol=1e-3)
