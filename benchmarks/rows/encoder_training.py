"""A step of training an encoder to classify sentences of mixed length: BERT beside ours."""

from collections.abc import Sequence

import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.timing import Row
from benchmarks.training_steps import Case, Documents, compare, drawn_and_grouped, padded
from fratrie.conversion import from_hf

SENTENCES, FEWER = Documents(count=128, batch_size=32), Documents(count=64, batch_size=32)
CASES = (
    Case(6, 256, 8000, torch.float32, SENTENCES, goal=2.5),
    Case(6, 256, 8000, torch.bfloat16, SENTENCES, goal=3.5),
    Case(2, 768, 8000, torch.float32, FEWER, goal=3.3),
    Case(2, 768, 8000, torch.bfloat16, FEWER, goal=5.0),
)


def measure(rounds: int, cases: Sequence[Case] = CASES) -> list[Row]:
    """Two rows a case: random batches, and batches grouped by length."""
    return [row for case in cases for row in _compare(case, rounds)]


def _compare(case: Case, rounds: int) -> list[Row]:
    config = BertConfig(**case.sizes(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    theirs = BertForSequenceClassification(config)
    rows = [{"input_ids": ids, "labels": torch.randint(2, ())} for ids in case.documents.draw(case.vocabulary)]
    ways = drawn_and_grouped(rows, case.documents.batch_size)
    batches = {way: [padded(rows) for rows in batches] for way, batches in ways.items()}
    return compare(case, theirs, from_hf(theirs), batches, batches, rounds)
