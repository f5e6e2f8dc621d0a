"""Errors that a user can act on; the command lines print them as one line and exit with code 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SlabDetError(RuntimeError):
    """Base of every expected error: its message says what is wrong, where, and what to do."""


class ConfigError(SlabDetError):
    """A config that cannot be read, or from which runner, model or data cannot be built."""


class DataError(SlabDetError):
    """An annotation file, an image folder or an image that is missing, or does not fit config or model."""


class LatencyError(SlabDetError):
    """A latency measurement that this machine or model cannot make."""


class AgreementError(SlabDetError):
    """Detections that cannot be compared: of no image, of another number of images, or of no instances."""


class ReportError(SlabDetError):
    """A report.json that cannot be read, or entries that cannot stand in one table."""


class CheckpointError(SlabDetError):
    """A checkpoint that cannot be read, or that does not fit the model it is loaded into."""


class ConversionError(SlabDetError):
    """Norms that cannot be converted or absorbed."""


class RankError(SlabDetError):
    """An error of another process of a distributed run, which ends this one too."""


class DeploymentError(SlabDetError):
    """A model that cannot be deployed as asked."""


class ExportError(SlabDetError):
    """A detector, or a part of one, that cannot be exported, or an exported file that cannot be run."""


@contextmanager
def config_errors(config: str) -> Iterator[None]:
    """Turns what reading or building a config raises into an error that names the config.

    Args:
        config: Its file name.

    Raises:
        ConfigError: For every exception except SlabDetError and OSError, which pass as they are.
    """
    try:
        yield
    except (SlabDetError, OSError):
        raise
    except Exception as error:
        # The text of a KeyError is its argument in quotes.
        reason = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        reason = ' '.join(reason.split()) or 'no reason given'
        raise ConfigError(
            f'{config}: {type(error).__name__}: {reason}; correct the config, or the value given with --cfg-options'
        ) from error


def name_some(names: Iterable[str]) -> str:
    """The first five of ``names``, and how many more there are."""
    names = [*names]
    more = f' and {len(names) - 5} more' if len(names) > 5 else ''
    return ', '.join(names[:5]) + more


def describe_error(error: SlabDetError | OSError) -> str:
    """Returns the text of an expected error, as the user reads it."""
    if 'Original Traceback' in str(error):
        # A data loader's worker sends its whole traceback as the text, which ends with "type: message".
        return str(error).strip().splitlines()[-1].partition(': ')[2]
    if isinstance(error, SlabDetError) or error.errno is None:
        return str(error)
    return ': '.join(str(part) for part in (error.filename, error.strerror) if part)
