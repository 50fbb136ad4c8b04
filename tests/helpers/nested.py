"""Comparing the nested results of pipelines."""

import pytest


def assert_close(found, expected):
    """The same nested results, numbers to 1e-5."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == (expected if isinstance(expected, str | None) else pytest.approx(expected, abs=1e-5, rel=1e-4))
