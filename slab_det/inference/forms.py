"""Form: how a detector runs, what that needs of a machine, and how many things differ from the original detector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from slab_det.machine import MACHINE

# Runtime of slab_det.load_detector: its name in tables.
RUNTIMES = {'eager': 'eager', 'torch': 'deployed', 'onnxruntime': 'ONNX Runtime', 'openvino': 'OpenVINO'}
# The precisions of each runtime, on a CPU and on a GPU.
ON_CPU = {
    'eager': ('float32',),
    'torch': ('float32', 'bfloat16'),
    'onnxruntime': ('float32', 'int8'),
    'openvino': ('float32', 'bfloat16', 'int8'),
}
ON_GPU = {'eager': ('float32',), 'torch': ('float32', 'float16')}
# Options of slab_det.absorb for each budget of hidden channels, from many to few, by the name of the variant.
CHANNELS = {
    'channels75': dict(keep='all', channels=0.75),
    'channels50': dict(keep='all', channels=0.5),
    'channels33': dict(keep='all', channels=0.33),
}
# The options that also absorb the LayerNorms, and the name that they add to the variant's.
NORMS = {'norms': dict(keep='none')}
TITLES = {
    **{name: f'{options["channels"]:.0%} of the multiply-adds' for name, options in CHANNELS.items()},
    'norms': 'no LayerNorm',
}


@dataclass(frozen=True)
class Form:
    """How a detector runs.

    Attributes:
        runtime: A runtime of :func:`slab_det.load_detector`.
        precision: 'float32', 'bfloat16', 'float16' or 'int8', for most layers.
        variant: What absorption removed: names of :data:`CHANNELS` and :data:`NORMS`; () for the original detector.
    """

    runtime: str
    precision: str = 'float32'
    variant: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of the form in optimize.json, such as 'openvino-bfloat16-channels50'."""
        runtime = 'deployed' if self.runtime == 'torch' else self.runtime
        return '-'.join([runtime, *([self.precision] * (self.precision != 'float32')), *self.variant])

    @property
    def title(self) -> str:
        """The name of the form in tables."""
        precision = [self.precision] if self.runtime != 'eager' else []
        return ', '.join([RUNTIMES[self.runtime], *precision, *([self.removed] * bool(self.variant))])

    @property
    def removed(self) -> str:
        """What absorption removed, in words."""
        return ', '.join(TITLES[part] for part in self.variant)

    @property
    def changes(self) -> int:
        """The number of things that differ from the original detector in PyTorch: runtime, precision, removed parts."""
        return (self.runtime != 'eager') + (self.precision != 'float32') + len(self.variant)

    @property
    def model(self) -> str:
        """The name of the file with the weights, without its suffix; absorption for int8 makes other weights."""
        return '-'.join(self.variant + ('int8',) * (self.precision == 'int8')) if self.variant else 'original'

    @property
    def is_exported(self) -> bool:
        """Whether the form runs an ONNX file."""
        return self.runtime in ('onnxruntime', 'openvino')

    @property
    def effort(self) -> int:
        """How much is to be made before the form runs: 0 for a checkpoint, 1 for an export, 2 for a calibration too."""
        return self.is_exported + (self.precision == 'int8')

    def options(self, threads: int) -> dict:
        """The options of :func:`slab_det.load_detector` other than the files and the device."""
        if self.runtime == 'torch':
            return dict(dtype=getattr(torch, self.precision))
        if self.runtime == 'openvino':
            return dict(threads=threads, precision='bf16' if self.precision == 'bfloat16' else 'f32')
        return dict(threads=threads) if self.is_exported else {}

    def find_missing(self, device: str) -> str:
        """Returns what this machine lacks to run the form on ``device``, or ''."""
        if device != 'cpu' and not MACHINE.has_gpu:
            return 'a GPU that PyTorch sees'
        if self.is_exported:
            missing = [name for name in ('onnx', self.runtime) if find_spec(name) is None]
            if missing:
                extra = 'openvino' if self.runtime == 'openvino' else 'onnx'
                return f'the package{"s" * (len(missing) > 1)} {" and ".join(missing)} (pip install -e ".[{extra}]")'
            if (
                self.runtime == 'openvino'
                and self.precision == 'bfloat16'
                and 'BF16' not in MACHINE.openvino_precisions
            ):
                return 'a CPU that multiplies bfloat16 in OpenVINO'
        elif self.precision == 'bfloat16' and device == 'cpu' and not MACHINE.multiplies_bfloat16:
            return 'a CPU that multiplies bfloat16 (AVX-512)'
        return ''


def list_forms(device: str) -> Iterator[Form]:
    """Yields the forms of the original detector on a device, also those that this machine cannot run."""
    for runtime, precisions in (ON_CPU if device == 'cpu' else ON_GPU).items():
        for precision in precisions:
            yield Form(runtime, precision)
