"""convert_norms: replaces the LayerNorms of a model by norms that fold away at inference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from mmcv.cnn import build_norm_layer
from mmdet.registry import MODELS
from torch import nn

from slab_det.backbones.adopt import adopt
from slab_det.common.errors import ConversionError
from slab_det.common.modules import copy_module, is_deployed
from slab_det.common.record import Record
from slab_det.fusion.folding import reason_to_keep, replace_module
from slab_det.norms import OfflineNorm, PRepBN, check_norm_weights, named_norms


@dataclass
class ConversionReport(Record):
    """The norms that :func:`convert_norms` replaced or left; a norm with several names is listed once, by the first.

    Attributes:
        converted: Names of the norms that were replaced.
        kept: Every LayerNorm that was not replaced, and the reason.
    """

    converted: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield f'{len(self.converted)} norms converted, {len(self.kept)} kept'
        yield from (f'  {name}: kept, {reason}' for name, reason in self.kept.items())


def convert_norms(
    model: nn.Module,
    norm_cfg: dict | None = None,
    *,
    inplace: bool = False,
    skip: Iterable[str] = (),
) -> nn.Module:
    """Replaces every LayerNorm over the last dimension by a norm of slab_det that keeps its weight and bias.

    Blocks of mmdet's Swin and PVT become those of slab_det (:func:`~slab_det.backbones.adopt.adopt`).

    A PRepBN starts at gamma = 1 and computes what the LayerNorm did; :class:`slab_det.hooks.ProgressiveNormHook` trains
    it down to gamma = 0. ``model.conversion_report`` names the norms that were replaced or left.

    Args:
        model: Any model with ``nn.LayerNorm``: mmdet's, timm's, a whole detector.
        norm_cfg: The new norm; None means ``dict(type='PRepBN')``. The LayerNorm's eps becomes its ``ln_eps``.
        inplace: Change ``model`` itself instead of a copy.
        skip: Names of norms, or of modules that hold them, that stay as they are.

    Returns:
        The converted model; ``model`` itself with ``inplace``.

    Raises:
        ConversionError: If no norm can be converted, ``norm_cfg`` is no offline norm of slab_det, or the model is
            deployed. ``model`` stays unchanged.
    """
    if is_deployed(model):
        raise ConversionError('a deployed model cannot be trained; convert the model that was deployed')
    norm_cfg = norm_cfg or dict(type='PRepBN')
    if not inplace:
        model = copy_module(model)
    report, replaced, skipped = ConversionReport(), {}, tuple(f'{name}.' for name in skip)
    # named_norms leaves out the LayerNorm inside a PRepBN, which is converted already.
    for name, norm in named_norms(model, nn.LayerNorm):
        is_skipped = f'{name}.'.startswith(skipped)
        owner = model.get_submodule(name.rpartition('.')[0])
        if reason := 'skipped' if is_skipped else reason_to_keep(name, norm, owner):
            report.kept[name] = reason
        else:
            report.converted.append(name)
            replaced[norm] = _build_converted(norm, norm_cfg, model)
    if not replaced:
        reasons = '; '.join(dict.fromkeys(report.kept.values())) or 'it has none'
        raise ConversionError(f'the model has no LayerNorm to convert: {reasons}')
    adopt(model)
    for parent in list(model.modules()):
        # Not named_children(): a module may hold a norm under several names.
        for name, child in parent._modules.items():
            if child in replaced:
                replace_module(parent, name, replaced[child])
    model.register_load_state_dict_pre_hook(check_norm_weights)
    model.conversion_report = report
    return model


@MODELS.register_module()
def ConvertedModel(model: dict, norm_cfg: dict) -> nn.Module:  # noqa: N802 (a config's type)
    """Builds a model, such as a backbone of another library, and replaces its norms by :func:`convert_norms`."""
    return convert_norms(MODELS.build(model), norm_cfg, inplace=True)


@torch.no_grad()
def _build_converted(norm: nn.LayerNorm, norm_cfg: dict, model: nn.Module) -> OfflineNorm:
    new = build_norm_layer(norm_cfg, norm.normalized_shape[0])[1]
    if not isinstance(new, OfflineNorm):
        raise ConversionError(f'{type(new).__name__} is no offline norm of slab_det; choose PRepBN')
    target = new.ln if isinstance(new, PRepBN) else new
    if isinstance(new, PRepBN) and norm_cfg.get('ln_eps') is None:
        target.eps = norm.eps
    given = dict(norm.named_parameters())
    for name, parameter in given.items():
        getattr(target, name).copy_(parameter).requires_grad_(parameter.requires_grad)
    if given and not any(parameter.requires_grad for parameter in given.values()):
        # DDP would wait for gradients of the new norm's other parameters, and a frozen stage gives none.
        new.requires_grad_(False)
    example = next(chain(given.values(), model.parameters()), None)
    if example is not None:
        new.to(device=example.device, dtype=example.dtype)
    return new.train(norm.training)
