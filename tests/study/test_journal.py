import json

import pytest

from fratrie.study.journal import Journal


def test_a_step_that_ended_is_not_taken_again(tmp_path):
    calls = []

    def find(value):
        calls.append(value)
        return {"found": [value, 0.1 + 0.2]}

    journal = Journal(tmp_path / "steps", {"seed": 1})
    assert journal.step("a", lambda: find(1)) == {"found": [1, 0.1 + 0.2]}
    again = Journal(tmp_path / "steps", {"seed": 1})
    assert again.step("a", lambda: find(2)) == {"found": [1, 0.1 + 0.2]} and calls == [1]
    again.write("b", 0, 2.345)
    assert again.read("b") == 0 and again.read("c") is None
    assert list(again.seconds()) == ["a", "b"] and again.seconds()["b"] == 2.3


def test_a_step_that_fails_leaves_nothing_and_another_study_is_refused(tmp_path):
    journal = Journal(tmp_path, {"seed": 1, "data": "x"})
    with pytest.raises(ZeroDivisionError):
        journal.step("a", lambda: 1 / 0)
    assert journal.step("a", lambda: 3) == 3
    with pytest.raises(ValueError, match=r"another study \(data: 'x' then, 'y' now; seed: 1 then, 2 now\): choose"):
        Journal(tmp_path, {"seed": 2, "data": "y"})
    (tmp_path / "a.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"a\.json must hold a JSON object"):
        journal.read("a")
