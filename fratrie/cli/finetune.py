"""Fine-tune a sentence classifier: from a checkpoint of any Hugging Face encoder, or from scratch.

Without files it learns the shipped family-relations corpus (11 labels, several per sentence). The output folder
holds the best model with its tokenizer, a model card and metrics.json. Example:
fratrie finetune --model runs/encoder --output_dir runs/family --num_train_epochs 10
"""

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from accelerate import Accelerator
from datasets import DatasetDict
from torch.utils.data import Dataset
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from fratrie.checkpoints import CONFIG, MOST_COUNTED, read_json
from fratrie.data.swaps import Lexicon, add_swapped
from fratrie.export import require_own_class
from fratrie.files import write_json
from fratrie.tokenization.fragments import tell_fragments
from fratrie.training.batches import Collator
from fratrie.training.classifiers import ClassifierHead, as_ours, new_classifier
from fratrie.training.encoding import EncodedRows, encode, max_tokens
from fratrie.training.evaluation import evaluate_loss
from fratrie.training.fingerprint import fingerprint_rows
from fratrie.training.frozen_states import keep_states
from fratrie.training.labelled_data import LabelledDataOptions, load_parts
from fratrie.training.launch import log_from_main_process
from fratrie.training.layers import freeze_below, learning_rates
from fratrie.training.loop import Evaluator, TrainingOptions, TrainingResult, open_run, train
from fratrie.training.metrics import (
    MULTI_LABEL,
    REGRESSION,
    Scores,
    markdown_code,
    probabilities,
    scores_table,
    thresholds_by_name,
    tune_thresholds,
)
from fratrie.training.model_card import (
    CardFacts,
    classification_tables,
    describe_hardware,
    portable_path,
    write_model_card,
)
from fratrie.training.model_folders import check_checkpoint, check_same_tokens, load_config, load_tokenizer
from fratrie.training.options import check_ranges
from fratrie.training.pretraining import new_config
from fratrie.training.schedules import LEAST_STEPS, enough_epochs
from fratrie.training.scoring import predict_logits, score_rows
from fratrie.training.tasks import balanced_weights, check_every_label_occurs, targets_of, task_of

from .options import read_options
from .running import run

logger = logging.getLogger("fratrie.finetune")

EPOCHS, PATIENCE = 10, 4

SHIPPED = (
    "The family-relations corpus shipped with Fratrie: machine-written French sentences in the voice of teenagers "
    "about their families, no real person's words. Labels: `+` good relation, `-` bad, `0` neither, `i` information; "
    "`j` the respondent, `f` brothers, `s` sisters, `p` father, `m` mother, `a` the family, `t` others"
)


