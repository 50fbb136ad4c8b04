"""Qwen3-Next (Qwen Team 2025): Gated DeltaNet, gated attention in some layers, RMSNorm times 1 + w, a gated expert
that all tokens share."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from transformers import PreTrainedConfig

from .llama import EXPERTS, FIELDS, LAYOUT, QWEN3, QWEN3_MOE, heads, one_rope, own_head_dim
from .recipe import Field, Groups, Weight

_NORM = "rms_norm_plus_one"
_NORM_SLOTS = ("mixer_input_norm", "feed_forward_input_norm", "final_norm")
_WHOLE_HEADS = {"partial_rotary_factor": 1.0}
_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
          "linear_conv_kernel_dim")  # fmt: skip


def _read_rope(theirs: PreTrainedConfig) -> dict[str, Any]:
    """The rotary parameters, which theirs takes to turn a quarter of each head where they do not say how much."""
    parameters = one_rope(theirs)
    return {name: value for name, value in parameters.items() if (name, value) not in _WHOLE_HEADS.items()}


def _mixer_types(theirs: PreTrainedConfig) -> list[str]:
    return ["softmax" if kind == "full_attention" else "gated_delta" for kind in theirs.layer_types]


def _of_delta(name: str) -> Callable[[PreTrainedConfig], Any]:
    """Reads a field of their linear attentions, if there are some."""
    return lambda theirs: getattr(theirs, name) if "linear_attention" in theirs.layer_types else None


def _gate(theirs: PreTrainedConfig) -> bool | None:
    return True if "full_attention" in theirs.layer_types else None


def _is_sparse(theirs: PreTrainedConfig) -> bool:
    return "sparse" in QWEN3_MOE.read["mlp_layer_types"](theirs)


def _shared_width(theirs: PreTrainedConfig) -> int | None:
    return theirs.shared_expert_intermediate_size if _is_sparse(theirs) else None


def _query_and_gate(theirs: PreTrainedConfig) -> Groups:
    return Groups(theirs.num_attention_heads, ((own_head_dim(theirs),),) * 2)


def _values_per_key(theirs: PreTrainedConfig) -> int:
    return theirs.linear_num_value_heads // theirs.linear_num_key_heads


def _delta_states(theirs: PreTrainedConfig) -> Groups:
    key, value = theirs.linear_key_head_dim, theirs.linear_value_head_dim * _values_per_key(theirs)
    return Groups(theirs.linear_num_key_heads, ((key, key, value), (value,)))


def _delta_rates(theirs: PreTrainedConfig) -> Groups:
    return Groups(theirs.linear_num_key_heads, ((_values_per_key(theirs),),) * 2)


_QUERY = "layers.*.self_attn.q_proj"
_DELTA_WEIGHTS = (
    *(("conv1d", "conv"), ("dt_bias", "step_bias"), ("A_log", "log_rate"), ("norm", "output_norm")),
    ("out_proj", "out_proj"),
)
QWEN3_NEXT = replace(
    QWEN3,
    model_type="qwen3_next",
    fields=(
        *FIELDS,
        Field("head_dim", default=own_head_dim),
        Field("num_experts_per_tok"),
        Field("moe_intermediate_size"),
        Field("norm_topk_prob"),
        Field("output_router_logits"),
    ),
    always={
        **LAYOUT,
        **dict.fromkeys(_NORM_SLOTS, _NORM),
        "query_key_norm": _NORM,
        "router_aux_loss_scope": "model",
    },
    read={
        "rope_parameters": _read_rope,
        "mixer_types": _mixer_types,
        "attention_output_gate": _gate,
        **{name: QWEN3_MOE.read[name] for name in ("mlp_layer_types", "num_experts", "router_aux_loss_coef")},
        "num_shared_experts": lambda theirs: int(_is_sparse(theirs)),
        "shared_experts_gate": _is_sparse,
        "shared_expert_intermediate_size": _shared_width,
        **{name: _of_delta(name) for name in _DELTA},
    },
    write={
        **{name: compute for name, compute in QWEN3_MOE.write.items()
           if name not in ("head_dim", "use_sliding_window")},
        "rope_parameters": lambda ours: ours.rope_parameters and {**_WHOLE_HEADS, **ours.rope_parameters},
        "layer_types": attrgetter("layer_types"),
        "shared_expert_intermediate_size": lambda ours: ours.shared_experts_width or None,
        **{name: attrgetter(name) for name in _DELTA},
    },
    neutral={"shared_expert_intermediate_size": None},  # which is the width of the other experts
    layer_types=frozenset({"full_attention", "linear_attention"}),
    required={"hidden_act": "silu", "attention_bias": False},
    weights=(
        *(line for line in QWEN3.weights if line.theirs != _QUERY),
        Weight(_QUERY, ("layers.*.mixer.q_proj", "layers.*.mixer.gate_proj"), groups=_query_and_gate),
        Weight(
            "layers.*.linear_attn.in_proj_qkvz",
            ("layers.*.mixer.qkv_proj", "layers.*.mixer.output_gate_proj"),
            groups=_delta_states,
        ),
        Weight(
            "layers.*.linear_attn.in_proj_ba",
            ("layers.*.mixer.rate_proj", "layers.*.mixer.step_proj"),
            groups=_delta_rates,
        ),
        *(Weight(f"layers.*.linear_attn.{theirs}", f"layers.*.mixer.{ours}") for theirs, ours in _DELTA_WEIGHTS),
        *EXPERTS,
        *(
            Weight(f"layers.*.mlp.shared_expert.{name}", f"layers.*.feed_forward.shared_experts.{name}")
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        Weight("layers.*.mlp.shared_expert_gate", "layers.*.feed_forward.shared_experts_gate"),
    ),
    heads=heads("Qwen3Next"),
    inert=("decoder_sparse_step", "mlp_only_layers"),
)  # fmt: skip
