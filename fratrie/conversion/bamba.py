"""Bamba (IBM et al. 2024): the state space of Mamba-2, and attention that turns half of each head in some layers."""

import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from transformers import PreTrainedConfig

from .llama import FIELDS, LAYOUT, LLAMA, heads, one_rope, own_head_dim, write_head_dim
from .recipe import Field, Weight

_STATE_SPACE = (
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"),
    "mamba_proj_bias",
)


def _mixer_types(theirs: PreTrainedConfig) -> list[str]:
    return ["softmax" if kind == "full_attention" else "ssd" for kind in theirs.layer_types]


def _of_state_space(name: str) -> Callable[[PreTrainedConfig], Any]:
    """Reads a field of their state spaces, if there are some."""
    return lambda theirs: getattr(theirs, name) if "linear_attention" in theirs.layer_types else None


def _limit(theirs: PreTrainedConfig) -> list[float] | None:
    limit = _of_state_space("time_step_limit")(theirs)
    return None if limit is None or tuple(limit) == (0.0, math.inf) else list(limit)


def _expansion(ours: Any) -> int | None:
    return ours.mamba_n_heads and ours.mamba_n_heads * ours.mamba_d_head // ours.hidden_size


BAMBA = replace(
    LLAMA,
    model_type="bamba",
    fields=(
        *FIELDS,
        Field("attention_bias", ("attention_bias", "attention_output_bias")),
        Field("mlp_bias", "feed_forward_bias"),
    ),
    always=LAYOUT,
    read={
        "rope_parameters": one_rope,
        "head_dim": own_head_dim,
        "mixer_types": _mixer_types,
        "mamba_time_step_limit": _limit,
        **{name: _of_state_space(name) for name in _STATE_SPACE},
    },
    write={
        **LLAMA.write,
        "head_dim": write_head_dim,
        "attn_layer_indices": lambda ours: [i for i, name in enumerate(ours.mixer_types) if name == "softmax"],
        "mamba_expand": _expansion,
        "time_step_limit": lambda ours: ours.mamba_time_step_limit,
        **{name: attrgetter(name) for name in _STATE_SPACE},
        "mamba_n_heads": lambda ours: ours.mamba_n_heads or 1,  # theirs checks them where no layer has them
    },
    layer_types=frozenset({"full_attention", "linear_attention"}),
    required={"hidden_act": "silu", "z_loss_coefficient": 0.0},
    weights=(
        Weight("embed_tokens", "embed_tokens"),
        Weight("layers.*.input_layernorm", "layers.*.mixer_input_norm"),
        *(Weight(f"layers.*.self_attn.{name}_proj", f"layers.*.mixer.{name}_proj") for name in "qkvo"),
        *(
            Weight(f"layers.*.mamba.{name}", f"layers.*.mixer.{name}")
            for name in ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
        ),
        Weight("layers.*.pre_ff_layernorm", "layers.*.feed_forward_input_norm"),
        *(
            Weight(f"layers.*.feed_forward.{name}", f"layers.*.feed_forward.{name}")
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        Weight("final_layernorm", "norm"),
    ),
    heads=heads("Bamba")[:2],
    inert=("mamba_chunk_size", "num_logits_to_keep"),
)