@dataclass
class ClassifierOptions:
    """What to fine-tune, and how much of it."""

    model: str | None = field(
        default=None, metadata={"help": "Folder or hub id of a checkpoint: Fratrie's or any Hugging Face encoder's."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder of the tokenizer; by default that of the model."}
    )
    model_type: str | None = field(
        default=None,
        metadata={"help": "Instead of --model, a new model of this type: encoder, or one of transformers."},
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Instead of --model, the config.json of a new model."}
    )
    config_overrides: str = field(
        default="", metadata={"help": "Fields of the new config, as in 'hidden_size=128,num_hidden_layers=4'."}
    )
    attn_implementation: Literal["eager", "sdpa"] | None = field(
        default=None, metadata={"help": "Kernel of attention; by default sdpa."}
    )
    trainable_layers: int = field(
        default=-1,
        metadata={
            "help": "Layers to train, from the top; those below and the embeddings stay as they are. 0: the head "
            "alone; -1: all."
        },
    )
    recompute_frozen_states: bool = field(
        default=False,
        metadata={
            "help": "Compute the states of frozen layers in every epoch, with dropout. By default (Fratrie's models) "
            "they are computed once, without dropout, and kept in a temporary file in output_dir."
        },
    )
    class_weights: Literal["none", "balanced"] = field(
        default="none", metadata={"help": "`balanced` weighs labels in the loss by their rarity in train."}
    )
    swap_words: str | None = field(
        default=None,
        metadata={
            "help": "JSON file {group: {label: [phrase, …]}}: an epoch has each training text twice, once with a "
            "label's phrase in the place of another's of its group, where it can be (several labels)."
        },
    )
    pooling: Literal["first", "mean", "last"] | None = field(
        default=None, metadata={"help": "Token(s) that stand for the sentence; by default as the config says."}
    )
    classifier_hidden_sizes: list[int] | None = field(
        default=None, metadata={"help": "Widths of dense layers before the output (Fratrie's models)."}
    )
    tune_thresholds: bool = field(
        default=False,
        metadata={"help": "Choose each label's threshold for the best F1 on the validation part (several labels)."},
    )
    label_thresholds: str | None = field(
        default=None,
        metadata={
            "help": "Probability that a label must exceed (several labels), for all or by name, as JSON: 0.4 or "
            "'{\"joie\": 0.3}'; by default 0.5."
        },
    )
    allow_missing_labels: bool = field(
        default=False, metadata={"help": "Go on although a label has no positive training text."}
    )


@dataclass
class FinetuningOptions(TrainingOptions):
    """Training options with the defaults of fine-tuning."""

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of AdamW."})
    head_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the head; by default that of the top layer."}
    )
    layer_decay: float = field(
        default=1.0,
        metadata={
            "help": "Learning rate of a layer as a share of that of the layer above; the embeddings come last. "
            "1: one rate."
        },
    )
    num_train_epochs: float | None = field(  # type: ignore[assignment] # `choose_length` fills it in
        default=None,
        metadata={
            "help": f"Passes over the training data, at most; by default {EPOCHS}, or of few texts as many as make "
            f"{LEAST_STEPS} steps."
        },
    )
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Rows of one micro-batch on one process."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of one evaluation batch."})
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Steps of linear warm-up; below 1 it is the share of all steps."}
    )
    save_steps: int = field(
        default=0, metadata={"help": "Steps between checkpoints; 0 keeps only the best, if one is sought."}
    )
    metric_for_best_model: str | None = field(
        default="auto",
        metadata={"help": "Metric whose best checkpoint is kept; `auto`: eval_macro_f1, or eval_mse for real values."},
    )
    early_stopping_patience: int | None = field(  # type: ignore[assignment] # `choose_length` fills it in
        default=None,
        metadata={
            "help": f"Stop after so many evaluations without a better metric; 0 never stops. By default {PATIENCE}, "
            f"or in proportion more where few texts make more than {EPOCHS} epochs."
        },
    )

    def __post_init__(self) -> None:
        if self.eval_strategy == "no":
            self.watch_nothing()
        super().__post_init__()

    def watch_nothing(self) -> None:
        """Train to the end and keep the last model."""
        self.eval_strategy, self.metric_for_best_model, self.early_stopping_patience = "no", None, 0

    def choose_length(self, steps_per_epoch: int) -> None:
        """Fill in the epochs, where they are not given, and a patience in proportion to them."""
        epochs = EPOCHS
        if self.num_train_epochs is None and self.max_steps <= 0:
            epochs = enough_epochs(EPOCHS, steps_per_epoch)
        if epochs > EPOCHS:
            steps = epochs * steps_per_epoch
            logger.info("few texts: %d epochs in the place of %d, which make %d steps", epochs, EPOCHS, steps)
        if self.num_train_epochs is None:
            self.num_train_epochs = epochs
        if self.early_stopping_patience is None:
            self.early_stopping_patience = math.ceil(PATIENCE * epochs / EPOCHS)

    def choose_metric(self, problem_type: str) -> None:
        """Turn `auto` into the usual metric of the task."""
        if self.metric_for_best_model == "auto":
            self.greater_is_better = problem_type != REGRESSION
            self.metric_for_best_model = "eval_macro_f1" if self.greater_is_better else "eval_mse"


