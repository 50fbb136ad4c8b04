"""Which words speak for a label: integrated gradients (Sundararajan et al. 2017) over the embeddings, by captum.

Shapes: N sentences, L labels, T tokens of a sentence, D hidden.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fratrie.training.baselines import Sentences
from fratrie.training.encoding import encode
from fratrie.training.metrics import SINGLE_LABEL
from fratrie.training.tasks import Task

from .packages import check_package

# «beau-père», «l’», or what stands between words.
_WORD = re.compile(r"\w+(?:-\w+)*['’]?|[^\w\s]+")
# Tokens of a pass, over all steps that it holds: more take memory, and are no faster.
_TOKENS_PER_PASS = 1024


def words_for_labels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sentences,
    task: Task,
    probabilities_NL: NDArray[np.float64],
    predictions_NL: NDArray[np.int64],
    per_label: int = 3,
    steps: int = 32,
) -> dict[str, list[dict[str, Any]]]:
    """Explain a few sentences of each label that carry it and are given it.

    Args:
        model: a classifier.
        tokenizer: its tokenizer, a fast one.
        sentences: of the test part.
        task: of the classifier.
        probabilities_NL: of each label.
        predictions_NL: indicators of what was decided.
        per_label: sentences, the most probable ones of different respondents; fewer where there are fewer.
        steps: of the integral, see `word_attributions`.

    Returns:
        For each label `text`, `probability` and `pieces`: words with their share of the log-odds, in the order of the
        text, which they make up again when joined.

    Raises:
        ValueError: captum is not installed, or a tokenizer that does not say where its tokens lie.
    """
    right_NL = (predictions_NL == 1) & (sentences.labels == 1)
    explained: dict[str, list[dict[str, Any]]] = {}
    for index, label in enumerate(task.labels):
        rows = _most_probable(probabilities_NL[:, index], right_NL[:, index], sentences, per_label)
        explained[label] = [
            {
                "text": sentences.texts[row],
                "probability": float(probabilities_NL[row, index]),
                "pieces": word_attributions(model, tokenizer, sentences.texts[row], task, index, steps),
            }
            for row in rows
        ]
    return explained


def _most_probable(
    probabilities_N: NDArray[np.float64], allowed_N: NDArray[np.bool_], sentences: Sentences, most: int
) -> list[int]:
    """Rows of the most probable sentences, the first of each respondent, or of each text where they are not known."""
    speakers = sentences.texts if sentences.groups is None else sentences.groups
    rows: dict[Any, int] = {}
    for row in np.argsort(-probabilities_N, kind="stable"):
        if allowed_N[row]:
            rows.setdefault(speakers[row], int(row))
    return list(rows.values())[:most]


def word_attributions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    task: Task,
    label: int,
    steps: int = 32,
) -> list[list[Any]]:
    """Share out the log-odds of a label among the words of a text.

    The shares add up to the log-odds of the text less those of the same text with all of its tokens masked, up to the
    error of the integral. With several labels per text the log-odds of a label are its logit.

    Args:
        model: a classifier, which is put into evaluation mode.
        tokenizer: its tokenizer, a fast one.
        text: cut where the model's positions end.
        task: of the classifier.
        label: index of the label.
        steps: at which the gradient is taken between the masked text and the text (Gauss-Legendre).

    Returns:
        Words, with the space behind them, and their shares; joined they are the text. What was cut off has 0.

    Raises:
        ValueError: captum is not installed, or a tokenizer that does not say where its tokens lie.
    """
    check_package("captum", "the search for words that speak for a label")
    from captum.attr import LayerIntegratedGradients

    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say where in a text its tokens lie: use a fast one")
    (row,) = encode([text], model, tokenizer)
    length = len(row["input_ids"])
    places = tokenizer(
        text, truncation=True, max_length=length, return_offsets_mapping=True, return_special_tokens_mask=True
    )
    inputs = {name: torch.tensor([values], device=model.device) for name, values in row.items()}
    ids_1T, others = inputs.pop("input_ids"), inputs
    special_T = torch.tensor(places["special_tokens_mask"], device=model.device).bool()
    nothing = tokenizer.pad_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    baseline_1T = torch.where(special_T, ids_1T, cast(int, nothing))

    def log_odds(ids: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        logits = model(ids, **dict(zip(others, values, strict=True))).logits.float()
        if task.problem_type != SINGLE_LABEL:
            return logits[:, label]
        rest = torch.cat([logits[:, :label], logits[:, label + 1 :]], dim=1)
        return logits[:, label] - rest.logsumexp(1)

    model.eval()
    method = LayerIntegratedGradients(log_odds, cast(nn.Module, model.get_input_embeddings()))
    shares_1TD = method.attribute(
        ids_1T,
        baseline_1T,
        additional_forward_args=tuple(others.values()),
        n_steps=steps,
        internal_batch_size=max(1, _TOKENS_PER_PASS // length),
    )
    return _by_word(text, places["offset_mapping"], shares_1TD.detach().float().sum(-1)[0].tolist())


def _by_word(text: str, spans: Sequence[tuple[int, int]], shares: Sequence[float]) -> list[list[Any]]:
    """Add up the shares of each word's tokens; words that one token spans stay together.

    Args:
        text: the text.
        spans: where each token begins and ends in it.
        shares: of the tokens; 0 for special ones, which have no place.

    Returns:
        Pieces, which joined are the text, with their shares.
    """
    # A token may begin with the space before its word, or be nothing but this space.
    starts = [end - len(text[start:end].lstrip()) for start, end in spans]
    inside = {place for start, (_, end) in zip(starts, spans, strict=True) for place in range(start + 1, end)}
    words = [word.start() for word in _WORD.finditer(text) if word.start() not in inside]
    bounds = [0, *words[1:], len(text)]
    sums = np.zeros(len(bounds) - 1)
    np.add.at(sums, np.searchsorted(bounds[1:-1], starts, side="right"), shares)
    return [[text[start:end], share] for (start, end), share in zip(pairwise(bounds), sums.tolist(), strict=True)]
