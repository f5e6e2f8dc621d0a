"""What slab_det needs of torch, mmengine, mmcv and mmdet that their versions do not agree on.

Importing it checks the installation, supplies the operators that mmcv lacks, and makes mmengine's files atomic on
writing, its checkpoints safe on reading, and distributed runs and mixed precision possible without a GPU. It has to
come before the first import of ``mmdet.models``.
"""

from slab_det.runtime.distributions import check_distributions

# Before the next imports: they need the packages that this looks for.
check_distributions()

from slab_det.runtime.amp import install_amp  # noqa: E402
from slab_det.runtime.autograd import (  # noqa: E402
    graph_position,
    is_recomputed_twice,
    is_recomputing,
    recomputed_graph_position,
)
from slab_det.runtime.engine import install_checkpoint_files  # noqa: E402
from slab_det.runtime.ops import install_ops  # noqa: E402
from slab_det.runtime.processes import install_cpu_processes  # noqa: E402
from slab_det.runtime.run_folder import install_run_folder  # noqa: E402

install_ops()
install_checkpoint_files()
install_run_folder()
install_cpu_processes()
install_amp()

__all__ = [
    'check_distributions',
    'graph_position',
    'install_amp',
    'install_checkpoint_files',
    'install_cpu_processes',
    'install_ops',
    'install_run_folder',
    'is_recomputed_twice',
    'is_recomputing',
    'recomputed_graph_position',
]
