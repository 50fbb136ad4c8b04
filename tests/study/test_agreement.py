import warnings

import hypothesis.strategies as st
import krippendorff
import numpy as np
import pytest
from hypothesis import given, settings
from sklearn.metrics import cohen_kappa_score

from fratrie.study.agreement import agreement, masi_distances

LABELS = ["m", "p", "+"]
ROWS = st.lists(st.tuples(*[st.integers(0, 1)] * 6), min_size=1, max_size=30)


def annotators(seed=0, size=40, labels=3, slips=0.2):
    generator = np.random.default_rng(seed)
    first = (generator.random((size, labels)) < 0.4).astype(int)
    return first, first ^ (generator.random((size, labels)) < slips)


def masi(one, other):
    """The distance of Passonneau (2006), by its words."""
    if one == other:
        return 0.0
    jaccard = len(one & other) / len(one | other)
    return 1 - jaccard * (2 / 3 if one <= other or other <= one else 1 / 3)


def sets_of(rows):
    return [frozenset(np.flatnonzero(row).tolist()) for row in rows]


def package_alpha(first, second):
    """Alpha by the package `krippendorff`, or `None` where it has no two values to tell apart."""
    rows = sets_of(np.concatenate([first, second]))
    domain = sorted(set(rows), key=sorted)
    if len(domain) == 1:
        return None

    def distance(v1, v2, i1, i2, n_v, dtype):
        return np.array([[masi(domain[a], domain[b]) for b in i2.ravel()] for a in i1.ravel()], dtype)

    codes = np.array([domain.index(row) for row in rows]).reshape(2, -1)
    return krippendorff.alpha(codes, value_domain=range(len(domain)), level_of_measurement=distance)


def sklearn_kappas(first, second):
    """Kappa of each label, `None` where scikit-learn finds it undefined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [cohen_kappa_score(a, b, labels=[0, 1]) for a, b in zip(first.T, second.T, strict=True)]
    return [None if np.isnan(value) else value for value in values]


@given(ROWS)
@settings(max_examples=40, deadline=None)
def test_kappa_and_alpha_are_those_of_the_libraries(rows):
    first, second = np.split(np.array(rows), 2, axis=1)
    result = agreement(first, second, LABELS, draws=2)
    expected = sklearn_kappas(first, second)
    assert list(result["kappa"].values()) == pytest.approx(expected)
    defined = [value for value in expected if value is not None]
    assert result["mean_kappa"] == (pytest.approx(np.mean(defined)) if defined else None)
    assert result["alpha"] == pytest.approx(package_alpha(first, second))
    assert result["exact"] == np.mean([a == b for a, b in zip(sets_of(first), sets_of(second), strict=True)])


def test_masi_distances_of_all_sets_of_three_labels():
    sets = np.array([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)], dtype=float)
    expected = [[masi(one, other) for other in sets_of(sets)] for one in sets_of(sets)]
    np.testing.assert_allclose(masi_distances(sets), expected, atol=1e-15)


def test_alpha_of_one_label_per_sentence_is_the_nominal_one():
    first, second = np.random.default_rng(1).integers(0, 3, (2, 50))
    result = agreement(np.eye(3)[first], np.eye(3)[second], LABELS, draws=0)
    assert result["alpha"] == pytest.approx(krippendorff.alpha([first, second], level_of_measurement="nominal"))


def test_a_published_example_of_alpha():
    """Krippendorff (2011), «Computing Krippendorff's alpha-reliability», A: two observers, ten items, 0.095."""
    first, second = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    result = agreement(np.eye(2)[first], np.eye(2)[second], ["no", "yes"], draws=0)
    assert result["alpha"] == pytest.approx(0.095, abs=5e-4)


def test_only_sentences_of_both_count():
    first, second = annotators()
    some = [None if i % 4 == 0 else row for i, row in enumerate(second)]
    others = [None if i == 1 else row for i, row in enumerate(first)]
    result = agreement(others, some, LABELS, groups=range(40), draws=5)
    kept = [i for i in range(40) if i % 4 and i != 1]
    alone = agreement(first[kept], second[kept], LABELS, groups=kept, draws=5)
    assert (result["sentences"], result["left_out"], alone["left_out"]) == (29, 11, 0)
    assert {**result, "left_out": 0} == alone
    with pytest.raises(ValueError, match="no sentence has labels of both annotators"):
        agreement([None, [1, 0, 0]], [[1, 0, 0], None], LABELS)


def test_intervals_are_those_of_respondents_written_out():
    first, second = annotators()
    groups = [f"r{i}" for i in np.random.default_rng(3).integers(0, 9, 40)]
    result = agreement(first, second, LABELS, groups, draws=60, seed=4)
    names, kappas, alphas = sorted(set(groups)), [], []
    for counts in np.random.default_rng(4).multinomial(9, [1 / 9] * 9, size=60):
        times = [counts[names.index(group)] for group in groups]
        drawn = [np.repeat(each, times, axis=0) for each in (first, second)]
        kappas.append(sklearn_kappas(*drawn))
        alphas.append(package_alpha(*drawn))
    assert result["alpha_interval"] == pytest.approx(np.quantile(alphas, [0.025, 0.975]))
    assert result["mean_kappa_interval"] == pytest.approx(np.quantile(np.mean(kappas, 1), [0.025, 0.975]))
    ends = np.quantile(kappas, [0.025, 0.975], axis=0).T
    assert np.array(list(result["kappa_interval"].values())) == pytest.approx(ends)


def test_what_is_not_defined_is_null():
    same = np.array([[1, 0, 0]] * 4)
    result = agreement(same, same, LABELS)
    assert result["kappa"] == result["kappa_interval"] == dict.fromkeys(LABELS)
    assert result["mean_kappa"] is result["alpha"] is result["alpha_interval"] is None
    assert result["exact"] == 1.0
    one = agreement(*annotators(), LABELS, groups=["r"] * 40)
    assert one["alpha"] is not None and one["alpha_interval"] is one["mean_kappa_interval"] is None
