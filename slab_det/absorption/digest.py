"""Digest of all that the fits of an absorption depend on: it names the files of intermediate results."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import nn

import slab_det
from slab_det.absorption.images import Images, to_bytes
from slab_det.common.record import describe_environment


def teacher_digest(teacher: nn.Module, images: Images) -> hashlib._Hash:
    """Digest of what all fits have in common: the images, the teacher's weights and settings, and the code."""
    digest = images.digest.copy()
    settings = images.count, _settings(teacher), describe_environment()['versions']
    digest.update(repr(settings).encode())
    digest.update(_source_digest(Path(slab_det.__file__).parent))
    add_weights(digest, teacher)
    return digest


def add_weights(digest: hashlib._Hash, model: nn.Module) -> None:
    """Adds the weights of a model to a digest."""
    for name, value in model.state_dict().items():
        digest.update(f'{name} {value.dtype} {tuple(value.shape)}'.encode() + to_bytes(value))


def _source_digest(package: Path) -> bytes:
    """Digest of the source of a package: another commit of the same version may make other fits."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob('*.py')):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.digest()


def _settings(model: nn.Module) -> list[tuple]:
    """What modules hold beside weights, such as eps, heads and window sizes: their types, numbers and words."""

    def is_plain(value: object) -> bool:
        return all(map(is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float, str))

    # Private attributes are caches and flags, which may change between two calls.
    return [
        (name, type(module).__qualname__, key, repr(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if not key.startswith('_') and is_plain(value)
    ]
