"""Collators of the three pretraining objectives. They draw from torch's global generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling

from fratrie.modeling.losses import IGNORED


@dataclass
class MaskingCollator(DataCollatorForLanguageModeling):
    """Hugging Face's masking, whose whole-word option also takes rows of different lengths."""

    def torch_call(self, examples: list[Any]) -> dict[str, Tensor]:
        """Mask the rows: `input_ids`, `attention_mask` and `labels`, each (B, T)."""
        length = max(len(row["input_ids"]) for row in examples)
        for place, row in enumerate(examples):
            if (offsets := row.get("offset_mapping")) is not None:
                filled = [*offsets, *[[0, 0]] * (length - len(offsets))]
                examples[place] = {**row, "offset_mapping": filled}
        return super().torch_call(examples)


@dataclass
class PackedCausalCollator:
    """Rows of packed documents for a decoder, padded to `block_size`.

    No attention mask: `position_ids` that start again separate the documents, and the padding counts as one of them.
    """

    pad_token_id: int
    block_size: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`input_ids`, `position_ids` and `labels`, each (B, block_size).

        The first token of a document has no label, as nothing may predict it.
        """
        shape = len(rows), self.block_size
        ids = torch.full(shape, self.pad_token_id)
        positions = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        for place, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[place, :length] = torch.as_tensor(row["input_ids"])
            positions[place, :length] = torch.as_tensor(row["position_ids"])
            positions[place, length:] = torch.arange(self.block_size - length)
            labels[place, :length] = ids[place, :length].masked_fill(positions[place, :length] == 0, IGNORED)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}


@dataclass
class SpanCorruptionCollator:
    """The denoising of T5 (Raffel et al. 2020): a sentinel replaces each hidden span, which is to be predicted.

    The input holds the visible text with sentinel i for hidden span i; the target holds sentinel i before span i,
    then one more sentinel; both end with the end token. Unlike in the paper's code a row need not begin with
    visible text and end with a hidden span, which would hide nothing but the end of every short sentence.

    Args:
        sentinel_ids: ids of `<extra_id_0>`, `<extra_id_1>`, …; they limit the spans of a row.
        eos_token_id, pad_token_id: special tokens.
        noise_density: share of the tokens to hide.
        mean_span_length: mean length of a hidden span.

    Raises:
        ValueError: fewer than two sentinels, or a share or length out of range.
    """

    sentinel_ids: list[int]
    eos_token_id: int
    pad_token_id: int
    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def __post_init__(self) -> None:
        if len(self.sentinel_ids) < 2:
            raise ValueError(
                f"the tokenizer has {len(self.sentinel_ids)} sentinels <extra_id_0>, …, but denoising needs two "
                "or more: train it for seq2seq, or with more sentinels"
            )
        if not 0 < self.noise_density < 1:
            raise ValueError(f"noise_density={self.noise_density} must lie between 0 and 1")
        if not self.mean_span_length >= 1:
            raise ValueError(f"mean_span_length={self.mean_span_length} must be at least 1")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Corrupt the rows: `input_ids` and `attention_mask` (B, T), `labels` (B, S)."""
        pairs = [self.corrupt(list(row["input_ids"])) for row in rows]
        inputs = [torch.tensor(source) for source, _ in pairs]
        targets = [torch.tensor(target) for _, target in pairs]
        return {
            "input_ids": pad_sequence(inputs, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in inputs], batch_first=True),
            "labels": pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        }

    def corrupt(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Input and target of one row of at least one token."""
        source: list[int] = []
        target: list[int] = []
        place = 0
        spans = self._spans(len(ids))
        for sentinel, (kept, hidden) in zip(self.sentinel_ids, spans, strict=False):
            start, place = place + kept, place + kept + hidden
            source += [*ids[start - kept : start], sentinel]
            target += [sentinel, *ids[start:place]]
        closing = self.sentinel_ids[len(spans)]
        return [*source, *ids[place:], self.eos_token_id], [*target, closing, self.eos_token_id]

    def _spans(self, length: int) -> list[tuple[int, int]]:
        """Length of each hidden span and of the visible text before it."""
        hidden = min(max(round(length * self.noise_density), 1), max(length - 1, 1))
        kept = length - hidden
        most = min(hidden, max(kept, 1), len(self.sentinel_ids) - 1)
        number = min(max(round(hidden / self.mean_span_length), 1), most)
        first, *between, _ = _random_parts(kept + 2, number + 1)  # the outer parts may be empty: one off each
        return list(zip([first - 1, *between], _random_parts(hidden, number), strict=True))


def _random_parts(total: int, number: int) -> list[int]:
    """`number` positive lengths that sum to `total`, every such list equally likely."""
    cuts = (torch.randperm(total - 1)[: number - 1].sort().values + 1).tolist()
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
