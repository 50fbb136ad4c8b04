"""Llama (Touvron et al. 2023) and the decoders of its layout: Mistral (Jiang et al. 2023), Qwen2, Qwen3 (Yang et al.
2024, 2025), and with a mixture of experts Mixtral (Jiang et al. 2024) and Qwen3-MoE."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieDecoderConfig, norm_slots
from fratrie.modeling.decoder import (
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieDecoderModel,
)

from .recipe import Field, Head, Recipe, Weight


def read_rope(theirs: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary parameters, which must be one set for all layers.

    Raises:
        ValueError: there is one set per layer type, or only a part of each head is rotated.
    """
    parameters = one_rope(theirs)
    check_rope(theirs, parameters)
    return parameters


def one_rope(theirs: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary parameters of a family that may turn a part of each head alone.

    Raises:
        ValueError: there is one set per layer type.
    """
    parameters = dict(theirs.rope_parameters)
    if "rope_type" not in parameters:
        raise ValueError(f"{theirs.model_type}: rope_parameters={parameters} must be one set for all layers.")
    return parameters


def check_rope(theirs: PreTrainedConfig, parameters: dict[str, Any]) -> None:
    """Refuse partial rotation of heads: these classes of theirs ignore it, ours would apply it.

    Raises:
        ValueError: only a part of each head is rotated.
    """
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ValueError(
            f"{theirs.model_type}: rope_parameters with partial_rotary_factor={factor} have no effect there."
        )


def own_head_dim(theirs: PreTrainedConfig) -> int:
    """Return the size of a head."""
    return getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads


def _window_everywhere(theirs: PreTrainedConfig) -> list[str]:
    kind = "sliding_attention" if theirs.sliding_window is not None else "full_attention"
    return [kind] * theirs.num_hidden_layers


def _window_where_used(theirs: PreTrainedConfig) -> int | None:
    return theirs.sliding_window if "sliding_attention" in theirs.layer_types else None


def heads(name: str) -> tuple[Head, ...]:
    """The classes of a decoder family."""
    return (
        Head(f"{name}Model", FratrieDecoderModel),
        Head(f"{name}ForCausalLM", FratrieDecoderForCausalLM, "model.", (Weight("lm_head", "lm_head"),)),
        Head(f"{name}ForSequenceClassification", FratrieDecoderForSequenceClassification, "model.",
             (Weight("score", "classifier.out_proj"),), always={"classifier_output_bias": False}),
    )  # fmt: skip


FIELDS = (
    Field("vocab_size"),
    Field("hidden_size"),
    Field("intermediate_size"),
    Field("num_hidden_layers"),
    Field("num_attention_heads"),
    Field("num_key_value_heads"),
    Field("hidden_act"),
    Field("max_position_embeddings"),
    Field("initializer_range"),
    Field("rms_norm_eps", "norm_eps"),
    Field("attention_dropout"),
    Field("use_cache"),
    Field("tie_word_embeddings"),
    Field("pad_token_id"),
    Field("bos_token_id"),
    Field("eos_token_id"),
)
_HEAD_DIM = Field("head_dim", default=own_head_dim)
_BIASES = Field("attention_bias", ("attention_bias", "attention_output_bias"))
_WINDOW = Field("sliding_window")
_NO_BIASES = {"attention_bias": False, "attention_output_bias": False, "feed_forward_bias": False}
LAYOUT = {**norm_slots("pre", "rms_norm"), "position_type": "rotary", "gated_feed_forward": True, **_NO_BIASES}
_ROPE = {"rope_parameters": lambda ours: ours.rope_parameters}


def write_head_dim(ours: Any) -> int | None:
    """Return the size of a head for families without such a field, where it is no quotient."""
    return None if ours.head_dim == ours.hidden_size // ours.num_attention_heads else ours.head_dim


LLAMA = Recipe(
    model_type="llama",
    config=FratrieDecoderConfig,
    fields=(*FIELDS, _HEAD_DIM, _BIASES, Field("mlp_bias", "feed_forward_bias")),
    always=LAYOUT,
    read={"rope_parameters": read_rope},
    write=_ROPE,
    weights=(
        Weight("embed_tokens", "embed_tokens"),
        Weight("layers.*.input_layernorm", "layers.*.mixer_input_norm"),
        Weight("layers.*.self_attn.q_proj", "layers.*.mixer.q_proj"),
        Weight("layers.*.self_attn.k_proj", "layers.*.mixer.k_proj"),
        Weight("layers.*.self_attn.v_proj", "layers.*.mixer.v_proj"),
        Weight("layers.*.self_attn.o_proj", "layers.*.mixer.o_proj"),
        Weight("layers.*.post_attention_layernorm", "layers.*.feed_forward_input_norm"),
        Weight("layers.*.mlp.gate_proj", "layers.*.feed_forward.gate_proj"),
        Weight("layers.*.mlp.up_proj", "layers.*.feed_forward.up_proj"),
        Weight("layers.*.mlp.down_proj", "layers.*.feed_forward.down_proj"),
        Weight("norm", "norm"),
    ),
    heads=heads("Llama"),
    inert=("pretraining_tp",),
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    fields=(*FIELDS, _HEAD_DIM, _WINDOW),
    read={"rope_parameters": read_rope, "layer_types": _window_everywhere},
    heads=heads("Mistral"),
    inert=(),
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    fields=(*FIELDS, Field("layer_types")),
    always={**LAYOUT, "attention_bias": True},
    read={"rope_parameters": read_rope, "head_dim": own_head_dim, "sliding_window": _window_where_used},
    write={
        **_ROPE,
        "head_dim": write_head_dim,
        "sliding_window": lambda ours: ours.sliding_window,
        "use_sliding_window": lambda ours: ours.sliding_window is not None,
    },
    heads=heads("Qwen2"),
    inert=("max_window_layers", "use_sliding_window", "sliding_window"),
)
_HEAD_NORMS = (
    Weight("layers.*.self_attn.q_norm", "layers.*.mixer.query_norm"),
    Weight("layers.*.self_attn.k_norm", "layers.*.mixer.key_norm"),
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    fields=(*FIELDS, _HEAD_DIM, _BIASES, Field("layer_types")),
    always={**LAYOUT, "query_key_norm": "rms_norm"},
    read={"rope_parameters": read_rope, "sliding_window": _window_where_used},
    write={name: compute for name, compute in QWEN2.write.items() if name != "head_dim"},
    weights=(*LLAMA.weights, *_HEAD_NORMS),
    heads=heads("Qwen3"),
)

EXPERTS = (
    Weight("layers.*.mlp.gate", "layers.*.feed_forward.router"),
    Weight("layers.*.mlp.experts.gate_up_proj", "layers.*.feed_forward.experts.gate_up_proj"),
    Weight("layers.*.mlp.experts.down_proj", "layers.*.feed_forward.experts.down_proj"),
)


def _balance(theirs: PreTrainedConfig) -> float:
    # Their loss counts the choices of a token, ours their shares, which sum to one.
    return theirs.router_aux_loss_coef * theirs.num_experts_per_tok


_BALANCE = {"router_aux_loss_coef": lambda ours: ours.router_aux_loss_coef / ours.num_experts_per_tok}


def _sparse_everywhere(theirs: PreTrainedConfig) -> list[str]:
    return ["sparse"] * theirs.num_hidden_layers


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    fields=(
        *MISTRAL.fields,
        Field("num_local_experts", "num_experts"),
        Field("num_experts_per_tok"),
        Field("output_router_logits"),
    ),
    always={**LAYOUT, "router_aux_loss_scope": "model", "float32_parts": ["expert_weights"]},
    read={**MISTRAL.read, "router_aux_loss_coef": _balance, "mlp_layer_types": _sparse_everywhere},
    write={**_ROPE, **_BALANCE},
    weights=(*LLAMA.weights, *EXPERTS),
    heads=heads("Mixtral"),
    required={"router_jitter_noise": 0.0},
)


def _sparse_layers(theirs: PreTrainedConfig) -> list[str]:
    step, dense = theirs.decoder_sparse_step, theirs.mlp_only_layers
    sparse = [i not in dense and theirs.num_experts > 0 and (i + 1) % step == 0
              for i in range(theirs.num_hidden_layers)]  # fmt: skip
    return ["sparse" if layer else "dense" for layer in sparse]


def _experts(theirs: PreTrainedConfig) -> int:
    return theirs.num_experts if "sparse" in _sparse_layers(theirs) else 0


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    fields=(
        *FIELDS,
        _BIASES,
        _WINDOW,
        Field("num_experts_per_tok"),
        Field("moe_intermediate_size"),
        Field("norm_topk_prob"),
        Field("output_router_logits"),
    ),
    always={**QWEN3.always, "router_aux_loss_scope": "model"},
    read={
        "rope_parameters": read_rope,
        "head_dim": own_head_dim,
        "layer_types": _window_everywhere,
        "mlp_layer_types": _sparse_layers,
        "num_experts": _experts,
        "router_aux_loss_coef": _balance,
    },
    write={
        **_ROPE,
        **_BALANCE,
        "head_dim": write_head_dim,
        "use_sliding_window": lambda ours: ours.sliding_window is not None,
        "num_experts": lambda ours: ours.num_experts,
        "decoder_sparse_step": lambda ours: 1,
        "mlp_only_layers": lambda ours: [i for i, kind in enumerate(ours.mlp_layer_types) if kind == "dense"],
    },
    weights=(*LLAMA.weights, *_HEAD_NORMS, *EXPERTS),
    heads=heads("Qwen3Moe"),
    inert=("decoder_sparse_step", "mlp_only_layers", "use_sliding_window"),
)
