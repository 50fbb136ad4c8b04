"""BERT (Devlin et al. 2019) and its kin of one layout: RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020) and
CamemBERT (Martin et al. 2020)."""

from dataclasses import replace

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieEncoderConfig
from fratrie.modeling.encoder import (
    FratrieEncoderForMaskedLM,
    FratrieEncoderForSequenceClassification,
    FratrieEncoderForTokenClassification,
    FratrieEncoderModel,
)

from .recipe import Field, Head, Recipe, Weight

_POOLED = {"classifier_activation": "tanh", "classifier_pooling": "first"}
CLASSIFIER_DROPOUT = Field("classifier_dropout", default=lambda config: config.hidden_dropout_prob)
DENSE_CLASSIFIER = {"classifier_hidden_sizes": lambda config: [config.hidden_size]}
TOKEN_CLASSIFIER = (Weight("classifier", "classifier.out_proj"),)
# A second bias of the output layer, which is the first one where weights are tied, and is not read elsewhere.
_UNTIED = {"tie_word_embeddings": False}
# Hugging Face dropped these fields with the code that read them; old checkpoints still have them.
_REQUIRED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}


def _token_types(theirs: PreTrainedConfig) -> int:
    if theirs.type_vocab_size < 1:
        raise ValueError(f"{theirs.model_type}: type_vocab_size={theirs.type_vocab_size} must be at least 1.")
    return theirs.type_vocab_size


BERT = Recipe(
    model_type="bert",
    config=FratrieEncoderConfig,
    fields=(
        Field("vocab_size"),
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("intermediate_size"),
        Field("hidden_act"),
        Field("hidden_dropout_prob", ("hidden_dropout", "embedding_dropout")),
        Field("attention_probs_dropout_prob", "attention_dropout"),
        Field("max_position_embeddings"),
        Field("initializer_range"),
        Field("layer_norm_eps", "norm_eps"),
        Field("tie_word_embeddings"),
        Field("pad_token_id"),
        Field("bos_token_id"),
        Field("eos_token_id"),
    ),
    weights=(
        Weight("embeddings.word_embeddings", "embed_tokens"),
        Weight("embeddings.position_embeddings", "embed_positions"),
        Weight("embeddings.token_type_embeddings", "embed_token_types"),
        Weight("embeddings.LayerNorm", "embedding_norm"),
        Weight("encoder.layer.*.attention.self.query", "layers.*.mixer.q_proj"),
        Weight("encoder.layer.*.attention.self.key", "layers.*.mixer.k_proj"),
        Weight("encoder.layer.*.attention.self.value", "layers.*.mixer.v_proj"),
        Weight("encoder.layer.*.attention.output.dense", "layers.*.mixer.o_proj"),
        Weight("encoder.layer.*.attention.output.LayerNorm", "layers.*.mixer_output_norm"),
        Weight("encoder.layer.*.intermediate.dense", "layers.*.feed_forward.up_proj"),
        Weight("encoder.layer.*.output.dense", "layers.*.feed_forward.down_proj"),
        Weight("encoder.layer.*.output.LayerNorm", "layers.*.feed_forward_output_norm"),
    ),
    heads=(
        Head("BertModel", FratrieEncoderModel, weights=(Weight("pooler.dense", "pooler.dense"),),
             pooler=lambda config: "tanh"),
        Head("BertForMaskedLM", FratrieEncoderForMaskedLM, "bert.", (
            Weight("cls.predictions.transform.dense", "head_dense"),
            Weight("cls.predictions.transform.LayerNorm", "head_norm"),
            Weight("cls.predictions.decoder", "lm_head"),
            Weight("cls.predictions.bias", when=_UNTIED),
        )),
        Head("BertForSequenceClassification", FratrieEncoderForSequenceClassification, "bert.", (
            Weight("bert.pooler.dense", "classifier.dense.0"),
            Weight("classifier", "classifier.out_proj"),
        ), always=_POOLED, read=DENSE_CLASSIFIER, fields=(CLASSIFIER_DROPOUT,)),
        Head("BertForTokenClassification", FratrieEncoderForTokenClassification, "bert.", TOKEN_CLASSIFIER,
             fields=(CLASSIFIER_DROPOUT,)),
    ),
    read={"type_vocab_size": _token_types},
    write={"type_vocab_size": lambda ours: ours.type_vocab_size},
    required=_REQUIRED,
    inert=("use_cache",),
)  # fmt: skip


def _first_position(theirs: PreTrainedConfig) -> int:
    if theirs.pad_token_id is None:
        raise ValueError(f"{theirs.model_type}: positions begin behind pad_token_id=None: it must be a number.")
    return theirs.pad_token_id + 1


def _like_roberta(model_type: str, name: str) -> Recipe:
    """BERT with positions that begin behind the padding id, and heads of its own."""
    rows = "max_position_embeddings"
    return replace(
        BERT,
        model_type=model_type,
        fields=tuple(pair for pair in BERT.fields if pair.theirs != rows),
        read={
            **BERT.read,
            "position_offset": _first_position,
            rows: lambda config: config.max_position_embeddings - _first_position(config),
        },
        write={**BERT.write, rows: lambda config: config.max_position_embeddings + config.position_offset},
        heads=(
            replace(BERT.heads[0], theirs=f"{name}Model"),
            Head(f"{name}ForMaskedLM", FratrieEncoderForMaskedLM, "roberta.", (
                Weight("lm_head.dense", "head_dense"),
                Weight("lm_head.layer_norm", "head_norm"),
                Weight("lm_head.decoder", "lm_head"),
                Weight("lm_head.bias", when=_UNTIED),
            ), always={"head_activation": "gelu"}),
            Head(f"{name}ForSequenceClassification", FratrieEncoderForSequenceClassification, "roberta.", (
                Weight("classifier.dense", "classifier.dense.0"),
                Weight("classifier.out_proj", "classifier.out_proj"),
            ), always=_POOLED, read=DENSE_CLASSIFIER, fields=(CLASSIFIER_DROPOUT,)),
            Head(f"{name}ForTokenClassification", FratrieEncoderForTokenClassification, "roberta.",
                 TOKEN_CLASSIFIER, fields=(CLASSIFIER_DROPOUT,)),
        ),
    )  # fmt: skip


ROBERTA = _like_roberta("roberta", "Roberta")
XLM_ROBERTA = _like_roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _like_roberta("camembert", "Camembert")
