from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_forked
from sklearn.metrics import accuracy_score, classification_report

from fratrie.training import metrics
from fratrie.training.metrics import (
    classification_scores,
    decide,
    multilabel_scores,
    probabilities,
    regression_scores,
    scores_table,
    single_label_scores,
    thresholds_by_name,
    tune_thresholds,
)
from fratrie.training.model_card import classification_tables

METRIC_FOLDER = Path(metrics.__file__).parent / "multilabel_f1"


@st.composite
def indicator_pairs(draw):
    samples, labels = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    bits = st.lists(st.lists(st.integers(0, 1), min_size=labels, max_size=labels), min_size=samples, max_size=samples)
    return np.array(draw(bits)), np.array(draw(bits))


def naive_counts(predicted, truth):
    hits = sum(1 for p, t in zip(predicted, truth, strict=True) if p and t)
    return hits, sum(map(int, predicted)), sum(map(int, truth))


def ratio(numerator, denominator):
    return numerator / denominator if denominator else 0.0


@settings(deadline=None)
@given(indicator_pairs())
def test_multilabel_scores_equal_a_naive_count(pair):
    predicted, truth = pair
    names = [f"label {i}" for i in range(truth.shape[1])]
    scores = multilabel_scores(predicted, truth, names)
    f1 = []
    for i, name in enumerate(names):
        hits, chosen, support = naive_counts(predicted[:, i], truth[:, i])
        assert scores["precision"][name] == pytest.approx(ratio(hits, chosen))
        assert scores["recall"][name] == pytest.approx(ratio(hits, support))
        assert scores["f1"][name] == pytest.approx(ratio(2 * hits, chosen + support))
        assert scores["support"][name] == support
        f1.append(scores["f1"][name])
    hits, chosen, support = naive_counts(predicted.ravel(), truth.ravel())
    assert scores["micro_precision"] == pytest.approx(ratio(hits, chosen))
    assert scores["micro_recall"] == pytest.approx(ratio(hits, support))
    assert scores["micro_f1"] == pytest.approx(ratio(2 * hits, chosen + support))
    assert scores["macro_f1"] == pytest.approx(sum(f1) / len(f1))
    present = [value for value, column in zip(f1, truth.T, strict=True) if column.any()]
    assert scores["present_macro_f1"] == pytest.approx(ratio(sum(present), len(present)))
    assert scores["samples"] == len(truth)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_single_label_scores_equal_scikit_learn(pairs):
    predicted, truth = zip(*pairs, strict=True)
    names = ["a", "b", "c", "d"]
    scores = single_label_scores(predicted, truth, names)
    report = classification_report(
        truth, predicted, labels=range(4), target_names=names, output_dict=True, zero_division=0
    )
    for name in names:
        assert scores["f1"][name] == pytest.approx(report[name]["f1-score"])
        assert scores["support"][name] == report[name]["support"]
    assert scores["macro_f1"] == pytest.approx(report["macro avg"]["f1-score"])
    assert scores["macro_recall"] == pytest.approx(report["macro avg"]["recall"])
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert scores["micro_f1"] == pytest.approx(scores["accuracy"])


def test_one_label_alone_counts_its_positives():
    assert multilabel_scores([[1], [0], [0]], [[1], [1], [0]], ["t"])["recall"] == {"t": 0.5}


def test_regression_scores():
    scores = regression_scores([1.0, 2.0, 4.0], [1.0, 3.0, 2.0])
    assert scores == {"mse": pytest.approx(5 / 3), "mae": 1.0, "r2": pytest.approx(-1.5), "samples": 3}


def test_logits_become_decisions_as_the_problem_type_says():
    logits = [[2.0, -1.0, 0.4], [-3.0, -2.0, -1.0]]
    several = classification_scores(logits, [[1, 0, 1], [0, 0, 1]], "multi_label_classification", list("abc"))
    assert several["recall"] == {"a": 1.0, "b": 0.0, "c": 0.5}
    single = classification_scores(logits, [0, 0], "single_label_classification", list("abc"))
    assert single["accuracy"] == 0.5
    real = classification_scores([[1.0], [3.0]], [1.0, 2.0], "regression")
    assert real["mse"] == 0.5
    with pytest.raises(ValueError, match="'ordinal' is not one of multi_label"):
        classification_scores(logits, [0, 0], "ordinal")


