"""Mutes what the current thread logs and prints; other threads are heard."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from mmengine.logging import MMLogger

_lock = threading.Lock()


@contextmanager
def mute_log() -> Iterator[None]:
    """Mutes what the current thread logs below errors."""
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.ERROR

    # mmengine's loggers pass nothing on to the root logger.
    loggers = [logging.root, MMLogger.get_current_instance(), *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, 'handlers', ())} | {logging.lastResort}
    # logging.warning makes the first handler of the root logger.
    filtered = [*handlers, logging.root]
    for part in filtered:
        part.addFilter(is_heard)
    try:
        yield
    finally:
        for part in filtered:
            part.removeFilter(is_heard)


class _MutedThreads:
    """A stream that drops what some threads write."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.threads = stream, set()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() in self.threads else self.stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


@contextmanager
def mute_stdout() -> Iterator[None]:
    """Mutes what the current thread prints."""
    thread = threading.get_ident()
    # Several threads share a stream: each would else restore the stream that it met.
    with _lock:
        if not isinstance(sys.stdout, _MutedThreads):
            sys.stdout = _MutedThreads(sys.stdout)
        muted = sys.stdout
        muted.threads.add(thread)
    try:
        yield
    finally:
        with _lock:
            muted.threads.discard(thread)
            if not muted.threads and sys.stdout is muted:
                sys.stdout = muted.stream
