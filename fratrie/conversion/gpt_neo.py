"""GPT-Neo (Black et al. 2021): GPT-2 with windows in some layers, unscaled attention and no biases of its inputs."""

from typing import Any

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieDecoderConfig
from fratrie.modeling.decoder import (
    FratrieDecoderForCausalLM,
    FratrieDecoderForSequenceClassification,
    FratrieDecoderModel,
)

from .recipe import Field, Head, Recipe, Weight

_LAYER_TYPES = {"global": "full_attention", "local": "sliding_attention"}
_KINDS = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}


def _layer_types(theirs: PreTrainedConfig) -> list[str]:
    unknown = set(theirs.attention_layers) - _LAYER_TYPES.keys()
    if unknown:
        raise ValueError(f"gpt_neo: attention_types={theirs.attention_types} must be of {sorted(_LAYER_TYPES)}.")
    return [_LAYER_TYPES[kind] for kind in theirs.attention_layers]


def _window(theirs: PreTrainedConfig) -> int | None:
    return theirs.window_size if "local" in theirs.attention_layers else None


def _attention_types(ours: Any) -> list[Any]:
    return [[[_KINDS.get(kind, kind) for kind in ours.layer_types], 1]]


GPT_NEO = Recipe(
    model_type="gpt_neo",
    config=FratrieDecoderConfig,
    fields=(
        Field("vocab_size"),
        Field("hidden_size"),
        Field("num_layers", "num_hidden_layers"),
        Field("num_heads", "num_attention_heads"),
        Field("intermediate_size", default=lambda config: 4 * config.hidden_size),
        Field("max_position_embeddings"),
        Field("activation_function", "hidden_act"),
        Field("resid_dropout", "hidden_dropout"),
        Field("embed_dropout", "embedding_dropout"),
        Field("attention_dropout"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("initializer_range"),
        Field("use_cache"),
        Field("tie_word_embeddings"),
        Field("pad_token_id"),
        Field("bos_token_id"),
        Field("eos_token_id"),
    ),
    always={"attention_scale": 1.0, "attention_bias": False, "attention_output_bias": True},
    read={"layer_types": _layer_types, "sliding_window": _window},
    write={"attention_types": _attention_types, "window_size": lambda ours: ours.sliding_window},
    weights=(
        Weight("wte", "embed_tokens"),
        Weight("wpe", "embed_positions"),
        Weight("h.*.ln_1", "layers.*.mixer_input_norm"),
        *(Weight(f"h.*.attn.attention.{letter}_proj", f"layers.*.mixer.{letter}_proj") for letter in "qkv"),
        Weight("h.*.attn.attention.out_proj", "layers.*.mixer.o_proj"),
        Weight("h.*.ln_2", "layers.*.feed_forward_input_norm"),
        Weight("h.*.mlp.c_fc", "layers.*.feed_forward.up_proj"),
        Weight("h.*.mlp.c_proj", "layers.*.feed_forward.down_proj"),
        Weight("ln_f", "norm"),
    ),
    heads=(
        Head("GPTNeoModel", FratrieDecoderModel),
        Head("GPTNeoForCausalLM", FratrieDecoderForCausalLM, "transformer.", (Weight("lm_head", "lm_head"),)),
        Head("GPTNeoForSequenceClassification", FratrieDecoderForSequenceClassification, "transformer.",
             (Weight("score", "classifier.out_proj"),), always={"classifier_output_bias": False}),
    ),
    inert=("classifier_dropout",),
)  # fmt: skip
