"""What differs by intention from Hugging Face's models, as the documentation says."""

import pytest
import torch
from families import CASES, our_model, their_model

CASE = {case.name: case for case in CASES}
IDS = torch.tensor([[5, 6, 7, 8]])


def pair(name, **choices):
    theirs = their_model(CASE[name], **choices)
    return theirs, our_model(theirs)


def same(actual, expected):
    return torch.allclose(actual.double(), expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["RobertaModel-1", "CamembertModel-0", "XLMRobertaModel-0"])
def test_positions_without_a_mask(name):
    theirs, ours = pair(name)
    padded = torch.tensor([[5, 6, theirs.config.pad_token_id, 7, 8]])
    mask = (padded != theirs.config.pad_token_id).long()
    real = mask[0].bool()
    assert same(ours(padded, attention_mask=mask)[0][:, real], theirs(padded, attention_mask=mask)[0][:, real])
    assert not same(ours(padded)[0][:, real], theirs(padded)[0][:, real])
    places = torch.arange(5)[None]
    assert same(ours(padded)[0], theirs(padded, position_ids=places + theirs.config.pad_token_id + 1)[0])


@pytest.mark.parametrize("name", ["BertModel-0", "ModernBertModel-0", "LlamaModel-0", "GPT2Model-0"])
def test_positions_that_do_not_grow_begin_a_new_document(name):
    theirs, ours = pair(name)
    options = {"use_cache": False} if ours.config.is_causal_stack else {}
    for positions, packed in (([0, 1, 0, 1], True), ([3, 2, 1, 0], True), ([0, 0, 0, 0], True), ([0, 2, 4, 6], False)):
        places, mask = torch.tensor([positions]), torch.ones_like(IDS)
        actual = ours(IDS, position_ids=places, attention_mask=mask, **options)[0]
        assert same(actual, theirs(IDS, position_ids=places, attention_mask=mask, **options)[0]) != packed
        if options and packed:
            assert same(actual, theirs(IDS, position_ids=places, **options)[0])
    last = ours(IDS[:, 2:], **options)[0]
    assert same(ours(IDS, position_ids=torch.tensor([[0, 1, 0, 1]]), **options)[0][:, 2:], last)


def test_sparse_prediction_is_for_training_alone():
    theirs, ours = pair("ModernBertForMaskedLM-0", sparse_prediction=True)
    labels = torch.tensor([[-100, 6, -100, -100]])
    expected, actual = theirs(IDS, labels=labels), ours(IDS, labels=labels)
    assert expected.logits.shape == (1, 31) == ours.train()(IDS, labels=labels).logits.shape
    assert actual.logits.shape == (1, 4, 31) and same(actual.loss, expected.loss)
    assert same(actual.logits[:, 1], expected.logits)


def test_a_cast_rounds_the_rotary_frequencies_of_theirs():
    theirs = their_model(CASE["LlamaModel-0"], dtype=torch.float32).half()
    ours = our_model(theirs)
    assert theirs.rotary_emb.inv_freq.dtype == torch.float16 and ours.rotary_emb.inv_freq.dtype == torch.float32
