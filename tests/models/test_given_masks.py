"""Masks of the caller's own: what they mean, in every implementation, and what is refused."""

import pytest
import torch
from combinations import DECODER, ENCODER, SEQ2SEQ, Case, case_of, cases, documents, padded_inputs

PLAIN = cases(ENCODER, DECODER, names=("default", "llama", "t5", "alibi", "grouped_wide_heads"))


def whole_mask(case: Case, padding: torch.Tensor) -> torch.Tensor:
    """`(B, 1, T, T)`, true where a query sees a key."""
    length = padding.shape[1]
    seen = padding.bool()[:, None, None, :].expand(-1, 1, length, length)
    return seen & torch.ones(length, length, dtype=torch.bool).tril() if case.sibling == DECODER else seen


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_a_whole_mask_of_booleans_or_numbers_equals_the_padding(case: Case, implementation: str):
    model = case.build(attn_implementation=implementation)
    inputs = padded_inputs(case.sibling)
    real = inputs["attention_mask"].bool()
    expected = model(**inputs).logits[real]
    seen = whole_mask(case, inputs["attention_mask"])
    numbers = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, numbers):
        logits = model(inputs["input_ids"], attention_mask=mask).logits
        torch.testing.assert_close(logits[real], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_whole_numbers_in_a_whole_mask_are_refused(case: Case):
    inputs = padded_inputs(case.sibling)
    mask = whole_mask(case, inputs["attention_mask"]).long()
    with pytest.raises(ValueError, match=r"torch.int64 may mean either: give booleans"):
        case.build()(inputs["input_ids"], attention_mask=mask)


@pytest.mark.parametrize("case", cases(ENCODER, DECODER, names=("linear_full", "windows", "hybrid")), ids=str)
def test_mixers_that_mask_no_single_scores_refuse_a_whole_mask(case: Case):
    model, inputs = case.build(), padded_inputs(case.sibling)
    name = next(name for name in model.config.mixer_types if name not in ("softmax", "longformer"))
    whole = whole_mask(case, inputs["attention_mask"])
    pattern = rf"Mixers such as '{name}' take no mask of single scores: give the padding .*, not \(3, 1, 9, 9\)"
    with pytest.raises(ValueError, match=pattern):
        model(inputs["input_ids"], attention_mask=whole, use_cache=False)
    pattern = r"attention_mask\['\w+'\] has the shape \(3, 1, 9, 9\), but these layers take padding \(batch, length\)"
    with pytest.raises(ValueError, match=pattern):
        masks = dict.fromkeys(model.config.layer_types, whole)
        model(inputs["input_ids"], attention_mask=masks, use_cache=False)


@pytest.mark.parametrize("sibling", [ENCODER, DECODER, SEQ2SEQ])
@pytest.mark.parametrize("shape", [(3, 12), (3, 4), (1, 9), (9, 3)])
def test_a_padding_mask_of_another_shape_is_refused(sibling: str, shape: tuple[int, int]):
    inputs = padded_inputs(sibling)
    with pytest.raises(ValueError, match=rf"shape \({shape[0]}, {shape[1]}\) does not fit inputs of shape \(3, 9\)"):
        case_of(sibling).build()(**{**inputs, "attention_mask": torch.ones(shape)})


@pytest.mark.parametrize("sibling", [ENCODER, DECODER, SEQ2SEQ])
@pytest.mark.parametrize("shape", [(9,), (3, 9, 9)])
def test_a_mask_of_no_known_form_is_refused(sibling: str, shape: tuple[int, ...]):
    inputs = padded_inputs(sibling)
    with pytest.raises(ValueError, match=r"is neither padding .* nor a mask that is ready"):
        case_of(sibling).build()(**{**inputs, "attention_mask": torch.ones(shape)})


@pytest.mark.parametrize("shape", [(3, 12), (3, 4), (1, 9)])
def test_padding_that_does_not_fit_encoded_states_is_refused(shape: tuple[int, int]):
    model, inputs = case_of(SEQ2SEQ).build(), padded_inputs(SEQ2SEQ)
    encoded = model.get_encoder()(inputs["input_ids"])
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\) does not fit states of shape \(3, 9\)"):
        model(**{**inputs, "attention_mask": torch.ones(shape)}, encoder_outputs=encoded)


@torch.no_grad()
def test_a_text_whose_beginning_is_cached_is_classified_by_its_last_token():
    (ids,) = documents((6,))
    rows = ids[None].repeat(2, 1)
    mask = torch.ones_like(rows)
    mask[1, :2] = 0
    model = case_of(DECODER).build("sequence_classification")
    past = model.model(rows[:, :4], attention_mask=mask[:, :4], use_cache=True).cache
    logits = model(rows[:, 4:], attention_mask=mask, cache=past).logits
    torch.testing.assert_close(logits, model(rows, attention_mask=mask).logits, atol=1e-5, rtol=1e-5)
    for pooling in ("first", "mean"):
        model.config.classifier_pooling = pooling
        past = model.model(rows[:, :4], use_cache=True).cache
        with pytest.raises(ValueError, match=f"classifier_pooling='{pooling}' needs all tokens"):
            model(rows[:, 4:], attention_mask=mask, cache=past)
