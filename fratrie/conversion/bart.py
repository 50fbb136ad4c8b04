"""Encoder-decoders of the first Transformer's layout (Vaswani et al. 2017): Marian (Junczys-Dowmunt et al. 2018) keeps
its sinusoids, BART (Lewis et al. 2020) learns its positions and norms its embeddings."""

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieDecoderConfig, norm_slots
from fratrie.modeling.decoder import FratrieDecoderForCausalLM
from fratrie.modeling.positions import SinusoidalPositions
from fratrie.modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel
from fratrie.modeling.seq2seq_configuration import FratrieSeq2SeqConfig

from .recipe import Field, Head, Recipe, Weight, both


def _layout(**fields: object) -> dict[str, object]:
    """Fields that both stacks have."""
    return {name: value for field, value in fields.items() for name in both(field)}


# Fields that every stack has.
_STACK = {
    "d_model": ("hidden_size",),
    "max_position_embeddings": ("max_position_embeddings",),
    "activation_function": ("hidden_act",),
    "dropout": ("hidden_dropout", "embedding_dropout"),
    "attention_dropout": ("attention_dropout",),
    "activation_dropout": ("activation_dropout",),
    "init_std": ("initializer_range",),
    "scale_embedding": ("scale_embeddings",),
}
_STACKS = tuple(
    Field(theirs, tuple(name for field in ours for name in both(field))) for theirs, ours in _STACK.items()
)
_SIZES = tuple(
    Field(f"{stack}_{theirs}", f"{stack}.{ours}")
    for stack in ("encoder", "decoder")
    for theirs, ours in (("layers", "num_hidden_layers"), ("attention_heads", "num_attention_heads"),
                         ("ffn_dim", "intermediate_size"))
)  # fmt: skip
_LANGUAGE_MODEL = tuple(
    map(Field, ("use_cache", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"))
)


def _stack_weights(stack: str, prefix: str | None = None) -> tuple[Weight, ...]:
    """Weights of a stack; within ours they lie under a prefix, by default the stack's name."""
    prefix = f"{stack}." if prefix is None else prefix
    theirs, ours = f"{stack}.layers.*.", f"{prefix}layers.*."
    attentions = [("self_attn", "mixer"), ("encoder_attn", "cross_attention")]
    return (
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
_LEARNED = {"position_type": "learned", "position_offset": 2, **_NORMS, "embedding_norm": "layer_norm"}
_SINUSOIDS = {"position_type": "sinusoidal", "sinusoid_layout": "halves", **_NORMS}
# Their bias is a buffer of zeros where ours has none.
_HEAD = (Weight("final_logits_bias", "lm_head.bias", leading=True), Weight("lm_head", "lm_head"))

BART = Recipe(
    model_type="bart",
    config=FratrieSeq2SeqConfig,
    fields=(
        Field("vocab_size", both("vocab_size")),
        *_SIZES,
        *_STACKS,
        Field("init_std", "initializer_range"),  # of the output layer
        *_LANGUAGE_MODEL,
        Field("decoder_start_token_id"),
    ),
    always={**_layout(**_LEARNED), "lm_head_bias": True},
    neutral={"lm_head_bias": False},
    weights=(
        Weight("shared", "encoder.embed_tokens"),
        Weight("encoder.embed_positions", "encoder.embed_positions"),
        Weight("decoder.embed_positions", "decoder.embed_positions"),
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


def _sinusoids(positions: int, size: int) -> torch.Tensor:
    return SinusoidalPositions(size, "halves")(torch.arange(positions))


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
    always={**_layout(**_SINUSOIDS), "lm_head_bias": True},
    read={"share_embeddings": _share_embeddings},
    write={"share_encoder_decoder_embeddings": lambda ours: ours.share_embeddings},
    weights=(
        Weight("encoder.embed_positions", formula=_sinusoids),
        Weight("decoder.embed_positions", formula=_sinusoids),
        Weight("shared", "encoder.embed_tokens", when=_SHARED),
        Weight("encoder.embed_tokens", "encoder.embed_tokens", when=_APART),
        Weight("decoder.embed_tokens", "decoder.embed_tokens", when=_APART),
        *_stack_weights("encoder"),
        *_stack_weights("decoder"),
    ),
    heads=(
        Head("MarianModel", FratrieSeq2SeqModel),
        Head("MarianMTModel", FratrieSeq2SeqForConditionalGeneration, "model.", _HEAD),
    ),
    required={name: value for name, value in BART.required.items() if name != "tie_word_embeddings"},
    inert=("forced_eos_token_id",),
)


def _decoder_alone(recipe: Recipe, name: str, layout: dict[str, object], embeddings: tuple[Weight, ...]) -> Recipe:
    """The decoder of a family as a language model, which attends the states of an encoder if it gets some."""
    sizes = [(pair.theirs, pair.names[0].partition(".")) for pair in _SIZES]
    return replace(
        recipe,
        config=FratrieDecoderConfig,
        fields=(
            Field("vocab_size"),
            *(Field(theirs, ours) for theirs, (stack, _, ours) in sizes if stack == "decoder"),
            *(Field(theirs, ours) for theirs, ours in _STACK.items()),
            *_LANGUAGE_MODEL,
        ),
        always={**layout, "add_cross_attention": True},
        neutral={},
        read={},
        write={},
        weights=(Weight("decoder.embed_tokens", "embed_tokens"), *embeddings, *_stack_weights("decoder", "")),
        # Of whole models, which save the embedding that their stacks share under its own name.
        renamed={r"^(model\.)?shared\.": "model.decoder.embed_tokens."},
        heads=(Head(f"{name}ForCausalLM", FratrieDecoderForCausalLM, "model.", (Weight("lm_head", "lm_head"),)),),
        required={"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        inert=(
            *recipe.inert,
            *("decoder_start_token_id", "is_decoder", "share_encoder_decoder_embeddings"),
            *(theirs for theirs, (stack, _, _) in sizes if stack == "encoder"),
        ),
    )


def _one_vocabulary(theirs: PreTrainedConfig) -> int:
    if theirs.decoder_vocab_size != theirs.vocab_size:
        raise ValueError(
            f"marian: the decoder alone writes vocab_size={theirs.vocab_size} tokens and reads decoder_vocab_size="
            f"{theirs.decoder_vocab_size}: they must be equal."
        )
    return theirs.vocab_size


BART_DECODER = _decoder_alone(
    BART,
    "Bart",
    _LEARNED,
    (
        Weight("decoder.embed_positions", "embed_positions"),
        Weight("decoder.layernorm_embedding", "embedding_norm"),
    ),
)
MARIAN_DECODER = replace(
    _decoder_alone(MARIAN, "Marian", _SINUSOIDS, (Weight("decoder.embed_positions", formula=_sinusoids),)),
    read={"vocab_size": _one_vocabulary},
    write={"decoder_vocab_size": lambda ours: ours.vocab_size},
)
