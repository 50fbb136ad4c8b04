"""How a stack of blocks is split over several devices, in the form of Hugging Face's parallel plans.

A plan maps modules and parameters (`*` stands for the number of a layer) to styles. It names what the configuration
builds and nothing else, so each plan is made of the configuration's fields.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration import FratrieConfig

Plan = dict[str, Any]


def tensor_parallel_plan(config: "FratrieConfig") -> Plan:
    """Each device holds some heads of every mixer and some columns of every feed-forward (Shoeybi et al. 2019)."""
    plan: Plan = {}
    for mixer in dict.fromkeys(config.mixers):
        own = _within("mixer", mixer.tensor_parallel_plan(config))
        assert all(plan.get(name, style) == style for name, style in own.items()), "one plan names all layers"
        plan |= own
        if mixer.shared_class(config) is not None:
            plan[f"shared.{mixer.__name__}"] = "shared_by_heads"
    if getattr(config, "add_cross_attention", False):
        from .attention import CrossAttention  # here, since it is built on configurations

        plan |= _within("cross_attention", CrossAttention.tensor_parallel_plan(config))
    if config.position_type in ("relative", "alibi"):
        plan["position_bias"] = "own_heads"
    if "dense" in (config.mlp_layer_types or []):
        plan |= _feed_forward(config, "feed_forward")
    if "sparse" in (config.mlp_layer_types or []):
        plan |= _sparse(config, "packed_colwise" if config.gated_feed_forward else "colwise", "rowwise")
        plan["layers.*.feed_forward.experts"] = "moe_tp_experts"
        if config.num_shared_experts:
            plan |= _feed_forward(config, "feed_forward.shared_experts")
    return plan


def expert_parallel_plan(config: "FratrieConfig") -> Plan | None:
    """Each device holds some experts whole (Lepikhin et al. 2020); `None` without experts."""
    if "sparse" not in (config.mlp_layer_types or []):
        return None
    return {
        **_sparse(config, "grouped_gemm", "grouped_gemm"),
        "layers.*.feed_forward.experts": "ep_dispatch_experts",
    }


def pipeline_parallel_plan(config: "FratrieConfig") -> Plan | None:
    """Each device holds some layers; `None` for what Hugging Face's pipeline cannot run (see `check_parallelism`)."""
    if not config.is_causal_stack or getattr(config, "add_cross_attention", False) or config.reversible:
        return None
    plan: Plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    return plan


def sharded_data_parallel_plan(config: "FratrieConfig") -> Plan:
    """Which modules gather their weights together under FSDP; a final norm stays gathered until the backward pass."""
    plan = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight"}
    return plan if config.final_norm is None else {**plan, "norm": "keep_full_weight"}


def _within(module: str, plan: Plan) -> Plan:
    return {f"layers.*.{module}.{name}": style for name, style in plan.items()}


def _feed_forward(config: "FratrieConfig", name: str) -> Plan:
    into = ("gate_proj", "up_proj") if config.gated_feed_forward else ("up_proj",)
    plan = dict.fromkeys(into, "colwise") | {"down_proj": "rowwise"}
    return {f"layers.*.{name}.{projection}": style for projection, style in plan.items()}


def _sparse(config: "FratrieConfig", into: str, out: str) -> Plan:
    prefix = "layers.*.feed_forward.experts"
    return {f"{prefix}.{'gate_up_proj' if config.gated_feed_forward else 'up_proj'}": into, f"{prefix}.down_proj": out}
