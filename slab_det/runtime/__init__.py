"""Checks the installation, supplies operators that mmcv lacks, and patches mmengine.

Importing this package checks the installation, supplies missing operators, and lets mmengine resolve configs named
``slab_det::...``. Import it before ``mmdet.models``. Nothing else of torch, mmengine, mmcv or mmdet changes until
:func:`install` is called.
"""

from slab_det.runtime.distributions import check_distributions

# The imports below fail in obscure ways if distributions overwrite each other.
check_distributions()

from slab_det.runtime.checkpoint_files import install_safe_reading, read_checkpoint  # noqa: E402
from slab_det.runtime.gloo import install_cpu_training  # noqa: E402
from slab_det.runtime.ops import install_ops  # noqa: E402
from slab_det.runtime.registries import register_scope  # noqa: E402
from slab_det.runtime.run_folder import find_latest_checkpoint, install_run_folder  # noqa: E402

install_ops()
register_scope()


def install() -> None:
    """Patches mmengine in this process. Every command calls it first; your own scripts should too.

    | patch | without it |
    |---|---|
    | :func:`~slab_det.runtime.checkpoint_files.install_safe_reading` | a checkpoint can run code |
    | :func:`~slab_det.runtime.run_folder.install_run_folder` | a killed run can lose its only complete checkpoint |
    | :func:`~slab_det.runtime.gloo.install_cpu_training` | distributed training needs GPUs |

    The linked functions name the code of mmengine that they replace. A second call changes nothing.
    """
    install_safe_reading()
    install_run_folder()
    install_cpu_training()


__all__ = ['find_latest_checkpoint', 'install', 'read_checkpoint']
