"""Texts as rows of tokens that a model can read."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fratrie.data.annotation import excerpt, first_of
from fratrie.pipelines.text_length import longest_text

logger = logging.getLogger(__name__)

EncodedRows = list[dict[str, Any]]


def max_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, requested: int | None = None) -> int | None:
    """The most tokens a text may have: what model and tokenizer allow, or less where requested.

    Args:
        model: that will read the text.
        tokenizer: its tokenizer, whose `model_max_length` counts if it is set.
        requested: a smaller limit.

    Returns:
        The number of tokens; `None` for any number.

    Raises:
        ValueError: the request exceeds it.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 10**9 else []
    if longest := longest_text(model):
        limits.append(longest)
    limit = min(limits, default=None)
    if requested is not None and not 1 <= requested <= (limit or requested):
        raise ValueError(f"max_length={requested}: the model takes 1 to {limit} tokens")
    return requested or limit


def encode(
    texts: Sequence[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    targets: NDArray[Any] | None = None,
) -> EncodedRows:
    """Turn texts into rows of model inputs; texts longer than the model are cut.

    How many were cut, and how many tokens are unknown, is logged.

    Args:
        texts: N texts.
        model: the model that will read the rows.
        tokenizer: its tokenizer.
        max_length: tokens at most; the model's own limit when not given.
        targets: what `targets_of` gives; becomes the entry `labels`. Shape: (N,) or (N, L)

    Raises:
        ValueError: a limit beyond the model's, a text without any token, or one the model has no embedding for.
    """
    limit = max_tokens(model, tokenizer, max_length)
    encoded = tokenizer(list(texts), verbose=False)
    names = _input_names(model) & set(encoded)
    rows: EncodedRows = [{name: encoded[name][i] for name in names} for i in range(len(texts))]
    long = [i for i, row in enumerate(rows) if limit and len(row["input_ids"]) > limit]
    if long:
        cut = tokenizer([texts[i] for i in long], truncation=True, max_length=limit)
        for place, i in enumerate(long):
            rows[i] = {name: cut[name][place] for name in names}
        logger.warning("%d of %d texts are longer than %d tokens and were cut", len(long), len(texts), limit)
    _check_ids(texts, rows, model, tokenizer)
    unknown = unknown_token(tokenizer)
    tell_unknown(sum(row["input_ids"].count(unknown) for row in rows), sum(len(row["input_ids"]) for row in rows))
    if targets is not None:
        for row, target in zip(rows, targets.tolist(), strict=True):
            row["labels"] = target
    return rows


def unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id for what the vocabulary lacks; `None` without one, or where it means something else too, as in GPT-2."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return None if unknown in others else unknown


def tell_unknown(number: int, total: int, texts: str = "texts") -> None:
    """Warn of unknown tokens, of which a model learns nothing but that something stood there."""
    if number:
        logger.warning(
            "%d of %d tokens of the %s are unknown; a byte-level tokenizer, or a unigram one with byte_fallback, "
            "knows every text",
            number,
            total,
            texts,
        )


def _input_names(model: PreTrainedModel) -> set[str]:
    """What the model's forward takes by name; where a subclass only passes arguments on, that of the class below."""
    forwards = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
    names = (set(inspect.signature(forward).parameters) for forward in forwards)
    return next(found for found in names if "input_ids" in found)


def _check_ids(
    texts: Sequence[str], rows: EncodedRows, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    empty = [excerpt(text, 40) for text, row in zip(texts, rows, strict=True) if not row["input_ids"]]
    if empty:
        raise ValueError(
            f"the text {', '.join(first_of(empty))} has no token at all, since the tokenizer puts none around a text: "
            "leave it out"
        )
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    highest = max([*(max(row["input_ids"]) for row in rows), cast(int, tokenizer.pad_token_id)])
    if highest >= size:
        raise ValueError(
            f"the tokenizer gives the token {highest}, but the model has embeddings for {size}: "
            "they do not belong together"
        )