@dataclass
class Run:
    """What the steps of a run share."""

    data: LabelledDataOptions
    choices: ClassifierOptions
    options: FinetuningOptions
    accelerator: Accelerator
    parts: DatasetDict
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: dict[str, EncodedRows]

    def scores(self, part: str, intervals: bool = False) -> Scores:
        """Scores of the model on a part of the data, with intervals over its respondents (rows, if it names none)."""
        size = self.options.per_device_eval_batch_size
        groups: Sequence[Hashable] | None = None
        if intervals:
            dataset = self.parts[part]
            groups = dataset["respondent"][:] if "respondent" in dataset.column_names else range(len(dataset))
        return score_rows(self.model, self.accelerator, self.rows[part], self.tokenizer, size, groups)


def main() -> None:
    """Load, train, score, and leave a complete folder behind."""
    data, choices, options = read_options(__doc__, LabelledDataOptions, ClassifierOptions, FinetuningOptions)
    _check_options(data, choices, options)
    with open_run(options) as accelerator:
        log_from_main_process(accelerator)
        _finetune(_prepare(data, choices, options, accelerator))


def _finetune(current: Run) -> None:
    data, choices, options = current.data, current.choices, current.options
    collator = _collator(current)
    result = train(
        current.model,
        options,
        current.accelerator,
        cast(Dataset, current.rows["train"]),
        collator,
        evaluate=_evaluator(current, collator) if "validation" in current.parts else None,
        tokenizer=current.tokenizer,
        run_config={"data": asdict(data), "model": asdict(choices)},
        learning_rates=learning_rates(
            current.model, options.learning_rate, options.layer_decay, options.head_learning_rate
        ),
        compared=_compared(current),
    )
    if choices.tune_thresholds:
        _tune(current)
    parts = [part for part in ("validation", "test") if part in current.parts]
    scores = {part: current.scores(part, intervals=part == "test") for part in parts}
    if current.accelerator.is_main_process:
        _write(current, result, scores)
        logger.info("saved in %s after %.0f seconds of training", current.options.output_dir, result.seconds)
        if scores:
            print(scores_table(scores))


def _collator(current: Run) -> Collator:
    """Pads the tokens of texts, or their states where layers are frozen."""
    options, pad = current.options, DataCollatorWithPadding(current.tokenizer)
    if current.choices.recompute_frozen_states:
        return pad
    rows = current.rows["train"] + current.rows.get("validation", [])
    size, folder, progress = options.per_device_eval_batch_size, options.output_dir, not options.disable_progress
    return keep_states(current.model, current.accelerator, rows, pad, size, folder, progress)


def _compared(current: Run) -> dict[str, Any]:
    """What must be unchanged in a resumed run, besides the rows of train."""
    choices = {name: getattr(current.choices, name) for name in ("class_weights", "tune_thresholds")}
    parts = [part for part in ("validation", "test") if part in current.rows]
    return choices | {f"{part} data": fingerprint_rows(cast(Dataset, current.rows[part])) for part in parts}


def _check_options(data: LabelledDataOptions, choices: ClassifierOptions, options: FinetuningOptions) -> None:
    check_ranges(data, {"validation_size": (0, 0.999999), "max_length": (1, 10**6)})
    check_ranges(choices, {"classifier_hidden_sizes": (1, 10**6), "trainable_layers": (-1, MOST_COUNTED)})
    check_ranges(options, {"head_learning_rate": (0, 1000)})
    new = choices.model_type or choices.config_name
    if bool(choices.model) == bool(new):
        raise ValueError(
            "give either --model (a checkpoint to go on from), or --model_type or --config_name (a new model)"
        )
    if new and not choices.tokenizer:
        raise ValueError("a new model needs --tokenizer: train one with fratrie train-tokenizer")
    if new and choices.trainable_layers >= 0:
        raise ValueError("--trainable_layers keeps pretrained layers as they are: a new model has none")
    if choices.config_overrides and not new:
        raise ValueError("--config_overrides describe a new model: a checkpoint keeps its own config")
    if choices.tune_thresholds and choices.label_thresholds is not None:
        raise ValueError("--tune_thresholds chooses what --label_thresholds gives: leave one of them out")
    if not data.validation_size and not data.validation_file:
        options.watch_nothing()
        if choices.tune_thresholds:
            raise ValueError("--tune_thresholds needs a validation part: give --validation_file or a validation_size")


