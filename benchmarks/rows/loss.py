"""Output layer and cross entropy, forward and backward: the logits at once, as Hugging Face computes them, or ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor, nn

from benchmarks.limits import products_alone
from benchmarks.timing import Row, device, peak_memory, times
from fratrie.modeling.chunked_loss import chunked_cross_entropy

ROWS, VOCABULARY = 2048, 32_000


@dataclass(frozen=True)
class Case:
    """A width of the states, the dtype of the products, and the least that is aimed at."""

    width: int
    dtype: torch.dtype
    goal: float = 1.25


CASES = tuple(Case(width, dtype) for width in (384, 768) for dtype in (torch.float32, torch.bfloat16))


def measure(rounds: int, cases: Sequence[Case] = CASES) -> list[Row]:
    """One row a case."""
    return [_compare(case, rounds) for case in cases]


def whole_logits(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss of logits that are all there, in float32 as in Hugging Face's loss functions."""
    return nn.functional.cross_entropy(nn.functional.linear(states, weight).float(), labels)


def torch_chunks(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's own loss over chunks, which takes what autocast would have made of its inputs."""
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
        states, weight = states.to(dtype), weight.to(dtype)
    options = nn.LinearCrossEntropyOptions()
    return nn.functional.linear_cross_entropy(states, weight, labels, options=options)


def our_chunks(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What `chunked_loss=True` computes."""
    return chunked_cross_entropy(states, weight, None, labels)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "whole": whole_logits,
    "torch": torch_chunks,
    "ours": our_chunks,
}


def _step(case: Case, way: str) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    states = torch.randn(ROWS, case.width, device=device(), requires_grad=True)
    weight = nn.Parameter(torch.randn(VOCABULARY, case.width, device=device()) * case.width**-0.5)
    labels = torch.randint(VOCABULARY, (ROWS,), device=device())

    def run() -> Tensor:
        states.grad = weight.grad = None
        with torch.autocast(device().type, case.dtype, enabled=case.dtype != torch.float32):
            loss = WAYS[way](states, weight, labels)
        loss.backward()
        return loss.detach()

    return run


def _memory(case: Case, way: str, threads: int) -> float:
    torch.set_num_threads(threads)
    return peak_memory(_step(case, way)) / 1e6


def _compare(case: Case, rounds: int) -> Row:
    steps = {way: _step(case, way) for way in WAYS}
    losses = {way: float(step()) for way, step in steps.items()}
    assert abs(losses["ours"] - losses["whole"]) < 1e-3 * losses["whole"], losses
    measured = times({**steps, "products": products_alone(steps["ours"])}, rounds)
    memory = {}
    for way in WAYS:  # each in a process of its own: what others have freed would hide its peak
        with get_context("spawn").Pool(1) as pool:
            memory[way] = pool.apply(partial(_memory, case, way, torch.get_num_threads()))
    name = str(case.dtype).removeprefix("torch.")
    return Row(
        work=f"head and cross entropy, {ROWS} rows, width {case.width}, vocabulary {VOCABULARY}, {name}",
        against_default=measured["whole"] / measured["ours"],
        hf_best=None,
        goal=case.goal,
        ours=f"{measured['ours'] * 1e3:.0f} ms",
        note=f"peak {memory['ours']:.0f} MB of {memory['whole']:.0f} MB ({memory['whole'] / memory['ours']:.1f} times "
        f"less); torch's linear_cross_entropy {measured['whole'] / measured['torch']:.2f}, {memory['torch']:.0f} MB, "
        f"loss {losses['torch'] - losses['whole']:+.0e}",
        limit=measured["whole"] / measured["products"],
    )
