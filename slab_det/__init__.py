"""Fast Swin and PVT detectors for MMDetection: SLAB (Guo et al., ICML 2024) and the norms around it.

Importing this package registers its norms, backbones, hooks, datasets and configs, and supplies the operators that mmcv
lacks. Nothing else of torch, mmengine, mmcv or mmdet changes; ``slab_det.runtime.install()`` mends mmengine, as tools/
do.

What needs mmdet's models or datasets is imported when it is first asked for: they take seconds.
"""

import sys
from importlib import import_module
from typing import Any

# First: it looks whether the packages that all others need are there, and supplies operators.
from slab_det import runtime  # noqa: F401

# isort: split
from mmdet.registry import DATASETS, MODELS

from slab_det import hooks, norms  # noqa: F401 (register themselves)
from slab_det.norms import set_gamma
from slab_det.runtime.scope import register_on_demand

register_on_demand(MODELS, 'slab_det.backbones', 'slab_det.conversion', 'slab_det.data')
register_on_demand(DATASETS, 'slab_det.data')

__version__ = '0.1.0'

# The name of the norms' room in 0.1.
sys.modules[f'{__name__}.layers'] = layers = norms

# The room of each function.
_FUNCTIONS = {
    'absorb': 'absorption',
    'convert_norms': 'conversion',
    'deploy': 'deployment',
    'fuse': 'fusion',
    'load_detector': 'deployment',
    'load_pretrained': 'checkpoints',
    'measure_latency': 'measure',
    'recalibrate': 'recalibration',
}
_ROOMS = ('absorption', 'attention', 'backbones', 'conversion', 'data', 'deployment', 'fusion', 'measure')

__all__ = [*_FUNCTIONS, 'set_gamma']


def __getattr__(name: str) -> Any:
    """A function or a room that is not imported yet."""
    if name in _FUNCTIONS:
        return getattr(import_module(f'{__name__}.{_FUNCTIONS[name]}'), name)
    if name in _ROOMS:
        return import_module(f'{__name__}.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
