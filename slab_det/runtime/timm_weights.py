"""``timm://NAME``: the pretrained weights that timm has under a name, wherever mmengine takes a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.runner import CheckpointLoader
from torch import Tensor

from slab_det.runtime.errors import CheckpointError

SCHEME = 'timm://'


@CheckpointLoader.register_scheme(prefixes=SCHEME, force=True)
def load_from_timm(filename: str, map_location: object = None) -> dict[str, Tensor]:
    """The state dict of ``timm.create_model(NAME, pretrained=True)``.

    timm downloads it once, into its own cache.

    Args:
        filename: ``timm://NAME``, such as ``timm://swin_tiny_patch4_window7_224.ms_in1k``.
        map_location: Not used: what loads the weights copies them to where the model is.

    Raises:
        CheckpointError: If timm does not know the name, has no weights for it or cannot get them.
    """
    name = filename.removeprefix(SCHEME)
    try:
        import timm
    except ImportError as error:
        raise CheckpointError(f'{filename}: this needs timm: pip install timm') from error
    if not timm.models.is_model_pretrained(name):
        raise CheckpointError(
            f'{filename}: timm has no pretrained weights of this name; python -c "import timm; '
            "print(timm.list_models(['swin_*', 'pvt_v2_b?'], pretrained=True))\" lists those that load here"
        )
    try:
        with weights_only():
            return timm.create_model(name, pretrained=True).state_dict()
    except MemoryError:
        raise
    except Exception as error:  # whatever timm, the hub's client and its network raise
        reason = str(error).strip().partition('\n')[0] or type(error).__name__
        raise CheckpointError(
            f'{filename}: timm cannot get the weights ({reason}). Where there is a network, run python -c "import '
            f"timm, torch; torch.save(timm.create_model('{name}', pretrained=True).state_dict(), '{name}.pth')\" "
            f'and name that file; or train from scratch with init_cfg=None'
        ) from error


@contextmanager
def weights_only() -> Iterator[None]:
    """Has torch refuse to run what a file holds, whatever the timm at hand asks it for."""
    # torch refuses to load anything with both of them set.
    force, forbid = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'
    before = {name: os.environ.pop(name, None) for name in (force, forbid)}
    os.environ[force] = '1'
    try:
        yield
    finally:
        del os.environ[force]
        os.environ.update({name: value for name, value in before.items() if value is not None})
