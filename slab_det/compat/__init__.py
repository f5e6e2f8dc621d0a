"""What slab_det needs of torch, mmengine, mmcv and mmdet that their versions do not agree on.

Importing it checks the installation, supplies the operators that mmcv lacks, and makes mmengine's checkpoint files
atomic on writing and safe on reading. It has to come before the first import of ``mmdet.models``.
"""
from slab_det.compat.distributions import check_distributions

# Before the next imports: they need the packages that this looks for.
check_distributions()

from slab_det.compat.autograd import is_recomputing  # noqa: E402
from slab_det.compat.engine import install_checkpoint_files  # noqa: E402
from slab_det.compat.ops import install_ops  # noqa: E402

install_ops()
install_checkpoint_files()

__all__ = ['check_distributions', 'install_checkpoint_files', 'install_ops', 'is_recomputing']
