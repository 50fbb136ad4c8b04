"""Classical methods for labelled sentences: a classifier per label over words and characters, or over given vectors.

Tuned by cross-validation on the training part alone, with all sentences of a respondent in one fold, and scored on the
test part with the measures of `fratrie.training.metrics`.

Shapes: N sentences, L labels, D columns.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.feature_selection import SelectKBest, chi2
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GroupKFold, ParameterGrid
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import LinearSVC
from threadpoolctl import threadpool_limits

from .metrics import Scores, multilabel_scores
from .tasks import targets_of, task_of

if TYPE_CHECKING:
    from datasets import Dataset

Fold = tuple[NDArray[np.int64], NDArray[np.int64]]
Inputs = Sequence[str] | NDArray[np.floating]
Grid = Mapping[str, Sequence[Any]]
Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Sentences:
    """Texts with their 0/1 labels, shape (N, L), the group (respondent) of each, and its row in the file."""

    texts: Sequence[str]
    labels: NDArray[np.int64]
    groups: Sequence[Hashable] | None = None
    rows: Sequence[int] | None = None

    @property
    def respondents(self) -> Sequence[Hashable]:
        """Who speaks in each sentence; without groups, each sentence is a respondent's own."""
        return range(len(self.texts)) if self.groups is None else self.groups

    def row(self, place: int) -> int:
        """The row of the file in which a sentence stands; where it is not known, sentences are counted from 1."""
        return int(place) + 1 if self.rows is None else self.rows[place]

    @classmethod
    def from_dataset(cls, dataset: "Dataset") -> "Sentences":
        """Take the columns `text`, `labels` (one label per text or several) and, where there, `respondent`, `row`."""
        labels = targets_of(dataset).astype(np.int64)
        if labels.ndim == 1:
            labels = np.eye(len(task_of(dataset.features).labels), dtype=np.int64)[labels]
        groups, rows = (dataset[name][:] if name in dataset.features else None for name in ("respondent", "row"))
        return cls(dataset["text"][:], labels, groups, rows)


@dataclass(frozen=True)
class Method:
    """A classifier of scikit-learn that tells one label from the rest, and what to try.

    Attributes:
        classifier: not fitted; where it draws, `fit` gives it a seed.
        words: parameters to try on TF-IDF of texts.
        states: the same on vectors.
        dense_columns: for a classifier that reads no sparse matrix: how many of its columns each label keeps, those
            that depend most on the label. Single words decide here, and a factorisation would mix them.
        by_kernel: whether the classifier is given, in the place of D columns, the Gaussian kernel of each sentence
            with those learnt from. It is computed once for all labels and parameters.
    """

    classifier: Any
    words: Grid
    states: Grid = field(default_factory=dict)
    dense_columns: int | None = None
    by_kernel: bool = False


# Balanced, because without class weights the cross-validated macro-F1 is 0.04 to 0.24 lower at every penalty tried.
BASELINES: dict[str, Method] = {
    "logistic_regression": Method(
        LogisticRegression(class_weight="balanced", solver="liblinear", max_iter=1000), {"C": [1.0, 3.0, 10.0, 30.0]}
    ),
    "linear_svc": Method(LinearSVC(class_weight="balanced"), {"C": [0.03, 0.1, 0.3, 1.0]}, {"C": [1e-3, 1e-2, 1e-1]}),
}


def tfidf_features() -> FeatureUnion:
    """Word 1- and 2-grams (one-letter words kept: «j», «à») beside character 2- to 4-grams within words."""
    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b", sublinear_tf=True)
    characters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True)
    return FeatureUnion([("words", words), ("characters", characters)])


class GaussianKernel(TransformerMixin, BaseEstimator):
    """`exp(-γ ‖x - y‖²)` of rows x with those learnt from, y, where γ is 1 / (D · variance), as scikit-learn's SVC."""

    def fit(self, matrix_ND: Any, y: Any = None) -> "GaussianKernel":
        """Keep the rows, and find γ."""
        mean_square = matrix_ND.multiply(matrix_ND).mean() if issparse(matrix_ND) else np.mean(matrix_ND**2)
        self.gamma_ = 1 / (matrix_ND.shape[1] * (mean_square - matrix_ND.mean() ** 2))
        self.rows_ND_ = matrix_ND
        return self

    def transform(self, matrix_ND: Any) -> NDArray[np.floating]:
        """Shape: (M, D) → (M, N)"""
        return rbf_kernel(matrix_ND, self.rows_ND_, gamma=self.gamma_)


