"""A step of masked language modelling on sentences of mixed length: BERT beside ours."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from benchmarks.timing import Row
from benchmarks.training_steps import Case, Documents, compare, drawn_and_grouped, padded
from fratrie.conversion import from_hf
from fratrie.modeling.losses import IGNORED

SENTENCES, FEWER = Documents(count=128, batch_size=32), Documents(count=64, batch_size=32)
CASES = (
    Case(6, 256, 8000, torch.float32, SENTENCES, goal=4.0),
    Case(6, 256, 32_000, torch.bfloat16, FEWER, goal=7.0),
    Case(2, 768, 32_000, torch.float32, FEWER, goal=7.0),
)
SHARE = 0.15  # of the tokens is to be predicted


def measure(rounds: int, cases: Sequence[Case] = CASES) -> list[Row]:
    """Two rows a case: random batches, and batches grouped by length."""
    return [row for case in cases for row in _compare(case, rounds)]


def _compare(case: Case, rounds: int) -> list[Row]:
    config = BertConfig(**case.sizes(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    theirs = BertForMaskedLM(config)
    ours = from_hf(theirs)
    ours.config.sparse_prediction = True  # as `scripts/pretrain.py` sets it
    rows = [{"input_ids": ids, "labels": _targets(ids)} for ids in case.documents.draw(case.vocabulary)]
    ways = drawn_and_grouped(rows, case.documents.batch_size)
    batches = {way: [padded(rows) for rows in batches] for way, batches in ways.items()}
    return compare(case, theirs, ours, batches, batches, rounds)


def _targets(ids: Tensor) -> Tensor:
    return ids.masked_fill(torch.rand(ids.shape) >= SHARE, IGNORED)
