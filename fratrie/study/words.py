"""Which words speak for a label: integrated gradients (Sundararajan et al. 2017) over the embeddings, by captum.

Shapes: N sentences, L labels, T tokens of a sentence, D hidden.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
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

Progress = Callable[[float, float], None]
Step = Callable[[str, Callable[[], Any]], Any]

# «beau-père», «l’», or what stands between words.
_WORD = re.compile(r"\w+(?:-\w+)*['’]?|[^\w\s]+")
# Steps of the integral in a part of the way, parts at most, and the share of the whole that may be missing in all.
_STEPS, _MOST_PARTS, _TOLERANCE = 8, 8, 0.1
# Tokens of a pass, all steps together: a bound on its memory that only long texts reach.
_TOKENS_PER_PASS = 1024


def words_for_labels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sentences,
    task: Task,
    probabilities_NL: NDArray[np.float64],
    predictions_NL: NDArray[np.int64],
    per_label: int = 3,
    step: Step = lambda name, find: find(),
    progress: Progress | None = None,
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
        step: gives what is known of a sentence under a name, or finds it; JSON can hold what is found.
        progress: told the sentences explained and all of them.

    Returns:
        For each label `text`, `probability` and `pieces`: words with their share of the log-odds, in the order of the
        text, which they make up again when joined.

    Raises:
        ValueError: captum is not installed, or a tokenizer that does not say where its tokens lie.
    """
    right_NL = (predictions_NL == 1) & (sentences.labels == 1)
    rows_of = [
        _most_probable(probabilities_NL[:, index], right_NL[:, index], sentences, per_label)
        for index in range(len(task.labels))
    ]
    total, done = sum(map(len, rows_of)), count(1)
    explained: dict[str, list[dict[str, Any]]] = {label: [] for label in task.labels}
    for index, (label, rows) in enumerate(zip(task.labels, rows_of, strict=True)):
        for row in rows:
            text = sentences.texts[row]
            find = partial(word_attributions, model, tokenizer, text, task, index)
            pieces = step(f"{index}_{row}", find)
            explained[label].append(
                {"text": text, "probability": float(probabilities_NL[row, index]), "pieces": pieces}
            )
            if progress:
                progress(next(done), total)
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, task: Task, label: int
) -> list[list[Any]]:
    """Share out the log-odds of a label among the words of a text.

    The shares add up to the log-odds of the text less those of the same text with all of its tokens masked, to 10 %
    (or 0.1, where there is less to share out) or as near as eight parts of the way bring them, a matter of seconds.
    With several labels per text the log-odds of a label are its logit.

    Args:
        model: a classifier, which is put into evaluation mode.
        tokenizer: its tokenizer, a fast one.
        text: cut where the model's positions end.
        task: of the classifier.
        label: index of the label.

    Returns:
        Words, with the space behind them, and their shares; joined they are the text. What was cut off has 0.

    Raises:
        ValueError: captum is not installed, or a tokenizer that does not say where its tokens lie.
    """
    check_package("captum", "the search for words that speak for a label")
    check_tokenizer(tokenizer)
    from captum.attr import IntegratedGradients

    (row,) = encode([text], model, tokenizer)
    places = tokenizer(
        text,
        truncation=True,
        max_length=len(row["input_ids"]),
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    inputs = {name: torch.tensor([values], device=model.device) for name, values in row.items()}
    ids_1T = inputs.pop("input_ids")
    special_T = torch.tensor(places["special_tokens_mask"], device=model.device).bool()
    nothing = tokenizer.pad_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    embed = cast(nn.Module, model.get_input_embeddings())

    def log_odds(embeddings_BTD: torch.Tensor) -> torch.Tensor:
        repeated = {name: values.expand(len(embeddings_BTD), -1) for name, values in inputs.items()}
        logits_BL = model(inputs_embeds=embeddings_BTD, **repeated).logits.float()
        if task.problem_type != SINGLE_LABEL:
            return logits_BL[:, label]
        others_BL = torch.cat([logits_BL[:, :label], logits_BL[:, label + 1 :]], dim=1)
        return logits_BL[:, label] - others_BL.logsumexp(1)

    model.eval()
    with torch.no_grad():
        masked_1TD, read_1TD = embed(torch.where(special_T, ids_1T, cast(int, nothing))), embed(ids_1T)
        difference = float(log_odds(read_1TD) - log_odds(masked_1TD))
    tolerance = _TOLERANCE * max(1, abs(difference))
    with _frozen(model):
        shares_1TD = _integrate(IntegratedGradients(log_odds), masked_1TD, read_1TD, tolerance)
    return _by_word(text, places["offset_mapping"], shares_1TD.float().sum(-1)[0].tolist())


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that words can be found from tokens.

    Raises:
        ValueError: a tokenizer that does not say where its tokens lie.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say where in a text its tokens lie: use a fast one")


def _integrate(method: Any, start: torch.Tensor, end: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Integrate gradients from `start` to `end`, both of shape `(1, T, D)`, with finer steps where they need them.

    Between a masked text and the text a classifier changes its mind at once: 64 even steps missed up to three
    log-odds. The part of the way whose shares add up worst is halved until they do; captum's
    `LayerIntegratedGradients` could not begin in the middle.
    """
    rows = max(2, _TOKENS_PER_PASS // start.shape[1])

    def parts_between(points: list[torch.Tensor]) -> list[_Part]:
        starts, ends = torch.cat(points[:-1]), torch.cat(points[1:])
        shares, errors = method.attribute(
            ends, starts, n_steps=_STEPS, internal_batch_size=rows, return_convergence_delta=True
        )
        return [
            _Part(float(error.abs()), first, last, own[None])
            for error, (first, last), own in zip(errors, pairwise(points), shares.detach(), strict=True)
        ]

    parts = parts_between([start, end])
    while sum(part.error for part in parts) > tolerance and len(parts) < _MOST_PARTS:
        worst = max(parts, key=lambda part: part.error)
        parts.remove(worst)
        parts += parts_between([worst.first, (worst.first + worst.last) / 2, worst.last])
    return torch.stack([part.shares for part in parts]).sum(0)


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of the way: how far its shares miss the difference between its ends, of shape `(1, T, D)` as they are."""

    error: float
    first: torch.Tensor
    last: torch.Tensor
    shares: torch.Tensor


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Without the gradients of weights, which would be a third of the work."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


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
