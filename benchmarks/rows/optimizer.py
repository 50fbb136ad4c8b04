"""A step of the optimizer with its clipping, for a model of many small weights: torch's AdamW beside ours."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from benchmarks.timing import Row, device, times
from fratrie.training.schedules import build_optimizer

RATE, DECAY, BETAS = 1e-4, 0.0, (0.9, 0.999)


def measure(rounds: int, layers: int = 6, width: int = 256, vocabulary: int = 8000) -> list[Row]:
    """One row: the default AdamW against the fused one and ours."""
    sizes = {"hidden_size": width, "num_attention_heads": 4, "intermediate_size": 4 * width}
    model = BertForMaskedLM(BertConfig(num_hidden_layers=layers, vocab_size=vocabulary, **sizes)).to(device())
    gradients = [torch.randn_like(weight) for weight in model.parameters()]
    models = [copy.deepcopy(model) for _ in range(3)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), RATE, BETAS, weight_decay=DECAY),
        torch.optim.AdamW(models[1].parameters(), RATE, BETAS, weight_decay=DECAY, fused=True),
        build_optimizer(models[2], RATE, DECAY, BETAS),
    ]
    default, fused, ours = (
        _step_of(model, optimizer, gradients) for model, optimizer in zip(models, optimizers, strict=True)
    )
    for step in (default, fused, ours):
        step()
    _assert_equal_weights(models)
    works = {"default": default, "fused": fused, "ours": ours, "bytes": _bytes_moved(sum(map(torch.numel, gradients)))}
    seconds = times(works, 10 * rounds)
    return [
        Row(
            work=f"AdamW and clipping, {sum(weight.numel() for weight in model.parameters()):,} parameters in "
            f"{len(gradients)} tensors",
            against_default=seconds["default"] / seconds["ours"],
            hf_best=seconds["default"] / seconds["fused"],
            goal=4.0,
            ours=f"{1e3 * seconds['ours']:.1f} ms a step",
            note="Hugging Face's best: fused, which `Trainer` takes by default",
            limit=seconds["default"] / seconds["bytes"],
        )
    ]


def _step_of(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]
) -> Callable[[], None]:
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.grad = gradient.clone()
    return partial(_step, list(model.parameters()), optimizer)


def _step(weights: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()


def _bytes_moved(count: int) -> Callable[[], None]:
    """The least traffic of a step: gradients read for their norm and again, weights and moments read and written."""
    gradients, states = (torch.ones(copies * count, device=device()) for copies in (1, 3))

    def move() -> None:
        torch.dot(gradients, gradients)
        torch.dot(gradients, gradients)
        states.mul_(1.0)

    return move


def _assert_equal_weights(models: list[PreTrainedModel]) -> None:
    expected, *others = (list(model.parameters()) for model in models)
    for weights in others:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
