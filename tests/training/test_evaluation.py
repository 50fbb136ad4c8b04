import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

from fratrie.training.collators import PackedCausalCollator
from fratrie.training.evaluation import ConfigSwitch, evaluate_loss, evaluating, perplexity, predict

DOCUMENTS = [[1, 5, 9, 2], [1, 7, 7, 7, 8, 2], [1, 3, 2], [1, 4, 6, 2]]


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=12, initializer_range=0.5, **sizes)).train()


def packed(*documents):
    ids = [token for document in documents for token in document]
    return {"input_ids": ids, "position_ids": [place for document in documents for place in range(len(document))]}


def test_packed_documents_are_as_alone(model, accelerator):
    """Also outside of training, where the config asks for a cache, with which packed documents would leak."""
    assert model.config.use_cache
    collator = PackedCausalCollator(pad_token_id=0, block_size=12)
    together = evaluate_loss(model, accelerator, [packed(*DOCUMENTS[:2]), packed(*DOCUMENTS[2:])], collator, 2)
    alone = evaluate_loss(model, accelerator, [packed(document) for document in DOCUMENTS], collator, 3)
    assert together["eval_targets"] == alone["eval_targets"] == sum(len(document) - 1 for document in DOCUMENTS)
    assert together["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    assert model.training and model.config.use_cache


def test_nothing_to_evaluate(model, accelerator):
    collator = PackedCausalCollator(pad_token_id=0, block_size=12)
    with pytest.raises(ValueError, match="have no rows"):
        evaluate_loss(model, accelerator, [], collator, 2)
    with pytest.raises(ValueError, match="hold no target"):
        evaluate_loss(model, accelerator, [packed([1])], collator, 2)


def test_masks_are_the_same_every_time(model, accelerator):
    def collator(rows):
        ids = torch.randint(3, 12, (len(rows), 8))
        return {"input_ids": ids, "labels": ids}

    first = evaluate_loss(model, accelerator, range(5), collator, 2)
    torch.manual_seed(1)
    assert evaluate_loss(model, accelerator, range(5), collator, 2) == first


class Scorer(torch.nn.Module):
    def forward(self, values):
        return type("Output", (), {"logits": torch.stack([values, -values], 1)})


def test_predictions_keep_the_order_of_the_rows(accelerator):
    def collator(rows):
        return {"values": torch.tensor([float(row) for row in rows]), "labels": torch.tensor(rows)}

    logits, labels = predict(Scorer(), accelerator, list(range(7)), collator, [[6], [2, 0, 1], [3, 5, 4]])
    assert labels.tolist() == list(range(7))
    assert logits.tolist() == [[value, -value] for value in range(7)]
    bare = predict(Scorer(), accelerator, [4], lambda rows: {"values": torch.tensor([4.0])}, [[0]])
    assert bare[0].tolist() == [[4, -4]] and bare[1] is None


def test_evaluating_restores_the_mode(model):
    model.eval()
    with evaluating(model):
        assert not model.training and not torch.is_grad_enabled() and not model.config.use_cache
    assert not model.training and torch.is_grad_enabled() and model.config.use_cache


def test_the_switch_shows_the_given_value_within(model):
    switch = ConfigSwitch(model)
    with switch.on():
        with switch.as_given():
            assert model.config.use_cache
        assert not model.config.use_cache
    assert model.config.use_cache


def test_perplexity():
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e9) == math.inf
