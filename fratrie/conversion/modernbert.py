"""ModernBERT (Warner et al. 2024): rotary positions by layer type, sliding windows, a gated feed-forward."""

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieEncoderConfig, norm_slots
from fratrie.modeling.encoder import (
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
)

from .llama import check_rope
from .recipe import Field, Head, Recipe, Weight

_CLASSIFIER_FIELDS = (
    Field("classifier_bias"),
    Field("classifier_activation"),
    Field("classifier_dropout"),
)
_CLASSIFIER_WEIGHTS = (
    Weight("head.dense", "classifier.dense.0"),
    Weight("head.norm", "classifier.norms.0"),
    Weight("classifier", "classifier.out_proj"),
)
_DENSE_CLASSIFIER = {"classifier_hidden_sizes": lambda config: [config.hidden_size]}
_NORMED = {"classifier_norm": "layer_norm"}


def _window(theirs: PreTrainedConfig) -> int | None:
    return theirs.sliding_window if "sliding_attention" in theirs.layer_types else None


def _rope(theirs: PreTrainedConfig) -> dict[str, dict]:
    parameters = {kind: theirs.rope_parameters[kind] for kind in sorted(set(theirs.layer_types))}
    for rope in parameters.values():
        check_rope(theirs, rope)
    return parameters


MODERNBERT = Recipe(
    model_type="modernbert",
    config=FratrieEncoderConfig,
    fields=(
        Field("vocab_size"),
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("intermediate_size"),
        Field("hidden_activation", "hidden_act"),
        Field("max_position_embeddings"),
        Field("initializer_range"),
        Field("norm_eps"),
        Field("norm_bias"),
        Field("attention_bias", ("attention_bias", "attention_output_bias")),
        Field("mlp_bias", "feed_forward_bias"),
        Field("mlp_dropout", "activation_dropout"),
        Field("embedding_dropout"),
        Field("layer_types"),
        Field("tie_word_embeddings"),
        Field("pad_token_id"),
        Field("bos_token_id"),
        Field("eos_token_id"),
        Field("sparse_prediction"),
    ),
    always={
        **norm_slots("pre"),
        "first_input_norm": False,
        "embedding_norm": "layer_norm",
        "gated_feed_forward": True,
        "position_type": "rotary",
        "float32_parts": ["rotations"],
    },
    read={"sliding_window": _window, "rope_parameters": _rope},
    write={
        "local_attention": lambda ours: ours.sliding_window and 2 * ours.sliding_window,
        "rope_parameters": lambda ours: ours.rope_parameters,
    },
    weights=(
        Weight("embeddings.tok_embeddings", "embed_tokens"),
        Weight("embeddings.norm", "embedding_norm"),
        Weight("layers.*.attn_norm", "layers.*.mixer_input_norm"),
        Weight("layers.*.attn.Wqkv", ("layers.*.mixer.q_proj", "layers.*.mixer.k_proj", "layers.*.mixer.v_proj")),
        Weight("layers.*.attn.Wo", "layers.*.mixer.o_proj"),
        Weight("layers.*.mlp_norm", "layers.*.feed_forward_input_norm"),
        Weight("layers.*.mlp.Wi", ("layers.*.feed_forward.gate_proj", "layers.*.feed_forward.up_proj")),
        Weight("layers.*.mlp.Wo", "layers.*.feed_forward.down_proj"),
        Weight("final_norm", "norm"),
    ),
    heads=(
        Head("ModernBertModel", FratrieEncoderModel),
        Head("ModernBertForMaskedLM", FratrieEncoderForMaskedLM, "model.", (
            Weight("head.dense", "head_dense"),
            Weight("head.norm", "head_norm"),
            Weight("decoder", "lm_head"),
        ), fields=(
            Field("classifier_bias", "head_bias"),
            Field("classifier_activation", "head_activation"),
            Field("decoder_bias", "lm_head_bias"),
        )),
        Head("ModernBertForSequenceClassification", FratrieEncoderForSequenceClassification, "model.",
             _CLASSIFIER_WEIGHTS, always=_NORMED, read=_DENSE_CLASSIFIER,
             fields=(*_CLASSIFIER_FIELDS, Field("classifier_pooling", values={"cls": "first", "mean": "mean"}))),
        Head("ModernBertForTokenClassification", FratrieEncoderForTokenClassification, "model.",
             _CLASSIFIER_WEIGHTS, always=_NORMED, read=_DENSE_CLASSIFIER, fields=_CLASSIFIER_FIELDS),
    ),
    # Their dropout of attention also acts on the branch, where ours has one rate for both branches.
    required={"attention_dropout": 0.0, "sparse_pred_ignore_index": -100},
    inert=("local_attention", "cls_token_id", "sep_token_id", "initializer_cutoff_factor", "deterministic_flash_attn"),
)  # fmt: skip
