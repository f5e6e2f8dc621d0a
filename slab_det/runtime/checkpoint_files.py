"""Reads checkpoint files without running code that they hold."""

import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import FunctionType
from typing import Any
from urllib.error import URLError

import mmengine.runner.checkpoint
import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.logging import HistoryBuffer
from mmengine.optim import OneCycleParamScheduler
from mmengine.runner import CheckpointLoader

from slab_det.common.distributed import run_on_main
from slab_det.common.errors import CheckpointError, describe_reason, name_error

SAFETENSORS, TIMM = '.safetensors', 'timm://'
# torch's allow-list belongs to the process: two threads that leave it in another order would restore each other's.
_ALLOW_LIST = RLock()


def install_safe_reading() -> None:
    """Makes mmengine read every checkpoint with the allow-list of this module, and adds ``timm://NAME``.

    Patches ``_safe_torch_load``, which retries with ``weights_only=False`` a file that the allow-list refuses, and
    ``load_from_http``, which has no allow-list (mmengine/runner/checkpoint.py, onedl-mmengine 0.10.12).
    """
    CheckpointLoader.register_scheme(TIMM, load_from_timm, force=True)
    # An empty prefix matches every path; mmengine tries it last.
    CheckpointLoader.register_scheme('', load_from_local, force=True)
    CheckpointLoader.register_scheme(('http://', 'https://'), load_from_http, force=True)
    # torchvision:// and open-mmlab:// look up load_from_http in mmengine's module, s3:// _safe_torch_load.
    mmengine.runner.checkpoint.load_from_http = load_from_http
    mmengine.runner.checkpoint._safe_torch_load = read_torch_file


def read_checkpoint(name: str | os.PathLike) -> Any:
    """Returns the content of a checkpoint, with tensors on the CPU.

    Args:
        name: A file in torch's format or safetensors, ``timm://NAME``, or an address with a scheme of mmengine:
            https, torchvision, open-mmlab, mmcls, s3 and others. Some of them need a package of the storage's owner.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged, or holds objects that are not allowed.
    """
    name = os.fspath(name)
    if name.startswith(TIMM):
        return load_from_timm(name)
    if name.startswith(('http://', 'https://')):
        return load_from_http(name, map_location='cpu')
    return load_from_mmengine(name) if '://' in name else load_from_local(name, map_location='cpu')


def load_from_local(filename: str, map_location: Any = None) -> Any:
    """Reads a local file; raises as :func:`read_checkpoint`."""
    path = os.path.expanduser(filename)
    if not os.path.isfile(path):
        raise CheckpointError(
            f'There is no checkpoint {path}; check its name, which is a file, timm://NAME, or an address of mmengine '
            'such as https://'
        )
    if not path.endswith(SAFETENSORS):
        return read_torch_file(path, map_location)
    # Installed with timm.
    from safetensors.torch import load_file

    with safe_reading(path):
        return load_file(path)


def load_from_http(filename: str, map_location: Any = None) -> Any:
    """Downloads a checkpoint once, into torch's cache; raises as :func:`read_checkpoint`.

    All processes of a run must call it.
    """

    def load() -> Any:
        try:
            with safe_reading(filename):
                return torch.hub.load_state_dict_from_url(  # noqa: TID251 (weights_only=True)
                    filename, map_location=map_location, weights_only=True
                )
        except URLError as error:
            raise CheckpointError(
                f'{filename} cannot be downloaded ({error.reason}). Download it elsewhere and name the file, for '
                'a backbone with --cfg-options model.backbone.init_cfg.checkpoint=FILE; or train from scratch with '
                '--cfg-options model.backbone.init_cfg=None'
            ) from error

    # The other processes read the file that the main process downloaded, or raise its error.
    checkpoint = run_on_main(load)
    return checkpoint if is_main_process() else load()


def load_from_mmengine(filename: str) -> Any:
    """Reads an address by mmengine's loader of its scheme, with the allow-list; raises as :func:`read_checkpoint`."""
    loader = CheckpointLoader._get_checkpoint_loader(filename)
    if loader in (load_from_local, mmengine.runner.checkpoint.load_from_local):
        return load_from_local(filename, map_location='cpu')
    if getattr(loader, '__globals__', None) is vars(mmengine.runner.checkpoint):
        # The same function with our readers in place of mmengine's; mmengine itself stays as it is.
        readers = dict(load_from_http=load_from_http, _safe_torch_load=read_torch_file)
        loader = FunctionType(loader.__code__, loader.__globals__ | readers, argdefs=loader.__defaults__)
    try:
        return loader(filename, map_location='cpu')
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # of mmengine, the client of the storage or the network
        raise CheckpointError(
            f'{filename}: mmengine cannot load this address ({name_error(error)}); check its name, or '
            'download the checkpoint and name the file'
        ) from error


