"""Repeated sentences: counted as a comparison of every two of them does, contradictions with their rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fratrie.study.data import StudyData
from fratrie.study.repeats import repeats
from fratrie.training.baselines import Sentences
from fratrie.training.metrics import MULTI_LABEL
from fratrie.training.tasks import Task

ROWS = st.lists(st.tuples(st.sampled_from(["un", " un", "deux", "trois"]), st.sampled_from([0, 1])), max_size=6)


def corpus(train, test):
    parts = [
        Sentences([text for text, _ in rows], np.array([[label, 1] for _, label in rows]).reshape(-1, 2), None, places)
        for rows, places in ((train, range(2, 20)), (test, None))
    ]
    return StudyData(*parts, Task(MULTI_LABEL, ["a", "b"]))


def test_contradictions_are_quoted_with_their_places():
    found = repeats(corpus([("un", 1), ("deux", 0), ("un", 1)], [("deux", 1)]))
    assert found["counts"] == {
        "train": {"same": 1, "other": 0},
        "test": {"same": 0, "other": 0},
        "both": {"same": 0, "other": 1},
    }
    (conflict,) = found["conflicts"]
    assert conflict == {
        "text": "deux",
        "again": {"part": "test", "row": 1, "labels": ["a", "b"]},
        "before": {"part": "train", "row": 3, "labels": ["b"]},
    }


@given(ROWS, ROWS)
def test_counts_are_those_of_every_two_sentences(train, test):
    rows = [("train", *row) for row in train] + [("test", *row) for row in test]
    expected = {name: {"same": 0, "other": 0} for name in ("train", "test", "both")}
    for place, (part, text, label) in enumerate(rows):
        met = [row for row in rows[:place] if row[1].strip() == text.strip()]
        if met:
            where = part if met[0][0] == part else "both"
            expected[where]["same" if met[0][2] == label else "other"] += 1
    found = repeats(corpus(train, test), most=2)
    assert found["counts"] == expected
    assert len(found["conflicts"]) == min(2, sum(count["other"] for count in expected.values()))
