import logging

import pytest

from fratrie.data.loading import load_labelled
from fratrie.data.repeats import tell_overlap


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def test_repeated_texts_and_conflicting_labels_are_counted(tmp_path, told):
    path = tmp_path / "a.csv"
    path.write_text("text,labels\nun,x\ndeux,y\n un  ,x\nun,y\nun,x\n", encoding="utf-8")
    load_labelled(path)
    repeated, conflicting = (record.getMessage() for record in told.records)
    assert "2 of 5 rows repeat an earlier text, such as row 3 is row 1 again: ' un  '" in repeated
    assert "1 of 5 rows repeat an earlier text with other labels, such as row 4 is row 1 again: 'un'" in conflicting


def test_unique_texts_are_no_matter(tmp_path, told):
    path = tmp_path / "a.csv"
    path.write_text("text,labels\nun,x\ndeux,y\n", encoding="utf-8")
    load_labelled(path)
    tell_overlap("test", ["trois"], ["un"])
    assert not told.records


def test_texts_of_train_in_another_part_are_counted(told):
    tell_overlap("test", ["e\u0301te\u0301", "deux", "trois "], ["\u00e9t\u00e9", "trois"])
    assert "2 of 3 texts of test stand in train too, such as" in told.text