def test_probabilities_are_sigmoid_or_softmax():
    several = probabilities([[0.0, np.log(3)]], "multi_label_classification")
    np.testing.assert_allclose(several, [[0.5, 0.75]])
    single = probabilities([[0.0, np.log(3)]], "single_label_classification")
    np.testing.assert_allclose(single, [[0.25, 0.75]])
    assert np.isfinite(probabilities([[1e4, -1e4]], "multi_label_classification")).all()


def test_thresholds_belong_to_their_labels():
    np.testing.assert_array_equal(decide([[0.4, 0.6], [0.6, 0.6]]), [[0, 1], [1, 1]])
    np.testing.assert_array_equal(decide([[0.4, 0.6], [0.6, 0.6]], [0.3, 0.7]), [[1, 0], [1, 0]])
    with pytest.raises(ValueError, match="3 thresholds for 2 labels"):
        decide([[0.4, 0.6]], [0.1, 0.2, 0.3])


@settings(max_examples=40, deadline=None)
@given(indicator_pairs(), st.integers(0, 2**31))
def test_tuned_thresholds_beat_every_other_threshold(pair, seed):
    _, truth = pair
    values = np.random.default_rng(seed).choice([0.05, 0.2, 0.45, 0.5, 0.7, 0.9], truth.shape)
    thresholds = tune_thresholds(values, truth)
    tuned = multilabel_scores(decide(values, thresholds), truth)["f1"]
    for other in (0.04, 0.1, 0.3, 0.47, 0.5, 0.6, 0.8, 0.95):
        fixed = multilabel_scores(decide(values, [other] * truth.shape[1]), truth)["f1"]
        for i, column in enumerate(truth.T):
            if column.min() == column.max():
                assert thresholds[i] == 0.5
            else:
                assert tuned[str(i)] >= fixed[str(i)] - 1e-12


def test_tuned_thresholds_stay_near_one_half_on_a_tie():
    assert tune_thresholds([[0.2], [0.9]], [[0], [1]]) == [0.5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multilabel_scores([[1, 0]], [[1, 0, 1]]), r"\(1, 2\), references \(1, 3\)"),
        (lambda: multilabel_scores([[0.3, 1]], [[1, 0]]), "predictions hold 0.3"),
        (lambda: multilabel_scores([[1, 0]], [[2, 0]]), "references hold 2"),
        (lambda: multilabel_scores(np.zeros((0, 2)), np.zeros((0, 2))), "at least one"),
        (lambda: multilabel_scores([[1, 0]], [[1, 0]], ["a"]), "1 label names for 2 labels"),
        (lambda: multilabel_scores([[1, 0]], [[1, 0]], ["a", "a"]), "label names repeat: a, a"),
        (lambda: single_label_scores([0, 3], [0, 1], ["a", "b"]), r"0…1 \(labels: a, b\)"),
        (lambda: single_label_scores([0], [0, 1]), "two equal lists"),
        (lambda: regression_scores([0.0], [0.0, 1.0]), "give equal shapes"),
    ],
)
def test_values_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_table_has_labels_in_columns_and_one_row_a_method():
    truth = np.array([[1, 0, 1], [0, 1, 1]])
    methods = {
        "model": multilabel_scores(truth, truth, ["+", "-", "j"]),
        "linear_svc": multilabel_scores(1 - truth, truth, ["+", "-", "j"]),
    }
    lines = scores_table(methods).splitlines()
    assert lines[0].split() == ["Label", "+", "-", "j", "macro", "micro"]
    assert lines[1].split() == ["Support", "1", "1", "2"]
    assert [line for line in lines if not line.startswith(" ")][2:] == ["Precision", "Recall", "F1"]
    assert lines[-2].split() == ["model", *["1.000"] * 5]
    assert lines[-1].split() == ["linear_svc", *["0.000"] * 5]
    assert len({len(line) for line in lines if line[0] == " "}) == 1


