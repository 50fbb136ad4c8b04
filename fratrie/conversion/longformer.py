"""Longformer and LED (Beltagy et al. 2020): RoBERTa and BART whose encoders have windows and global tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from fratrie.modeling.seq2seq import FratrieSeq2SeqForConditionalGeneration, FratrieSeq2SeqModel

from .bart import BART
from .bert import ROBERTA
from .recipe import Field, Head, Weight, both

_PROJECTIONS = {"query": "q", "key": "k", "value": "v"}


def _window(theirs: PreTrainedConfig) -> int:
    """Half of theirs, which counts both sides."""
    given = theirs.attention_window
    windows = set(given) if isinstance(given, list) else {given}
    if len(windows) != 1:
        raise ValueError(
            f"{theirs.model_type}: attention_window={given} differs by layer, but all of ours have one sliding_window."
        )
    return windows.pop() // 2


def _write_window(stack: Callable[[Any], Any]) -> Callable[[Any], list[int] | None]:
    def write(ours: Any) -> list[int] | None:
        encoder = stack(ours)
        window = encoder.sliding_window  # none where the mixer is another, which is refused
        return window and [2 * window] * encoder.num_hidden_layers

    return write


def _global_projections(theirs: str, ours: str) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"{theirs}.{name}_global", f"{ours}.{letter}_global_proj") for name, letter in _PROJECTIONS.items()
    )


def _head(theirs: Head) -> Head:
    dropout = {"classifier_dropout": lambda config: config.hidden_dropout_prob}
    return replace(
        theirs,
        theirs=theirs.theirs.replace("Roberta", "Longformer"),
        prefix=theirs.prefix.replace("roberta", "longformer"),
        fields=(),
        read={**theirs.read, **dropout} if "Classification" in theirs.theirs else theirs.read,
    )


LONGFORMER = replace(
    ROBERTA,
    model_type="longformer",
    read={
        **ROBERTA.read,
        "mixer_types": lambda theirs: ["longformer"] * theirs.num_hidden_layers,
        "sliding_window": _window,
    },
    write={**ROBERTA.write, "attention_window": _write_window(lambda ours: ours)},
    weights=(
        *ROBERTA.weights,
        *_global_projections("encoder.layer.*.attention.self", "layers.*.mixer"),
    ),
    heads=tuple(map(_head, ROBERTA.heads)),
    required={},
    inert=("sep_token_id", "onnx_export"),
)

_THEIR_ATTENTION = "encoder.layers.*.self_attn"
_OUR_MIXER = "encoder.layers.*.mixer"
LED = replace(
    BART,
    model_type="led",
    fields=(
        *(pair for pair in BART.fields if pair.theirs not in ("max_position_embeddings", "scale_embedding")),
        *(
            Field(f"max_{stack}_position_embeddings", f"{stack}.max_position_embeddings")
            for stack in ("encoder", "decoder")
        ),
    ),
    always={
        **{name: value for name, value in BART.always.items() if not name.endswith("position_offset")},
        **dict.fromkeys(both("scale_embeddings"), False),
    },
    read={
        "encoder.mixer_types": lambda theirs: ["longformer"] * theirs.encoder_layers,
        "encoder.sliding_window": _window,
    },
    write={"attention_window": _write_window(lambda ours: ours.encoder)},
    weights=(
        *(pair for pair in BART.weights if not pair.theirs.startswith(f"{_THEIR_ATTENTION}.")),
        *(
            Weight(f"{_THEIR_ATTENTION}.longformer_self_attn.{name}", f"{_OUR_MIXER}.{letter}_proj")
            for name, letter in _PROJECTIONS.items()
        ),
        *_global_projections(f"{_THEIR_ATTENTION}.longformer_self_attn", _OUR_MIXER),
        Weight(f"{_THEIR_ATTENTION}.output", f"{_OUR_MIXER}.o_proj"),
    ),
    heads=(
        Head("LEDModel", FratrieSeq2SeqModel),
        Head("LEDForConditionalGeneration", FratrieSeq2SeqForConditionalGeneration, "led.", BART.heads[1].weights),
    ),
)
