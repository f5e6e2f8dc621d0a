"""mmengine's checkpoint files: written whole or not at all, read without running what is in them."""

import errno
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from uuid import uuid4

import mmengine.runner.checkpoint
import numpy as np
import torch
from mmengine.dist import barrier, get_rank
from mmengine.fileio import LocalBackend, register_backend
from mmengine.fileio.io import backend_instances
from mmengine.logging import HistoryBuffer
from mmengine.optim import OneCycleParamScheduler
from mmengine.runner import CheckpointLoader

from slab_det.runtime.errors import CheckpointError, CheckpointNotFoundError

SAFETENSORS = '.safetensors'

# What torch.load(map_location=...) takes.
MapLocation = str | torch.device | dict | Callable | None


def install_checkpoint_files() -> None:
    """Has mmengine write local files through :class:`AtomicLocalBackend` and read checkpoints with an allow-list."""
    register_backend('local', AtomicLocalBackend, force=True, prefixes='')
    # The backends that mmengine has made so far, for reuse.
    backend_instances.clear()

    # An empty prefix matches every path, and mmengine asks it last.
    CheckpointLoader.register_scheme('', load_from_local, force=True)
    CheckpointLoader.register_scheme(('http://', 'https://'), load_from_http, force=True)
    # The remaining schemes call these two by name: torchvision:// and open-mmlab:// the first, s3:// the second.
    mmengine.runner.checkpoint.load_from_http = load_from_http
    mmengine.runner.checkpoint._safe_torch_load = read_checkpoint


