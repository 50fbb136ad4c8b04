"""LFM2 (Liquid AI 2025): gated short convolutions, and grouped attention with head norms in some layers; LFM2-MoE has
experts besides."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from .llama import EXPERTS, FIELDS, LAYOUT, LLAMA, heads, own_head_dim, read_rope, write_head_dim
from .recipe import Field, Weight

_ABSENT = ("intermediate_size", "hidden_act", "rms_norm_eps", "attention_dropout")


def _intermediate_size(theirs: PreTrainedConfig) -> int:
    """The width of their feed-forward, which is by default two thirds of the field, rounded up to a multiple."""
    size = theirs.intermediate_size
    if not theirs.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if theirs.block_ffn_dim_multiplier is None:
        return size
    size, multiple = int(theirs.block_ffn_dim_multiplier * size), theirs.block_multiple_of
    return -(-size // multiple) * multiple


def _of_convolutions(name: str) -> Any:
    """Reads a field of their convolutions, if there are some."""
    return lambda theirs: getattr(theirs, name) if "conv" in theirs.layer_types else None


LFM2 = replace(
    LLAMA,
    model_type="lfm2",
    fields=(
        *(field for field in FIELDS if field.theirs not in _ABSENT),
        Field("norm_eps"),
        Field("layer_types"),
    ),
    always={**LAYOUT, "hidden_act": "silu", "query_key_norm": "rms_norm"},
    read={
        "rope_parameters": read_rope,
        "head_dim": own_head_dim,
        "intermediate_size": _intermediate_size,
        "short_conv_kernel_size": _of_convolutions("conv_L_cache"),
        "short_conv_bias": _of_convolutions("conv_bias"),
    },
    write={
        **LLAMA.write,
        "head_dim": write_head_dim,
        "intermediate_size": lambda ours: ours.intermediate_size,
        "block_auto_adjust_ff_dim": lambda ours: False,
        "conv_L_cache": lambda ours: ours.short_conv_kernel_size,
        "conv_bias": lambda ours: ours.short_conv_bias,
        "full_attn_idxs": lambda ours: [i for i, kind in enumerate(ours.layer_types) if kind == "full_attention"],
    },
    layer_types=frozenset({"full_attention", "conv"}),
    weights=(
        Weight("embed_tokens", "embed_tokens"),
        Weight("layers.*.operator_norm", "layers.*.mixer_input_norm"),
        *(Weight(f"layers.*.self_attn.{name}_proj", f"layers.*.mixer.{name}_proj") for name in "qkv"),
        Weight("layers.*.self_attn.out_proj", "layers.*.mixer.o_proj"),
        Weight("layers.*.self_attn.q_layernorm", "layers.*.mixer.query_norm"),
        Weight("layers.*.self_attn.k_layernorm", "layers.*.mixer.key_norm"),
        *(Weight(f"layers.*.conv.{name}", f"layers.*.mixer.{name}") for name in ("in_proj", "conv", "out_proj")),
        Weight("layers.*.ffn_norm", "layers.*.feed_forward_input_norm"),
        Weight("layers.*.feed_forward.w1", "layers.*.feed_forward.gate_proj"),
        Weight("layers.*.feed_forward.w3", "layers.*.feed_forward.up_proj"),
        Weight("layers.*.feed_forward.w2", "layers.*.feed_forward.down_proj"),
        Weight("embedding_norm", "norm"),
    ),
    heads=heads("Lfm2")[:2],
    inert=("block_multiple_of", "block_ffn_dim_multiplier"),
)


def _mlp_layers(theirs: PreTrainedConfig) -> list[str]:
    dense = min(theirs.num_dense_layers, theirs.num_hidden_layers)
    return ["dense"] * dense + ["sparse"] * (theirs.num_hidden_layers - dense)


def _experts(theirs: PreTrainedConfig) -> int:
    return theirs.num_experts if "sparse" in _mlp_layers(theirs) else 0


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    fields=(
        *LFM2.fields,
        Field("intermediate_size"),
        Field("moe_intermediate_size"),
        Field("num_experts_per_tok"),
        Field("use_expert_bias", "router_selection_bias"),
        Field("routed_scaling_factor"),
        Field("norm_topk_prob"),
        Field("output_router_logits"),
    ),
    always={**LFM2.always, "router_scoring": "sigmoid", "router_norm_eps": 1e-6, "router_aux_loss_coef": 0.0},
    read={
        **{name: compute for name, compute in LFM2.read.items() if name != "intermediate_size"},
        "mlp_layer_types": _mlp_layers,
        "num_experts": _experts,
    },
    write={
        **LLAMA.write,
        **{name: LFM2.write[name] for name in ("head_dim", "conv_L_cache", "conv_bias")},
        "num_experts": lambda ours: ours.num_experts,
        "num_dense_layers": lambda ours: ours.mlp_layer_types.count("dense"),
    },
    weights=(
        *LFM2.weights,
        *(replace(line, theirs=line.theirs.replace(".mlp.", ".feed_forward.")) for line in EXPERTS),
        Weight("layers.*.feed_forward.expert_bias", "layers.*.feed_forward.router.selection_bias"),
    ),
    heads=heads("Lfm2Moe")[:2],
    inert=("num_dense_layers",),
)
