"""Errors that a user can act on. Commands print them as one line and exit with code 1."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SlabDetError(RuntimeError):
    """Base of every expected error. The message says what is wrong, where, and what to do."""


class ConfigError(SlabDetError):
    """A config that cannot be read, or whose runner, model or data cannot be built."""


class DataError(SlabDetError):
    """Annotations or images that are missing, or do not match the config or the model."""


class TrainingError(SlabDetError):
    """A training whose loss or weights are not finite."""


class ComparisonError(SlabDetError):
    """Detections of two detectors that cannot be compared."""


class CheckpointError(SlabDetError):
    """A checkpoint that cannot be read, or that does not match the model."""


class ConversionError(SlabDetError):
    """Norms that cannot be converted or absorbed, or hidden channels that cannot be removed."""


class RankError(SlabDetError):
    """An error of another process of a distributed run, which ends this process too."""


class DeploymentError(SlabDetError):
    """A model that cannot be deployed as asked."""


class ExportError(SlabDetError):
    """A detector that cannot be exported, or an exported file that cannot be run."""


@contextmanager
def config_errors(config: str) -> Iterator[None]:
    """Turns exceptions, except SlabDetError and OSError, into a ConfigError that names the file ``config``."""
    try:
        yield
    except (SlabDetError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f'{config}: {name_error(error)}; correct the config') from error


def name_error(error: Exception) -> str:
    """The type and the reason of an exception, in one line."""
    return f'{type(error).__name__}: {describe_reason(error)}'


def describe_reason(error: Exception) -> str:
    """The text of an exception in one line; for one without text, such as of ``assert``, the line that raised it."""
    # The text of a KeyError is its argument in quotes.
    reason = ' '.join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if reason or not frames:
        return reason or type(error).__name__
    return f'{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}'


def name_some(names: Iterable[object]) -> str:
    """Joins the first five names with commas, followed by the number of remaining names."""
    names = [str(name) for name in names]
    more = f' and {len(names) - 5} more' if len(names) > 5 else ''
    return ', '.join(names[:5]) + more


def describe_error(error: SlabDetError | OSError) -> str:
    """Returns the message that a command prints for an error."""
    if 'Original Traceback' in str(error):
        # The message of an error in a DataLoader worker is a traceback, whose last line is "type: message".
        return str(error).strip().splitlines()[-1].partition(': ')[2]
    if isinstance(error, SlabDetError) or error.errno is None:
        return str(error)
    return ': '.join(str(part) for part in (error.filename, error.strerror) if part)
