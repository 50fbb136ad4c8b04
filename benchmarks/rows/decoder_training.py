"""A step of training a decoder on documents of mixed length: Llama beside ours, which reads them flattened."""

from collections.abc import Sequence

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from benchmarks.timing import Row
from benchmarks.training_steps import Case, Documents, compare, drawn_and_grouped, padded
from fratrie.conversion import from_hf

SENTENCES = Documents(count=128, batch_size=32)
DOCUMENTS = Documents(count=16, batch_size=8, log_mean=4.6, log_deviation=0.8, longest=512)
CASES = (
    Case(4, 256, 8000, torch.float32, SENTENCES, goal=3.5),
    Case(4, 256, 8000, torch.float32, DOCUMENTS, goal=3.5),
    Case(4, 256, 8000, torch.bfloat16, DOCUMENTS, goal=5.0),
)


def measure(rounds: int, cases: Sequence[Case] = CASES) -> list[Row]:
    """One row a case."""
    return [row for case in cases for row in _compare(case, rounds)]


def _compare(case: Case, rounds: int) -> list[Row]:
    theirs = LlamaForCausalLM(LlamaConfig(**case.sizes(), use_cache=False))
    rows = [{"input_ids": ids, "labels": ids} for ids in case.documents.draw(case.vocabulary)]
    ways = drawn_and_grouped(rows, case.documents.batch_size)
    batches = {way: [padded(rows) for rows in batches] for way, batches in ways.items()}
    flattened = {"flattened": [DataCollatorWithFlattening()(rows) for rows in ways["random batches"]]}
    return compare(case, theirs, from_hf(theirs), batches | flattened, flattened, rounds)
