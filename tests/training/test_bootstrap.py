import numpy as np
import pytest
from sklearn.metrics import f1_score

from fratrie.training.bootstrap import bootstrap_f1, compare, comparison_table, f1_intervals


def sample(seed=0, size=60, labels=3, groups=12):
    generator = np.random.default_rng(seed)
    truth = generator.random((size, labels)) < [0.6, 0.3, 0.1]
    runs = truth ^ (generator.random((2, size, labels)) < 0.2)
    return runs.astype(int), truth.astype(int), [f"r{i}" for i in generator.integers(0, groups, size)]


def naive(run, truth, groups, draws, seed):
    """Sentences of the drawn respondents written out one after another, counted by scikit-learn."""
    names = sorted(set(groups))
    drawn = np.random.default_rng(seed).multinomial(len(names), [1 / len(names)] * len(names), size=draws)
    scores = []
    for counts in drawn:
        names_drawn = [name for name, times in zip(names, counts, strict=True) for _ in range(times)]
        rows = [i for name in names_drawn for i, group in enumerate(groups) if group == name]
        by_label = f1_score(truth[rows], run[rows], average=None, zero_division=0)
        by_label[~truth[rows].any(0)] = np.nan
        scores.append([*by_label, np.nanmean(by_label)])
    return np.array(scores)


def test_draws_are_those_of_sentences_written_out():
    runs, truth, groups = sample()
    expected = [naive(run, truth, groups, 40, seed=3) for run in runs]
    np.testing.assert_allclose(bootstrap_f1(runs[0], truth, groups, 40, seed=3), expected[0], atol=1e-12)
    np.testing.assert_allclose(bootstrap_f1(runs, truth, groups, 40, seed=3), np.mean(expected, 0), atol=1e-12)


def test_draws_without_a_label_say_nothing_of_it():
    """One respondent alone uses the last label, and it is always found: a third of the draws do not hold it."""
    _, truth, groups = sample()
    truth[:, 2] = np.array(groups) == "r1"
    drawn = bootstrap_f1(truth, truth, groups)
    assert 0.3 < np.isnan(drawn[:, 2]).mean() < 0.4
    assert np.isfinite(drawn[:, 3]).all() and drawn[:, 3].min() == 1.0
    by_label, macro = f1_intervals(truth, truth, groups, ["a", "b", "macro"])
    assert by_label == {"a": [1.0, 1.0], "b": [1.0, 1.0], "macro": [1.0, 1.0]} and macro == [1.0, 1.0]
    runs = 1 - truth  # found nowhere, and given wherever it is not
    expected = naive(runs, truth, groups, 40, seed=5)
    np.testing.assert_allclose(bootstrap_f1(runs, truth, groups, 40, seed=5), expected)
    assert np.isnan(expected).any()


def test_a_label_without_an_example_has_no_interval():
    _, truth, groups = sample()
    truth[:, 0] = 0
    by_label, macro = f1_intervals(truth, truth, groups, "abc")
    assert by_label == {"a": None, "b": [1.0, 1.0], "c": [1.0, 1.0]} and macro == [1.0, 1.0]
    with pytest.raises(ValueError, match="no sample has the label 'a'"):
        compare(truth, {"same": truth}, truth, groups, "abc")


def test_a_group_is_drawn_whole():
    """With one group every draw is the sample itself; with a group a sample the draws spread."""
    runs, truth, _ = sample()
    one = bootstrap_f1(runs[0], truth, ["r"] * 60, 20)
    np.testing.assert_allclose(one[:, :3], np.tile(f1_score(truth, runs[0], average=None), (20, 1)))
    assert bootstrap_f1(runs[0], truth, range(60), 20)[:, -1].std() > 0.01


def test_draws_of_two_methods_are_paired():
    """A method that is right wherever the other is, and more often, is better in every draw."""
    runs, truth, groups = sample()
    better = np.where(np.arange(60)[:, None] < 30, truth, runs[0])
    difference = bootstrap_f1(better, truth, groups) - bootstrap_f1(runs[0], truth, groups)
    assert difference.min() >= 0 and np.quantile(difference[:, -1], 0.025) > 0


def test_a_comparison_takes_the_best_baseline_of_each_label():
    runs, truth, groups = sample()
    weak = np.zeros_like(truth)
    strange = np.column_stack([truth[:, 0], weak[:, 1], weak[:, 2]])  # knows the first label alone
    found = compare(runs, {"weak": weak, "other": runs[1], "strange": strange}, truth, groups, "abc", draws=500)
    assert list(found) == ["a", "b", "c", "macro"]
    assert [row["baseline"] for row in found.values()] == ["strange", "other", "other", "other"]
    scores = np.array([f1_score(truth, run, average=None) for run in runs])
    drawn = np.array([bootstrap_f1(run, truth, groups, 500) for run in (*runs, strange)])
    difference = drawn[:2].mean(0) - np.column_stack([drawn[2, :, :1], drawn[1, :, 1:]])
    for i, row in enumerate(found.values()):
        point = [*scores.mean(0), scores.mean()][i]
        baseline = [1.0, *scores[1, 1:], scores[1].mean()][i]
        assert row["f1"] == pytest.approx(point) and row["baseline_f1"] == pytest.approx(baseline)
        assert row["difference"] == pytest.approx(point - baseline)
        for ends, values in (
            (row["interval"], drawn[:2].mean(0)[:, i]),
            (row["difference_interval"], difference[:, i]),
        ):
            assert ends == pytest.approx(list(np.quantile(values, [0.025, 0.975])))
            assert ends[0] < ends[1]
    with pytest.raises(ValueError, match="no baseline"):
        compare(runs, {}, truth, groups, "abc")


def test_the_table_has_a_row_a_label():
    runs, truth, groups = sample()
    lines = comparison_table(compare(runs[0], {"svc": runs[1]}, truth, groups, "abc", draws=50)).splitlines()
    assert len(lines) == 6 and all(line.count("|") == 7 for line in lines)
    assert f"| {f1_score(truth, runs[0], average='macro'):.3f} |" in lines[-1] and "(svc)" in lines[-1]


@pytest.mark.parametrize("change", ["rows", "labels", "groups"])
def test_shapes_that_do_not_fit(change):
    runs, truth, groups = sample()
    given = {"rows": (runs[0][1:], truth, groups), "labels": (runs[0][:, 1:], truth, groups)}
    given["groups"] = (runs[0], truth, groups[1:])
    with pytest.raises(ValueError, match="do not belong together"):
        bootstrap_f1(*given[change])


@pytest.mark.parametrize("wrong", [0.9, 2])
def test_what_is_no_indicator_is_refused(wrong):
    runs, truth, groups = sample()
    with pytest.raises(ValueError, match="must be indicators, 0 or 1"):
        bootstrap_f1(runs * wrong, truth, groups)


def test_no_sample_is_refused():
    with pytest.raises(ValueError, match="of one sample or more"):
        bootstrap_f1(np.zeros((0, 2)), np.zeros((0, 2)), [])


def test_groups_may_be_of_any_kind():
    runs, truth, _ = sample()
    kinds = [1, "1", None, (2, 3)]
    groups = [kinds[i % 4] for i in range(len(truth))]
    names = [str(index) for index in range(4)]
    assert np.isfinite(bootstrap_f1(runs, truth, groups, draws=20)).all()
    alone = bootstrap_f1(runs, truth, [names[i % 4] for i in range(len(truth))], draws=500, seed=3)
    mixed = bootstrap_f1(runs, truth, groups, draws=500, seed=3)
    assert abs(alone.mean() - mixed.mean()) < 0.02