def load_from_timm(filename: str, map_location: Any = None) -> dict[str, torch.Tensor]:
    """Returns the state dict of ``timm.create_model(NAME, pretrained=True)``; raises as :func:`read_checkpoint`."""
    import timm

    name = filename.removeprefix(TIMM)
    # Other names, such as hf-hub:, may load anybody's files.
    if not timm.models.is_model_pretrained(name):
        raise CheckpointError(
            f'{filename}: timm has no pretrained weights of this name; python -c "import timm; '
            "print(timm.list_models(['swin_*', 'pvt_v2_b?'], pretrained=True))\" lists those that load here"
        )
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # of timm, the hub's client or the network
        raise CheckpointError(
            f'{filename}: timm cannot get the weights ({describe_reason(error)}). Where there is a network, save '
            f"the state_dict of timm.create_model('{name}', pretrained=True) and name that file; or train from scratch "
            'with init_cfg=None'
        ) from error


def read_torch_file(file: Any, map_location: Any = None) -> Any:
    """Reads a file as ``torch.load`` does, with the allow-list of this module; raises as :func:`read_checkpoint`."""
    with safe_reading(file):
        return torch.load(file, map_location=map_location, weights_only=True)  # noqa: TID251


@contextmanager
def safe_reading(file: Any) -> Iterator[None]:
    """Allows the objects in ``CHECKPOINT_GLOBALS``; damaged or unsafe contents of ``file`` become a CheckpointError."""
    try:
        with _ALLOW_LIST, torch.serialization.safe_globals(CHECKPOINT_GLOBALS):
            yield
    except (MemoryError, torch.cuda.OutOfMemoryError, URLError, ConnectionError, TimeoutError, PermissionError):
        raise
    except Exception as error:
        unsafe = re.search(r' GLOBAL (\w+(?:\.\w+)+)(?:\s|$)', str(error))
        if isinstance(error, pickle.UnpicklingError) and unsafe and _is_of_torch(file):
            raise CheckpointError(
                f'{file}: holds {unsafe[1]}, which could run code. Not loaded. If you trust its source, read '
                'it with torch.load(FILE, weights_only=False) and save its state_dict alone.'
            ) from error
        raise CheckpointError(f'{file}: cannot be read as a checkpoint; {_describe_kind(file)}') from error


def _is_of_torch(file: Any) -> bool:
    """Whether a local file begins as torch's archives and pickles; a text can spell the names of code too."""
    return _first_bytes(file)[:2] in (b'', b'PK', *(bytes([0x80, protocol]) for protocol in range(2, 6)))


def _first_bytes(file: Any) -> bytes:
    """The first 200 bytes of a local file; none of anything else."""
    if not isinstance(file, (str, os.PathLike)) or not os.path.isfile(file):
        return b''
    with open(file, 'rb') as stream:
        return stream.read(200)


def _describe_kind(file: Any) -> str:
    """What a file that could not be read is, and what to do."""
    start = _first_bytes(file)
    if start.startswith(b'version https://git-lfs'):
        return 'it is a pointer of Git LFS, not the file itself: get that with `git lfs pull`.'
    # A length of eight bytes, then JSON.
    if start[8:9] == b'{' and not str(file).endswith(SAFETENSORS):
        return f'it is a safetensors file: rename it, so that its name ends in {SAFETENSORS}.'
    if start.lstrip()[:1] == b'<':
        return 'it is a page of HTML, as servers send instead of a file: download it again, by the address of the file.'
    return 'it is cut off or another kind of file. Get it again, or take an earlier one.'


def known_method(owner: type, name: str) -> Callable:
    """Replaces ``getattr`` in checkpoints: returns only methods of the classes in ``METHOD_OWNERS``."""
    if owner not in METHOD_OWNERS or name.startswith('__'):
        raise pickle.UnpicklingError('Unsupported global: GLOBAL builtins.getattr')
    return getattr(owner, name)


# Checkpoints hold pickled methods of the message hub's HistoryBuffers, and of OneCycle schedulers.
METHOD_OWNERS = (HistoryBuffer, OneCycleParamScheduler)
NUMPY_CORE = np._core.multiarray if hasattr(np, '_core') else np.core.multiarray
DTYPE_CODES = '?' + np.typecodes['AllInteger'] + np.typecodes['Float'] + 'SU'
CHECKPOINT_GLOBALS = (
    *METHOD_OWNERS,
    # mmengine allows getattr itself, which reaches any attribute of any class on the list.
    (known_method, 'builtins.getattr'),
    # Metrics and learning rates are numpy scalars, histories are arrays. numpy 2 renamed the module.
    *(
        (getattr(NUMPY_CORE, name), f'numpy.{core}.multiarray.{name}')
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    ),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in DTYPE_CODES},
)
