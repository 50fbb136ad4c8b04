"""What the three pretraining objectives need: tokenizer, model, rows and collator that fit together."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import fratrie  # noqa: F401 (registers its models)
from fratrie.checkpoints import check_counts, check_memory, read_json, reason_of
from fratrie.pipelines.text_length import longest_text
from fratrie.tokenization import SIBLINGS, knows_templates, sentinel_token_ids, with_sibling

from .batches import Collator
from .collators import MaskingCollator, PackedCausalCollator, SpanCorruptionCollator
from .corpora import PackedRows, PlainRows, SentenceRows
from .model_folders import LOADING_ERRORS, check_checkpoint, load_config, load_tokenizer

logger = logging.getLogger(__name__)

ObjectiveName = Literal["mlm", "clm", "denoise"]
SIBLING_FOR: dict[str, Any] = {"mlm": "encoder", "clm": "decoder", "denoise": "seq2seq"}
_AUTO_MODELS: dict[str, Any] = {
    "mlm": AutoModelForMaskedLM,
    "clm": AutoModelForCausalLM,
    "denoise": AutoModelForSeq2SeqLM,
}
_LITERALS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Corruption:
    """How text is hidden: for `mlm` the share and whole words, for `denoise` the share and the span length."""

    share: float = 0.15
    whole_words: bool = False
    mean_span_length: float = 3.0


def open_tokenizer(folder: str, objective: ObjectiveName) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, with the template of the objective's sibling if it was trained by Fratrie.

    Raises:
        ValueError: there is none, it lacks a special token that the objective needs, or it is from elsewhere and puts
            other tokens around a text than the objective's sibling reads.
    """
    tokenizer = load_tokenizer(folder)
    if type(tokenizer) is PreTrainedTokenizerFast and knows_templates(tokenizer):
        before, tokenizer = tokenizer, with_sibling(tokenizer, SIBLING_FOR[objective])
        if (tokens := tokenizer("a").tokens()) != before("a").tokens():
            logger.info("The tokenizer of the new model puts around a text what %s needs: %s", objective, tokens)
    needed = {"mlm": "mask_token", "clm": "eos_token", "denoise": "eos_token"}[objective]
    if getattr(tokenizer, needed) is None:
        raise ValueError(
            f"the tokenizer in {folder} has no {needed}, which {objective} needs: {_way_out(tokenizer, objective)}"
        )
    _check_template(tokenizer, folder, objective)
    return tokenizer


def _check_template(tokenizer: PreTrainedTokenizerBase, folder: str, objective: ObjectiveName) -> None:
    bare, end = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id
    ids = tokenizer("a")["input_ids"]
    if objective == "clm" and ids != bare and ids[-1:] == [end]:
        problem = f"ends a text with {tokenizer.eos_token}, and so a prompt, after which a decoder has nothing to say"
    elif objective == "denoise" and ids != [*bare, end]:
        problem = f"makes {tokenizer.convert_ids_to_tokens(ids)} of a text, but denoise learns texts that only end"
    else:
        return
    raise ValueError(f"the tokenizer in {folder} {problem}: {_way_out(tokenizer, objective)}")


def _way_out(tokenizer: PreTrainedTokenizerBase, objective: ObjectiveName) -> str:
    sibling = SIBLING_FOR[objective]
    if isinstance(tokenizer, PreTrainedTokenizerFast) and knows_templates(tokenizer):
        return f"save what fratrie.tokenization.with_sibling(tokenizer, {sibling!r}) gives, and take that"
    return f"set what is missing and save it, or train one (fratrie train-tokenizer) as sibling {sibling!r}"


def parse_overrides(text: str) -> dict[str, Any]:
    """`"hidden_size=128,layer_types=[\\"full_attention\\"]"` as a dictionary; values are JSON or bare words.

    Raises:
        ValueError: a part is not `field=value`.
    """
    parts: list[str] = []
    depth = 0
    for piece in text.split(","):
        if depth:
            parts[-1] += "," + piece
        else:
            parts.append(piece)
        depth += sum(map(piece.count, "[{")) - sum(map(piece.count, "]}"))
    return dict(_parse_override(part) for part in parts if part.strip())


