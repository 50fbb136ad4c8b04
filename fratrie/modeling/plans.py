"""How a stack of blocks is split over several devices, in the form of Hugging Face's parallel plans.

A plan maps modules and parameters (`*` stands for the number of a layer) to styles. It names what the configuration
builds and nothing else, so each plan is made of the configuration's fields.
"""

from typing import Any

from transformers import PreTrainedConfig

Plan = dict[str, Any]

_LATENT, _SOFTMAX = "latent", "softmax"


def tensor_parallel_plan(config: PreTrainedConfig) -> Plan:
    """Each device holds some heads of every mixer and some columns of every feed-forward (Shoeybi et al. 2019)."""
    plan: Plan = {}
    for mixer in _mixers(config):
        plan |= _latents(config) if mixer == _LATENT else _projections(config, "mixer")
    if getattr(config, "add_cross_attention", False):
        plan |= _projections(config, "cross_attention")
    if config.position_type in ("relative", "alibi"):
        plan["position_bias"] = "own_heads"
    if "dense" in config.mlp_layer_types:
        plan |= _feed_forward(config, "feed_forward")
    if "sparse" in config.mlp_layer_types:
        plan |= _sparse(config, "packed_colwise" if config.gated_feed_forward else "colwise", "rowwise")
        plan["layers.*.feed_forward.experts"] = "moe_tp_experts"
        if config.num_shared_experts:
            plan |= _feed_forward(config, "feed_forward.shared_experts")
    return plan


def expert_parallel_plan(config: PreTrainedConfig) -> Plan | None:
    """Each device holds some experts whole (Lepikhin et al. 2020); `None` without experts."""
    if "sparse" not in config.mlp_layer_types:
        return None
    return {
        **_sparse(config, "grouped_gemm", "grouped_gemm"),
        "layers.*.feed_forward.experts": "ep_dispatch_experts",
    }


def pipeline_parallel_plan(config: PreTrainedConfig) -> Plan | None:
    """Each device holds some layers; `None` for what Hugging Face's pipeline cannot run (see `check_parallelism`)."""
    if not config.is_causal_stack or getattr(config, "add_cross_attention", False):
        return None
    plan: Plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    return plan


def sharded_data_parallel_plan(config: PreTrainedConfig) -> Plan:
    """Which modules gather their weights together under FSDP; a final norm stays gathered until the backward pass."""
    plan = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight"}
    return plan if config.final_norm is None else {**plan, "norm": "keep_full_weight"}


def _mixers(config: PreTrainedConfig) -> list[str]:
    latent = config.kv_lora_rank is not None
    return sorted({_LATENT if latent and kind == "full_attention" else _SOFTMAX for kind in config.layer_types})


def _projections(config: PreTrainedConfig, mixer: str) -> Plan:
    prefix = f"layers.*.{mixer}"
    plan: Plan = {f"{prefix}.{name}_proj": "colwise" for name in "qkv"} | {f"{prefix}.o_proj": "rowwise"}
    if config.query_key_norm is not None:
        plan |= {f"{prefix}.{name}_norm": "shared_by_heads" for name in ("query", "key")}
    return plan


def _latents(config: PreTrainedConfig) -> Plan:
    # What leads into the latents is whole on every device, what leads out of them is split by heads.
    queries = "q_proj" if config.q_lora_rank is None else "q_up_proj"
    plan = {queries: "colwise", "kv_down_proj": "mla_kv_a_proj", "kv_up_proj": "colwise", "o_proj": "rowwise"}
    return {f"layers.*.mixer.{name}": style for name, style in plan.items()}


def _feed_forward(config: PreTrainedConfig, name: str) -> Plan:
    into = ("gate_proj", "up_proj") if config.gated_feed_forward else ("up_proj",)
    plan = dict.fromkeys(into, "colwise") | {"down_proj": "rowwise"}
    return {f"layers.*.{name}.{projection}": style for projection, style in plan.items()}


def _sparse(config: PreTrainedConfig, into: str, out: str) -> Plan:
    prefix = "layers.*.feed_forward.experts"
    return {f"{prefix}.{'gate_up_proj' if config.gated_feed_forward else 'up_proj'}": into, f"{prefix}.down_proj": out}
