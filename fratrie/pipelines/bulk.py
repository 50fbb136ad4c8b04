"""Many texts through a pipeline: tokens in bulk, batches of like length under a budget of tokens, results in order.

A file that travels with the code of the pipelines.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.pipelines.base import ChunkPipeline, Pipeline, pad_collate_fn

WINDOW = 2048
"""Inputs of known number that are sorted together."""

TOKENS_PER_BATCH = 4096
"""Enough to keep the matrix products of a small model busy; more only costs memory."""

TOKENS_PER_BATCH_ON_CPU = 2048
"""The same for a processor: what a layer makes of more leaves its cache."""

Row = dict[str, Any]


class BulkPipeline(Pipeline):
    """A pipeline over texts that forms its own batches; Hugging Face's tasks and ours derive from it.

    Inputs are read in windows, `WINDOW` of them where their number is known, else `batch_size`, so that a live
    generator is never asked for more than the caller allows. A window is tokenised at once and passed through the
    model in batches of like length. Each input gets what it gets alone, in the order of the inputs; a mistake in one
    is raised after the results before it (one that a dataset raises, with its window). Where padding may change a
    result (models of others, or a tokenizer without a padding token), Hugging Face's own iterator runs.
    """

    model: Any
    tokenizer: Any

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        """The results of many inputs, lazily; `Pipeline.__call__` asks for them."""
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r} must be a positive integer.")
        params = (preprocess_params, forward_params, postprocess_params)
        if not self._pads_exactly():
            return super().get_iterator(inputs, num_workers, batch_size, *params)
        return BulkResults(self, inputs, num_workers, batch_size, params)

    def _pads_exactly(self) -> bool:
        # Models that say whether they take padding out give a row the same result in a batch and alone.
        config, padding = self.model.config, getattr(self.tokenizer, "pad_token_id", None)
        ours = hasattr(config, "unpad_inputs") and getattr(config, "return_dict", True)
        return ours and padding is not None and padding < config.vocab_size

    def preprocess_in_bulk(self, inputs: Sequence[Any], **params: Any) -> list[Row] | None:
        """What `preprocess` gives for each of the inputs, at once; `None` where they are to be taken one by one."""
        return None

    def tokenize(self, columns: Mapping[str, Sequence[str]], **params: Any) -> list[Row] | None:
        """Tokens `(1, T)` of each text as by a call of its own; `None` where only such calls give that.

        Args:
            columns: the tokenizer's `text`, perhaps `text_pair`.
            params: for the tokenizer.
        """
        if not self.tokenizer.is_fast or not all(
            isinstance(text, str) for texts in columns.values() for text in texts
        ):
            return None
        encoding = self.tokenizer(**columns, **params)
        rows = zip(*encoding.values(), strict=True)
        return [dict(zip(encoding, (torch.tensor([values]) for values in row), strict=True)) for row in rows]

    def run_window(
        self, inputs: Sequence[Any], preprocess: dict[str, Any], forward: dict[str, Any], postprocess: dict[str, Any]
    ) -> Iterator[Any]:
        """The results of some inputs in their order; a batch is run when the first of its results is asked for."""
        prepared, mistake = self._prepare(inputs, preprocess)
        rows = [row for chunks in prepared for row in chunks]
        most = TOKENS_PER_BATCH_ON_CPU if self.device.type == "cpu" else TOKENS_PER_BATCH
        batches = {place: batch for batch in plan_rows(rows, most) for place in batch}
        outputs: dict[int, Any] = {}
        places = iter(range(len(rows)))
        for chunks in prepared:
            own = list(islice(places, len(chunks)))
            for place in own:
                if place not in outputs:
                    outputs |= self._run_rows(rows, batches, place, forward)
            results = [outputs.pop(place) for place in own]
            of_input: Any = results if isinstance(self, ChunkPipeline) else results[0]
            yield self.postprocess(of_input, **postprocess)
        if mistake is not None:
            raise mistake

    def _run_rows(
        self, rows: list[Row], batches: dict[int, list[int]], place: int, forward: dict[str, Any]
    ) -> dict[int, Any]:
        """What `forward` gives for a row, and for those that go with it."""
        batch = batches[place]
        try:
            return dict(zip(batch, self._run_batch([rows[one] for one in batch], forward), strict=True))
        except Exception:
            if len(batch) == 1:
                raise
            batches |= {one: [one] for one in batch}  # the input at fault is found alone
            return self._run_rows(rows, batches, place, forward)

    def _prepare(self, inputs: Sequence[Any], params: dict[str, Any]) -> tuple[list[list[Row]], Exception | None]:
        """The rows of each input, up to the first with a mistake."""
        try:
            rows = self.preprocess_in_bulk(inputs, **params) if self._bulk_is_newest() else None
        except Exception:  # one by one, the input at fault is found
            rows = None
        if rows is not None:
            return [[row] for row in rows], None
        prepared: list[list[Row]] = []
        try:
            for one in inputs:
                made: Any = self.preprocess(one, **params)
                prepared.append(list(made) if isinstance(self, ChunkPipeline) else [made])
        except Exception as mistake:
            return prepared, mistake
        return prepared, None

    def _bulk_is_newest(self) -> bool:
        """Whether `preprocess_in_bulk` knows of `preprocess`, which a subclass may have of its own."""
        methods = {"preprocess", "preprocess_in_bulk"}
        newest = next(vars(base).keys() for base in type(self).__mro__ if methods & vars(base).keys())
        return "preprocess_in_bulk" in newest

    def _run_batch(self, rows: list[Row], params: dict[str, Any]) -> list[Any]:
        """What `forward` gives for each row."""
        if len(rows) == 1:
            return [self.forward(rows[0], **params)]
        batch = pad_collate_fn(self.tokenizer, None)(rows)
        names, length = set(batch), batch["input_ids"].shape[1]
        tokens = [_tokens(row) for row in rows]
        if self.tokenizer.padding_side == "left":
            spans = [slice(length - own, length) for own in tokens]
        else:
            spans = [slice(own) for own in tokens]
        outputs = self.forward(batch, **params)
        # The states of all layers, in a tuple, are read by no task.
        kept = {name: value for name, value in outputs.items() if not isinstance(value, tuple)}
        of_tokens = {name for name, value in kept.items() if name in names or _is_per_token(value, length)}

        def part(name: str, place: int) -> Any:
            value = kept[name]
            if not _has_rows(value, len(rows)):
                return value
            if not isinstance(value, torch.Tensor):
                return value[place]
            row = value[place : place + 1]
            return row[:, spans[place]] if name in of_tokens else row

        return [type(outputs)(**{name: part(name, place) for name in kept}) for place in range(len(rows))]


def _tokens(row: Row) -> int:
    return row["input_ids"].shape[1]


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, list | torch.Tensor) and getattr(value, "ndim", 1) > 0 and len(value) == rows


def _is_per_token(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[1] == length


class BulkResults(IterableDataset):
    """The results of many inputs, in their order, computed as they are asked for."""

    def __init__(
        self, pipeline: BulkPipeline, inputs: Any, num_workers: int, batch_size: int, params: tuple[dict, dict, dict]
    ) -> None:
        self.inputs = inputs
        self.pipeline = pipeline
        self.num_workers = num_workers
        self.batch_size = batch_size
        self.params = params

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[Any]:
        for window in self._windows():
            yield from self.pipeline.run_window(window, *self.params)

    def _windows(self) -> Iterable[list[Any]]:
        if isinstance(self.inputs, Sized):
            inputs: Any = self.inputs
            return DataLoader(inputs, WINDOW, num_workers=self.num_workers, collate_fn=list)
        source = iter(self.inputs)
        return iter(lambda: list(islice(source, self.batch_size)), [])


def plan_rows(rows: Sequence[Row], max_tokens: int) -> Iterator[list[int]]:
    """Which rows to pass together: those with the same entries, and without a mask those that need no padding.

    What is several rows already goes alone.
    """
    groups = defaultdict(list)
    for place, row in enumerate(rows):
        names, alone = frozenset(row), place if len(row["input_ids"]) > 1 else None
        groups[names, alone, None if "attention_mask" in names else _tokens(row)].append(place)
    for places in groups.values():
        for batch in plan_batches([_tokens(rows[place]) for place in places], max_tokens=max_tokens):
            yield [places[one] for one in batch]


def plan_batches(
    lengths: Sequence[int], max_rows: int | None = None, max_tokens: int = TOKENS_PER_BATCH
) -> list[list[int]]:
    """Batches of like length, from the shortest on.

    A longer text, and each text without tokens, is a batch of its own.

    Args:
        lengths: tokens of each row.
        max_rows: of a batch.
        max_tokens: of a batch, with padding.

    Returns:
        Places in `lengths`, each once.
    """
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        rows = len(batches[-1]) + 1 if batches else 0
        fits = lengths[place] * rows <= max_tokens and (max_rows is None or rows <= max_rows)
        if batches and fits and lengths[batches[-1][0]]:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
