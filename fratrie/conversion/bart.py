"""Encoder-decoders of the first Transformer's layout (Vaswani et al. 2017): Marian (Junczys-Dowmunt et al. 2018) keeps
its sinusoids, BART (Lewis et al. 2020) learns its positions and norms its embeddings."""

from dataclasses import replace

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import norm_slots
from fratrie.modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel
from fratrie.modeling.seq2seq_configuration import FratrieSeq2SeqConfig

from .recipe import Field, Head, Recipe, Weight, both


def _layout(**fields: object) -> dict[str, object]:
    """Fields that both stacks have."""
    return {name: value for field, value in fields.items() for name in dict.fromkeys(both(field), value)}


def _stack_weights(stack: str) -> tuple[Weight, ...]:
    theirs, ours = f"{stack}.layers.*.", f"{stack}.layers.*."
    attentions = [("self_attn", "mixer"), ("encoder_attn", "cross_attention")]
    return (
        Weight(f"{stack}.embed_positions", f"{stack}.embed_positions"),
        *(
            Weight(f"{theirs}{attention}.{their_name}", f"{ours}{mixer}.{our_name}")
            for attention, mixer in attentions
            for their_name, our_name in (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"),
                                         ("out_proj", "o_proj"))
        ),
        *(Weight(f"{theirs}{attention}_layer_norm", f"{ours}{mixer}_output_norm") for attention, mixer in attentions),
        Weight(f"{theirs}fc1", f"{ours}feed_forward.up_proj"),
        Weight(f"{theirs}fc2", f"{ours}feed_forward.down_proj"),
        Weight(f"{theirs}final_layer_norm", f"{ours}feed_forward_output_norm"),
    )  # fmt: skip


_NORMS = {name: value for name, value in norm_slots("post").items() if name != "embedding_norm"}
_HEAD = (Weight("final_logits_bias", "lm_head.bias", leading=True), Weight("lm_head", "lm_head"))

BART = Recipe(
    model_type="bart",
    config=FratrieSeq2SeqConfig,
    fields=(
        Field("vocab_size", both("vocab_size")),
        Field("d_model", both("hidden_size")),
        Field("encoder_layers", "encoder.num_hidden_layers"),
        Field("decoder_layers", "decoder.num_hidden_layers"),
        Field("encoder_attention_heads", "encoder.num_attention_heads"),
        Field("decoder_attention_heads", "decoder.num_attention_heads"),
        Field("encoder_ffn_dim", "encoder.intermediate_size"),
        Field("decoder_ffn_dim", "decoder.intermediate_size"),
        Field("max_position_embeddings", both("max_position_embeddings")),
        Field("activation_function", both("hidden_act")),
        Field("dropout", (*both("hidden_dropout"), *both("embedding_dropout"))),
        Field("attention_dropout", both("attention_dropout")),
        Field("activation_dropout", both("activation_dropout")),
        Field("init_std", ("initializer_range", *both("initializer_range"))),
        Field("scale_embedding", both("scale_embeddings")),
        Field("use_cache"),
        Field("tie_word_embeddings"),
        Field("pad_token_id"),
        Field("bos_token_id"),
        Field("eos_token_id"),
        Field("decoder_start_token_id"),
    ),
    always={
        **_layout(position_type="learned", position_offset=2, **_NORMS, embedding_norm="layer_norm"),
        "lm_head_bias": True,
    },
    weights=(
        Weight("shared", "encoder.embed_tokens"),
        Weight("encoder.layernorm_embedding", "encoder.embedding_norm"),
        Weight("decoder.layernorm_embedding", "decoder.embedding_norm"),
        *_stack_weights("encoder"),
        *_stack_weights("decoder"),
    ),
    heads=(
        Head("BartModel", FratrieSeq2SeqModel),
        Head("BartForConditionalGeneration", FratrieSeq2SeqForConditionalGeneration, "model.", _HEAD),
    ),
    required={
        "is_encoder_decoder": True,
        "is_decoder": False,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "tie_word_embeddings": True,
    },
    inert=("forced_eos_token_id", "classifier_dropout"),
)


def _share_embeddings(theirs: PreTrainedConfig) -> bool:
    if theirs.share_encoder_decoder_embeddings:
        for name, value in (("tie_word_embeddings", True), ("decoder_vocab_size", theirs.vocab_size)):
            if getattr(theirs, name) != value:
                raise ValueError(
                    f"marian: {name}={getattr(theirs, name)} does not fit share_encoder_decoder_embeddings=True, "
                    f"with which it is {value}."
                )
    return theirs.share_encoder_decoder_embeddings


_SHARED = {"share_encoder_decoder_embeddings": True}
_APART = {"share_encoder_decoder_embeddings": False}
MARIAN = replace(
    BART,
    model_type="marian",
    fields=(
        *(pair for pair in BART.fields if pair.theirs != "vocab_size"),
        Field("vocab_size", "encoder.vocab_size"),
        Field("decoder_vocab_size", "decoder.vocab_size"),
    ),
    always={
        **_layout(position_type="sinusoidal", sinusoid_layout="halves", **_NORMS),
        "lm_head_bias": True,
    },
    read={"share_embeddings": _share_embeddings},
    write={"share_encoder_decoder_embeddings": lambda ours: ours.share_embeddings},
    weights=(
        # Sinusoids are computed, in float32 as there.
        Weight("encoder.embed_positions"),
        Weight("decoder.embed_positions"),
        Weight("shared", "encoder.embed_tokens", when=_SHARED),
        Weight("encoder.embed_tokens", "encoder.embed_tokens", when=_APART),
        Weight("decoder.embed_tokens", "decoder.embed_tokens", when=_APART),
        *(rule for rule in (*_stack_weights("encoder"), *_stack_weights("decoder")) if "embed" not in rule.theirs),
    ),
    heads=(
        Head("MarianModel", FratrieSeq2SeqModel),
        Head("MarianMTModel", FratrieSeq2SeqForConditionalGeneration, "model.", _HEAD),
    ),
    required={name: value for name, value in BART.required.items() if name != "tie_word_embeddings"},
    inert=("forced_eos_token_id",),
)
