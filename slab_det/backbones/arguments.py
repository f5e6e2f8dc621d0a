"""Checks of a backbone's arguments: an error at construction, instead of one in the middle of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isclass
from numbers import Integral

from mmengine.registry import MODELS
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def per_stage(name: str, value: object, num_stages: int) -> tuple:
    """One value for every stage: a sequence as it is, anything else repeated.

    Raises:
        ValueError: If a sequence has another length.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (value,) * num_stages
    if len(value) != num_stages:
        raise ValueError(f'{name}={tuple(value)} needs one entry for each of the {num_stages} stages')
    return tuple(value)


def check_whole_numbers(least: int = 1, **values: object) -> None:
    """Raises ValueError unless every argument is a whole number, or a sequence of them, of at least ``least``."""
    wanted = 'positive whole numbers' if least else 'whole numbers, 0 or more'
    for name, value in values.items():
        for number in value if isinstance(value, Sequence) else (value,):
            if not isinstance(number, Integral) or number < least:
                raise ValueError(f'{name}={value}: give {wanted}')


def check_out_indices(out_indices: Sequence[int], num_stages: int) -> None:
    """Raises ValueError unless these are different stages, counted from 0."""
    if not set(out_indices) <= set(range(num_stages)):
        raise ValueError(f'out_indices={tuple(out_indices)} names stages that {num_stages=} does not have')
    if len(set(out_indices)) < len(out_indices):
        raise ValueError(f'out_indices={tuple(out_indices)} names a stage twice')


def check_mlp_ratio(name: str, ratio: float, channels: int) -> None:
    """Raises ValueError unless an FFN of so many times ``channels`` has any channel."""
    if int(ratio * channels) < 1:
        raise ValueError(f'{name}={ratio} leaves no hidden channel in the FFN of {channels} channels: give more')


def check_norm_cfg(name: str, norm_cfg: dict) -> None:
    """Raises ValueError unless ``norm_cfg`` names a norm that can take tokens, channels last."""
    kind = norm_cfg.get('type') if isinstance(norm_cfg, dict) else None
    if kind is None:
        raise ValueError(f"{name} must be a dict with a 'type', such as dict(type='PRepBN'); got {norm_cfg}")
    if not isclass(kind):
        with MODELS.switch_scope_and_registry(None) as registry:
            norm = registry.get(kind)
        if norm is None:
            raise ValueError(
                f"{name}: there is no norm called {kind!r}; 'LN', 'TokenBN', 'RepBN', 'PRepBN', 'UN', "
                "'MABN' and 'PowerNorm' are there, and what custom_imports registers in mmengine's MODELS"
            )
        kind = norm
    if isclass(kind) and issubclass(kind, (_NormBase, nn.GroupNorm)):
        raise ValueError(
            f'{name}: {kind.__name__} takes channels first, and would normalise tokens instead of '
            "channels here; dict(type='TokenBN') is the BatchNorm of tokens"
        )
