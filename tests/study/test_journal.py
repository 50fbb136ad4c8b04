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
    assert again.step("b", lambda: find(2)) == 0 and again.read("c") is None
    assert list(again.seconds) == ["a", "b"] and again.seconds["b"] == 2.3
    assert Journal(tmp_path / "steps", {"seed": 1}).seconds == {}  # of this process's steps alone


def test_a_step_that_fails_leaves_nothing_and_another_study_is_refused(tmp_path):
    journal = Journal(tmp_path, {"seed": 1, "data": "x"})
    with pytest.raises(ZeroDivisionError):
        journal.step("a", lambda: 1 / 0)
    assert journal.step("a", lambda: 3) == 3
    with pytest.raises(ValueError, match=r"another study \(data: 'x' then, 'y' now; seed: 1 then, 2 now\): choose"):
        Journal(tmp_path, {"seed": 2, "data": "y"})


@pytest.mark.parametrize("text", ["[1]", '{"found": 1', '{"found": 1}', '{"found": 1, "seconds": null}', ""])
def test_a_damaged_step_says_how_to_go_on(tmp_path, text):
    journal = Journal(tmp_path, {})
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json .*delete it, and what it held is found anew"):
        journal.step("a", lambda: 1)


def test_a_study_of_which_no_step_has_ended_may_become_another(tmp_path):
    Journal(tmp_path, {"seed": 1})
    assert Journal(tmp_path, {"seed": 2}).step("a", lambda: 3) == 3
    with pytest.raises(ValueError, match="another study"):
        Journal(tmp_path, {"seed": 1})


def test_fits_are_kept_to_the_bit_by_key(tmp_path):
    fits = Journal(tmp_path, {}).fits("search")
    logits = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    fits.keep((1, 4e-4, 10, 0), logits, 1.25)
    fits.keep(7, -logits, 2.0)
    known = Journal(tmp_path, {}).fits("search")
    assert known.get((1, 4e-4, 10, 1)) is None and known.get(7) is not None
    got, seconds = known.get((1, 4e-4, 10, 0))
    np.testing.assert_array_equal(got, logits)
    assert got.dtype == np.float32 and seconds == 1.2
    assert Journal(tmp_path, {}).fits("curve").get(7) is None
