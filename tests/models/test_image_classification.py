"""What only images have: patches, and labels of what they show.

What all models keep is in the other files, of which images are cases: `Combination("vit…")` in combinations.py.
"""

import pytest
import torch
from combinations import IMAGE, Case, case_of, cases, padded_inputs, training_inputs

every_case = pytest.mark.parametrize("case", cases(IMAGE), ids=str)
LABELS = torch.tensor([4, 0, 2])


def images() -> torch.Tensor:
    return padded_inputs(IMAGE)["pixel_values"]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@every_case
@torch.no_grad()
def test_scores_are_those_of_the_head_on_the_pooled_states(case: Case):
    model = case.build()
    states = model.model(pixel_values=images()).last_hidden_state
    pooled = states.mean(1) if model.config.classifier_pooling == "mean" else states[:, 0]
    close(model(pixel_values=images()).logits, model.classifier(pooled))


@every_case
@torch.no_grad()
def test_every_patch_and_its_place_count(case: Case):
    model = case.build()
    expected = model(pixel_values=images()).logits
    for top in range(0, 12, 4):
        for left in range(0, 12, 4):
            other = images()
            other[:, :, top + 1, left + 2] += 3
            assert (model(pixel_values=other).logits - expected).abs().max() > 1e-4
    swapped = images()
    swapped[..., :4], swapped[..., 4:8] = images()[..., 4:8], images()[..., :4]
    assert (model(pixel_values=swapped).logits - expected).abs().max() > 1e-4


PROBLEMS = {
    "single_label_classification": (LABELS, torch.nn.functional.cross_entropy),
    "multi_label_classification": (
        torch.eye(5)[LABELS],
        torch.nn.functional.binary_cross_entropy_with_logits,
    ),
    "regression": (torch.randn(3, 5), torch.nn.functional.mse_loss),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problem_types(problem: str):
    labels, expected = PROBLEMS[problem]
    outputs = case_of(IMAGE).build(problem_type=problem)(pixel_values=images(), labels=labels)
    close(outputs.loss, expected(outputs.logits, labels))
    model = case_of(IMAGE).build()
    assert model.config.problem_type is None
    if problem == "multi_label_classification":
        labels = labels.long()
    if problem != "regression":  # several float targets might be either: they are read as labels
        model(pixel_values=images(), labels=labels)
        assert model.config.problem_type == problem


def test_labels_that_do_not_fit_are_named():
    model = case_of(IMAGE).build(problem_type="single_label_classification")
    with pytest.raises(ValueError, match="Label 5 lies outside the 5 labels"):
        model(pixel_values=images(), labels=torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match=r"\(2,\) do not fit one label"):
        model(pixel_values=images(), labels=torch.tensor([0, 1]))


@torch.no_grad()
def test_pixels_may_come_in_the_models_own_precision():
    """Image processors give float32, which the contract tests."""
    model = case_of(IMAGE).build().to(torch.bfloat16)
    expected = model(**padded_inputs(IMAGE)).logits
    assert torch.equal(model(pixel_values=images().to(torch.bfloat16)).logits, expected)


def test_router_logits_are_one_a_layer_for_all_vectors_of_all_images():
    model = case_of(IMAGE, "vit_rotary_experts").build()
    logits = model(**training_inputs(IMAGE), output_router_logits=True).router_logits
    assert [tuple(layer.shape) for layer in logits] == [(3 * 10, 4)] * 2
    assert model(**training_inputs(IMAGE)).router_logits is None


def test_what_the_library_reads_of_the_model():
    model = case_of(IMAGE).build()
    assert model.main_input_name == "pixel_values"
    assert model.get_input_embeddings() is model.model.embed_tokens
