"""LongT5 with local attention (Guo et al. 2022): T5 1.1 whose encoder sees a window."""

from dataclasses import replace
from typing import Any

from .recipe import Weight
from .t5 import T5, T5_ENCODER

_LOCAL = {"encoder_attention_type": "local"}


def _local(weight: Weight) -> Weight:
    """The line of a weight, under the name that the attention of these encoders has."""
    if not weight.theirs.startswith("encoder."):
        return weight
    return replace(weight, theirs=weight.theirs.replace("SelfAttention", "LocalSelfAttention"))


def _fields(recipe: Any) -> tuple[Any, ...]:
    return tuple(pair for pair in recipe.fields if pair.theirs != "scale_decoder_outputs")


def _windows(number: int) -> list[str]:
    return ["sliding_attention"] * number


LONGT5 = replace(
    T5,
    model_type="longt5",
    fields=_fields(T5),
    always={name: value for name, value in T5.always.items() if not name.endswith("float32_parts")},
    read={
        **T5.read,
        "encoder.layer_types": lambda theirs: _windows(theirs.num_layers),
        "encoder.sliding_window": lambda theirs: theirs.local_radius,
        "scale_decoder_outputs": lambda theirs: theirs.scale_decoder_outputs,
    },
    write={
        **T5.write,
        "local_radius": lambda ours: ours.encoder.sliding_window,
        # Their configuration reads one field as the other.
        "tie_word_embeddings": lambda ours: ours.scale_decoder_outputs,
    },
    weights=tuple(map(_local, T5.weights)),
    heads=tuple(replace(head, theirs=f"Long{head.theirs}") for head in T5.heads),
    required={**T5.required, **_LOCAL},
    inert=("initializer_factor", "global_block_size", "decoder_start_token_id", "tie_word_embeddings"),
)

LONGT5_ENCODER = replace(
    T5_ENCODER,
    model_type="longt5",
    fields=_fields(T5_ENCODER),
    always={name: value for name, value in T5_ENCODER.always.items() if name != "float32_parts"},
    read={
        **T5_ENCODER.read,
        "layer_types": lambda theirs: _windows(theirs.num_layers),
        "sliding_window": lambda theirs: theirs.local_radius,
    },
    write={**T5_ENCODER.write, "local_radius": lambda ours: ours.sliding_window},
    weights=tuple(map(_local, T5_ENCODER.weights)),
    heads=(replace(T5_ENCODER.heads[0], theirs="LongT5EncoderModel"),),
    required={**T5_ENCODER.required, **_LOCAL},
    inert=("initializer_factor", "global_block_size", "num_decoder_layers", "use_cache", "tie_word_embeddings"),
)
