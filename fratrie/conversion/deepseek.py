"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, shared experts, a sigmoid router with selection bias, groups."""

from dataclasses import replace

from transformers import PreTrainedConfig

from .llama import EXPERTS, FIELDS, LAYOUT, LLAMA, heads, read_rope
from .recipe import Field, Weight


def _mlp_layers(theirs: PreTrainedConfig) -> list[str]:
    dense = min(theirs.first_k_dense_replace, theirs.num_hidden_layers)
    return ["dense"] * dense + ["sparse"] * (theirs.num_hidden_layers - dense)


def _experts(theirs: PreTrainedConfig) -> int:
    return theirs.n_routed_experts if "sparse" in _mlp_layers(theirs) else 0


def _shared_experts(theirs: PreTrainedConfig) -> int:
    if theirs.n_shared_experts < 1:
        raise ValueError(f"deepseek_v3: n_shared_experts={theirs.n_shared_experts} must be at least 1.")
    return theirs.n_shared_experts if "sparse" in _mlp_layers(theirs) else 0


def _scale(theirs: PreTrainedConfig) -> float | None:
    """The factor of the scores where YaRN changes it (Peng et al. 2024, section 3.4)."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    plain = theirs.qk_head_dim**-0.5
    scale = yarn_apply_mscale(theirs.rope_parameters, plain)
    return None if scale == plain else scale


_ATTENTION = (
    ("q_a_proj", "q_down_proj"),
    ("q_a_layernorm", "q_latent_norm"),
    ("q_b_proj", "q_up_proj"),
    ("kv_a_proj_with_mqa", "kv_down_proj"),
    ("kv_a_layernorm", "kv_latent_norm"),
    ("kv_b_proj", "kv_up_proj"),
)
DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    fields=(
        *FIELDS,
        Field("attention_bias", ("attention_bias", "attention_output_bias")),
        Field("kv_lora_rank"),
        Field("q_lora_rank"),
        Field("qk_rope_head_dim", "head_dim"),
        Field("qk_nope_head_dim"),
        Field("v_head_dim"),
        Field("rope_interleave", "rope_interleaved"),
        Field("moe_intermediate_size"),
        Field("num_experts_per_tok"),
        Field("norm_topk_prob"),
        Field("routed_scaling_factor"),
        Field("n_group", "router_num_groups"),
        Field("topk_group", "router_groups_per_tok"),
        Field("output_router_logits"),
    ),
    always={**LAYOUT, "router_scoring": "sigmoid", "router_selection_bias": True, "router_aux_loss_coef": 0.0},
    read={
        "rope_parameters": read_rope,
        "attention_scale": _scale,
        "mlp_layer_types": _mlp_layers,
        "num_experts": _experts,
        "num_shared_experts": _shared_experts,
    },
    write={
        **LLAMA.write,
        "n_routed_experts": lambda ours: ours.num_experts,
        "n_shared_experts": lambda ours: ours.num_shared_experts,
        "first_k_dense_replace": lambda ours: ours.mlp_layer_types.count("dense"),
    },
    weights=(
        *LLAMA.weights,
        *(Weight(f"layers.*.self_attn.{theirs}", f"layers.*.mixer.{ours}") for theirs, ours in _ATTENTION),
        *EXPERTS,
        Weight("layers.*.mlp.gate.e_score_correction_bias", "layers.*.feed_forward.router.selection_bias"),
        *(
            Weight(f"layers.*.mlp.shared_experts.{name}", f"layers.*.feed_forward.shared_experts.{name}")
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
    ),
    heads=heads("DeepseekV3"),
    inert=("pretraining_tp", "num_mtp_layers", "n_routed_experts", "n_shared_experts", "first_k_dense_replace"),
)
