import pytest

from fratrie.wording import did_you_mean


@pytest.mark.parametrize(
    ("name", "hint"), [("joei", " (did you mean 'joie'?)"), ("Table", ""), ("12", ""), ("1", ""), ("-1", "")]
)
def test_names_that_are_close_are_proposed_and_numbers_never(name, hint):
    assert did_you_mean(name, ["joie", "tristesse", "11", "10"]) == hint
