"""Pretrain a model on texts: masked words (mlm), next words (clm) or hidden spans (denoise).

The output folder holds the model with its tokenizer, a model card, metrics.json and run_config.json. Example:
fratrie pretrain --objective mlm --tokenizer runs/tokenizer --files corpus.txt --output_dir runs/encoder
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import datasets
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from fratrie.export import require_own_class
from fratrie.files import write_json
from fratrie.training.batches import Collator
from fratrie.training.context_parallel import open_context
from fratrie.training.corpora import make_rows, named_texts, read_texts, stream_texts
from fratrie.training.evaluation import evaluate_loss, perplexity
from fratrie.training.fingerprint import fingerprint_files, fingerprint_rows
from fratrie.training.launch import log_from_main_process
from fratrie.training.loop import TrainingOptions, TrainingResult, open_run, train
from fratrie.training.metrics import markdown_code
from fratrie.training.model_card import CardFacts, describe_hardware, portable_path, write_model_card
from fratrie.training.model_folders import check_same_tokens, checkpoint_folder
from fratrie.training.options import TextOptions, check_ranges
from fratrie.training.pretraining import (
    SIBLING_FOR,
    Corruption,
    build_model,
    check_fit,
    new_config,
    open_model,
    open_tokenizer,
    rows_and_collator,
)

from .options import read_options
from .running import run

TASKS = {"mlm": "fill-mask", "clm": "text-generation", "denoise": "text2text-generation"}
AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset


@dataclass(kw_only=True)
class CorpusOptions(TextOptions):
    """Which texts to learn from and to evaluate on."""

    validation_files: list[str] = field(
        default_factory=list, metadata={"help": "Texts to evaluate on; by default a part of the training texts."}
    )
    validation_split: float = field(
        default=0.05, metadata={"help": "Share of the texts to evaluate on where no files are given; 0: none."}
    )


@dataclass
class ModelOptions:
    """What to train, and on which task."""

    objective: Literal["mlm", "clm", "denoise"] = field(
        metadata={"help": "mlm: masked tokens (encoder); clm: next token (decoder); denoise: spans (seq2seq)."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder of the tokenizer; by default that of --model."}
    )
    model: str | None = field(
        default=None, metadata={"help": "Folder of a checkpoint to go on from; by default a new model is made."}
    )
    model_type: str | None = field(
        default=None,
        metadata={
            "help": "Type of the new model: encoder, decoder, seq2seq or one of transformers; "
            "by default what the objective needs."
        },
    )
    config_name: str | None = field(default=None, metadata={"help": "A config.json for the new model."})
    config_overrides: str = field(
        default="",
        metadata={
            "help": "Fields of the new config, as in 'hidden_size=128,num_hidden_layers=2,"
            'mixer_types=["linear","softmax"]\'.'
        },
    )
    block_size: int = field(default=256, metadata={"help": "Tokens per row; longer texts go on in further rows."})
    mask_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to hide (mlm, denoise)."})
    whole_words: bool = field(default=False, metadata={"help": "mlm: mask all tokens of a word together."})
    mean_span_length: float = field(default=3.0, metadata={"help": "denoise: mean tokens of a hidden span."})


@dataclass
class PretrainingOptions(TrainingOptions):
    """Training options with the defaults of pretraining."""

    warmup_steps: float = field(
        default=0.06, metadata={"help": "Steps of linear warm-up; below 1 it is the share of all steps."}
    )
    context_parallel_size: int = field(
        default=1,
        metadata={
            "help": "mlm, clm: processes that hold a part of every row each, for rows that are too long to train on "
            "one; the number of processes must be a multiple. Evaluation has whole rows."
        },
    )


def main() -> None:
    """Load, train, evaluate, and leave a complete folder behind."""
    data, choices, options = read_options(__doc__, CorpusOptions, ModelOptions, PretrainingOptions)
    _check_options(data, choices)
    with open_run(options) as accelerator:
        _pretrain(data, choices, options, accelerator)


def _pretrain(
    data: CorpusOptions, choices: ModelOptions, options: PretrainingOptions, accelerator: Accelerator
) -> None:
    log_from_main_process(accelerator)
    set_seed(options.seed)
    model, tokenizer = _model_and_tokenizer(choices)
    if options.export_code:
        require_own_class(model)
    context = open_context(model, options.context_parallel_size)
    corruption = Corruption(choices.mask_probability, choices.whole_words, choices.mean_span_length)
    maker, collator = rows_and_collator(choices.objective, tokenizer, choices.block_size, corruption)
    texts = _texts(data, options.seed)
    rows = {part: make_rows(part_texts, maker, part) for part, part_texts in texts.items()}
    evaluate = None
    if "validation" in rows:
        size = options.per_device_eval_batch_size
        evaluate = partial(_evaluate, rows=cast(Dataset, rows["validation"]), collator=collator, batch_size=size)
    result = train(
        model,
        options,
        accelerator,
        cast(Dataset, rows["train"]),
        collator,
        evaluate=evaluate,
        tokenizer=tokenizer,
        run_config={"data": asdict(data), "model": asdict(choices), "config": model.config.to_dict()},
        compared=_compared(data, rows),
        context=context,
    )
    if accelerator.is_main_process:
        sizes = {part: _size(part_rows) for part, part_rows in rows.items()}
        facts = _card(data, choices, options, accelerator, model, result, sizes)
        _write(Path(options.output_dir), result, facts)


def _compared(data: CorpusOptions, rows: dict[str, AnyDataset]) -> dict[str, Any]:
    """What must be unchanged in a resumed run, besides the rows of train: a stream cannot be read beforehand."""
    compared: dict[str, Any] = {}
    if "validation" in rows:
        compared["validation data"] = fingerprint_rows(cast(Dataset, rows["validation"]))
    if data.streaming:
        reading = ("text_column", "encoding", "delimiter", "sheet", "dataset_config", "dataset_split")
        compared |= {name: getattr(data, name) for name in reading}
        if data.dataset and not Path(data.dataset).is_dir():
            compared["dataset"] = data.dataset
        compared |= fingerprint_files([data.dataset] if data.dataset else data.files)
    return compared


def _check_options(data: CorpusOptions, choices: ModelOptions) -> None:
    data.check_sources()
    check_ranges(data, {"validation_split": (0, 0.999999)})
    check_ranges(
        choices, {"block_size": (1, 10**6), "mask_probability": (0, 0.999999), "mean_span_length": (1, 10**6)}
    )
    if not choices.tokenizer and not choices.model:
        raise ValueError("a new model needs --tokenizer: train one with fratrie train-tokenizer")
    if choices.model and (choices.config_name or choices.config_overrides or choices.model_type):
        raise ValueError("--config_name, --config_overrides and --model_type describe a new model: leave out --model")


def _model_and_tokenizer(choices: ModelOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = open_tokenizer(choices.tokenizer or cast(str, choices.model), choices.objective)
    if choices.model:
        model = open_model(choices.objective, choices.model)
        if choices.tokenizer:
            check_same_tokens(tokenizer, checkpoint_folder(choices.model))
    else:
        model_type = choices.model_type or SIBLING_FOR[choices.objective]
        config = new_config(model_type, choices.config_overrides, tokenizer, choices.block_size, choices.config_name)
        model = build_model(choices.objective, config)
    check_fit(model, tokenizer, choices.block_size)
    return model, tokenizer


def _texts(data: CorpusOptions, seed: int) -> dict[str, AnyDataset]:
    texts: AnyDataset
    if data.dataset:
        texts = named_texts(data.dataset, data.dataset_config, data.dataset_split, data.text_column, data.streaming)
    elif data.streaming:
        texts = stream_texts(data.files, data.text_column, data.text_format())
    else:
        texts = read_texts(data.files, data.text_column, data.annotated, data.text_format())
    if data.validation_files:
        held_out = read_texts(data.validation_files, data.text_column, data.annotated, data.text_format())
        return {"train": texts, "validation": held_out}
    if isinstance(texts, datasets.IterableDataset) or not data.validation_split:
        return {"train": texts}
    if len(texts) < 2:
        raise ValueError(
            "there is one text only, from which no validation part can be taken: give more texts, "
            "--validation_files, or --validation_split 0"
        )
    size = min(max(1, round(len(texts) * data.validation_split)), len(texts) - 1)
    parts = texts.train_test_split(test_size=size, seed=seed)
    return {"train": parts["train"], "validation": parts["test"]}


def _evaluate(
    model: PreTrainedModel, accelerator: Accelerator, rows: Dataset, collator: Collator, batch_size: int
) -> dict[str, float]:
    metrics = evaluate_loss(model, accelerator, rows, collator, batch_size)
    return metrics | {"eval_perplexity": perplexity(metrics["eval_loss"])}


def _size(rows: AnyDataset) -> str:
    return "a stream of" if isinstance(rows, datasets.IterableDataset) else f"{len(rows):,}"


def _card(
    data: CorpusOptions,
    choices: ModelOptions,
    options: PretrainingOptions,
    accelerator: Accelerator,
    model: PreTrainedModel,
    result: TrainingResult,
    sizes: dict[str, str],
) -> CardFacts:
    origin = f"the checkpoint {markdown_code(portable_path(choices.model))}" if choices.model else "random weights"
    files = ", ".join(markdown_code(Path(file).name) for file in data.files)
    source = f"The dataset {markdown_code(portable_path(data.dataset))}" if data.dataset else f"Files: {files}"
    lines = [f"| {name} | {value:.6g} |" for name, value in result.metrics.items()]
    tables = {"Evaluation": "\n".join(["| metric | value |", "|---|---|", *lines])} if lines else {}
    return CardFacts(
        name=Path(options.output_dir).resolve().name,
        task=TASKS[choices.objective],
        summary=(
            f"A {model.config.model_type} model with {model.num_parameters():,} weights, trained by the objective "
            f"`{choices.objective}` from {origin} for {result.global_step:,} steps ({result.epoch:.4g} epochs)."
        ),
        data=f"{source}. {', '.join(f'{size} {part} rows' for part, size in sizes.items())}.",
        tables=tables,
        arguments=asdict(data) | asdict(choices) | asdict(options),
        hardware=describe_hardware(accelerator.num_processes, str(accelerator.device)),
        seconds=result.seconds,
        limits=["It has learnt from these texts alone, and repeats what they hold, errors and prejudices included."],
    )


def _write(folder: Path, result: TrainingResult, facts: CardFacts) -> None:
    losses = [record["loss"] for record in result.history if "loss" in record]
    metrics = {
        **result.metrics,
        "train_loss": losses[-1] if losses else None,
        "global_step": result.global_step,
        "epoch": result.epoch,
        "best_step": result.best_step,
        "seconds": result.seconds,
    }
    write_model_card(facts, folder)
    write_json(folder / "metrics.json", metrics)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    run(main)
