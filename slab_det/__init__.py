"""Fast Swin and PVT detectors for MMDetection: SLAB (Guo et al., ICML 2024) and the norms around it.

Importing this package registers its norms, backbones, hooks, datasets and configs, and supplies the operators that mmcv
lacks. Nothing else of torch, mmengine, mmcv or mmdet changes. ``slab_det.runtime.install()``, which every command
calls, patches mmengine.

Functions and subpackages that need mmdet's models or datasets, which take seconds, are imported at their first use.
"""

import sys
from functools import cache
from importlib import import_module
from typing import Any

__version__ = '0.1.0'

# Public function: the module that defines it.
_FUNCTIONS = {
    'absorb': 'absorption.absorption',
    'convert_norms': 'conversion',
    'deploy': 'inference.deployment',
    'fuse': 'fusion.folding',
    'load_detector': 'inference',
    'load_pretrained': 'checkpoints',
    'measure_latency': 'measure.latency',
    'optimize': 'optimization.search',
    'recalibrate': 'recalibration',
    'set_gamma': 'norms',
}
_SUBPACKAGES = (
    'absorption',
    'attention',
    'backbones',
    'conversion',
    'data',
    'export',
    'fusion',
    'inference',
    'measure',
)

__all__ = [*_FUNCTIONS]


@cache
def register() -> None:
    """Registers the classes of this package with mmengine and mmdet, and supplies the operators that mmcv lacks."""
    # First, because slab_det.runtime checks the installation that the other imports need.
    from slab_det import runtime  # noqa: F401

    # isort: split
    from mmdet.registry import DATASETS, MODELS

    from slab_det import hooks, norms  # noqa: F401 (register themselves)
    from slab_det.runtime.registries import register_on_demand

    register_on_demand(MODELS, 'slab_det.backbones', 'slab_det.conversion', 'slab_det.data')
    register_on_demand(DATASETS, 'slab_det.data')


def __getattr__(name: str) -> Any:
    """Imports a public function or a subpackage at its first use."""
    if name in _FUNCTIONS:
        return getattr(import_module(f'{__name__}.{_FUNCTIONS[name]}'), name)
    if name in _SUBPACKAGES:
        return import_module(f'{__name__}.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS, *_SUBPACKAGES})


if not getattr(sys.modules.get('slab_det_command'), 'registers_late', False):
    register()
