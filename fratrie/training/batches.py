"""Micro-batches in an order and with a randomness that depend on the seed and the position only.

Every micro-batch of a run has a number. Data order comes from the seed and the epoch, masks and dropout come
from the seed and the number: so a resumed run needs no generator state, evaluation disturbs nothing, and one
process with two micro-batches per step draws the same numbers as two processes with one each.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .stopping import leave_signals_to_the_main_process

Collator = Callable[[list[dict[str, Any]]], dict[str, Tensor]]


@dataclass(frozen=True)
class MicroBatch:
    """What one process computes at a time.

    `filler` marks a batch that only keeps this process in step with the others: its loss does not count.
    `last` marks the last one of an optimizer step.
    """

    number: int
    inputs: dict[str, Tensor]
    filler: bool
    last: bool


@dataclass(frozen=True)
class StepShape:
    """How the rows of an optimizer step spread over processes and micro-batches."""

    micro_batch_size: int
    rounds: int
    process_index: int = 0
    num_processes: int = 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all processes."""
        return self.rounds * self.num_processes

    @property
    def rows(self) -> int:
        """Rows of a step over all processes."""
        return self.micro_batches * self.micro_batch_size


def seed_all(seed: int, purpose: str, number: int) -> None:
    """Set Python's, numpy's and torch's global generators (of all devices) by `seed_for`."""
    value = seed_for(seed, purpose, number)
    random.seed(value)
    np.random.seed(value)
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:  # for devices that are not there, it would note the whole call stack each time
        torch.default_generator.manual_seed(value)


def seed_for(seed: int, purpose: str, number: int) -> int:
    """A 32-bit seed for the `number`-th use of randomness for `purpose` in a run seeded by `seed`."""
    digest = hashlib.blake2b(f"{seed} {purpose} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class _Request:
    number: int
    indices: list[int]
    filler: bool
    last: bool


class _RequestedRows(Dataset):
    """Collates what a request asks for, so that the number of a micro-batch reaches DataLoader workers."""

    def __init__(self, rows: Dataset, collator: Collator, seed: int) -> None:
        self.rows, self.collator, self.seed = rows, collator, seed

    def __getitem__(self, request: _Request) -> MicroBatch:
        seed_all(self.seed, "collate", request.number)
        inputs = self.collator([self.rows[index] for index in request.indices])
        return MicroBatch(request.number, inputs, request.filler, request.last)


class EpochBatches:
    """The steps of a dataset that can be indexed: shuffled anew in every epoch, no row dropped or repeated.

    The last step of an epoch is smaller where rows are left over; processes without rows get a filler.

    Raises:
        ValueError: the dataset has no rows.
    """

    def __init__(
        self, dataset: Dataset, collator: Collator, shape: StepShape, seed: int, num_workers: int = 0
    ) -> None:
        self.dataset, self.collator, self.shape = dataset, collator, shape
        self.seed, self.num_workers = seed, num_workers
        self.size = len(cast(Any, dataset))
        if self.size == 0:
            raise ValueError("the training data has no rows; give files that hold text")
        self.steps_per_epoch = -(-self.size // shape.rows)

    def steps(self, start: int) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches of step `start`, `start + 1`, … without end."""
        loader = DataLoader(
            _RequestedRows(self.dataset, self.collator, self.seed),
            sampler=cast(Any, self._requests(start)),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_the_main_process,
        )
        step: list[MicroBatch] = []
        for micro_batch in loader:
            step.append(micro_batch)
            if micro_batch.last:
                yield step
                step = []

    def state(self) -> None:
        """Nothing: the number of the step says where the data stand."""

    def _requests(self, start: int) -> Iterator[_Request]:
        first_epoch, first_step = divmod(start, self.steps_per_epoch)
        for epoch in itertools.count(first_epoch):
            generator = torch.Generator().manual_seed(seed_for(self.seed, "order", epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
            for step in range(first_step if epoch == first_epoch else 0, self.steps_per_epoch):
                rows = order[step * self.shape.rows : (step + 1) * self.shape.rows]
                yield from self._step_requests(epoch * self.steps_per_epoch + step, rows)

    def _step_requests(self, step: int, rows: list[int]) -> Iterator[_Request]:
        shape, size = self.shape, self.shape.micro_batch_size
        rounds = -(-len(rows) // (size * shape.num_processes))
        for turn in range(rounds):
            place = turn * shape.num_processes + shape.process_index
            piece = rows[place * size : (place + 1) * size]
            number = step * shape.micro_batches + place
            yield _Request(number, piece or rows[:1], filler=not piece, last=turn == rounds - 1)


def _unchanged(item: Any) -> Any:
    return item


class StreamBatches:
    """The steps of a `datasets.IterableDataset`: micro-batches in the order of the stream, dealt out to processes.

    Every process reads the whole stream and leaves out the others' micro-batches, so that two processes compute what
    one does; where tokenizing on the fly is slow, give more `num_workers`, each of which reads files (shards) of its
    own. A pass ends with the last full step. A stream resumes exactly unless it has a shuffle buffer, which `datasets`
    fills anew.
    """

    steps_per_epoch = None

    def __init__(
        self,
        dataset: datasets.IterableDataset,
        collator: Collator,
        shape: StepShape,
        seed: int,
        num_workers: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.dataset, self.collator, self.shape = dataset, collator, shape
        self.seed, self.num_workers = seed, num_workers
        self.epoch = state["epoch"] if state else 0
        self.loader = self._open_pass()
        if state:
            self.loader.load_state_dict(state["loader"])

    def steps(self, start: int) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches of step `start`, `start + 1`, … without end.

        Raises:
            ValueError: a whole pass does not fill one step.
        """
        step, empty_passes = start, 0
        while empty_passes < 2:  # a resumed run may begin at the very end of a pass
            first, rows = step, iter(self.loader)
            while self._is_full(batches := list(itertools.islice(rows, self.shape.micro_batches))):
                own = range(self.shape.process_index, len(batches), self.shape.num_processes)
                yield [self._collate(step, place, batches[place], last=place == own[-1]) for place in own]
                step += 1
            empty_passes = empty_passes + 1 if step == first else 0
            self.epoch += 1
            self.loader = self._open_pass()
        raise ValueError(
            f"the stream holds fewer rows than the {self.shape.rows} of one step; "
            "give more text, smaller batches or fewer accumulation steps"
        )

    def state(self) -> dict[str, Any]:
        """The place in the stream after the last step that was taken, as JSON can hold it."""
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def _open_pass(self) -> StatefulDataLoader:
        self.dataset.set_epoch(self.epoch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital'")  # torchdata 0.11 with a newer torch
            return StatefulDataLoader(
                self.dataset,
                self.shape.micro_batch_size,
                collate_fn=_unchanged,
                num_workers=self.num_workers,
                worker_init_fn=leave_signals_to_the_main_process,
            )

    def _is_full(self, batches: list[list[dict[str, Any]]]) -> bool:
        return sum(map(len, batches)) == self.shape.rows

    def _collate(self, step: int, place: int, rows: list[dict[str, Any]], last: bool) -> MicroBatch:
        number = step * self.shape.micro_batches + place
        seed_all(self.seed, "collate", number)
        return MicroBatch(number, self.collator(rows), filler=False, last=last)
