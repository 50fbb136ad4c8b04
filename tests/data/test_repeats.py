import logging

import pytest

from fratrie.data.repeats import find_repeats, tell_overlap


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def test_repeated_texts_and_conflicting_labels_are_told_apart():
    texts, labels = ["un", "deux", " un  ", "un", "un"], ["x", "y", "x", "y", "x"]
    assert find_repeats(texts, labels) == ([(2, 0), (4, 0)], [(3, 0)])


def test_unique_texts_are_no_matter(told):
    assert find_repeats(["un", "deux"], ["x", "x"]) == ([], [])
    tell_overlap("test", ["trois"], ["un"])
    assert not told.records


def test_texts_of_train_in_another_part_are_counted(told):
    tell_overlap("test", ["e\u0301te\u0301", "deux", "trois "], ["\u00e9t\u00e9", "trois"])
    assert "2 of 3 texts of test stand in train too, such as" in told.text
