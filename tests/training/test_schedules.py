import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from fratrie.training.schedules import build_optimizer, build_scheduler, enough_epochs, warmup_length


def rates(shape, warmup, total):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = build_scheduler(optimizer, shape, warmup, total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_linear():
    assert rates("linear", 2, 6) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0])


def test_cosine():
    expected = [0, 0.5, *((1 + math.cos(math.pi * step / 4)) / 2 for step in range(5))]
    assert rates("cosine", 2, 6) == pytest.approx(expected)


def test_constant():
    assert rates("constant", 2, 4) == pytest.approx([0, 0.5, 1, 1, 1])


@pytest.mark.parametrize(("steps_per_epoch", "epochs"), [(1, 500), (11, 46), (49, 11), (50, 10), (165, 10)])
def test_few_rows_are_seen_in_more_epochs(steps_per_epoch, epochs):
    assert enough_epochs(10, steps_per_epoch, least_steps=500) == epochs


@pytest.mark.parametrize(("given", "length"), [(0, 0), (0.1, 3), (0.5, 13), (1, 1), (7.0, 7), (25, 25)])
def test_warmup_as_steps_or_share(given, length):
    assert warmup_length(given, 25) == length


@pytest.mark.parametrize("given", [-1, -0.1, 26])
def test_warmup_out_of_range(given):
    with pytest.raises(ValueError, match=f"warmup_steps={given}"):
        warmup_length(given, 25)


def tiny():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=10, **sizes))


def test_norms_and_biases_do_not_decay():
    model = tiny()
    optimizer = build_optimizer(model, 1e-3, 0.5)
    names = {weight: name for name, weight in model.named_parameters()}
    decay = {names[w]: group["weight_decay"] for group in optimizer.param_groups for w in group["params"]}
    assert set(decay) == set(names.values())
    for name, value in decay.items():
        assert value == (0.0 if name.endswith("bias") or "LayerNorm" in name else 0.5), name


def test_only_trainable_weights():
    model = tiny()
    model.bert.requires_grad_(False)
    optimizer = build_optimizer(model, 1e-3, 0.5)
    taken = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert taken == {id(weight) for weight in model.parameters() if weight.requires_grad}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no weight of the model is trainable"):
        build_optimizer(model, 1e-3, 0.5)


def test_rates_are_of_the_weights_they_name_throughout_the_schedule():
    model = tiny()
    model.bert.embeddings.requires_grad_(False)
    layer = {name: 2.5e-3 for name, _ in model.named_parameters() if ".layer.0." in name}
    optimizer = build_optimizer(model, 1e-2, 0.5, rates=layer)
    scheduler = build_scheduler(optimizer, "linear", 0, 4)
    names = {weight: name for name, weight in model.named_parameters()}
    for remaining in (1, 0.75, 0.5):
        groups = optimizer.param_groups
        rates = {names[weight]: group["lr"] for group in groups for weight in group["params"]}
        assert set(rates) == {name for name, weight in model.named_parameters() if weight.requires_grad}
        for name, rate in rates.items():
            assert rate == pytest.approx(1e-2 * remaining * (0.25 if name in layer else 1)), name
        assert scheduler.get_last_lr()[0] == max(rates.values())  # the one that is logged
        optimizer.step()
        scheduler.step()
    decay = {names[w]: group["weight_decay"] for group in optimizer.param_groups for w in group["params"]}
    assert {name for name, value in decay.items() if not value} == {
        name for name in decay if name.endswith("bias") or "LayerNorm" in name
    }