def _prepare(
    data: LabelledDataOptions, choices: ClassifierOptions, options: FinetuningOptions, accelerator: Accelerator
) -> Run:
    parts = load_parts(data, options.seed)
    check_every_label_occurs(parts["train"], choices.allow_missing_labels)
    task = task_of(parts["train"].features)
    for name in ("tune_thresholds", "label_thresholds", "swap_words"):
        if getattr(choices, name) and task.problem_type != MULTI_LABEL:
            raise ValueError(f"--{name} is for several labels per text, but the task is {task.problem_type}")
    thresholds = choices.label_thresholds and thresholds_by_name(choices.label_thresholds, task.labels)
    if choices.swap_words:
        parts["train"] = add_swapped(parts["train"], Lexicon.read(choices.swap_words), options.seed)
    options.choose_metric(task.problem_type)
    set_seed(options.seed)
    model, tokenizer = _build(choices, parts, data.max_length)
    if thresholds:
        model.config.label_thresholds = thresholds
    if options.export_code:
        require_own_class(model)
    for part, dataset in parts.items():
        tell_fragments(tokenizer, dataset["text"][:], part)
    rows = {
        part: encode(dataset["text"][:], model, tokenizer, data.max_length, targets_of(dataset))
        for part, dataset in parts.items()
    }
    rows_of_a_step = (
        options.per_device_train_batch_size * options.gradient_accumulation_steps * accelerator.num_processes
    )
    options.choose_length(math.ceil(len(rows["train"]) / rows_of_a_step))
    return Run(data, choices, options, accelerator, parts, model, tokenizer, rows)


