"""Classical methods for labelled sentences: a classifier per label over words and characters, or over given vectors.

Tuned by cross-validation on the training part alone, with all sentences of a respondent in one fold, and scored on the
test part with the measures of `fratrie.training.metrics`.

Shapes: N sentences, L labels, D columns.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
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
from threadpoolctl import ThreadpoolController

from fratrie.data.annotation import excerpt

from .metrics import Scores, multilabel_scores
from .tasks import targets_of, task_of

if TYPE_CHECKING:
    from datasets import Dataset

Fold = tuple[NDArray[np.int64], NDArray[np.int64]]
Inputs = Sequence[str] | NDArray[np.floating]
Grid = Mapping[str, Sequence[Any]]


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
        bins: for a classifier of trees: to how many quantiles each column is rounded.
        by_kernel: whether the classifier is given, in the place of D columns, the Gaussian kernel of each sentence
            with those learnt from. It is computed once for all labels and parameters.
    """

    classifier: Any
    words: Grid
    states: Grid = field(default_factory=dict)
    dense_columns: int | None = None
    bins: int | None = None
    by_kernel: bool = False

    def grid(self, features: str) -> Grid:
        """Parameters to try on `words` or `states`."""
        return self.words if features == "words" else self.states


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
    """`exp(-γ ‖x - y‖²)` of rows x with those learnt from, y, where γ is 1 / (D · variance), as scikit-learn's SVC.

    Of rows that are all the same γ is 1.
    """

    def fit(self, matrix_ND: Any, y: Any = None) -> "GaussianKernel":
        """Keep the rows, and find γ."""
        mean_square = matrix_ND.multiply(matrix_ND).mean() if issparse(matrix_ND) else np.mean(matrix_ND**2)
        spread = matrix_ND.shape[1] * (mean_square - matrix_ND.mean() ** 2)
        self.gamma_ = 1 / spread if spread > 0 else 1.0
        self.rows_ND_ = matrix_ND
        return self

    def transform(self, matrix_ND: Any) -> NDArray[np.floating]:
        """Shape: (M, D) → (M, N)"""
        return rbf_kernel(matrix_ND, self.rows_ND_, gamma=self.gamma_)


class QuantileBins(TransformerMixin, BaseEstimator):
    """The number of the bin of each value, between the quantiles of its column.

    Unlike scikit-learn's `KBinsDiscretizer` it tells a value that is nearly all of a column from what is above.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, matrix_ND: NDArray[np.floating], y: Any = None) -> "QuantileBins":
        """Find the quantiles."""
        self.quantiles_ = np.quantile(matrix_ND, np.arange(1, self.number) / self.number, axis=0)
        return self

    def transform(self, matrix_ND: NDArray[np.floating]) -> NDArray[np.int64]:
        """Shape: (N, D)"""
        columns = zip(self.quantiles_.T, matrix_ND.T, strict=True)
        return np.stack([np.searchsorted(quantiles, values) for quantiles, values in columns], axis=1)


@dataclass(frozen=True)
class Fit:
    """One classifier to fit, and the sentences that it is asked about.

    Attributes:
        method: what to fit.
        parameters: of its classifier.
        learnt: rows to learn from.
        asked: rows to ask about.
        label: index of the label to tell from the rest.
        seed: of classifiers that draw.
    """

    method: Method
    parameters: Mapping[str, Any]
    learnt: NDArray[np.int64]
    asked: NDArray[np.int64]
    label: int
    seed: int = 0


FitAll = Callable[[Sequence[Fit]], Iterable[tuple[int, NDArray[np.float64]]]]


class Learner:
    """Fits classifiers to some sentences of a corpus, and asks them about others.

    Args:
        inputs: N texts, for TF-IDF, or vectors (N, D), which are standardised.
        truth_NL: indicators; those of sentences that are only asked about are not read.
    """

    def __init__(self, inputs: Inputs, truth_NL: NDArray[np.int64]) -> None:
        self.inputs = inputs if isinstance(inputs, np.ndarray) else np.array(inputs, dtype=object)
        self.truth_NL = truth_NL
        self._threads = ThreadpoolController()
        self._last: tuple[Fit, Any, Any] | None = None

    def scores(self, fit: Fit) -> NDArray[np.float64]:
        """Of the sentences asked about, above 0 where the label is likelier than not. Shape: (M,)

        Raises:
            ValueError: none of the sentences to learn from holds a word.
        """
        # scikit-learn's OneVsRestClassifier would compare all scores with the threshold of its first label, which is
        # another one for a constant label, and of one label per text prefer those without an example.
        truth_N = self.truth_NL[fit.learnt, fit.label]
        if truth_N.min() == truth_N.max():
            return np.full(len(fit.asked), np.inf if truth_N[0] else -np.inf)
        with self._threads.limit(limits=1):  # with more, sums would be rounded otherwise
            learnt_ND, asked_MD = self._matrices(fit)
            classifier = _new_classifier(fit, learnt_ND).fit(learnt_ND, truth_N)
            if hasattr(classifier, "decision_function"):
                return classifier.decision_function(asked_MD)
            return classifier.predict_proba(asked_MD)[:, 1] - 0.5

    def fit_all(self, fits: Sequence[Fit]) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Scores by place, one after the other."""
        return enumerate(map(self.scores, fits))

    def _matrices(self, fit: Fit) -> tuple[Any, Any]:
        """What is read of the sentences learnt and of those asked about; the last are kept, since all labels do."""
        if self._last is None or not _read_the_same(self._last[0], fit):
            of_texts = self.inputs.dtype == object
            if of_texts and not any(re.search(r"\w", text) for text in self.inputs[fit.learnt]):
                raise ValueError(
                    f"none of the {len(fit.learnt)} sentences to learn from holds a word, such as "
                    f"{excerpt(self.inputs[fit.learnt[0]], 40)}: give more training text, or leave the classical "
                    "methods of a study out (--leave_out classical)"
                )
            features = tfidf_features() if of_texts else StandardScaler()
            if fit.method.by_kernel:
                features = make_pipeline(features, GaussianKernel())
            self._last = None  # two would take the memory of both
            learnt_ND = features.fit_transform(self.inputs[fit.learnt])
            self._last = fit, learnt_ND, features.transform(self.inputs[fit.asked])
        return self._last[1:]


