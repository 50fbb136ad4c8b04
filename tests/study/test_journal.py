import json

import numpy as np
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


def test_fits_are_kept_to_the_bit_by_key(tmp_path):
    fits = Journal(tmp_path, {}).fits("search")
    logits = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    fits.keep((1, 4e-4, 10, 0), logits, 1.25)
    fits.keep(7, -logits, 2.0)
    known = Journal(tmp_path, {}).fits("search")
    assert set(known) == {(1, 4e-4, 10, 0), 7} and len(known) == 2 and (1, 4e-4, 10, 1) not in known
    got, seconds = known[1, 4e-4, 10, 0]
    np.testing.assert_array_equal(got, logits)
    assert got.dtype == np.float32 and seconds == 1.2
    assert Journal(tmp_path, {}).seconds() == {} and not Journal(tmp_path, {}).fits("curve")
