"""Draws what mixers let a token see, and how far: `python docs/mixers.py` writes `mixers.png` and `gradients.png`.

Nothing is drawn by hand: a layer of the model is built. In the first picture a pixel shows how much the output of one
token (row) changes with the input of another (column), by gradient; the second one shows the norm of such gradients at
growing distances, of which a table is printed, too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel
from fratrie.modeling.layout import Rows
from fratrie.modeling.masks import GivenMask
from fratrie.modeling.mixers import MIXERS

TOKENS = 32
COLUMNS = 7
GLOBAL = (0, 12)  # the tokens that Longformer is told of
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "position_type": "none", "vocab_size": 8}
# Sizes at which a pattern shows within a few tokens.
FIELDS: dict[str, dict[str, Any]] = {
    "latent": {"kv_lora_rank": 16},
    "longformer": {"sliding_window": 4},
    "bigbird": {"bigbird_block_size": 2, "bigbird_random_blocks": 2},
    "adaptive_span": {"adaptive_span_ramp": 6},
    "linformer": {"max_position_embeddings": TOKENS},
    "reformer": {"reformer_num_buckets": 4, "reformer_num_hashes": 1, "reformer_window": 4},
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"], "sliding_window": 5}


# How far back the gradient is followed, and where the table shows it.
FARTHEST = 64
SHOWN = (1, 8, 64)
WIDTH = 16
# Recurrent matrices are orthogonal times a gain; without a gain they are zero, and the gate that keeps the state is
# open: that of the rows from `WIDTH` to `2 * WIDTH`, in torch's LSTM and in its GRU.
CURVES: dict[str, dict[str, Any]] = {
    "`rnn`, gain 0.5": {"name": "rnn", "gain": 0.5},
    "`rnn`, gain 1.5": {"name": "rnn", "gain": 1.5},
    "the same, clipped": {"name": "rnn", "gain": 1.5, "max_norm": 1.0},
    "`lstm`": {"name": "lstm"},
    "`gru`": {"name": "gru"},
    "`softmax`": {"name": "softmax"},
}


def main() -> None:
    """Draw both pictures, and print the table."""
    draw_patterns()
    draw_gradients()
    print(table())


def draw_patterns() -> None:
    """Draw every mixer in both directions, where it has them."""
    panels = {name: {"mixer_types": [name], **FIELDS.get(name, {})} for name in MIXERS}
    panels = {"softmax": panels.pop("softmax"), "softmax, sliding": SLIDING, **panels}
    blocks = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(1.5 * COLUMNS, 3.3 * blocks), layout="constrained")
    for index, (name, fields) in enumerate(panels.items()):
        block, column = divmod(index, COLUMNS)
        for below, is_causal in enumerate((True, False)):
            axes = figure.add_subplot(2 * blocks, COLUMNS, (2 * block + below) * COLUMNS + column + 1)
            axes.set(xticks=[], yticks=[], box_aspect=1)
            if is_causal:
                axes.set_title(name, fontsize="small")
            if not column:
                axes.set_ylabel("causal" if is_causal else "bidirectional", fontsize="small")
            mixer = MIXERS[name.partition(",")[0]]
            if mixer.runs_causal if is_causal else mixer.runs_bidirectional:
                axes.imshow(influence(is_causal, fields).log1p(), cmap="Blues", vmin=0)
            else:
                axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize="small", transform=axes.transAxes)
                axes.spines[:].set_visible(False)
    figure.savefig(Path(__file__).with_name("mixers.png"), dpi=100)


def influence(is_causal: bool, fields: dict[str, Any]) -> torch.Tensor:
    """How much the output of token T changes with the input of token S, `(T, S)`, the largest in each row being 1."""
    torch.manual_seed(0)
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if is_causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    model = model_class(config_class(**SIZES, **fields, initializer_range=0.2)).eval()
    states = torch.randn(1, TOKENS, SIZES["hidden_size"], requires_grad=True)
    layout = Rows(shape=(1, TOKENS), given=GivenMask.read(None))
    if model.mixers[0].takes_global_tokens:
        layout.set_global_tokens(torch.isin(torch.arange(TOKENS), torch.tensor(GLOBAL))[None], None, is_causal)
    model.complete(layout, states, None)
    mixed, _ = model.layers[0].mixer(states, layout)
    rows = [torch.autograd.grad(mixed[0, token].sum(), states, retain_graph=True)[0] for token in range(TOKENS)]
    seen = torch.stack([row[0].norm(dim=-1) for row in rows])
    return (seen > 0) * (0.15 + seen / seen.amax(dim=1, keepdim=True))


def reach(name: str, distance: int, gain: float | None = None, max_norm: float | None = None) -> float:
    """Norm of the gradient of a token's output by the input `distance` tokens before it, about states of zero.

    Args:
        name: of the mixer, in a layer of random weights.
        distance: in tokens; before them there are none.
        gain: by which recurrent weights make every vector longer.
        max_norm: to which the gradient of all inputs together is clipped.
    """
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": WIDTH, "mixer_types": [name], "initializer_range": WIDTH**-0.5}
    model = FratrieDecoderModel(FratrieDecoderConfig(**sizes)).double()
    mixer = model.layers[0].mixer
    if gain is not None:
        nn.init.orthogonal_(mixer.weight_hh_l0, gain)
    elif name in ("lstm", "gru"):
        nn.init.zeros_(mixer.weight_hh_l0)
        nn.init.constant_(mixer.bias_ih_l0[WIDTH : 2 * WIDTH], 20.0 if name == "lstm" else 3.0)
    states = torch.zeros(1, distance + 1, WIDTH, dtype=torch.float64, requires_grad=True)
    layout = Rows(shape=(1, distance + 1), given=GivenMask.read(None))
    model.complete(layout, states, None)
    mixed, _ = mixer(states, layout)
    (states.grad,) = torch.autograd.grad(mixed[0, -1].sum(), states)
    if max_norm is not None:
        nn.utils.clip_grad_norm_([states], max_norm)
    return states.grad[0, 0].norm().item()


def table() -> str:
    """The gradients at some distances, in Markdown."""
    lines = ["| tokens | " + " | ".join(CURVES) + " |", "|---" * (1 + len(CURVES)) + "|"]
    for distance in SHOWN:
        norms = (reach(distance=distance, **curve) for curve in CURVES.values())
        lines.append(f"| {distance} | " + " | ".join(f"{norm:.2g}" for norm in norms) + " |")
    return "\n".join(lines)


def draw_gradients() -> None:
    """Draw the gradients at all distances."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in CURVES.items():
        norms = [reach(distance=distance, **curve) for distance in range(1, FARTHEST + 1)]
        style = "--" if "max_norm" in curve else "-"
        axes.plot(range(1, FARTHEST + 1), norms, style, label=label.replace("`", ""))
    axes.set(xlabel="tokens back", ylabel="norm of the gradient", yscale="log", xlim=(1, FARTHEST))
    axes.legend(fontsize="small")
    figure.savefig(Path(__file__).with_name("gradients.png"), dpi=100)


if __name__ == "__main__":
    main()