@dataclass(frozen=True)
class Fitted:
    """A method fitted to sentences.

    Attributes:
        features: what makes a matrix (N, D) of texts or vectors.
        classifiers: of each label; the value itself of a label that all sentences learnt from carry, or none.
        single_label: whether a sentence has just one label, the one with the highest score.
    """

    features: Any
    classifiers: Sequence[Any]
    single_label: bool = False

    def predict(self, inputs: Inputs) -> NDArray[np.int64]:
        """The labels of texts, or of vectors, as indicators. Shape: (N, L)"""
        return self.decide(self.features.transform(inputs))

    def decide(self, matrix_ND: Any) -> NDArray[np.int64]:
        """The labels of what `features` has made. Shape: (N, D) → (N, L)"""
        scores_NL = np.stack([_score(classifier, matrix_ND) for classifier in self.classifiers], axis=1)
        if self.single_label:
            return np.eye(scores_NL.shape[1], dtype=np.int64)[scores_NL.argmax(1)]
        return (scores_NL > 0).astype(np.int64)


def fit(
    method: Method,
    parameters: Mapping[str, Any],
    inputs: Inputs,
    truth_NL: NDArray[np.int64],
    single_label: bool = False,
    seed: int = 0,
    jobs: int = 1,
) -> Fitted:
    """Fit a classifier per label.

    Args:
        method: what to fit.
        parameters: of its classifier.
        inputs: N texts, for TF-IDF, or vectors (N, D), which are standardised.
        truth_NL: indicators. Shape: (N, L)
        single_label: whether a sentence has just one label.
        seed: of classifiers that draw.
        jobs: labels fitted side by side, on a core each; results do not depend on it.
    """
    features = _new_features(method, inputs)
    matrix_ND = features.fit_transform(inputs)
    classifiers = _fit_labels(method, parameters, matrix_ND, truth_NL, seed, jobs)
    return Fitted(features, classifiers, single_label)


@dataclass(frozen=True)
class Tuned:
    """The parameters that did best, the macro-F1 of their decisions on held-out sentences, and the method fitted."""

    parameters: dict[str, Any]
    cross_validated_macro_f1: float
    fitted: Fitted


