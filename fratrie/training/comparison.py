"""The same small decoder trained with one mixer or another, on the same texts, for the same number of tokens."""

from __future__ import annotations

import resource
import statistics
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, set_seed

from fratrie.accounting import cache_bytes
from fratrie.data.text_files import existing_file, read_text
from fratrie.modeling.configuration import FratrieDecoderConfig, norm_slots
from fratrie.modeling.mixers import MIXERS
from fratrie.tokenization import train_byte_level_bpe

from .batches import Collator
from .corpora import make_rows
from .evaluation import evaluate_loss
from .launch import open_run
from .loop import TrainingOptions, train
from .options import check_ranges
from .pretraining import Corruption, build_model, parse_overrides, rows_and_collator

# What a mixer needs beyond its name.
_FIELDS: dict[str, dict[str, Any]] = {"latent": {"kv_lora_rank": 32}}
_HELD_OUT = 0.1
# Modules of the standard library that are as long as a short story.
_SHORTEST, _LONGEST = 10_000, 100_000


@dataclass
class ComparisonOptions:
    """What to compare, and on which texts."""

    output_dir: str = field(metadata={"help": "Folder for the table, the plot and a model of each mixer."})
    files: list[str] = field(
        default_factory=list,
        metadata={"help": "Text files, a document each; by default modules of Python's standard library."},
    )
    mixers: list[str] = field(
        default_factory=list, metadata={"help": "Names in mixer_types; by default all that a decoder can have."}
    )
    config_overrides: str = field(
        default="hidden_size=128,num_hidden_layers=4,intermediate_size=384",
        metadata={"help": "Fields of the configuration that all have."},
    )
    vocab_size: int = field(default=1000, metadata={"help": "Tokens of the tokenizer, which is trained here."})
    block_size: int = field(default=256, metadata={"help": "Tokens per row."})
    batch_size: int = field(default=8, metadata={"help": "Rows per step."})
    max_steps: int = field(default=300, metadata={"help": "Steps of each training."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate."})
    seed: int = field(default=42, metadata={"help": "Seed of weights and data order."})

    def __post_init__(self) -> None:
        check_ranges(self, {"block_size": (2, 10**6), "max_steps": (1, 10**9), "batch_size": (1, 10**6)})
        causal = [name for name, mixer in MIXERS.items() if mixer.runs_causal]
        if unknown := [name for name in self.mixers if name not in causal]:
            raise ValueError(f"--mixers {' '.join(unknown)}: a decoder can have {', '.join(causal)}")
        self.mixers = self.mixers or causal


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, and the rows of tokens that it makes of the texts, a tenth of the documents held out."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    test: Dataset
    collator: Collator


@dataclass(frozen=True)
class Trained:
    """What came out for one mixer.

    Attributes:
        mixer: its name.
        parameters: weights of the model.
        loss: mean cross entropy of held-out tokens, in nats.
        tokens_per_second: in training.
        peak_bytes: most memory of the process, above the most that it had before the model was built.
        cache_bytes: of one row of `block_size` tokens, by formula, in float32.
        losses: step and mean training loss of each log record.
    """

    mixer: str
    parameters: int
    loss: float
    tokens_per_second: float
    peak_bytes: int
    cache_bytes: int
    losses: list[tuple[int, float]]


def read_corpus(options: ComparisonOptions) -> Corpus:
    """Read the texts, train a tokenizer on them, and make rows of tokens.

    Raises:
        ValueError: for fewer than two documents, and texts without a token.
    """
    documents = read_documents(options.files)
    tokenizer = train_byte_level_bpe(
        documents["train"]["text"], options.vocab_size, sibling="decoder", show_progress=False
    )
    maker, collator = rows_and_collator("clm", tokenizer, options.block_size, Corruption())
    train, test = (cast(Dataset, make_rows(documents[part], maker, part)) for part in ("train", "test"))
    return Corpus(tokenizer, train, test, collator)


def train_with(mixer: str, options: ComparisonOptions, corpus: Corpus) -> Trained:
    """Train a decoder that has this mixer in every layer, in a process that has done nothing else, for its memory.

    Raises:
        ValueError: for fields that do not fit.
    """
    run = _training_options(mixer, options)
    before = _peak_bytes()
    set_seed(options.seed)
    config = _config(mixer, options, corpus.tokenizer)
    model = build_model("clm", config)
    with open_run(run) as accelerator:
        result = train(model, run, accelerator, corpus.train, corpus.collator, tokenizer=corpus.tokenizer)
        peak = _peak_bytes() - before
        held_out = evaluate_loss(model, accelerator, corpus.test, corpus.collator, options.batch_size)
    records = [record for record in result.history if "loss" in record]
    return Trained(
        mixer=mixer,
        parameters=model.num_parameters(),
        loss=held_out["eval_loss"],
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in records),
        peak_bytes=peak,
        cache_bytes=cache_bytes(config, 1, options.block_size, torch.float32),
        losses=[(int(record["step"]), record["loss"]) for record in records],
    )


def read_documents(files: list[str]) -> datasets.DatasetDict:
    """The files as documents, a tenth of them held out as `test`.

    Raises:
        ValueError: for fewer than two.
    """
    paths = [existing_file(file) for file in files]
    if not paths:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        paths = [path for path in modules if _SHORTEST < path.stat().st_size < _LONGEST]
    if len(paths) < 2:
        raise ValueError("there is one document, of which none can be held out: give two --files or more")
    texts = datasets.Dataset.from_dict({"text": [read_text(path) for path in paths]})
    return texts.train_test_split(test_size=max(1, round(len(paths) * _HELD_OUT)), seed=0)


def _training_options(mixer: str, options: ComparisonOptions) -> TrainingOptions:
    return TrainingOptions(
        output_dir=str(Path(options.output_dir) / mixer),
        overwrite_output_dir=True,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=0.1,
        eval_strategy="no",
        save_steps=0,
        report_to="none",
        seed=options.seed,
    )


def _config(mixer: str, options: ComparisonOptions, tokenizer: PreTrainedTokenizerBase) -> FratrieDecoderConfig:
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    fields = {"num_hidden_layers": 4, **norm_slots("pre", "rms_norm"), **parse_overrides(options.config_overrides)}
    return FratrieDecoderConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=options.block_size,
        mixer_types=[mixer] * fields["num_hidden_layers"],
        **tokens,
        **_FIELDS.get(mixer, {}),
        **fields,
    )


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # where `resource` would count the peak of the process that started this one, too
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