def _parse_override(part: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals or not name:
        raise ValueError(f"config override {part.strip()!r} is not of the form field=value")
    try:
        return name, _LITERALS[value] if value in _LITERALS else json.loads(value)
    except json.JSONDecodeError:
        if value[:1] in ("[", "{"):
            raise ValueError(
                f"config override {part.strip()!r} is no JSON: write texts in double quotes, as in "
                '\'mixer_types=["linear","softmax"]\''
            ) from None
        return name, value


def new_config(
    model_type: str, overrides: str, tokenizer: PreTrainedTokenizerBase, block_size: int, file: str | None = None
) -> PreTrainedConfig:
    """The config of a new model: sizes of tokenizer and rows, then the file, then the overrides.

    Args:
        model_type: `encoder`, `decoder`, `seq2seq` or a model type of transformers.
        overrides: see `parse_overrides`.
        tokenizer: gives vocabulary and special tokens.
        block_size: tokens per row.
        file: a config.json, whose `model_type` takes precedence.

    Raises:
        ValueError: an unknown type or field (names the closest one), or a value that does not fit.
    """
    values: dict[str, Any] = {"vocab_size": len(tokenizer)}
    values |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    if file is not None:
        given = read_json(Path(file))
        model_type = given.pop("model_type", model_type)
        values = given | values
    name = f"fratrie_{model_type}" if model_type in SIBLINGS else model_type
    if name not in CONFIG_MAPPING:
        raise ValueError(f"model_type {model_type!r} is unknown: use {', '.join(SIBLINGS)} or one of transformers")
    config_class = CONFIG_MAPPING[name]
    values |= parse_overrides(overrides)
    check_counts(f"the config of {model_type}", values)
    if name.startswith("fratrie_") and file is None:
        values.setdefault("max_position_embeddings", max(512, block_size))
    try:
        return config_class(**values)
    except (ValueError, *LOADING_ERRORS) as error:
        place = f"{file} with" if file else f"the config of {model_type} with"
        raise ValueError(f"{place} {overrides or 'no overrides'}: {reason_of(error)}") from error


def build_model(objective: ObjectiveName, config: PreTrainedConfig) -> PreTrainedModel:
    """A new model for the objective.

    Raises:
        ValueError: there is no head for the objective in models of this config, or the model cannot be built.
    """
    auto = _AUTO_MODELS[objective]
    if type(config) not in auto._model_mapping:
        raise ValueError(
            f"a {config.model_type} has no head for {objective}: use the model type {SIBLING_FOR[objective]}"
        )
    try:
        check_memory(partial(auto.from_config, trust_remote_code=False), config)
        return auto.from_config(config, trust_remote_code=False)
    except (ValueError, *LOADING_ERRORS) as error:
        raise ValueError(f"the model {config.model_type} cannot be built: {reason_of(error)}") from error


def open_model(objective: ObjectiveName, folder: str) -> PreTrainedModel:
    """The model of a checkpoint folder, in float32.

    Raises:
        ValueError: it is damaged, or has no head for the objective.
    """
    path = check_checkpoint(folder, tokenizer=False)
    auto = _AUTO_MODELS[objective]
    config = load_config(path)
    try:
        check_memory(partial(auto.from_config, trust_remote_code=False), config)
        model = auto.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (ValueError, *LOADING_ERRORS) as error:
        raise ValueError(f"{folder} cannot be opened for --objective {objective}: {reason_of(error)}") from error
    return model


def check_fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
    """Check that the model has an embedding for each token and each position of the rows.

    Raises:
        ValueError: the tokenizer has more tokens than the model embeddings, or rows are longer than its positions.
    """
    size = cast(Any, model.get_input_embeddings()).num_embeddings
    if size < len(tokenizer):
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model embeddings for {size}")
    limits = [longest for side in ("encoder", "decoder") if (longest := longest_text(model, side))]
    limit = min(limits, default=block_size)
    if block_size > limit:
        raise ValueError(f"block_size={block_size} is more than the {limit} positions of the model")


def _require_words(tokenizer: PreTrainedTokenizerBase) -> None:
    # Hugging Face takes tokens without a gap between them for one word, so spaces must not belong to any.
    offsets = tokenizer("un mot", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if all(start == end for (_, end), (start, _) in pairwise(offsets)):
        raise ValueError(
            "whole_words=True: the spaces are tokens of this tokenizer, or parts of them, so that a text would count "
            "as one word and be masked all or not at all: leave it out, or train a tokenizer of words"
        )


def rows_and_collator(
    objective: ObjectiveName, tokenizer: PreTrainedTokenizerBase, block_size: int, corruption: Corruption
) -> tuple[SentenceRows | PackedRows | PlainRows, Collator]:
    """What makes rows from texts, and batches from rows.

    Args:
        objective: `mlm`, `clm` or `denoise`.
        tokenizer: from `open_tokenizer`.
        block_size: tokens per row.
        corruption: how text is hidden (`mlm`, `denoise`).

    Raises:
        ValueError: an option is out of range, or the tokenizer lacks what the objective needs.
    """
    pad = cast(int, tokenizer.pad_token_id)
    if objective == "clm":
        return PackedRows(tokenizer, block_size), PackedCausalCollator(pad, block_size)
    if objective == "denoise":
        sentinels = sentinel_token_ids(cast(PreTrainedTokenizerFast, tokenizer))
        end = cast(int, tokenizer.eos_token_id)
        collator = SpanCorruptionCollator(sentinels, end, pad, corruption.share, corruption.mean_span_length)
        return PlainRows(tokenizer, block_size), collator
    if not 0 < corruption.share < 1:
        raise ValueError(f"mask_probability={corruption.share} must lie between 0 and 1")
    whole = corruption.whole_words
    if whole:
        _require_words(tokenizer)
    masked, random = (1.0, 0.0) if whole else (0.8, 0.1)
    masking = MaskingCollator(tokenizer, True, whole, corruption.share, masked, random)
    return SentenceRows(tokenizer, block_size, word_offsets=whole), masking