class AtomicLocalBackend(LocalBackend):
    """mmengine's local files, but a file appears under its name when all of it is on the disk.

    A run that is killed while it saves leaves the previous file as it was, and next to it at most one whose name
    ends with ``.tmp``.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes bytes to a file and makes its folder if it has none."""
        # A link keeps pointing to its file, whose content changes.
        path = Path(os.path.realpath(filepath))
        if path.exists() and not path.is_file():
            # A device or a pipe, such as /dev/stdout: renaming would replace it.
            super().put(obj, filepath)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f'.{path.name}.{uuid4().hex[:8]}.tmp')
        try:
            # Not by tempfile: its files are readable by nobody else, whatever the umask.
            with open(temporary, 'xb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                # A full disk does not say which file it was.
                error.filename = str(path)
            raise

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Writes text to a file and makes its folder if it has none."""
        self.put(obj.encode(encoding), filepath)


def load_from_local(filename: str, map_location: MapLocation = None) -> Any:
    """Reads a local checkpoint for mmengine's ``CheckpointLoader``.

    Raises:
        CheckpointNotFoundError: If there is no such file.
        CheckpointError: If it is not a whole checkpoint, or holds objects that are not allowed.
    """
    if not filename:
        raise CheckpointError('The name of the checkpoint is empty; name one.')
    path = os.path.expanduser(filename)
    # mmengine knows the schemes that it has loaders for, and takes anything else for a file.
    scheme, separator, _ = path.partition('://')
    if separator:
        raise CheckpointError(
            f'{path}: nothing here can read {scheme}://; give a file, or an address that begins with '
            'https://, timm://, torchvision:// or open-mmlab://.'
        )
    if os.path.isdir(path):
        raise CheckpointError(f'{path} is a folder; name the checkpoint in it.')
    if not os.path.isfile(path):
        raise CheckpointNotFoundError(f'There is no checkpoint {path}; check its name.')
    if path.endswith(SAFETENSORS):
        return read_safetensors(path)
    return read_checkpoint(path, map_location)


def load_from_http(
    filename: str, map_location: MapLocation = None, model_dir: str | None = None, progress: bool = True
) -> Any:
    """Downloads a checkpoint once, into torch's cache or ``model_dir``, and reads it there.

    Raises:
        CheckpointError: If it cannot be downloaded, is not a whole checkpoint, or holds objects that are not allowed.
    """
    if filename.partition('?')[0].endswith(SAFETENSORS):
        # torch names its copy after the last part of the address, and on model hubs that is the same for all models.
        raise CheckpointError(
            f'{filename}: safetensors are read from files; download it and name the file, or use '
            'timm://NAME for weights that timm knows.'
        )
    if get_rank() != 0:
        barrier()
    try:
        with safe_globals(), checkpoint_errors(filename):
            checkpoint = torch.hub.load_state_dict_from_url(
                filename, model_dir, map_location=map_location, progress=progress, weights_only=True
            )
    except URLError as error:
        raise CheckpointError(
            f'{filename} cannot be downloaded ({error.reason}). Download it elsewhere and name the file, for '
            'a backbone with --cfg-options model.backbone.init_cfg.checkpoint=FILE; or train from scratch with '
            '--cfg-options model.backbone.init_cfg=None'
        ) from error
    if get_rank() == 0:
        barrier()
    return checkpoint


def read_checkpoint(file: Any, map_location: MapLocation = None) -> Any:
    """``torch.load`` for what mmengine and its kin write, and for nothing that could run code.

    Args:
        file: A path, or a file that can seek.
        map_location: Where tensors go, as for ``torch.load``.

    Raises:
        CheckpointError: If it is not a whole checkpoint, or holds objects that are not allowed.
    """
    with safe_globals(), checkpoint_errors(file):
        return torch.load(file, map_location=map_location, weights_only=True)


def read_safetensors(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, which holds nothing else.

    Raises:
        CheckpointError: If it is not a whole safetensors file, or the package is not installed.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f'{path}: reading it needs the safetensors package: pip install safetensors') from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise broken(path, str(error)) from error


@contextmanager
def checkpoint_errors(file: Any) -> Iterator[None]:
    """Turns the many errors of reading a broken or unsafe checkpoint into one that says what to do."""
    try:
        yield
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except OSError as error:
        # A cut off archive has torch seek before the beginning. Other errors are the disk's or the network's.
        if error.errno != errno.EINVAL:
            raise
        raise broken(file, 'it ends too early') from error
    except pickle.UnpicklingError as error:
        # torch words it differently for a name it does not know and for a call it does not allow.
        found = re.search(r'GLOBAL (\S+)|unrecognized function (<.+?>)|instantiate (?:class|object) (\S+)', str(error))
        if found is None:
            # torch's own message recommends weights_only=False.
            raise broken(file, "its content is not in torch's format") from error
        name = next(filter(None, found.groups()))
        raise CheckpointError(
            f'{file}: holds {name}, which is neither weights nor what mmengine saves, and could run code. Not loaded. '
            'If you trust where it comes from, save its weights alone: torch.save(torch.load(FILE, '
            "weights_only=False)['state_dict'], NEW_FILE)"
        ) from error
    except Exception as error:
        raise broken(file, str(error).partition('\n')[0].partition('. ')[0] or type(error).__name__) from error


def broken(file: Any, reason: str) -> CheckpointError:
    """The error for a file that torch cannot make sense of."""
    return CheckpointError(
        f'{file}: cannot be read as a checkpoint ({reason}). It may have been cut off while it was written or '
        'downloaded, or be no checkpoint: get it again, or take an earlier one.'
    )


@contextmanager
def safe_globals() -> Iterator[None]:
    """Allows ``torch.load(weights_only=True)`` what checkpoints of mmengine hold beside tensors."""
    # torch.serialization.safe_globals does this from torch 2.5 on.
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(list(CHECKPOINT_GLOBALS))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def known_method(owner: type, name: str) -> Callable:
    """``getattr`` as far as pickled methods of the message hub and of the schedulers need it.

    Raises:
        UnpicklingError: If it is asked for anything else.
    """
    if owner not in METHOD_OWNERS or name.startswith('__'):
        raise pickle.UnpicklingError('Unsupported global: GLOBAL builtins.getattr')
    return getattr(owner, name)


def under_name(function: Callable, qualified_name: str) -> Callable:
    """A copy of a function that unpickling finds under another name (torch < 2.6 has no other way to say so)."""

    def renamed(*args: Any) -> Any:
        return function(*args)

    renamed.__module__, _, renamed.__name__ = qualified_name.rpartition('.')
    renamed.__qualname__ = renamed.__name__
    return renamed


# The message hub holds HistoryBuffers, and each of them its methods; OneCycle schedulers hold their annealing method.
METHOD_OWNERS = (HistoryBuffer, OneCycleParamScheduler)
NUMPY_CORE = np._core.multiarray if hasattr(np, '_core') else np.core.multiarray
DTYPE_CODES = '?' + np.typecodes['AllInteger'] + np.typecodes['Float'] + 'SU'
CHECKPOINT_GLOBALS = (
    *METHOD_OWNERS,
    # mmengine's own list has the real one, by which a file reaches any attribute of any class above.
    under_name(known_method, 'builtins.getattr'),
    # Metrics and learning rates are numpy scalars, histories are arrays. numpy 2 renamed the module.
    *(
        under_name(getattr(NUMPY_CORE, name), f'numpy.{core}.multiarray.{name}')
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    ),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in DTYPE_CODES},
)
