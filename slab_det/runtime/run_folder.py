"""Writes the files of a training run atomically, so that a run can be killed at any time and resumed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.fileio import LocalBackend, register_backend
from mmengine.fileio.io import backend_instances
from mmengine.hooks import CheckpointHook

from slab_det.common.config import to_values
from slab_det.common.errors import CheckpointError, ConfigError, config_errors, name_some
from slab_det.common.files import whole_file


def install_run_folder() -> None:
    """Makes mmengine write local files atomically, and remove a checkpoint only after the next one is written.

    Replaces mmengine's ``LocalBackend``, whose ``put`` writes under the final name. Patches
    ``CheckpointHook._save_checkpoint_with_step`` and ``_save_best_checkpoint``, which remove the previous checkpoint
    first: a run with ``max_keep_ckpts=1`` that is killed while it saves would have no checkpoint left.
    """
    register_backend('local', AtomicLocalBackend, force=True, prefixes='')
    # mmengine caches backend instances.
    backend_instances.clear()
    for name in ('_save_checkpoint_with_step', '_save_best_checkpoint'):
        save = getattr(CheckpointHook, name)
        if not hasattr(save, '__wrapped__'):
            setattr(CheckpointHook, name, remove_after_saving(save))


def save_with_config(checkpoint: dict, cfg: Config, path: str | Path) -> tuple[Path, Path]:
    """Writes a checkpoint and, beside it, ``<stem>_config.py``; returns both paths."""
    path, buffer, backend = Path(path), BytesIO(), AtomicLocalBackend()
    config = path.with_name(f'{path.stem}_config.py')
    # Save to memory first: torch.save into a file on a full disk raises an error without file name and cause.
    torch.save(checkpoint, buffer)
    # Write the config last: an old config refuses a new checkpoint, but a new config might accept an old one.
    backend.put(buffer.getvalue(), path)
    write_config(cfg, config)
    return path, config


def write_config(cfg: Config, path: str | Path) -> None:
    """Writes a config as Python, with :func:`~slab_det.common.config.to_values`, and reads it once.

    Raises:
        ConfigError: If the file does not read as what was written; it names the values.
    """
    written = Config(to_values(cfg), filename=cfg.filename)
    AtomicLocalBackend().put_text(written.pretty_text, path)
    with config_errors(f'{path}, as it was written'):
        read = Config.fromfile(path).to_dict()
    if lost := [key for key, value in written.to_dict().items() if read.get(key) != value]:
        raise ConfigError(f'{path}: the values of {name_some(lost)} are not read as they were: write plain values')


class AtomicLocalBackend(LocalBackend):
    """mmengine's LocalBackend, which writes with :func:`whole_file`."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes bytes to a file, and creates its folder if needed."""
        with whole_file(filepath) as name:
            name.write_bytes(obj)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Writes text to a file, and creates its folder if needed."""
        self.put(obj.encode(encoding), filepath)


def remove_after_saving(save: Callable) -> Callable:
    """Wraps a saving method of ``CheckpointHook``, so that it removes files only after saving."""

    @wraps(save)
    def save_then_remove(self: CheckpointHook, *args: Any, **kwargs: Any) -> None:
        backend, removals = self.file_backend, []
        self.file_backend = copy.copy(backend)
        self.file_backend.remove = removals.append
        try:
            save(self, *args, **kwargs)
        finally:
            self.file_backend = backend
        best = [getattr(self, 'best_ckpt_path', None), *getattr(self, 'best_ckpt_path_dict', {}).values()]
        for path in removals:
            # A resumed run may save a checkpoint under a name that it also removes.
            if path not in (self.last_ckpt, *best):
                backend.remove(path)

    return save_then_remove


def find_latest_checkpoint(folder: str | Path) -> str | None:
    """Returns the checkpoint to resume from in a work directory, or None if there is none yet.

    This is the checkpoint named in the file ``last_checkpoint``, even after the folder was moved. If that file or its
    checkpoint is missing, this is the newest ``iter_N.pth`` or ``epoch_N.pth``.

    Raises:
        CheckpointError: If there is a ``last_checkpoint``, but no checkpoint.
    """
    folder = Path(folder)
    marker = folder / 'last_checkpoint'
    name = marker.read_text().strip() if marker.is_file() else ''
    # Look in the folder first: it may be a copy of the folder that last_checkpoint names.
    for candidate in (folder / Path(name).name, Path(name)):
        if candidate.is_file():
            return str(candidate)
    saved = [file for file in folder.glob('*.pth') if re.fullmatch(r'(iter|epoch)_\d+\.pth', file.name)]
    if saved:
        return str(max(saved, key=lambda file: file.stat().st_mtime_ns))
    if marker.exists():
        raise CheckpointError(
            f'{marker} names {name or "nothing"}, which is not there, and {folder} has no other '
            f'checkpoint; give the checkpoint to resume from, or remove last_checkpoint to start from the beginning'
        )
    return None
