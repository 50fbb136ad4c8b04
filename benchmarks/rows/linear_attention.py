"""A layer of linear attention beside one of softmax attention (SDPA) at long texts, both ours and with projections."""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.limits import products_alone
from benchmarks.timing import Row, device, times
from fratrie import FratrieDecoderConfig, FratrieEncoderConfig
from fratrie.modeling.layout import Rows
from fratrie.modeling.linear_attention import LinearAttention, feature_map
from fratrie.modeling.masks import GivenMask
from fratrie.modeling.mixer import AttentionMixer

HEADS, HEAD = 4, 64
CASES = ((False, 8192, 15.0), (False, 16384, 35.0), (True, 8192, 6.0))  # whether causal, tokens, and the goal


@torch.no_grad()
def measure(rounds: int, cases: Sequence[tuple[bool, int, float]] = CASES) -> list[Row]:
    """One row a case, for one text."""
    return [_row(is_causal, length, goal, rounds) for is_causal, length, goal in cases]


def _row(is_causal: bool, length: int, goal: float, rounds: int) -> Row:
    softmax, linear = (_layer(is_causal, kind) for kind in ("full_attention", "linear_attention"))
    _assert_formula(linear)
    states = torch.randn(1, length, HEADS * HEAD, device=device())
    attend = partial(linear, states, _one_text(linear, length))
    seconds = times(
        {
            "softmax": partial(softmax, states, _one_text(softmax, length)),
            "linear": attend,
            "products": products_alone(attend),
            "projections": partial(_project, linear, states),
        },
        rounds,
    )
    return Row(
        work=f"linear against softmax attention, {'causal' if is_causal else 'bidirectional'}, {length:,} tokens",
        against_default=seconds["softmax"] / seconds["linear"],
        hf_best=None,
        goal=goal,
        ours=f"{1e3 * seconds['linear']:.0f} ms",
        note=f"the four projections, which both layers have, take {1e3 * seconds['projections']:.0f} ms: without any "
        f"cost of its own it would be {seconds['softmax'] / seconds['projections']:.1f}",
        limit=seconds["softmax"] / seconds["products"],
    )


def _layer(is_causal: bool, layer_type: str) -> AttentionMixer:
    config = (FratrieDecoderConfig if is_causal else FratrieEncoderConfig)(
        hidden_size=HEADS * HEAD, num_attention_heads=HEADS, num_hidden_layers=1, layer_types=[layer_type]
    )
    config._attn_implementation = "sdpa"
    return config.mixers[0](config, 0).to(device()).eval()


def _one_text(layer: AttentionMixer, length: int) -> Rows:
    return Rows(shape=(1, length), given=GivenMask.read(None), masks={(layer.mask_form, layer.layer_type): None})


def _project(layer: AttentionMixer, states: torch.Tensor) -> None:
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        projection(states)


def _assert_formula(layer: AttentionMixer) -> None:
    """Compare the kernel with weights of all pairs, in float64, at a length of several chunks."""
    assert isinstance(layer, LinearAttention)
    query, key, value = torch.randn(3, 1, HEADS, 300, HEAD, device=device())
    weights = feature_map(query.double()) @ feature_map(key.double()).transpose(-1, -2)
    weights = weights.tril() if layer.is_causal else weights
    expected = (weights / weights.sum(-1, keepdim=True) @ value.double()).transpose(1, 2)
    torch.testing.assert_close(layer.attend(query, key, value, None, None)[0].double(), expected, rtol=1e-4, atol=1e-5)
