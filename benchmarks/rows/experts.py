"""A layer of experts beside Hugging Face's with the same weights, and how near both come to a dense layer's speed."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.limits import products_alone
from benchmarks.timing import Row, device, times
from fratrie import FratrieDecoderConfig
from fratrie.modeling.experts import GatedExperts, PlainExperts
from fratrie.modeling.feed_forward import FeedForward

EXPERTS, CHOSEN, HIDDEN, WIDTH = 8, 2, 256, 512
IMPLEMENTATIONS = ("grouped_mm", "eager")  # Hugging Face's, its default first
GOALS = {torch.float32: 0.9, torch.bfloat16: 0.8}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def measure(rounds: int, tokens: int = 4096) -> list[Row]:
    """Forward, and forward and backward, of gated and plain experts, in float32 and under autocast to bfloat16."""
    states = torch.randn(tokens, HIDDEN, device=device(), requires_grad=True)
    weights, index = torch.rand(tokens, EXPERTS, device=device()).softmax(-1).topk(CHOSEN)
    return [
        _row(is_gated, dtype, trains, (states, index, weights), rounds)
        for is_gated in (True, False)
        for dtype in GOALS
        for trains in (False, True)
    ]


def _row(is_gated: bool, dtype: torch.dtype, trains: bool, inputs: tuple[torch.Tensor, ...], rounds: int) -> Row:
    layers = _layers(is_gated)
    dense = layers.pop("dense")
    runs = {name: partial(_run, layer, inputs, dtype, trains) for name, layer in layers.items()}
    expected, *others = (run() for run in runs.values())
    for found in others:
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    others = {"dense": partial(_run, dense, inputs[:1], dtype, trains), "products": products_alone(runs["ours"])}
    seconds = times(runs | others, 3 * rounds)
    default = IMPLEMENTATIONS[0] if IMPLEMENTATIONS[0] in seconds else None
    shares = {name: seconds["dense"] / seconds[name] for name in runs}
    best = min((name for name in seconds if name in IMPLEMENTATIONS), key=lambda name: seconds[name], default=None)
    theirs = "".join(f", Hugging Face's {name} {share:.2f}" for name, share in shares.items() if name != "ours")
    return Row(
        work=f"{'gated' if is_gated else 'plain'} experts, {EXPERTS}, {CHOSEN} a token, {HIDDEN} → {WIDTH}, "
        f"{len(inputs[0]):,} tokens, {'forward and backward' if trains else 'forward'}, "
        f"{'float32' if dtype == torch.float32 else 'bfloat16 autocast'}",
        against_default=seconds[default] / seconds["ours"] if default else None,
        hf_best=seconds[default] / seconds[best] if default and best else None,
        goal=None,
        ours=f"{1e3 * seconds['ours']:.0f} ms",
        note=f"speed over a dense layer's of equal work: ours {shares['ours']:.2f} (goal {GOALS[dtype]}, "
        f"limit {seconds['dense'] / seconds['products']:.2f}){theirs}",
        limit=seconds[default] / seconds["products"] if default else None,
    )


def _layers(is_gated: bool) -> dict[str, nn.Module]:
    """Hugging Face's experts in each implementation, ours with the same weights, and a dense layer of equal work."""
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": WIDTH, "hidden_act": "silu"}
    config = FratrieDecoderConfig(
        **sizes, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, gated_feed_forward=is_gated
    )
    config._experts_implementation = "grouped_mm"
    ours = (GatedExperts if is_gated else PlainExperts)(config)
    ours.initialise(0.05)
    layers: dict[str, nn.Module] = {}
    for name in IMPLEMENTATIONS if is_gated else ():
        foreign = MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
        foreign._experts_implementation = name
        layers[name] = MixtralExperts(foreign)
        layers[name].load_state_dict(ours.state_dict())
    layers |= {"ours": ours, "dense": FeedForward(config, CHOSEN * WIDTH)}
    return {name: layer.to(device()) for name, layer in layers.items()}


def _run(
    layer: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, trains: bool
) -> torch.Tensor:
    with torch.set_grad_enabled(trains), torch.autocast(device().type, dtype, enabled=dtype != torch.float32):
        outputs = layer(*inputs).float()
    if trains:
        torch.autograd.grad(outputs.sum(), [inputs[0], *layer.parameters()])  # type: ignore[attr-defined]
    return outputs.detach()
