"""The classical methods of a study, on words and on the pooled states of an encoder.

Shapes: N sentences, L labels, D hidden.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache, partial
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import ParameterGrid
from sklearn.svm import SVC
from transformers import AutoModel, DataCollatorWithPadding

from fratrie.modeling.heads import pool
from fratrie.pipelines.bulk import plan_batches
from fratrie.training.baselines import (
    BASELINES,
    Fit,
    FitAll,
    Fold,
    Grid,
    Inputs,
    Learner,
    Method,
    decide,
    rows_of,
    tune,
)
from fratrie.training.encoding import encode
from fratrie.training.evaluation import evaluating
from fratrie.training.fingerprint import digest_of
from fratrie.training.metrics import SINGLE_LABEL
from fratrie.training.model_folders import check_checkpoint, load_tokenizer

from .data import StudyData
from .scores import score
from .workers import number_of_workers, open_workers

FEATURES: Final = ("words", "states")
Progress = Callable[[float, float], None]
Step = Callable[[str, Callable[[], Any]], Any]

CLASSICAL_METHODS: dict[str, Method] = {
    # By stochastic descent: on words, coordinate descent knows no elastic net, and SAGA takes minutes to converge.
    "logistic_regression": Method(
        SGDClassifier(loss="log_loss", penalty="elasticnet", class_weight="balanced"),
        words={"alpha": [3e-5, 1e-4, 3e-4], "l1_ratio": [0.15, 0.5, 0.9]},
        states={"alpha": [1e-2, 3e-2, 1e-1], "l1_ratio": [0.15, 0.5]},
    ),
    "gradient_boosting": Method(
        HistGradientBoostingClassifier(class_weight="balanced", max_iter=60, learning_rate=0.2, early_stopping=False),
        words={"max_leaf_nodes": [4, 16]},
        states={"max_leaf_nodes": [4, 16]},
        dense_columns=300,
        # At 255 bins the search for splits takes seven times as long, over a thousand sentences. Of weighted classes
        # scikit-learn would look for weighted quantiles, in Python, which took nine tenths of the time.
        bins=32,
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


def pooled_states(
    encoder: str | os.PathLike[str], texts: Sequence[str], max_length: int | None = None
) -> NDArray[np.float32]:
    """The mean of the last hidden states over the tokens of each text. Shape: (N, D)

    Args:
        encoder: folder of an encoder and its tokenizer, or a hub id.
        texts: N texts; what is longer than the encoder reads is cut.
        max_length: tokens at most; the encoder's own limit when not given.

    Raises:
        ValueError: no such folder, a text without any token, or a limit beyond the encoder's.
    """
    folder = check_checkpoint(encoder)
    tokenizer = load_tokenizer(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    rows = encode(texts, model, tokenizer, max_length)
    pad = DataCollatorWithPadding(tokenizer)
    states_ND = np.zeros((len(rows), model.config.hidden_size), dtype=np.float32)
    with evaluating(model):
        for batch in plan_batches([len(row["input_ids"]) for row in rows], max_tokens=2048):
            inputs = pad([rows[place] for place in batch])
            states_BTD = model(**inputs).last_hidden_state
            states_ND[batch] = pool(states_BTD, inputs["attention_mask"].bool(), "mean").numpy()
    return states_ND


@contextmanager
def open_fits(
    features: str,
    data: StudyData,
    encoder: str | os.PathLike[str],
    workers: int | None = None,
    max_length: int | None = None,
) -> Iterator[FitAll]:
    """What fits classifiers on words or on states, side by side; rows are those of train and, behind them, of test.

    Nothing is computed and no process started before the first fit: all of them may be known.

    Args:
        features: one of `FEATURES`.
        data: train and test.
        encoder: folder of the pretrained encoder, for states.
        workers: processes; by default as many as cores and memory allow. They change no number.
        max_length: tokens of a sentence at most, for its states.
    """
    truth_NL = np.concatenate([data.train.labels, data.test.labels])
    if workers is None:
        kernel = len(data.train.texts) * len(truth_NL) * np.dtype(np.float64).itemsize
        workers = number_of_workers(2 * kernel)  # one of them is made from the other
    with ExitStack() as stack:

        @cache
        def opened() -> FitAll:
            texts = [*data.train.texts, *data.test.texts]
            inputs = texts if features == "words" else pooled_states(encoder, texts, max_length)
            if workers == 1:
                return Learner(inputs, truth_NL).fit_all
            pool = stack.enter_context(open_workers(workers, _prepare, inputs, truth_NL))
            return lambda fits: pool.results(_scores, {place: (fit,) for place, fit in enumerate(fits)})

        yield lambda fits: opened()(fits)


_learner: Learner


def _prepare(inputs: Inputs, truth_NL: NDArray[np.int64]) -> None:
    global _learner
    _learner = Learner(inputs, truth_NL)


def _scores(fit: Fit) -> NDArray[np.float64]:
    return _learner.scores(fit)


def score_classical(
    data: StudyData,
    encoder: str | os.PathLike[str],
    folds: Sequence[Fold],
    methods: Sequence[str] = tuple(CLASSICAL_METHODS),
    seed: int = 0,
    workers: int | None = None,
    max_length: int | None = None,
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
        workers: processes side by side; by default as many as cores and memory allow. They change no number.
        max_length: tokens of a sentence at most, for its states.
        step: gives what is known under a name, or finds it; JSON can hold all that is found.
        progress: told the work done and the work in all.

    Returns:
        By method and features: `parameters`, `cross_validated_macro_f1`, the scores on `test` with bootstrap intervals
        over its respondents (see `score`), and the `predictions` on test, indicators (N, L).
    """
    found: dict[str, dict[str, dict[str, Any]]] = {method: {} for method in methods}
    pairs = len(FEATURES) * len(methods)

    def find(name: str, features: str, fit_all: FitAll, place: int) -> dict[str, Any]:
        method = CLASSICAL_METHODS[name]
        grid = method.grid(features)
        fits = len(data.task.labels) * (len(ParameterGrid(grid)) * len(folds) + 1)
        told = _telling(fit_all, lambda done: progress and progress(place + done / fits, pairs))
        return _tune_and_score(method, grid, data, folds, told, seed)

    places = count()
    for features in FEATURES:
        with open_fits(features, data, encoder, workers, max_length) as fit_all:
            for method in methods:
                find_it = partial(find, method, features, fit_all, next(places))
                found[method][features] = step(f"classical-{name_of(method, features)}", find_it)
    return found


def name_of(method: str, features: str) -> str:
    """Of a step that tunes a method or fits it: another one when the method or its grid has changed."""
    return f"{method}-{features}-{digest_of(str(CLASSICAL_METHODS[method]))[:8]}"


def _tune_and_score(
    method: Method, grid: Grid, data: StudyData, folds: Sequence[Fold], fit_all: FitAll, seed: int
) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "fit_all": fit_all,
        "single_label": data.task.problem_type == SINGLE_LABEL,
        "seed": seed,
    }
    tuned = tune(method, grid, data.train.labels, folds, **choices)
    whole = rows_of(data.train, data.test)
    ((predicted_NL,),) = decide(method, [tuned.parameters], [whole], len(data.task.labels), **choices)
    return {
        **asdict(tuned),
        "test": score(predicted_NL[None], data.test, data.task.labels),
        "predictions": predicted_NL.tolist(),
    }


def _telling(fit_all: FitAll, tell: Callable[[int], object]) -> FitAll:
    """The same, which tells after each fit how many there were."""
    done = count(1)

    def fit_and_tell(fits: Sequence[Fit]) -> Iterator[tuple[int, NDArray[np.float64]]]:
        for found in fit_all(fits):
            tell(next(done))
            yield found

    return fit_and_tell
