"""Our encoder beside Hugging Face's BERT with the same weights: speed on padded batches of sentences, as ratios.

Run it on a quiet machine: `python benchmarks/encoder.py`. Each line is the median over alternating runs of
Hugging Face's time divided by ours, so that a drift of the machine's speed cancels out. Batches are drawn at random,
and grouped by length, which is Hugging Face's best setting; each compares the two on the same batches.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, HfArgumentParser

from fratrie import FratrieEncoderForMaskedLM
from fratrie.conversion import from_hf


@dataclass
class Options:
    """Size of the models and of the measurement."""

    layers: int = field(default=6, metadata={"help": "Layers."})
    width: int = field(default=256, metadata={"help": "Hidden size."})
    vocabulary: int = field(default=8000, metadata={"help": "Tokens."})
    batch: int = field(default=32, metadata={"help": "Sentences, of 18 tokens in the mean (log-normal, at most 128)."})
    rounds: int = field(default=10, metadata={"help": "Measured rounds."})


def main() -> None:
    """Build both models with the same weights, check that they agree, and time them by turns."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    torch.manual_seed(0)
    theirs, ours = same_models(options)
    batches = [sentences(options, lengths) for lengths in lengths_of_batches(options, grouped=False)]
    inputs, mask = (
        {key: batches[0][key] for key in ("input_ids", "attention_mask")},
        batches[0]["attention_mask"].bool(),
    )
    with torch.no_grad():
        difference = (theirs.eval()(**inputs).logits - ours.eval()(**inputs).logits)[mask].abs().max()
    share = 1 - mask.float().mean()
    print(f"largest difference of a logit {difference:.1e}; padding {share:.0%} of the first batch")
    size = f"{options.layers} layers of {options.width}, batch {options.batch}"
    print(f"{torch.get_num_threads()} threads, {size}, float32")
    grouped = [sentences(options, lengths) for lengths in lengths_of_batches(options, grouped=True)]
    for how, drawn in (("random batches", batches), ("batches grouped by length", grouped)):
        for name, step in (("forward", forward), ("forward and backward", train_step)):
            times = [(clock(step, theirs, batch), clock(step, ours, batch)) for batch in drawn][1:]
            ratio = statistics.median(their / our for their, our in times)
            print(f"{how}, {name}: {ratio:.2f}x ({statistics.median(our for _, our in times) * 1e3:.0f} ms ours)")


def same_models(options: Options) -> tuple[BertForMaskedLM, FratrieEncoderForMaskedLM]:
    """A random BERT, and our encoder made of it."""
    sizes = {"hidden_size": options.width, "num_hidden_layers": options.layers, "num_attention_heads": 4,
             "intermediate_size": 4 * options.width, "vocab_size": options.vocabulary}  # fmt: skip
    theirs = BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    ours = from_hf(theirs)
    assert isinstance(ours, FratrieEncoderForMaskedLM)
    ours.config.sparse_prediction = True
    return theirs, ours


def lengths_of_batches(options: Options, grouped: bool) -> list[torch.Tensor]:
    """Lengths of the sentences of each batch: as they come, or each batch of like lengths, in random order."""
    lengths = torch.empty(options.batch * (options.rounds + 1)).log_normal_(2.74, 0.55).long().clamp(3, 128)
    batches = (lengths.sort().values if grouped else lengths).split(options.batch)
    return [batches[place] for place in torch.randperm(len(batches))]


def sentences(options: Options, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """A padded batch of random sentences, 15 % of whose tokens are targets."""
    ids = torch.randint(1, options.vocabulary, (options.batch, int(lengths.max())))
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    targets = (torch.rand(ids.shape) < 0.15) & mask
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~targets, -100)}


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """One pass without gradients."""
    with torch.no_grad():
        model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"])


def train_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """One pass with loss and gradients."""
    model.train()(**batch).loss.backward()
    model.zero_grad()


def clock(step: Callable[[nn.Module, dict[str, torch.Tensor]], None], model: nn.Module, batch: dict) -> float:
    """Seconds of a step."""
    start = time.perf_counter()
    step(model, batch)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
