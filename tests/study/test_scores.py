import numpy as np
import pytest

from fratrie.study.scores import compare_with_classical, decisions, score
from fratrie.training.baselines import Sentences
from fratrie.training.metrics import MULTI_LABEL, SINGLE_LABEL, multilabel_scores
from fratrie.training.tasks import Task

LABELS = ["a", "b", "never"]


def test_decisions_by_thresholds_or_by_the_most_probable_label():
    logits = np.array([[0.0, 1.0, -1.0], [2.0, 3.0, -3.0]])
    task = Task(MULTI_LABEL, LABELS)
    assert decisions(logits, task).tolist() == [[0, 1, 0], [1, 1, 0]]
    assert decisions(np.stack([logits, -logits]), task, [0.4, 0.8, 0.5]).tolist() == [
        [[1, 0, 0], [1, 1, 0]],
        [[1, 0, 1], [0, 0, 1]],
    ]
    assert decisions(logits, Task(SINGLE_LABEL, LABELS)).tolist() == [[0, 1, 0], [0, 1, 0]]


def test_scores_are_those_of_the_runs_averaged_and_absent_labels_are_not_compared():
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 2, (60, 3)) * [1, 1, 0]
    test = Sentences([str(i) for i in range(60)], truth, [i // 3 for i in range(60)])
    runs = np.where(generator.random((2, 60, 3)) < 0.8, truth, 1 - truth)
    got, single = score(runs, test, LABELS), [multilabel_scores(run, truth, LABELS) for run in runs]
    for name in ("present_macro_f1", "micro_precision"):
        assert got[name] == pytest.approx((single[0][name] + single[1][name]) / 2)
    assert got["recall"]["a"] == pytest.approx((single[0]["recall"]["a"] + single[1]["recall"]["a"]) / 2)
    assert got["support"] == single[0]["support"] and got["samples"] == 60
    low, high = got["f1_interval"]["a"]
    assert low < got["f1"]["a"] < high and got["f1_interval"]["never"] is None
    found = compare_with_classical(runs, {"none": np.zeros_like(truth)}, test, LABELS)
    assert list(found) == ["a", "b", "macro"] and found["macro"]["baseline_f1"] == 0
    assert score(runs, Sentences(test.texts, truth), LABELS)["present_macro_f1"] == got["present_macro_f1"]