def test_table_has_the_support_of_every_part():
    validation, test = [[1, 0], [1, 0], [0, 1]], [[1, 1], [0, 1]]
    table = scores_table({"validation": multilabel_scores(validation, validation, ["a", "b"]),
                          "test": multilabel_scores(test, test, ["a", "b"])})  # fmt: skip
    lines = table.splitlines()
    assert [line.split() for line in lines[1:4]] == [["Support"], ["validation", "2", "1"], ["test", "1", "2"]]


def test_a_label_without_example_is_told_once_and_the_mean_without_it_stands_beside():
    truth = np.array([[1, 0, 0], [0, 1, 0]])
    scores = multilabel_scores(truth, truth, ["joie", "colère", "peur"])
    assert (scores["macro_f1"], scores["present_macro_f1"]) == (pytest.approx(2 / 3), 1.0)
    table = scores_table({"test": scores})
    lines = table.splitlines()
    assert lines[0].split() == ["Label", "joie", "colère", "peur", "macro", "present", "micro"]
    assert lines[-2].split() == ["test", "1.000", "1.000", "0.000", "0.667", "1.000", "1.000"]
    assert lines[-1] == "test: no example of peur; such a label counts 0 in macro, not in present"
    assert table.count("no example") == 1
    scores |= {"f1_interval": {"joie": [0.5, 1.0], "colère": None}, "present_macro_f1_interval": [0.25, 1.0]}
    rows = metrics.markdown_table(scores).splitlines()
    assert rows[3] == "| `colère` | 1.000 | 1.000 | 1.000 |  | 1 |"
    assert rows[5] == "| macro mean | 0.667 | 0.667 | 0.667 |  | 2 |"
    assert rows[6] == "| macro mean, labels present | 1.000 | 1.000 | 1.000 | 0.250 to 1.000 | 2 |"


@pytest.mark.parametrize(
    ("samples", "groups", "who"), [(40, 9, "9 respondents"), (9, 9, "9 texts"), (30, 10, "10 respondents")]
)
def test_intervals_of_few_respondents_are_told(samples, groups, who):
    truth = np.tile([[1, 0], [0, 1]], (samples, 1))[:samples]
    scores = multilabel_scores(truth, truth, ["a", "b"]) | {
        "f1_interval": {"a": [0.5, 1.0], "b": [0.5, 1.0]},
        "present_macro_f1_interval": [0.5, 1.0],
        "interval_groups": groups,
    }
    for said in (scores_table({"m": scores}), *classification_tables({"test": scores}).values()):
        assert f"the intervals of F1 are drawn from {who}" in said
        assert ("too narrow" in said) == (groups < 10)


def test_a_class_without_example_counts_in_one_macro_mean_only():
    scores = single_label_scores([0, 1, 2], [0, 1, 1], ["a", "b", "c"])
    assert scores["macro_recall"] == pytest.approx(0.5) and scores["present_macro_recall"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0.4", [0.4, 0.4, 0.4]),
        ('{"joie": 0.3, "peur": 1}', [0.3, 0.2, 1.0]),
        ({"colère": 0}, [0.1, 0.0, 0.3]),
        (0.7, [0.7, 0.7, 0.7]),
        ("{}", [0.1, 0.2, 0.3]),
    ],
)
def test_thresholds_are_given_by_name(given, expected):
    assert thresholds_by_name(given, ["joie", "colère", "peur"], [0.1, 0.2, 0.3]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("joie=0.3", "'joie=0.3' cannot be read .*give a number from 0 to 1"),
        ('{"jioe": 0.3}', "unknown label 'jioe' .did you mean 'joie'"),
        ('{"joie": 0.3, "joie": 0.4}', "the key 'joie' occurs twice"),
        ('{"joie": "0.3"}', "'0.3' of the label 'joie'"),
        ('{"joie": true}', "True of the label"),
        ("NaN", "nan of the label"),
        ("1.5", "1.5 of the label"),
        ("[0.3]", r"\[0.3\] of the label"),
        ("[" * 100_000, "too deeply"),
    ],
)
def test_thresholds_that_are_none_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        thresholds_by_name(given, ["joie", "peur"])


