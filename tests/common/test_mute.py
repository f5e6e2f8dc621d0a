"""What one thread mutes, other threads still say."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from mmengine.logging import MMLogger

from slab_det.common.mute import mute_log, mute_stdout


def in_another_thread(call: object, *args: object) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, *args).result()


class Heard(logging.Handler):
    """Remembers messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_the_first_handler_of_the_root_logger_is_muted_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    # ONNX Runtime's quantizer calls logging.warning, which makes a handler where there is none.
    monkeypatch.setattr(logging.root, 'handlers', [])
    with mute_log():
        logging.warning('muted')
    logging.warning('heard')
    assert 'muted' not in capsys.readouterr().err


def test_logs_of_other_threads_pass() -> None:
    loggers, heard = [logging.getLogger('ours'), MMLogger.get_current_instance()], Heard()
    # mmengine's loggers pass nothing on to the root logger.
    parts = [logging.root, loggers[1]]
    for part in parts:
        part.addHandler(heard)
    try:
        with mute_log():
            loggers.append(logging.getLogger('first used while muted'))
            for logger in loggers:
                logger.warning('muted')
                in_another_thread(logger.warning, f'heard of {logger.name}')
            loggers[0].error('broken')
        loggers[0].warning('after')
    finally:
        for part in parts:
            part.removeHandler(heard)
    assert heard.texts == [*(f'heard of {logger.name}' for logger in loggers), 'broken', 'after']


def test_prints_of_other_threads_pass(capsys: pytest.CaptureFixture) -> None:
    stdout = sys.stdout
    with mute_stdout():
        print('mine')
        in_another_thread(print, 'theirs')
    print('after')
    assert capsys.readouterr().out == 'theirs\nafter\n' and sys.stdout is stdout


def test_threads_that_mute_at_once_restore_stdout(capsys: pytest.CaptureFixture) -> None:
    stdout, first, second = sys.stdout, mute_stdout(), mute_stdout()
    first.__enter__()
    in_another_thread(second.__enter__)
    first.__exit__(None, None, None)
    print('heard')
    in_another_thread(second.__exit__, None, None, None)
    assert capsys.readouterr().out == 'heard\n' and sys.stdout is stdout
