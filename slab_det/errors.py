"""Errors that a user can act on; the command lines print them as one line and exit with code 1."""


class SlabDetError(RuntimeError):
    """Base of every expected error: its message says what is wrong, where, and what to do."""


class DataError(SlabDetError):
    """An annotation file or image folder that a config asks for is missing or does not fit it."""


class LatencyError(SlabDetError):
    """A latency measurement that this machine or model cannot make."""


class ReportError(SlabDetError):
    """A report.json that cannot be read, or entries that cannot stand in one table."""


class CheckpointError(SlabDetError):
    """A checkpoint that cannot be read, or that does not fit the model it is loaded into."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint that is not there. mmengine expects a FileNotFoundError."""
