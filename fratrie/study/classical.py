"""The classical methods of a study, on words and on the pooled states of an encoder.

Shapes: N sentences, L labels, D hidden.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import SGDClassifier
from sklearn.svm import SVC
from transformers import AutoModel, DataCollatorWithPadding

from fratrie.modeling.heads import pool
from fratrie.pipelines.bulk import plan_batches
from fratrie.training.baselines import BASELINES, Fold, Inputs, Method, tune
from fratrie.training.encoding import encode
from fratrie.training.evaluation import evaluating
from fratrie.training.metrics import SINGLE_LABEL
from fratrie.training.model_folders import check_checkpoint, load_tokenizer

from .data import StudyData
from .scores import score

FEATURES: Final = ("words", "states")
Progress = Callable[[float, float], None]
Step = Callable[[str, Callable[[], Any]], Any]

CLASSICAL_METHODS: dict[str, Method] = {
    # By stochastic descent: on words, coordinate descent knows no elastic net, and SAGA takes minutes to converge.
    "logistic_regression": Method(
        SGDClassifier(loss="log_loss", penalty="elasticnet", class_weight="balanced"),
        words={"alpha": [3e-5, 1e-4, 3e-4], "l1_ratio": [0.15, 0.5, 0.9]},
        states={"alpha": [3e-3, 1e-2, 3e-2], "l1_ratio": [0.15, 0.5]},
    ),
    "gradient_boosting": Method(
        # At 255 bins the search for splits takes seven times as long, over a thousand sentences.
        HistGradientBoostingClassifier(
            class_weight="balanced", max_iter=60, learning_rate=0.2, max_bins=32, early_stopping=False
        ),
        words={"max_leaf_nodes": [4, 16]},
        states={"max_leaf_nodes": [4, 16]},
        dense_columns=300,
    ),
    "random_forest": Method(
        RandomForestClassifier(100, class_weight="balanced"),
        words={"min_samples_leaf": [1, 3, 10]},
        states={"min_samples_leaf": [1, 3, 10]},
    ),
    "linear_svc": BASELINES["linear_svc"],
    "kernel_svc": Method(
        SVC(kernel="precomputed", class_weight="balanced"),
        words={"C": [0.03, 0.1, 0.3, 1.0, 3.0]},
        states={"C": [0.3, 1.0, 3.0, 10.0]},
        by_kernel=True,
    ),
}


def pooled_states(encoder: str | os.PathLike[str], texts: Sequence[str]) -> NDArray[np.float32]:
    """The mean of the last hidden states over the tokens of each text. Shape: (N, D)

    Args:
        encoder: folder of an encoder and its tokenizer, or a hub id.
        texts: N texts; what is longer than the encoder reads is cut.

    Raises:
        ValueError: no such folder, or a text without any token.
    """
    folder = check_checkpoint(encoder)
    tokenizer = load_tokenizer(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    rows = encode(texts, model, tokenizer)
    pad = DataCollatorWithPadding(tokenizer)
    states_ND = np.zeros((len(rows), model.config.hidden_size), dtype=np.float32)
    with evaluating(model):
        for batch in plan_batches([len(row["input_ids"]) for row in rows], max_tokens=2048):
            inputs = pad([rows[place] for place in batch])
            states_BTD = model(**inputs).last_hidden_state
            states_ND[batch] = pool(states_BTD, inputs["attention_mask"].bool(), "mean").numpy()
    return states_ND


def inputs_of(features: str, data: StudyData, encoder: str | os.PathLike[str]) -> Sequence[Inputs]:
    """What methods read of train and of test: their texts, or for `"states"` the pooled states of them."""
    texts = [data.train.texts, data.test.texts]
    return texts if features == "words" else [pooled_states(encoder, part) for part in texts]


def score_classical(
    data: StudyData,
    encoder: str | os.PathLike[str],
    folds: Sequence[Fold],
    methods: Sequence[str] = tuple(CLASSICAL_METHODS),
    seed: int = 0,
    jobs: int = 1,
    step: Step = lambda name, find: find(),
    progress: Progress | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Tune every method on train, on words and on pooled states, and score it on test.

    Args:
        data: train and test.
        encoder: folder of the pretrained encoder.
        folds: of the cross-validation, the same for all methods.
        methods: keys of `CLASSICAL_METHODS`.
        seed: of methods that draw.
        jobs: labels fitted side by side, on a core each; results do not depend on it.
        step: gives what is known under a name, or finds it; JSON can hold all that is found.
        progress: told the work done and the work in all.

    Returns:
        By method and features: `parameters`, `cross_validated_macro_f1`, the scores on `test` with bootstrap intervals
        over its respondents (see `score`), and the `predictions` on test, indicators (N, L).
    """
    known: dict[str, Sequence[Inputs]] = {}

    def find(place: int, method: str, features: str) -> dict[str, Any]:
        if features not in known:
            known[features] = inputs_of(features, data, encoder)
        learnt, unseen = known[features]
        tuned = tune(
            CLASSICAL_METHODS[method],
            learnt,
            data.train.labels,
            folds,
            single_label=data.task.problem_type == SINGLE_LABEL,
            seed=seed,
            jobs=jobs,
            progress=progress and (lambda done, total: progress(place + done / total, len(pairs))),
        )
        predicted_NL = tuned.fitted.predict(unseen)
        return {
            "parameters": tuned.parameters,
            "cross_validated_macro_f1": tuned.cross_validated_macro_f1,
            "test": score(predicted_NL[None], data.test, data.task.labels),
            "predictions": predicted_NL.tolist(),
        }

    pairs = [(method, features) for method in methods for features in FEATURES]
    found: dict[str, dict[str, dict[str, Any]]] = {method: {} for method in methods}
    for place, (method, features) in enumerate(pairs):
        name = f"classical-{method}-{features}"
        found[method][features] = step(name, partial(find, place, method, features))
    return found
