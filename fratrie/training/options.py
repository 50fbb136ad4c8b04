"""The options that commands share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fratrie.data.text_files import TextFormat
from fratrie.inference import Precision

TABLES = ".csv, .tsv, .xlsx, .ods, .sav, .dta, .json, .jsonl or .parquet"


@dataclass(kw_only=True)
class ReadingOptions:
    """How files of texts are read, for `HfArgumentParser`."""

    text_column: str = field(
        default="text", metadata={"help": "Column that holds the text, in everything but .txt files."}
    )
    encoding: str = field(
        default="utf-8", metadata={"help": "Encoding of text files, such as cp1252 (Windows) or utf-16."}
    )
    delimiter: str | None = field(
        default=None,
        metadata={"help": "What stands between the columns of csv files, such as ';'; by default as the file shows."},
    )
    sheet: str | None = field(
        default=None, metadata={"help": "Sheet of a spreadsheet; by default the only one that has content."}
    )

    def text_format(self) -> TextFormat:
        """Encoding, delimiter and sheet; a ValueError says which of them is impossible."""
        return TextFormat(self.encoding, self.delimiter, self.sheet)


@dataclass(kw_only=True)
class TextOptions(ReadingOptions):
    """Which texts to learn from, for `HfArgumentParser`."""

    files: list[str] = field(default_factory=list, metadata={"help": f"Texts: .txt (one per line), {TABLES} files."})
    annotated: bool = field(
        default=False, metadata={"help": "The .txt files hold annotated lines 'CODE SENTENCE': take the sentences."}
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "Instead of files: a folder, or a dataset of the Hugging Face Hub by its name."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the texts as they come, in the given order, instead of loading all."}
    )

    def check_sources(self) -> None:
        """Check that the options name one source of texts, and ask nothing of it that it does not have.

        Raises:
            ValueError: says which option to leave out or to give.
        """
        if bool(self.files) == bool(self.dataset):
            raise ValueError("give either --files or --dataset, the texts to learn from")
        if self.annotated and (self.dataset or self.streaming):
            raise ValueError("--annotated is for local files that are loaded: leave out --dataset and --streaming")


@dataclass(kw_only=True)
class LabelOptions(ReadingOptions):
    """How files of labelled texts are read, for `HfArgumentParser`."""

    label_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column of the labels or values, by default `labels` or as tools call it; or several columns that "
            "say yes or no, one for each label."
        },
    )
    group_column: str | None = field(
        default=None,
        metadata={"help": "Column that names who speaks; by default `respondent` or `group`, if there is one."},
    )
    annotator: str | None = field(
        default=None, metadata={"help": "Whose labels to read, where a column `annotator` names several."}
    )

    def reading(self) -> dict[str, Any]:
        """How to read a file of labelled texts, by the names of `read_labelled`'s arguments."""
        names = ("text_column", "label_column", "group_column", "annotator")
        return {name: getattr(self, name) for name in names} | {"form": self.text_format()}


@dataclass(kw_only=True)
class InferenceOptions(ReadingOptions):
    """What labels or scores texts, for `HfArgumentParser`."""

    model: str = field(metadata={"help": "Folder of the fine-tuned classifier."})
    label_thresholds: str | None = field(
        default=None,
        metadata={
            "help": "Probability that a label must exceed (several labels), for all or by name, as JSON: 0.4 or "
            "'{\"joie\": 0.3}'; by default what the model's config says, else 0.5."
        },
    )
    batch_size: int = field(
        default=64, metadata={"help": "Most texts of one batch on one process; long ones are fewer."}
    )
    precision: Precision | None = field(
        default=None,
        metadata={
            "help": "Of the matrix products: bfloat16 and, on a CPU, int8 are faster than float32 (int8_weights is "
            "for writing); by default that of the weights."
        },
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens at most, longer texts are cut; by default what the model takes."}
    )
    disable_progress: bool = field(default=False, metadata={"help": "Show no progress bar."})


# How a pretrained encoder of a hundred million weights is fine-tuned on a thousand sentences, as options of
# `fratrie finetune`. Chosen on respondents of the training part (benchmarks/family_relations.md).
PRETRAINED_ENCODER: dict[str, Any] = {
    "learning_rate": 4e-4,
    "head_learning_rate": 2e-3,
    "layer_decay": 0.9,
    "trainable_layers": 6,
    "per_device_train_batch_size": 8,
    "mixed_precision": "bf16",
    "validation_size": 0,
}
# With the sentences of the further writers, too, each is seen less often.
EXTENDED: dict[str, Any] = {"dataset": "family_relations_extended", "num_train_epochs": 4}

