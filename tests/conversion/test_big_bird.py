"""BigBird by blocks: texts of any length, long enough for it, give what Hugging Face's model gives in evaluation."""

import logging

import pytest
import torch
from families import ENCODER, Case, our_model, precise, their_model

from fratrie.conversion import to_hf

HEADS = ("BigBirdModel", "BigBirdForMaskedLM", "BigBirdForSequenceClassification", "BigBirdForTokenClassification")
LENGTHS = (15, 16, 19, 23, 40)  # above (5 + 2 · 1) · 2, some with room in the last block


def case_of(head, **fields):
    sizes = {**ENCODER, "pad_token_id": 0, "block_size": 2, "num_random_blocks": 1}
    return Case("big_bird", head, {**sizes, **fields}, head)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("length", LENGTHS)
def test_equal_outputs_in_blocks(head, length):
    """There and back again."""
    case = case_of(head)
    theirs = their_model(case)
    ours, ids = our_model(theirs), torch.randint(5, 31, (2, length))
    with torch.no_grad(), precise(case):
        expected, actual, back = (model(ids, output_hidden_states=True) for model in (theirs, ours, to_hf(ours)))
    assert theirs.base_model.attention_type == "block_sparse"
    for one, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        close(one, other[:, :length])  # theirs fill up the last block
    names = ("last_hidden_state", "pooler_output") if head == "BigBirdModel" else ("logits",)
    for name in names:
        close(actual[name], expected[name])
        close(back[name], expected[name])


@pytest.mark.parametrize(("block_size", "num_random_blocks"), [(1, 2), (3, 1), (1, 4)])
def test_equal_outputs_of_other_blocks(block_size, num_random_blocks):
    case = case_of("BigBirdForMaskedLM", block_size=block_size, num_random_blocks=num_random_blocks)
    theirs = their_model(case)
    ours, ids = our_model(theirs), torch.randint(5, 31, (2, 37))
    with torch.no_grad(), precise(case):
        close(ours(ids).logits, theirs(ids).logits)
    assert ours.config.bigbird_block_size == block_size


def test_a_short_text_changes_no_longer_one():
    """Theirs stays with full attention."""
    case = case_of("BigBirdForMaskedLM")
    theirs = their_model(case)
    ours, ids = our_model(theirs), torch.randint(5, 31, (1, 31))
    with torch.no_grad():
        before = ours(ids).logits, theirs(ids).logits
        close(ours(ids[:, :14]).logits, theirs(ids[:, :14]).logits, 1e-5)
        assert torch.equal(ours(ids).logits, before[0]) and not torch.allclose(theirs(ids).logits, before[1])


@pytest.mark.parametrize("head", HEADS)
def test_a_pooler_that_no_output_depends_on_is_said_to_be_drawn_anew(head, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    to_hf(our_model(their_model(case_of(head))))
    said = "bert.pooler.weight is drawn anew: no output of a" in caplog.text
    assert said == (head != "BigBirdModel")
