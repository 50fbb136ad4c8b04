import random

import numpy as np
import pytest
import torch
from cleanlab.filter import find_label_issues
from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class
from cleanlab.multilabel_classification.rank import get_label_quality_scores_per_class
from sklearn.metrics import confusion_matrix

from fratrie.study.errors import confident_errors, confusion, label_issues
from fratrie.training.baselines import Sentences
from fratrie.training.metrics import SINGLE_LABEL

LABELS = ["m", "p", "+"]


def classified(seed=0, size=200, labels=3):
    """Probabilities that mostly fit the truth, and labels of which a few have been turned."""
    generator = np.random.default_rng(seed)
    truth = (generator.random((size, labels)) < 0.4).astype(int)
    probabilities = np.clip(0.15 + 0.7 * truth + generator.normal(0, 0.1, truth.shape), 0.01, 0.99)
    turned = generator.random(truth.shape) < 0.04
    return probabilities, truth ^ turned, turned, Sentences([f"text {i}" for i in range(size)], truth ^ turned)


def test_confusion_of_several_labels_counts_pairs_in_one_sentence():
    truth = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]])
    given = np.array([[0, 0, 1], [0, 1, 1], [0, 0, 1], [1, 0, 1]])
    assert confusion(given, truth, LABELS) == {
        "labels": LABELS,
        "missed_given": [[0, 1, 2], [0, 0, 1], [0, 0, 0]],
        "missed": [2, 1, 0],
        "given": [0, 1, 3],
    }


def test_confusion_of_one_label_is_the_usual_matrix():
    truth, given = np.random.default_rng(0).integers(0, 3, (2, 60))
    expected = confusion_matrix(truth, given)
    np.fill_diagonal(expected, 0)
    result = confusion(np.eye(3, dtype=int)[given], np.eye(3, dtype=int)[truth], LABELS)
    assert result["missed_given"] == expected.tolist()
    assert (result["missed"], result["given"]) == (expected.sum(1).tolist(), expected.sum(0).tolist())


def test_the_surest_errors_come_first_and_a_sentence_once():
    truth = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]])
    probabilities = np.array([[0.3, 0.9, 0.1], [0.2, 0.8, 0.1], [0.05, 0.7, 0.1], [0.35, 0.1, 0.9], [0.1, 0.2, 0.55]])
    predictions = (probabilities > [0.32, 0.5, 0.6]).astype(int)
    sentences = Sentences(list("abcde"), truth, list("rsrss"), [2, 3, 5, 6, 9])
    result = confident_errors(probabilities, predictions, truth, sentences, LABELS)
    assert [(e["text"], e["row"], e["label"], e["truth"], e["probability"]) for e in result] == [
        ("c", 5, "m", 1, 0.05),
        ("a", 2, "p", 0, 0.9),
        ("e", 9, "+", 1, 0.55),
        ("d", 6, "m", 0, 0.35),
    ]
    assert result[1]["labels"] == ["m"] and result[1]["predicted"] == ["p"] and result[1]["respondent"] == "r"
    assert confident_errors(probabilities, predictions, truth, sentences, LABELS, most=1) == result[:1]
    assert confident_errors(probabilities, truth, truth, sentences, LABELS) == []
    alone = confident_errors(probabilities, predictions, truth, Sentences(sentences.texts, truth), LABELS)
    assert [error["respondent"] for error in alone] == [None] * 4


def test_turned_labels_are_found():
    probabilities, truth, turned, sentences = classified()
    issues = label_issues(probabilities, truth, sentences, LABELS, most=1000)
    found = {(issue["row"] - 1, LABELS.index(issue["label"])) for issue in issues}
    carried = [np.flatnonzero(row).tolist() for row in truth]
    flagged = find_multilabel_issues_per_class(carried, probabilities, n_jobs=1)
    assert found == set(zip(*map(np.ndarray.tolist, np.nonzero(flagged)), strict=True)), "and no other"
    assert found <= set(zip(*map(np.ndarray.tolist, np.nonzero(turned)), strict=True))
    assert len(found) >= turned.sum() - 2  # how many there are is estimated
    qualities = get_label_quality_scores_per_class(carried, probabilities)
    for issue in issues:
        row, label = issue["row"] - 1, LABELS.index(issue["label"])
        assert issue["quality"] == pytest.approx(qualities[row][label])
        assert issue["given"] == truth[row, label] and issue["text"] == f"text {row}" and issue["instead"] is None
    assert [issue["quality"] for issue in issues] == sorted(issue["quality"] for issue in issues)
    assert label_issues(probabilities, truth, sentences, LABELS, most=3) == issues[:3]


def test_one_label_per_sentence_is_judged_as_one():
    generator = np.random.default_rng(1)
    right, given = generator.integers(0, 3, (2, 200))
    given = np.where(generator.random(200) < 0.05, given, right)
    probabilities = 0.1 + 0.7 * np.eye(3)[right] + generator.uniform(0, 0.05, (200, 3))
    probabilities /= probabilities.sum(1, keepdims=True)
    sentences = Sentences([f"text {i}" for i in range(200)], np.eye(3, dtype=int)[given])
    issues = label_issues(probabilities, sentences.labels, sentences, LABELS, problem_type=SINGLE_LABEL)
    rows = [issue["row"] - 1 for issue in issues]
    assert sorted(rows) == np.flatnonzero(find_label_issues(given, probabilities)).tolist()
    assert set(rows) <= set(np.flatnonzero(given != right).tolist())
    assert len(issues) >= (given != right).sum() - 1 > 3
    for row, issue in zip(rows, issues, strict=True):
        assert (issue["label"], issue["given"]) == (LABELS[given[row]], 1)
        assert issue["instead"] == LABELS[right[row]]


def test_labels_that_all_or_none_carry_are_not_doubted():
    probabilities, truth, _, sentences = classified()
    truth[:, 0], truth[:, 1] = 1, 0
    issues = label_issues(probabilities, truth, sentences, LABELS)
    assert issues and all(issue["label"] == "+" for issue in issues)
    assert label_issues(probabilities, np.zeros_like(truth), sentences, LABELS) == []
    only = np.eye(3, dtype=int)[[1] * 200]
    assert label_issues(probabilities, only, sentences, LABELS, problem_type=SINGLE_LABEL) == []


def test_the_search_is_quiet_repeatable_and_draws_nothing(capfd, recwarn):
    probabilities, truth, _, sentences = classified(size=30)
    truth[:, 0] = 0
    truth[4, 0] = 1  # of one example cleanlab warns
    before = random_states()
    issues = label_issues(probabilities, truth, sentences, LABELS)
    assert label_issues(probabilities, truth, sentences, LABELS) == issues != []
    assert random_states() == before
    assert capfd.readouterr() == ("", "") and not recwarn.list


def random_states():
    _, key, place, *_ = np.random.get_state()
    return random.getstate(), key.tolist(), place, torch.get_rng_state().tolist()


def test_a_missing_package_is_named(monkeypatch):
    probabilities, truth, _, sentences = classified()
    monkeypatch.setattr("fratrie.study.packages.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package cleanlab: pip install 'fratrie\[study\]'"):
        label_issues(probabilities, truth, sentences, LABELS)