_ROWS, _STEPS = (1, 10**6), 10**9  # more is a slip of the pen, and would end in a crash or never
RANGES: dict[str, tuple[float, float]] = {
    "num_train_epochs": (0, 10**6),
    "max_steps": (-1, _STEPS),
    "per_device_train_batch_size": _ROWS,
    "per_device_eval_batch_size": _ROWS,
    "gradient_accumulation_steps": _ROWS,
    "learning_rate": (0, 1000),
    "weight_decay": (0, 1000),
    "adam_beta1": (0, 0.999999),
    "adam_beta2": (0, 0.999999),
    "adam_epsilon": (0, 1),
    "max_grad_norm": (0, 10**9),
    "warmup_steps": (0, _STEPS),
    "eval_steps": (1, _STEPS),
    "save_steps": (0, _STEPS),
    "save_total_limit": (1, _STEPS),
    "early_stopping_patience": (0, _STEPS),
    "logging_steps": (1, _STEPS),
    "dataloader_num_workers": (0, 256),
    "seed": (0, 2**31 - 1),
}


def check_ranges(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Check that options lie in their ranges, both ends included; `None` lies in all of them, NaN in none.

    Raises:
        ValueError: names the option, its value and its range.
    """
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not least <= number <= most:
                raise ValueError(f"{name}={value} must lie between {least} and {most}")


@dataclass
class TrainingOptions:
    """Options of a training run, for `HfArgumentParser`. Names follow `transformers.TrainingArguments`."""

    output_dir: str = field(metadata={"help": "Folder of the final model; checkpoints go below it."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the training data."})
    max_steps: int = field(
        default=-1, metadata={"help": "Number of optimizer steps; overrides the epochs (needed for streams)."}
    )
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Rows of one micro-batch on one process."})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Rows of one evaluation batch."})
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "Micro-batches of one process in an optimizer step."}
    )
    learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate of AdamW."})
    weight_decay: float = field(
        default=0.01, metadata={"help": "Decoupled weight decay of matrices (never of norms and biases)."}
    )
    adam_beta1: float = field(default=0.9, metadata={"help": "Decay of AdamW's first moment."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Decay of AdamW's second moment."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "AdamW's epsilon."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the gradient to this norm; 0 does not clip."})
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = field(
        default="linear", metadata={"help": "Shape of the learning rate after the warm-up."}
    )
    warmup_steps: float = field(
        default=0.0, metadata={"help": "Steps of linear warm-up; below 1 it is the share of all steps."}
    )
    mixed_precision: Literal["no", "bf16"] | None = field(
        default=None, metadata={"help": "Precision of the forward pass; by default the launcher's."}
    )
    eval_strategy: Literal["no", "steps", "epoch"] = field(default="epoch", metadata={"help": "When to evaluate."})
    eval_steps: int = field(default=500, metadata={"help": "Steps between evaluations (strategy `steps`)."})
    save_steps: int = field(
        default=500, metadata={"help": "Steps between checkpoints; 0 keeps only the best, if one is sought."}
    )
    save_total_limit: int = field(default=2, metadata={"help": "Checkpoints to keep, besides the best."})
    metric_for_best_model: str | None = field(
        default=None,
        metadata={"help": "Name of the evaluation metric whose best checkpoint becomes the final model."},
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether a greater metric is better; by default so, unless it is a loss or perplexity."},
    )
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after so many evaluations without a better metric; 0 never stops."}
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Replace the model in the folder, and delete the checkpoints and logs of an earlier run, once the "
            "first step is taken."
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Checkpoint folder to go on from, or `last` for the newest one."}
    )
    export_code: bool = field(
        default=False,
        metadata={"help": "Put the model's code into the folder, to be loaded without fratrie (trust_remote_code)."},
    )
    logging_steps: int = field(default=10, metadata={"help": "Steps between log records."})
    report_to: Literal["tensorboard", "none"] = field(
        default="tensorboard", metadata={"help": "Tracker; its files go to `<output_dir>/logs`."}
    )
    dataloader_num_workers: int = field(
        default=0, metadata={"help": "Worker processes that read and collate; 0 does it in the main process."}
    )
    find_unused_parameters: bool = field(
        default=False, metadata={"help": "Let DDP search for weights without gradient (slower)."}
    )
    disable_progress: bool = field(default=False, metadata={"help": "Show no progress bar."})
    seed: int = field(default=42, metadata={"help": "Seed of weights, data order, masks and dropout."})

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        if self.max_steps <= 0 and self.num_train_epochs == 0:
            raise ValueError(f"num_train_epochs={self.num_train_epochs} must be above 0 (or give max_steps)")
        if self.early_stopping_patience and self.metric_for_best_model is None:
            raise ValueError("early_stopping_patience needs metric_for_best_model, the metric to watch")
        if self.metric_for_best_model is not None and self.eval_strategy == "no":
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model!r} needs an eval_strategy other than 'no'"
            )

    def better_is_greater(self) -> bool:
        """The direction of `metric_for_best_model`."""
        if self.greater_is_better is None:
            return not (self.metric_for_best_model or "").endswith(("loss", "perplexity"))
        return self.greater_is_better
