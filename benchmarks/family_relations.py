"""How to fine-tune a pretrained encoder on the family-relations corpus: chosen on train, then scored on test.

`--step choose` compares settings by cross-validation over the respondents of the training part alone; `--step score`
fine-tunes one setting on all of it with several seeds and prints their mean F1 on the test part beside the best
classical baseline, with bootstrap intervals over respondents. Both train by the command line of scripts/finetune.py.
Example: python benchmarks/family_relations.py --step score --model runs/demo/pretrained
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold
from transformers import HfArgumentParser

import fratrie
from fratrie.cli.running import run
from fratrie.data.annotation import LABELS
from fratrie.data.corpus import load_family_relations
from fratrie.training.baselines import score_baselines
from fratrie.training.bootstrap import compare, comparison_table
from fratrie.training.classifiers import load_classifier
from fratrie.training.encoding import encode
from fratrie.training.launch import open_inference
from fratrie.training.metrics import multilabel_scores
from fratrie.training.options import EXTENDED, PRETRAINED_ENCODER
from fratrie.training.scoring import predict_logits
from fratrie.training.tasks import targets_of

PERSONS = Path(fratrie.__file__).parent / "data" / "family_relations" / "persons.json"
# What else there is to choose from, as changes of the chosen setting.
SETTINGS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "one_rate": {"head_learning_rate": 4e-4},
    "lower_rate": {"learning_rate": 2e-4},
    "three_layers": {"trainable_layers": 3},
    "all_layers": {"trainable_layers": 12},
    "no_layer_decay": {"layer_decay": 1.0},
    "six_epochs": {"num_train_epochs": 6},
    "fifteen_epochs": {"num_train_epochs": 15},
    "first_token": {"pooling": "first"},
    "balanced": {"class_weights": "balanced"},
    "swapped": {"swap_words": PERSONS, "num_train_epochs": 5},  # each of which has every sentence twice
    "extended": EXTENDED,
}


@dataclass
class Options:
    """What to measure."""

    model: str = field(metadata={"help": "Folder of the pretrained encoder, with its tokenizer."})
    step: Literal["choose", "score"] = field(
        default="choose", metadata={"help": "Compare settings on train, or score one on test."}
    )
    settings: list[str] = field(
        default_factory=lambda: list(SETTINGS), metadata={"help": "Settings to compare, by name."}
    )
    scored: str = field(default="chosen", metadata={"help": "Setting to score on test, by name."})
    folds: int = field(default=3, metadata={"help": "Folds of the cross-validation."})
    seeds: int = field(default=3, metadata={"help": "Runs on the whole training part, with the seeds 1, 2, …"})
    output_dir: str = field(default="runs/family_relations", metadata={"help": "Folder for the runs."})


def main() -> None:
    """Compare or score."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    if unknown := [name for name in [*options.settings, options.scored] if name not in SETTINGS]:
        raise ValueError(f"settings {', '.join(unknown)} are not among {', '.join(SETTINGS)}")
    corpus, extended = load_family_relations(), load_family_relations(extended=True)["train"]
    if options.step == "choose":
        choose(options, corpus["train"], extended.select(range(len(corpus["train"]), len(extended))))
    else:
        score(options, extended if "dataset" in SETTINGS[options.scored] else corpus["train"], corpus["test"])


def choose(options: Options, train: Dataset, more: Dataset) -> None:
    """Print the out-of-fold F1 of each setting as a Markdown table; `more` is learnt besides where it says so."""
    truth = targets_of(train).astype(int)
    print(f"| setting | macro | micro | {' | '.join(LABELS)} |")
    print("|---" * (len(LABELS) + 3) + "|", flush=True)
    for name in options.settings:
        setting = PRETRAINED_ENCODER | SETTINGS[name]
        besides = more if setting.pop("dataset", None) else more.select([])
        predictions = np.zeros_like(truth)
        for fold, (learnt, held_out) in enumerate(folds(train, options.folds)):
            folder = Path(options.output_dir) / f"{name}-fold{fold}"
            rows = concatenate_datasets([train.select(learnt), besides])
            data = write_rows(rows, folder.with_suffix(".jsonl"))
            finetune(options.model, folder, setting, data, seed=fold)
            predictions[held_out] = decisions(folder, train.select(held_out))
        scores = multilabel_scores(predictions, truth, LABELS)
        figures = [scores["macro_f1"], scores["micro_f1"], *scores["f1"].values()]
        print(f"| {name} | {' | '.join(f'{figure:.3f}' for figure in figures)} |", flush=True)


def folds(train: Dataset, number: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows to learn and rows to hold out, with all sentences of a respondent on one side."""
    splitter = GroupKFold(number, shuffle=True, random_state=0)
    return splitter.split(np.arange(len(train)), groups=list(train["respondent"]))


def write_rows(rows: Dataset, path: Path) -> Path:
    """The rows as a file that scripts/finetune.py reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = rows.features["labels"].feature.names
    lines = (
        {"text": row["text"], "labels": [names[i] for i in row["labels"]], "respondent": row["respondent"]}
        for row in rows
    )
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def finetune(model: str, folder: Path, setting: Mapping[str, Any], data: Path | None, seed: int) -> None:
    """Run scripts/finetune.py with a setting; without data on the whole training part, extended where it says so.

    Raises:
        ValueError: when the script fails; it has said why.
    """
    given = {"model": model, "output_dir": folder, "seed": seed, "report_to": "none", **setting}
    words = ["scripts/finetune.py", "--overwrite_output_dir", "--disable_progress"]
    for name, value in given.items():
        words += [f"--{name}", str(value)]
    if data:
        words += ["--train_file", str(data), "--label_names", *LABELS]
    done = subprocess.run([sys.executable, *words], check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"failed with exit code {done.returncode}: python {shlex.join(words)}")


def decisions(folder: Path, rows: Dataset) -> NDArray[np.int64]:
    """What the classifier of a folder says of texts, at a probability of 0.5. Shape: (N, L)"""
    model, tokenizer, _ = load_classifier(folder)
    encoded = encode(rows["text"], model, tokenizer)
    with open_inference() as accelerator:
        return (predict_logits(model, accelerator, encoded, tokenizer, 64) > 0).astype(int)


def score(options: Options, train: Dataset, test: Dataset) -> None:
    """Print the F1 of a setting on test, the mean over seeds, beside the best baseline."""
    predictions = []
    for seed in range(1, options.seeds + 1):
        folder = Path(options.output_dir) / f"{options.scored}-seed{seed}"
        finetune(options.model, folder, PRETRAINED_ENCODER | SETTINGS[options.scored], None, seed)
        predictions.append(decisions(folder, test))
        scores = multilabel_scores(predictions[-1], targets_of(test), LABELS)
        print(f"seed {seed}: macro-F1 {scores['macro_f1']:.3f}, micro-F1 {scores['micro_f1']:.3f}", flush=True)
    _, baselines = score_baselines(train, test)
    truth, groups = targets_of(test).astype(int), list(test["respondent"])
    print(comparison_table(compare(np.stack(predictions), baselines, truth, groups, LABELS)))


if __name__ == "__main__":
    run(main)
