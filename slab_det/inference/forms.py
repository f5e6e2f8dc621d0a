"""Form: how a detector runs, what that needs of a machine, and how many things differ from the original detector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from slab_det.precisions import RUNTIMES, TABLE, find_missing, precision_options

# Options of slab_det.absorb for each budget of hidden channels, from many to few, by the name of the variant.
CHANNELS = {
    'channels75': dict(channels=0.75),
    'channels50': dict(channels=0.5),
    'channels33': dict(channels=0.33),
}
# The options that also absorb the LayerNorms, and the name that they add to the variant's.
NORMS = {'norms': dict(norms='remove')}
TITLES = {
    **{name: f'{options["channels"]:.0%} of the multiply-adds' for name, options in CHANNELS.items()},
    'norms': 'no LayerNorm',
}


@dataclass(frozen=True)
class Form:
    """How a detector runs.

    Attributes:
        runtime: A runtime of :func:`slab_det.load_detector`.
        precision: 'float32', 'bfloat16', 'float16' or 'int8', for most layers; see :mod:`slab_det.precisions`.
        variant: What absorption removed: names of :data:`CHANNELS` and :data:`NORMS`; () for the original detector.
    """

    runtime: str
    precision: str = 'float32'
    variant: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping) -> Form:
        """The form that an entry of optimize.json describes."""
        return cls(values['runtime'], values['precision'], tuple(values['variant']))

    @property
    def key(self) -> str:
        """The name of the form in optimize.json, such as 'openvino-bfloat16-channels50'."""
        runtime = 'deployed' if self.runtime == 'torch' else self.runtime
        return '-'.join([runtime, *([self.precision] * (self.precision != 'float32')), *self.variant])

    @property
    def title(self) -> str:
        """The name of the form in tables."""
        precision = [self.precision] if self.runtime != BASE.runtime else []
        return ', '.join([RUNTIMES[self.runtime].title, *precision, *([self.removed] * bool(self.variant))])

    @property
    def removed(self) -> str:
        """What absorption removed, in words."""
        return ', '.join(TITLES[part] for part in self.variant)

    @property
    def changes(self) -> int:
        """The number of things that differ from the original detector in PyTorch: runtime, precision, removed parts."""
        return (self.runtime != BASE.runtime) + (self.precision != BASE.precision) + len(self.variant)

    @property
    def model(self) -> str:
        """The name of the file with the weights, without its suffix; absorption for int8 makes other weights."""
        return '-'.join(self.variant + ('int8',) * (self.precision == 'int8')) if self.variant else 'original'

    @property
    def is_exported(self) -> bool:
        """Whether the form runs an ONNX file."""
        return bool(RUNTIMES[self.runtime].module)

    def options(self, threads: int) -> dict:
        """The options of :func:`slab_det.load_detector` other than the files and the device."""
        if self.is_exported:
            # Files in int8 and float16 say so themselves.
            is_option = self.precision in precision_options(self.runtime)
            return dict(threads=threads, precision=self.precision if is_option else 'float32')
        return {name: getattr(torch, self.precision) for name in RUNTIMES[self.runtime].options}

    def find_missing(self, device: str) -> str:
        """Returns what this machine lacks to run the form on ``device``, or ''."""
        return find_missing(self.runtime, device, self.precision)


# The original detector as it is, with which every other form is compared.
BASE = Form('eager')


def list_forms(device: str) -> Iterator[Form]:
    """Yields the forms of the original detector on a device, also those that this machine cannot run."""
    for row in TABLE:
        if row.device == device and row.is_tried:
            yield Form(row.runtime, row.precision)
