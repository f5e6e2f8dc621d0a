"""What can go wrong between a detector and its exported form."""

from slab_det.runtime.errors import SlabDetError


class ExportError(SlabDetError):
    """A detector, or a part of one, that cannot be exported, or an exported file that cannot be run."""
