"""Errors name their cause, also where the exception behind them has no text."""

from __future__ import annotations

import pytest

from slab_det.common.errors import ConfigError, config_errors


def test_an_error_without_text_names_the_line_that_raised_it():
    with pytest.raises(ConfigError) as error, config_errors('my.py'):
        assert len('ab') == 3  # noqa: S101
    assert str(error.value).startswith('my.py: AssertionError: ') and 'correct the config' in str(error.value)
    with pytest.raises(ConfigError, match=r'ValueError: \S*test_errors\.py, line \d+: raise ValueError; corr'):
        with config_errors('my.py'):
            raise ValueError


def test_the_text_of_an_error_stays_one_line():
    with pytest.raises(ConfigError, match=r'^my\.py: KeyError: no such key; correct the config$'):
        with config_errors('my.py'):
            raise KeyError('no such\nkey')