def _read_the_same(one: Fit, other: Fit) -> bool:
    return (
        one.method.by_kernel == other.method.by_kernel
        and np.array_equal(one.learnt, other.learnt)
        and np.array_equal(one.asked, other.asked)
    )


def _new_classifier(fit: Fit, matrix_ND: Any) -> Any:
    classifier = clone(fit.method.classifier).set_params(**fit.parameters)
    if "random_state" in classifier.get_params():
        classifier.set_params(random_state=fit.seed)
    steps: list[Any] = []
    if fit.method.dense_columns and issparse(matrix_ND):
        columns = SelectKBest(chi2, k=min(fit.method.dense_columns, matrix_ND.shape[1]))
        steps += [columns, FunctionTransformer(csr_matrix.toarray, accept_sparse=True)]
    if fit.method.bins:
        steps += [QuantileBins(fit.method.bins)]
    return make_pipeline(*steps, classifier)


def decide(
    method: Method,
    candidates: Sequence[Mapping[str, Any]],
    parts: Sequence[Fold],
    labels: int,
    fit_all: FitAll,
    single_label: bool = False,
    seed: int = 0,
) -> list[list[NDArray[np.int64]]]:
    """Decisions of a method about sentences that it has not learnt.

    Args:
        method: what to fit.
        candidates: parameters of its classifier.
        parts: rows to learn and M rows to decide about.
        labels: their number, L; each has a classifier of its own.
        fit_all: gives the scores of fits by their places, in any order, as `Learner.fit_all` does.
        single_label: whether a sentence has just one label, the one with the highest score.
        seed: of classifiers that draw.

    Returns:
        For each part, indicators for each of the candidates. Shape: (M, L)
    """
    fits = [
        Fit(method, parameters, learnt, asked, label, seed)
        for learnt, asked in parts
        for parameters in candidates
        for label in range(labels)
    ]
    scores = dict(fit_all(fits))
    places = iter(range(len(fits)))

    def next_decisions() -> NDArray[np.int64]:
        scores_ML = np.stack([scores[next(places)] for _ in range(labels)], axis=1)
        return (
            np.eye(labels, dtype=np.int64)[scores_ML.argmax(1)] if single_label else (scores_ML > 0).astype(np.int64)
        )

    return [[next_decisions() for _ in candidates] for _ in parts]


@dataclass(frozen=True)
class Tuned:
    """The parameters that did best, and the macro-F1 of their decisions about held-out sentences."""

    parameters: dict[str, Any]
    cross_validated_macro_f1: float


def tune(
    method: Method,
    grid: Grid,
    truth_NL: NDArray[np.int64],
    folds: Sequence[Fold],
    fit_all: FitAll,
    single_label: bool = False,
    seed: int = 0,
) -> Tuned:
    """Choose a method's parameters by cross-validation.

    Features are fitted within each fold. The decisions about all held-out sentences are scored together, so that a
    label which is rare, or missing in a fold, counts as often as the others. Of equals the first parameters win.

    Args:
        method, fit_all, single_label, seed: of `decide`.
        grid: parameters to try.
        truth_NL: indicators of the N sentences in the folds.
        folds: of `folds_of`; each sentence is held out once.
    """
    candidates = list(ParameterGrid(grid))
    decided = decide(method, candidates, folds, truth_NL.shape[1], fit_all, single_label, seed)
    held_out = np.concatenate([asked for _, asked in folds])
    scores = [
        multilabel_scores(np.concatenate(by_fold), truth_NL[held_out])["macro_f1"]
        for by_fold in zip(*decided, strict=True)
    ]
    best = int(np.argmax(scores))
    return Tuned(candidates[best], scores[best])


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


def rows_of(train: Sentences, test: Sentences) -> Fold:
    """Rows of train and of test, which follow one another."""
    learnt = len(train.texts)
    return np.arange(learnt), np.arange(learnt, learnt + len(test.texts))


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
    learner = Learner([*learnt.texts, *unseen.texts], np.concatenate([learnt.labels, unseen.labels]))
    whole = rows_of(learnt, unseen)
    for name, method in BASELINES.items():
        tuned = tune(method, method.words, learnt.labels, parts, learner.fit_all)
        ((predictions[name],),) = decide(method, [tuned.parameters], [whole], len(names), learner.fit_all)
        scores[name] = multilabel_scores(predictions[name], unseen.labels, names) | {
            **tuned.parameters,
            "cross_validated_macro_f1": tuned.cross_validated_macro_f1,
        }
    return scores, predictions
