"""What this machine computes: asked in one place, so that tests can pretend another machine."""

from __future__ import annotations

import math
import os
import re
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The limit of processor time of a container: microseconds and their period, in one file or two ("-1" or "max": none).
_QUOTAS = (
    ('/sys/fs/cgroup/cpu.max',),
    ('/sys/fs/cgroup/cpu/cpu.cfs_quota_us', '/sys/fs/cgroup/cpu/cpu.cfs_period_us'),
)


class Machine:
    """A machine; each answer is found at its first use, because some need an import of seconds.

    Tests pretend a machine by setting attributes of :data:`MACHINE`.
    """

    @cached_property
    def has_gpu(self) -> bool:
        """Whether PyTorch sees a GPU."""
        import torch

        return torch.cuda.is_available()

    @cached_property
    def multiplies_bfloat16(self) -> bool:
        """Whether PyTorch's own check finds bfloat16 on the CPU: with AVX-512.

        Where ``lscpu`` lists avx512_bf16, bfloat16 was as fast as float32 or faster; other CPUs were not measured.
        """
        import torch

        # An internal operator, which another PyTorch may lack; tests/test_private_torch.py runs it.
        is_supported = getattr(torch.ops.mkldnn, '_is_mkldnn_bf16_supported', lambda: False)
        return _has_avx512() and is_supported()

    @cached_property
    def multiplies_float16(self) -> bool:
        """Whether PyTorch multiplies float16 on the CPU at the speed of float32 or faster: with AVX-512 FP16."""
        import torch

        is_supported = getattr(torch.ops.mkldnn, '_is_mkldnn_fp16_supported', lambda: False)
        return _has_avx512() and is_supported()

    @cached_property
    def instructions(self) -> tuple[str, ...]:
        """The vector instructions of the CPU from AVX2 on, such as 'avx512_bf16'; () where Linux does not tell them."""
        return tuple(sorted({*re.findall(r'\b(?:avx2|avx_vnni|avx512\w*|amx_\w+)', read_cpuinfo())}))

    @cached_property
    def openvino_precisions(self) -> tuple[str, ...]:
        """What OpenVINO computes fast on the CPU, such as 'FP32', 'BF16' and 'INT8'; () where it is not installed."""
        if find_spec('openvino') is None:
            return ()
        return tuple(openvino_core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'))

    @cached_property
    def processors(self) -> int:
        """The number of processors that this process may use: by its affinity, and by the quota of its container."""
        # Only Linux tells the affinity; os.cpu_count counts the processors of the host.
        count = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        return max(1, min(count, math.ceil(_read_quota(count))))


def _has_avx512() -> bool:
    import torch

    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == 'AVX512'


def read_cpuinfo() -> str:
    """What Linux tells of the processors; '' elsewhere."""
    cpuinfo = Path('/proc/cpuinfo')
    return cpuinfo.read_text(errors='replace') if cpuinfo.is_file() else ''


def _read_quota(default: float) -> float:
    """The processors that the cgroup of this process may use, or ``default`` where there is no limit."""
    for files in _QUOTAS:
        try:
            quota, period = ' '.join(Path(file).read_text() for file in files).split()
            if float(quota) > 0:
                return float(quota) / float(period)
        except (OSError, ValueError):  # no such file, or 'max'
            continue
    return default


@lru_cache(None)
def openvino_core() -> Any:
    """The Core of OpenVINO: one for the process, which ends with it.

    A Core installs a signal stack, and removing Cores in another order than LIFO leaves a stack that is freed, so that
    the next signal with a handler kills the process (OpenVINO 2026.2).
    """
    return import_module('openvino').Core()


MACHINE = Machine()


def find_device(name: str | torch.device | None = None) -> torch.device:
    """Returns the torch device with this name; None is a GPU if PyTorch sees one, else the CPU.

    Raises:
        SlabDetError: If PyTorch does not see the device.
    """
    import torch

    from slab_det.common.errors import SlabDetError

    try:
        device = torch.device(name or ('cuda' if MACHINE.has_gpu else 'cpu'))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SlabDetError(
            f'device {str(name)!r} is not available: torch {torch.__version__} sees the CPU and '
            f"{torch.cuda.device_count()} CUDA devices; give device 'cpu'"
        ) from error
    return device