def _build(
    choices: ClassifierOptions, parts: DatasetDict, max_length: int | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    checkpoint = check_checkpoint(choices.model, tokenizer=not choices.tokenizer) if choices.model else None
    tokenizer = load_tokenizer(choices.tokenizer or cast(Path, checkpoint))
    if checkpoint:
        if choices.tokenizer:
            check_same_tokens(tokenizer, checkpoint)
        config = as_ours(load_config(checkpoint))
    else:
        kind = choices.model_type or "encoder"
        config = new_config(kind, choices.config_overrides, tokenizer, max_length or 0, choices.config_name)
    weights = balanced_weights(parts["train"]) if choices.class_weights == "balanced" else None
    head = ClassifierHead(choices.pooling, choices.classifier_hidden_sizes, weights)
    model, new = new_classifier(config, task_of(parts["train"].features), head, checkpoint)
    if choices.attn_implementation:
        model.set_attn_implementation(choices.attn_implementation)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    trainable = freeze_below(model, choices.trainable_layers, new)
    count = sum(weight.numel() for name, weight in model.named_parameters() if name in trainable)
    logger.info("%s: %d of %d weights are trained", type(model).__name__, count, model.num_parameters())
    # The length to which pipelines cut a text.
    tokenizer.model_max_length = max_tokens(model, tokenizer) or tokenizer.model_max_length
    return model, tokenizer


def _evaluator(current: Run, collator: Collator) -> Evaluator:
    size, rows = current.options.per_device_eval_batch_size, current.rows["validation"]
    by_length = sorted(rows, key=lambda row: len(row["input_ids"]))

    def evaluate(model: PreTrainedModel, accelerator: Accelerator) -> dict[str, float]:
        metrics = evaluate_loss(model, accelerator, cast(Dataset, by_length), collator, size)
        scores = score_rows(model, accelerator, rows, current.tokenizer, size, collator=collator)
        metrics |= {f"eval_{name}": value for name, value in scores.items() if isinstance(value, float)}
        watched = current.options.metric_for_best_model or "eval_loss"
        logger.info("validation: loss %.4f, %s %.4f", metrics["eval_loss"], watched, metrics.get(watched, math.nan))
        return metrics

    return evaluate


def _tune(current: Run) -> None:
    size = current.options.per_device_eval_batch_size
    rows = current.rows["validation"]
    logits = predict_logits(current.model, current.accelerator, rows, current.tokenizer, size)
    values = probabilities(logits, MULTI_LABEL)
    current.model.config.label_thresholds = tune_thresholds(values, targets_of(current.parts["validation"]))


def _write(current: Run, result: TrainingResult, scores: dict[str, Scores]) -> None:
    folder = Path(current.options.output_dir)
    config: Any = current.model.config
    if current.choices.tune_thresholds:
        saved = read_json(folder / CONFIG)
        write_json(folder / CONFIG, saved | {"label_thresholds": config.label_thresholds})
    thresholds = getattr(config, "label_thresholds", None)
    training = {
        name: getattr(result, name)
        for name in ("global_step", "epoch", "best_step", "best_metric", "stopped_early", "seconds")
    }
    metrics = {
        **scores,
        "label_thresholds": dict(zip(config.id2label.values(), thresholds, strict=True)) if thresholds else None,
        "training": training,
    }
    write_model_card(_card(current, result, scores), folder)
    write_json(folder / "metrics.json", metrics)


def _card(current: Run, result: TrainingResult, scores: dict[str, Scores]) -> CardFacts:
    data, accelerator = current.data, current.accelerator
    config: Any = current.model.config
    shipped = data.train_file is None
    model = current.choices.model
    origin = f"the checkpoint {markdown_code(portable_path(model))}" if model else "random weights"
    sizes = ", ".join(f"{len(rows)} {part} texts" for part, rows in current.rows.items())
    files = [
        markdown_code(Path(file).name) for file in (data.train_file, data.validation_file, data.test_file) if file
    ]
    corpus = SHIPPED if shipped else f"Local files: {', '.join(files)}"
    if data.extended():
        corpus += (
            ". Train is extended by the sentences of twelve further writers (`--dataset family_relations_extended`)"
        )
    return CardFacts(
        name=Path(current.options.output_dir).resolve().name,
        task="text-classification",
        summary=(
            f"A {config.model_type} model with {current.model.num_parameters():,} weights for "
            f"{config.problem_type.replace('_', ' ')} of sentences into: "
            f"{', '.join(map(markdown_code, config.id2label.values()))}. It started from {origin}."
        ),
        data=f"{corpus}. {sizes}.",
        tables=classification_tables(scores),
        arguments=asdict(data) | asdict(current.choices) | asdict(current.options),
        hardware=describe_hardware(accelerator.num_processes, str(accelerator.device)),
        seconds=result.seconds,
        limits=_limits(current),
        language="fr" if shipped else None,
        dataset="family_relations" if shipped else None,
        scores=scores.get("test"),
    )


def _limits(current: Run) -> list[str]:
    longest = max(len(row["input_ids"]) for row in current.rows["train"])
    limits = [f"The longest training text had {longest} tokens; longer texts are outside of what it has seen."]
    config: Any = current.model.config
    thresholds = getattr(config, "label_thresholds", None)
    if config.problem_type == MULTI_LABEL and not thresholds:
        limits.append("A label is given above a probability of 0.5.")
    elif thresholds:
        names = map(markdown_code, config.id2label.values())
        shown = ", ".join(f"{name} {limit:.3g}" for name, limit in zip(names, thresholds, strict=True))
        limits.append(f"Labels are given above the probabilities of `label_thresholds` in its config: {shown}.")
    if current.choices.tune_thresholds:
        count = len(current.rows["validation"])
        limits.append(f"Thresholds were tuned on {count} validation texts, so the scores there are optimistic.")
    elif "validation" in current.rows:
        limits.append("The validation part chose the checkpoint, so the scores there are optimistic.")
    if "test" not in current.rows:
        limits.append("It was not scored on texts apart from training and validation.")
    if current.data.train_file is None:
        limits.append("Real answers of teenagers differ from the corpus; it has not been tried on them.")
    return limits


if __name__ == "__main__":
    run(main)
