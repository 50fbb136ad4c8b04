import logging

import pytest
from transformers.utils import logging as transformers_logging

from fratrie.quiet import without_bars, without_reports


@pytest.mark.parametrize("shown", [True, False])
def test_bars_are_hidden_and_come_back_as_they_were(shown):
    before = transformers_logging.is_progress_bar_enabled()
    try:
        (transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar)()
        with pytest.raises(KeyError), without_bars():
            assert not transformers_logging.is_progress_bar_enabled()
            raise KeyError
        assert transformers_logging.is_progress_bar_enabled() is shown
    finally:
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()


def test_reports_are_hidden_and_come_back_as_they_were():
    before = transformers_logging.get_verbosity()
    with pytest.raises(KeyError), without_reports():
        assert transformers_logging.get_verbosity() == logging.ERROR
        raise KeyError
    assert transformers_logging.get_verbosity() == before != logging.ERROR
