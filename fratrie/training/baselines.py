"""Classical baselines for multi-label sentences: TF-IDF of words and characters under two linear classifiers.

Tuned by cross-validation on the training part alone, with all sentences of a respondent in one fold, and
scored on the test part with the measures of `fratrie.training.metrics`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, make_scorer
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.svm import LinearSVC

from .metrics import Scores, multilabel_scores
from .tasks import targets_of, task_of

if TYPE_CHECKING:
    from datasets import Dataset

# Balanced, because without class weights the cross-validated macro-F1 is 0.04 to 0.24 lower at every penalty tried.
BASELINES: dict[str, tuple[Any, list[float]]] = {
    "logistic_regression": (
        LogisticRegression(class_weight="balanced", solver="liblinear", max_iter=1000),
        [1.0, 3.0, 10.0, 30.0],
    ),
    "linear_svc": (LinearSVC(class_weight="balanced"), [0.03, 0.1, 0.3, 1.0]),
}


@dataclass(frozen=True)
class Sentences:
    """Texts with their 0/1 labels, shape (N, L), and the group (respondent) that each belongs to."""

    texts: Sequence[str]
    labels: NDArray[np.int64]
    groups: Sequence[Hashable] | None = None

    @classmethod
    def from_dataset(cls, dataset: "Dataset") -> "Sentences":
        """Take the columns `text`, `labels` (one label per text or several) and, where there, `respondent`."""
        labels = targets_of(dataset).astype(np.int64)
        if labels.ndim == 1:
            labels = np.eye(len(task_of(dataset.features).labels), dtype=np.int64)[labels]
        groups = dataset["respondent"][:] if "respondent" in dataset.features else None
        return cls(dataset["text"][:], labels, groups)


def tfidf_features() -> FeatureUnion:
    """Word 1- and 2-grams (one-letter words kept: «j», «à») beside character 2- to 4-grams within words."""
    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b", sublinear_tf=True)
    characters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True)
    return FeatureUnion([("words", words), ("characters", characters)])


def tune_baseline(name: str, train: Sentences, folds: int = 5) -> GridSearchCV:
    """Fit one baseline, its penalty chosen for the best cross-validated macro-F1.

    A label that all or none of the sentences carry is predicted for all or none, with scikit-learn's warning.

    Args:
        name: a key of `BASELINES`.
        train: texts, labels and groups; without groups every sentence is its own.
        folds: at most; fewer when there are fewer groups.

    Raises:
        ValueError: an unknown name, or fewer than two groups.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} is not one of {', '.join(BASELINES)}")
    groups = np.arange(len(train.texts)) if train.groups is None else np.asarray(train.groups)
    folds = min(folds, len(np.unique(groups)))
    if folds < 2:
        raise ValueError("cross-validation needs the sentences of at least two respondents; give more training text")
    classifier, penalties = BASELINES[name]
    pipeline = Pipeline([("features", tfidf_features()), ("classifier", OneVsRestClassifier(classifier))])
    grid = {"classifier__estimator__C": penalties}
    macro_f1 = make_scorer(f1_score, average="macro", zero_division=0)
    search = GridSearchCV(pipeline, grid, scoring=macro_f1, cv=GroupKFold(folds))
    return search.fit(train.texts, train.labels, groups=groups)


def score_baselines(
    train: "Dataset", test: "Dataset", folds: int = 5
) -> tuple[dict[str, Scores], dict[str, NDArray[np.int64]]]:
    """Tune every baseline on train and score it on test.

    Args:
        train: has the columns `text`, `labels` (`List(ClassLabel)`) and, for folds by respondent, `respondent`.
        test: has `text` and the same `labels`.
        folds: of the cross-validation.

    Returns:
        For each baseline the scores of `multilabel_scores`, with the chosen penalty `C` and the
        `cross_validated_macro_f1` that chose it; and its predictions on test as indicators. Shape: (N, L)

    Raises:
        ValueError: train and test differ in their labels, or `tune_baseline` finds train too small.
    """
    names = train.features["labels"].feature.names
    if test.features["labels"] != train.features["labels"]:
        raise ValueError(f"train and test have the labels {names} and {test.features['labels']}; give equal ones")
    learnt, unseen = Sentences.from_dataset(train), Sentences.from_dataset(test)
    scores, predictions = {}, {}
    for name in BASELINES:
        search = tune_baseline(name, learnt, folds)
        predictions[name] = search.predict(unseen.texts)
        scores[name] = multilabel_scores(predictions[name], unseen.labels, names) | {
            "C": search.best_params_["classifier__estimator__C"],
            "cross_validated_macro_f1": float(search.best_score_),
        }
    return scores, predictions
