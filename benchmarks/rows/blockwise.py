"""Attention with all scores at once (eager), by SDPA and by blocks, forward and backward: time and peak memory."""

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.timing import Row, device, peak_memory, times
from fratrie import FratrieDecoderConfig
from fratrie.modeling.attention import SoftmaxAttention
from fratrie.modeling.layout import Rows
from fratrie.modeling.masks import GivenMask

HEADS, HEAD = 4, 64
LENGTHS = (2048, 4096)
WAYS = ("eager", "sdpa", "blockwise")


def measure(rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """One row a length, of one causal text with padding before it."""
    return [_compare(length, rounds) for length in lengths]


def _compare(length: int, rounds: int) -> Row:
    steps = {way: _step(length, way) for way in WAYS}
    expected = steps["sdpa"]()
    for way in WAYS:
        torch.testing.assert_close(steps[way](), expected, rtol=1e-3, atol=1e-4)
    seconds = times(steps, rounds)
    megabytes = {way: _memory_alone(length, way) for way in WAYS}
    return Row(
        work=f"causal attention, {HEADS} heads of {HEAD}, {length:,} tokens, forward and backward",
        against_default=seconds["sdpa"] / seconds["blockwise"],
        hf_best=None,
        goal=None,
        ours=f"{1e3 * seconds['blockwise']:.0f} ms, {megabytes['blockwise']:.0f} MB",
        note=f"peak with SDPA {megabytes['sdpa']:.0f} MB, with all scores {megabytes['eager']:.0f} MB; blocks take "
        f"{seconds['eager'] / seconds['blockwise']:.1f} times as short as all scores",
    )


def _step(length: int, way: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    config = FratrieDecoderConfig(hidden_size=HEADS * HEAD, num_attention_heads=HEADS, num_hidden_layers=1)
    config._attn_implementation = way
    layer = SoftmaxAttention(config, 0).to(device())
    states = torch.randn(1, length, HEADS * HEAD, device=device(), requires_grad=True)
    padding = (torch.arange(length, device=device()) >= length // 8)[None]
    real = padding[..., None]

    def run() -> torch.Tensor:
        rows = Rows(shape=(1, length), given=GivenMask(padding=padding))
        rows.add_masks(config, [(layer.mask_form, layer.layer_type)], states, None)
        states.grad = None
        layer(states, rows)[0].masked_fill(~real, 0.0).square().sum().backward()
        assert states.grad is not None
        return states.grad.masked_fill(~real, 0.0)

    return run


def _memory(length: int, way: str) -> float:
    torch.set_num_threads(1)
    step = _step(length, way)
    return peak_memory(step) / 1e6


def _memory_alone(length: int, way: str) -> float:
    """In a process of its own, as memory that was let go of stays with the process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(partial(_memory, length, way))