def test_table_of_accuracy_and_of_regression():
    assert "Accuracy  model: 0.500" in scores_table({"model": single_label_scores([0, 1], [0, 0])})
    assert scores_table({"model": regression_scores([1.0, 2.0], [1.0, 3.0])}).splitlines()[1].split() == [
        "model", "0.500", "0.500", "0.500",
    ]  # fmt: skip


def test_markdown_table_has_one_row_a_label_and_two_means():
    lines = metrics.markdown_table(multilabel_scores([[1, 0]], [[1, 1]], ["|", "b"])).splitlines()
    assert lines[2] == "| `\\|` | 1.000 | 1.000 | 1.000 | 1 |"
    assert lines[3] == "| `b` | 0.000 | 0.000 | 0.000 | 1 |"
    assert lines[4].startswith("| macro mean | 0.500") and lines[5].startswith("| micro mean | 1.000 | 0.500")


@pytest.mark.parametrize(
    ("label", "cell"),
    [
        ("a\nb\r\n", "`a b`"),
        ("a`b", "``a`b``"),
        ("`a``", "``` `a`` ```"),
        ("", "` `"),
        ("|`", "`` \\|` ``"),
        ("a\x1b[31mb\ud800", "`a\\x1b[31mb\\ud800`"),
        ("👨\u200d👩\u200d👧", "`👨\u200d👩\u200d👧`"),
    ],
)
def test_labels_of_any_characters_keep_to_their_cell(label, cell):
    scores = multilabel_scores([[1, 1]], [[1, 1]], [label, "b"])
    lines = metrics.markdown_table(scores).splitlines()
    assert lines[2] == f"| {cell} | 1.000 | 1.000 | 1.000 | 1 |"
    assert len(lines) == 6
    assert len(scores_table({"model": scores}).splitlines()) == 8


def test_markdown_table_shows_the_intervals_that_there_are():
    scores = multilabel_scores([[1, 0]], [[1, 1]], ["macro", "b"])  # a label may be called like a mean
    assert "95 %" not in metrics.markdown_table(scores)
    scores |= {"f1_interval": {"macro": [0.5, 0.75], "b": [0.0, 0.25]}, "present_macro_f1_interval": [0.125, 0.5]}
    lines = metrics.markdown_table(scores).splitlines()
    assert lines[0] == "| label | precision | recall | F1 | F1, 95 % | support |"
    assert lines[2] == "| `macro` | 1.000 | 1.000 | 1.000 | 0.500 to 0.750 | 1 |"
    assert lines[3] == "| `b` | 0.000 | 0.000 | 0.000 | 0.000 to 0.250 | 1 |"
    assert lines[4] == "| macro mean | 0.500 | 0.500 | 0.500 | 0.125 to 0.500 | 2 |"
    assert lines[5].startswith("| micro mean | ") and lines[5].endswith(" |  | 2 |")


LOAD = f"""
import evaluate, json, sys
metric = evaluate.load({str(METRIC_FOLDER)!r})
for predictions, references in json.loads(sys.argv[1]):
    metric.add_batch(predictions=predictions, references=references)
print(json.dumps(metric.compute(labels=["a", "b", "c"])))
"""


@pytest.mark.slow
def test_evaluate_loads_the_local_metric_offline_and_counts_the_same(tmp_path):
    import json

    rng = np.random.default_rng(0)
    predicted, truth = rng.integers(0, 2, (2, 9, 3))
    batches = [[predicted[:5].tolist(), truth[:5].tolist()], [predicted[5:].tolist(), truth[5:].tolist()]]
    environment = {"HF_HOME": str(tmp_path), "HF_EVALUATE_OFFLINE": "1"}
    run = run_forked("-c", LOAD, json.dumps(batches), environment=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == multilabel_scores(predicted, truth, ["a", "b", "c"])