def tune(
    method: Method,
    inputs: Inputs,
    truth_NL: NDArray[np.int64],
    folds: Sequence[Fold],
    single_label: bool = False,
    seed: int = 0,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Tuned:
    """Choose a method's parameters by cross-validation, then fit it to all sentences.

    Features are fitted within each fold. The decisions about all held-out sentences are scored together, so that a
    label which is rare, or missing in a fold, counts as often as the others. Of equals the first parameters win.

    Args:
        method, inputs, truth_NL, single_label, seed, jobs: of `fit`.
        folds: of `folds_of`; each sentence is held out once.
        progress: told how many of the fits are done, and how many there are.
    """
    inputs = as_array(inputs)
    candidates = list(ParameterGrid(method.words if _are_texts(inputs) else method.states))
    decisions = np.zeros((len(candidates), *truth_NL.shape), dtype=np.int64)
    total = len(candidates) * len(folds) + 1
    for fold, (learnt, held_out) in enumerate(folds):
        features = _new_features(method, inputs)
        learnt_ND = features.fit_transform(inputs[learnt])
        unseen_ND = features.transform(inputs[held_out])
        for place, parameters in enumerate(candidates):
            classifiers = _fit_labels(method, parameters, learnt_ND, truth_NL[learnt], seed, jobs)
            decisions[place, held_out] = Fitted(features, classifiers, single_label).decide(unseen_ND)
            if progress:
                progress(fold * len(candidates) + place + 1, total)
    scores = [multilabel_scores(decided, truth_NL)["macro_f1"] for decided in decisions]
    best = int(np.argmax(scores))
    fitted = fit(method, candidates[best], inputs, truth_NL, single_label, seed, jobs)
    if progress:
        progress(total, total)
    return Tuned(candidates[best], scores[best], fitted)


def as_array(inputs: Inputs) -> NDArray[Any]:
    """Texts, or vectors, of which rows can be taken by number."""
    return inputs if isinstance(inputs, np.ndarray) else np.array(inputs, dtype=object)


def _are_texts(inputs: Inputs) -> bool:
    return not isinstance(inputs, np.ndarray) or inputs.dtype == object


def _new_features(method: Method, inputs: Inputs) -> Any:
    features = tfidf_features() if _are_texts(inputs) else StandardScaler()
    return make_pipeline(features, GaussianKernel()) if method.by_kernel else features


def _fit_labels(
    method: Method, parameters: Mapping[str, Any], matrix_ND: Any, truth_NL: NDArray[np.int64], seed: int, jobs: int
) -> list[Any]:
    classifier = clone(method.classifier).set_params(**parameters)
    if "random_state" in classifier.get_params():
        classifier.set_params(random_state=seed)
    if method.dense_columns and issparse(matrix_ND):
        columns = SelectKBest(chi2, k=min(method.dense_columns, matrix_ND.shape[1]))
        classifier = make_pipeline(columns, FunctionTransformer(csr_matrix.toarray, accept_sparse=True), classifier)
    # Threads, since scikit-learn's loops leave Python's lock: nothing is copied.
    return Parallel(n_jobs=jobs, prefer="threads")(
        delayed(_fit_label)(clone(classifier), matrix_ND, truth_N) for truth_N in truth_NL.T
    )


def _fit_label(classifier: Any, matrix_ND: Any, truth_N: NDArray[np.int64]) -> Any:
    # scikit-learn's OneVsRestClassifier would compare all scores with the threshold of its first label, which is
    # another one for a constant label, and of one label per text prefer those without an example.
    if truth_N.min() == truth_N.max():
        return int(truth_N[0])
    with threadpool_limits(1, user_api="openmp"):  # which each thread has its own number of
        return classifier.fit(matrix_ND, truth_N)


def _score(classifier: Any, matrix_ND: Any) -> NDArray[np.float64]:
    """Above 0 where the label is likelier than not. Shape: (N,)"""
    if isinstance(classifier, int):
        return np.full(matrix_ND.shape[0], np.inf if classifier else -np.inf)
    if hasattr(classifier, "decision_function"):
        return classifier.decision_function(matrix_ND)
    return classifier.predict_proba(matrix_ND)[:, 1] - 0.5


def folds_of(sentences: Sentences, number: int, seed: int | None = None) -> list[Fold]:
    """Rows to learn and rows to hold out, with all sentences of a respondent on one side.

    Args:
        sentences: without groups, each sentence is a respondent of its own.
        number: of folds, at most; fewer where there are fewer respondents.
        seed: of the draw; without one, the folds are of sizes as equal as can be.

    Raises:
        ValueError: fewer than two respondents.
    """
    groups = np.asarray(sentences.respondents)
    number = min(number, len(np.unique(groups)))
    if number < 2:
        raise ValueError("cross-validation needs the sentences of at least two respondents; give more training text")
    splitter = GroupKFold(number) if seed is None else GroupKFold(number, shuffle=True, random_state=seed)
    return list(splitter.split(groups, groups=groups))


def score_baselines(
    train: "Dataset", test: "Dataset", folds: int = 5
) -> tuple[dict[str, Scores], dict[str, NDArray[np.int64]]]:
    """Tune every baseline on the words of train and score it on test.

    Args:
        train: has the columns `text`, `labels` (`List(ClassLabel)`) and, for folds by respondent, `respondent`.
        test: has `text` and the same `labels`.
        folds: of the cross-validation.

    Returns:
        For each baseline the scores of `multilabel_scores`, with the chosen penalty `C` and the
        `cross_validated_macro_f1` that chose it; and its predictions on test as indicators. Shape: (N, L)

    Raises:
        ValueError: train and test differ in their labels, or train is of fewer than two respondents.
    """
    names = train.features["labels"].feature.names
    if test.features["labels"] != train.features["labels"]:
        raise ValueError(f"train and test have the labels {names} and {test.features['labels']}; give equal ones")
    learnt, unseen = Sentences.from_dataset(train), Sentences.from_dataset(test)
    parts = folds_of(learnt, folds)
    scores, predictions = {}, {}
    for name, method in BASELINES.items():
        tuned = tune(method, learnt.texts, learnt.labels, parts)
        predictions[name] = tuned.fitted.predict(unseen.texts)
        scores[name] = multilabel_scores(predictions[name], unseen.labels, names) | {
            **tuned.parameters,
            "cross_validated_macro_f1": tuned.cross_validated_macro_f1,
        }
    return scores, predictions
