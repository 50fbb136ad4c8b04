"""Steps of training on documents of mixed length, batched in several ways: Hugging Face's models beside ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_length_grouped_indices

from fratrie.modeling.losses import IGNORED
from fratrie.training.objective import Objective
from fratrie.training.schedules import build_optimizer

from .limits import products_alone
from .timing import Row, device, times

Batch = dict[str, Tensor]
Batches = list[Batch]

LEARNING_RATE = 1e-4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Documents:
    """So many documents of log-normal lengths (by default sentences of 18 tokens in the mean), and a batch's share."""

    count: int
    batch_size: int
    log_mean: float = 2.74
    log_deviation: float = 0.55
    longest: int = 128

    def draw(self, vocabulary: int) -> list[Tensor]:
        """Random ids of each, (T,), none of them 0, which pads."""
        lengths = torch.empty(self.count).log_normal_(self.log_mean, self.log_deviation).long().clamp(3, self.longest)
        return [torch.randint(1, vocabulary, (length,)) for length in lengths.tolist()]


@dataclass(frozen=True)
class Case:
    """What is trained: the size of the model, the dtype of its products, the documents, and the goal."""

    layers: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    documents: Documents
    goal: float

    def sizes(self) -> dict[str, int]:
        """Fields of a configuration of Hugging Face's."""
        return {
            **{"num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.width // 64},
            **{"intermediate_size": 4 * self.width, "vocab_size": self.vocabulary},
        }

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lengths = f"up to {self.documents.longest} tokens"
        return f"{self.layers} × {self.width}, vocabulary {self.vocabulary:,}, {lengths}, {dtype}"


def drawn_and_grouped(rows: list[Batch], batch_size: int) -> dict[str, list[list[Batch]]]:
    """The rows of each batch: drawn at random, and those of like lengths, as `Trainer` groups them."""
    lengths = [len(row["input_ids"]) for row in rows]
    orders = {
        "random batches": torch.randperm(len(rows)).tolist(),
        "grouped by length": get_length_grouped_indices(lengths, batch_size, mega_batch_mult=50),
    }
    starts = range(0, len(rows), batch_size)
    return {
        way: [[rows[place] for place in order[start : start + batch_size]] for start in starts]
        for way, order in orders.items()
    }


def padded(rows: list[Batch]) -> Batch:
    """`input_ids` and `attention_mask`, each (B, T), and `labels`, (B,) or (B, T)."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = [row["labels"] for row in rows]
    joined = pad_sequence(labels, batch_first=True, padding_value=IGNORED) if labels[0].ndim else torch.stack(labels)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": joined}


def compare(
    case: Case,
    theirs: PreTrainedModel,
    ours: PreTrainedModel,
    theirs_on: Mapping[str, Batches],
    ours_on: Mapping[str, Batches],
    rounds: int,
) -> list[Row]:
    """One row for each way to batch the documents for our model.

    Args:
        case: what is trained, with a goal for the last way.
        theirs, ours: models with the same weights.
        theirs_on: the batches of one epoch, by the way they were made; the first is Hugging Face's default.
        ours_on: the same for our model; all hold the same documents.
        rounds: measured epochs.

    Raises:
        AssertionError: a loss over the documents, or the norm of its gradient, differs.
    """
    runs = {("theirs", way): _to_device(batches) for way, batches in theirs_on.items()}
    runs |= {("ours", way): _to_device(batches) for way, batches in ours_on.items()}
    models = {"theirs": theirs.to(device()).train(), "ours": ours.to(device()).train()}
    _assert_equal_losses([(models[whose], batches) for (whose, _), batches in runs.items()], case.dtype)
    steps = {"theirs": their_step(theirs, case.dtype), "ours": our_step(ours, case.dtype)}
    epochs = {(whose, way): partial(_epoch, steps[whose], batches) for (whose, way), batches in runs.items()}
    products = {("products", way): products_alone(epochs["ours", way]) for way in ours_on}
    seconds = times(epochs | products, rounds)
    default, *others = theirs_on
    best = min(others, key=lambda way: seconds["theirs", way])
    return [
        Row(
            work=f"{case}, {way}",
            against_default=seconds["theirs", default] / seconds["ours", way],
            hf_best=seconds["theirs", default] / seconds["theirs", best],
            goal=case.goal if way == list(ours_on)[-1] else None,
            ours=f"{1e3 * seconds['ours', way] / len(batches):.0f} ms a step",
            note=f"Hugging Face's best: {best}",
            limit=seconds["theirs", default] / seconds["products", way],
        )
        for way, batches in ours_on.items()
    ]


def their_step(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[Batch], None]:
    """A step as `Trainer` takes it by default: autocast and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True, weight_decay=0.0)
    return partial(_step, model, optimizer, dtype)


def our_step(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[Batch], None]:
    """A step of our training loop."""
    return partial(_step, model, build_optimizer(model, LEARNING_RATE, 0.0), dtype)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, dtype: torch.dtype, batch: Batch) -> None:
    with _autocast(dtype):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _epoch(step: Callable[[Batch], None], batches: Batches) -> None:
    for batch in batches:
        step(batch)


def _autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device().type, dtype, enabled=dtype != torch.float32)


def _to_device(batches: Batches) -> Batches:
    return [{name: tensor.to(device()) for name, tensor in batch.items()} for batch in batches]


def _assert_equal_losses(runs: list[tuple[PreTrainedModel, Batches]], dtype: torch.dtype) -> None:
    expected, *others = (_loss_and_gradient(model, batches, dtype) for model, batches in runs)
    for actual in others:
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=0.0)


def _loss_and_gradient(model: PreTrainedModel, batches: Batches, dtype: torch.dtype) -> Tensor:
    """The mean loss over all targets and the norm of its gradient, (2,)."""
    objective = Objective(model)
    counts = [objective.count(batch) for batch in batches]
    mean = torch.zeros((), device=device())
    for batch, count in zip(batches, counts, strict=True):
        with _autocast(dtype):
            share = objective.share(model, batch, count, sum(counts))
        share.backward()
        mean += share.detach()
    norm = torch.nn.utils.get_total_norm(weight.grad for weight in model.parameters() if weight.grad is not None)
    model.zero_grad()
    return torch.stack([mean, norm])
