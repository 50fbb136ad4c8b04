"""T5 and T5 1.1 (Raffel et al. 2020; Shazeer 2020): relative positions, RMSNorm, no biases, unscaled attention."""

from typing import Any

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieEncoderConfig, norm_slots
from fratrie.modeling.encoder import FratrieEncoderForTokenClassification, FratrieEncoderModel
from fratrie.modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel
from fratrie.modeling.seq2seq_configuration import FratrieSeq2SeqConfig

from .recipe import Field, Head, Recipe, Weight, both

_LAYOUT = {
    **norm_slots("pre", "rms_norm"),
    "position_type": "relative",
    "attention_scale": 1.0,
    "scale_embeddings": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "feed_forward_bias": False,
    "float32_parts": ["down_proj"],
}
# Fields that every stack has.
_STACK = {
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size",),
    "d_kv": ("head_dim",),
    "d_ff": ("intermediate_size",),
    "num_heads": ("num_attention_heads",),
    "relative_attention_num_buckets": ("relative_num_buckets",),
    "relative_attention_max_distance": ("relative_max_distance",),
    "dropout_rate": ("hidden_dropout", "embedding_dropout", "attention_dropout", "activation_dropout"),
    "layer_norm_epsilon": ("norm_eps",),
}
_GATED = {"is_gated_act": True}
_PLAIN = {"is_gated_act": False}


def _attention(theirs: str, ours: str) -> tuple[Weight, ...]:
    return tuple(Weight(f"{theirs}.{name}", f"{ours}.{name}_proj") for name in "qkvo")


def _feed_forward(theirs: str, ours: str) -> tuple[Weight, ...]:
    return (
        Weight(f"{theirs}.layer_norm", f"{ours}_input_norm"),
        Weight(f"{theirs}.DenseReluDense.wi", f"{ours}.up_proj", when=_PLAIN),
        Weight(f"{theirs}.DenseReluDense.wi_0", f"{ours}.gate_proj", when=_GATED),
        Weight(f"{theirs}.DenseReluDense.wi_1", f"{ours}.up_proj", when=_GATED),
        Weight(f"{theirs}.DenseReluDense.wo", f"{ours}.down_proj"),
    )


def _stack(theirs: str, ours: str) -> tuple[Weight, ...]:
    block, layer = f"{theirs}block.*.layer", f"{ours}layers.*"
    return (
        Weight(f"{theirs}block.0.layer.0.SelfAttention.relative_attention_bias", f"{ours}position_bias.table"),
        Weight(f"{block}.0.layer_norm", f"{layer}.mixer_input_norm"),
        *_attention(f"{block}.0.SelfAttention", f"{layer}.mixer"),
        Weight(f"{theirs}final_layer_norm", f"{ours}norm"),
    )


def _encoder(ours: str) -> tuple[Weight, ...]:
    return (
        Weight("shared", f"{ours}embed_tokens"),
        *_stack("encoder.", ours),
        *_feed_forward("encoder.block.*.layer.1", f"{ours}layers.*.feed_forward"),
    )


def _feed_forward_proj(ours: Any) -> str:
    stack = getattr(ours, "decoder", ours)
    kind = stack.hidden_act
    return f"gated-{kind.replace('gelu_new', 'gelu')}" if stack.gated_feed_forward else kind


def _start(theirs: PreTrainedConfig) -> int | None:
    start = getattr(theirs, "decoder_start_token_id", None)
    return theirs.pad_token_id if start is None else start


def _write_start(ours: Any) -> int | None:
    return None if ours.decoder_start_token_id == ours.pad_token_id else ours.decoder_start_token_id


T5 = Recipe(
    model_type="t5",
    config=FratrieSeq2SeqConfig,
    fields=(
        *(Field(theirs, tuple(stack for name in ours for stack in both(name))) for theirs, ours in _STACK.items()),
        Field("num_layers", "encoder.num_hidden_layers"),
        Field("num_decoder_layers", "decoder.num_hidden_layers"),
        Field("scale_decoder_outputs"),
        Field("use_cache"),
        Field("pad_token_id"),
        Field("eos_token_id"),
    ),
    always={name: value for field, value in _LAYOUT.items() for name in both(field)},
    read={
        **dict.fromkeys(both("hidden_act"), lambda theirs: theirs.dense_act_fn),
        **dict.fromkeys(both("gated_feed_forward"), lambda theirs: theirs.is_gated_act),
        "decoder_start_token_id": _start,
        "bos_token_id": lambda theirs: getattr(theirs, "bos_token_id", None),
    },
    write={
        "feed_forward_proj": _feed_forward_proj,
        "decoder_start_token_id": _write_start,
        "bos_token_id": lambda ours: ours.bos_token_id,
    },
    weights=(
        *_encoder("encoder."),
        *_stack("decoder.", "decoder."),
        Weight("decoder.block.*.layer.1.layer_norm", "decoder.layers.*.cross_attention_input_norm"),
        *_attention("decoder.block.*.layer.1.EncDecAttention", "decoder.layers.*.cross_attention"),
        *_feed_forward("decoder.block.*.layer.2", "decoder.layers.*.feed_forward"),
    ),
    heads=(
        Head("T5Model", FratrieSeq2SeqModel),
        Head("T5ForConditionalGeneration", FratrieSeq2SeqForConditionalGeneration, "",
             (Weight("lm_head", "lm_head"),)),
    ),
    required={"is_encoder_decoder": True, "is_decoder": False},
    # Output layers of T5 1.1 are matrices of their own although their configurations say that they are tied.
    inert=("initializer_factor", "classifier_dropout", "tie_word_embeddings", "decoder_start_token_id"),
)  # fmt: skip

T5_ENCODER = Recipe(
    model_type="t5",
    config=FratrieEncoderConfig,
    fields=(
        *(Field(theirs, ours) for theirs, ours in _STACK.items()),
        Field("num_layers", "num_hidden_layers"),
        Field("pad_token_id"),
        Field("eos_token_id"),
    ),
    always={**_LAYOUT, "embedding_norm": None},
    read={
        "hidden_act": lambda theirs: theirs.dense_act_fn,
        "gated_feed_forward": lambda theirs: theirs.is_gated_act,
    },
    write={"feed_forward_proj": _feed_forward_proj},
    weights=_encoder(""),
    heads=(
        Head("T5EncoderModel", FratrieEncoderModel),
        Head("T5ForTokenClassification", FratrieEncoderForTokenClassification, "transformer.",
             (Weight("classifier", "classifier.out_proj"),), fields=(Field("classifier_dropout"),)),
    ),
    required={"is_decoder": False},
    inert=("initializer_factor", "num_decoder_layers", "scale_decoder_outputs", "use_cache", "tie_word_embeddings"),
)  # fmt: skip
