"""Fast Swin and PVT detectors for MMDetection: SLAB (Guo et al., ICML 2024) and the norms around it.

Importing this package registers its norms, backbones, hooks and datasets, and supplies the operators that mmcv lacks.
Nothing else of torch, mmengine, mmcv or mmdet changes; ``slab_det.runtime.install()`` mends mmengine, as tools/ do.
"""

import contextlib
import io
import sys

# First: mmdet's models need the operators that the runtime supplies.
from slab_det import runtime  # noqa: F401

# mmdet prints that it cannot import the datasets of another product.
with contextlib.redirect_stdout(io.StringIO()):
    import mmdet.datasets  # noqa: F401

# isort: split
from slab_det import backbones, data, hooks, norms  # noqa: F401 (register themselves)
from slab_det.absorption import absorb
from slab_det.checkpoints import load_pretrained
from slab_det.conversion import convert_norms
from slab_det.deployment import deploy
from slab_det.fusion import fuse
from slab_det.measure.latency import measure_latency
from slab_det.norms import set_gamma
from slab_det.recalibration import recalibrate

__version__ = '0.1.0'

# The name of the norms' room in 0.1.
sys.modules[f'{__name__}.layers'] = layers = norms

__all__ = [
    'absorb',
    'convert_norms',
    'deploy',
    'fuse',
    'load_pretrained',
    'measure_latency',
    'recalibrate',
    'set_gamma',
]
