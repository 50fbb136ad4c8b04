from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from corpus import study_data
from hypothesis import given
from hypothesis import strategies as st

from fratrie.study.classical import score_classical
from fratrie.study.learning_curve import best_classical, classical_curve, subsets
from fratrie.training.baselines import BASELINES, Learner, Sentences, decide, folds_of, rows_of
from fratrie.training.metrics import multilabel_scores


@st.composite
def corpora(draw):
    groups = draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40))
    labels = draw(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=len(groups), max_size=len(groups))
    )
    return Sentences([""] * len(groups), np.array(labels, dtype=np.int64), draw(st.sampled_from([groups, None])))


@given(corpora(), st.lists(st.integers(1, 45), min_size=1, max_size=3), st.integers(0, 9))
def test_parts_hold_whole_respondents_and_lie_in_one_another(train, sizes, seed):
    sizes = sorted(sizes)
    groups = np.arange(len(train.texts)) if train.groups is None else np.array(train.groups)
    for parts in zip(*subsets(train, sizes, 2, seed), strict=True):
        for size, rows in zip(sizes, parts, strict=True):
            chosen = np.isin(groups, groups[rows])
            assert np.array_equal(rows, np.flatnonzero(chosen))
            largest = max(np.sum(groups == group) for group in groups[rows])
            assert min(size, len(groups)) <= len(rows) < size + largest
        for smaller, larger in pairwise(parts):
            assert set(smaller) <= set(larger)


@given(corpora(), st.integers(0, 9))
def test_no_part_lacks_a_label_where_room_is_for_one_respondent_of_each(train, seed):
    each = 1 if train.groups is None else max(map(train.groups.count, train.groups))
    (parts,) = subsets(train, [2 * each + 1], 2, seed)  # two respondents of whatever size leave room for a third
    for rows in parts:
        assert np.array_equal(train.labels[rows].any(0), train.labels.any(0))


def test_draws_differ_and_the_seed_repeats_them():
    train = study_data().train
    (first, second), (again, _), (other, _) = (subsets(train, [20], 2, seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second) and not np.array_equal(first, other)


@pytest.mark.parametrize("single_label", [False, True])
def test_the_curve_of_the_best_method_ends_at_its_score(single_label):
    data = study_data(single_label)
    classical = score_classical(
        data, "", folds_of(data.train, 3, seed=0), ["linear_svc"], workers=1, seed=5, step=words_only
    )
    whole = len(data.train.texts)
    parts = subsets(data.train, [8, whole], 2)
    assert best_classical(classical) == ("linear_svc", "words")
    parameters = classical["linear_svc"]["words"]["parameters"]
    small, end = classical_curve(data, "linear_svc", "words", parameters, parts, "", seed=5, workers=1)
    assert end == [classical["linear_svc"]["words"]["test"]["present_macro_f1"]] * 2
    learner = Learner([*data.train.texts, *data.test.texts], data.train.labels)
    for rows, score in zip(parts[0], small, strict=True):
        asked = rows_of(data.train, data.test)[1]
        ((expected,),) = decide(
            *(
                BASELINES["linear_svc"],
                [parameters],
                [(rows, asked)],
                len(data.task.labels),
                learner.fit_all,
                single_label,
            )
        )
        assert score == multilabel_scores(expected, data.test.labels)["present_macro_f1"]


def words_only(name, find):
    """Leave out what needs an encoder."""
    return find() if name.split("-")[2] == "words" else {"cross_validated_macro_f1": -1.0}


def test_one_respondent_per_sentence_without_groups():
    train = replace(study_data().train, groups=None)
    assert [len(rows) for (rows,) in subsets(train, [10, 25], 1)] == [10, 25]
