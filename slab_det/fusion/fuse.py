"""fuse: a detector without normalization, exact to rounding."""

from __future__ import annotations

import copy
from itertools import accumulate

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from slab_det.attention.window_attention import leave_released_order
from slab_det.fusion.folds import Fold, find_folds, split_part
from slab_det.fusion.interference import find_hooks, names_of_norms, other_owners
from slab_det.fusion.report import FusionReport, NormFate
from slab_det.fusion.rules import find_obstacle, fold_into_input, fold_into_output
from slab_det.norms import ChannelAffine, OfflineNorm, named_offline_norms, named_progressive_norms
from slab_det.runtime.errors import SlabDetError


class FusionError(SlabDetError):
    """A model that cannot be fused exactly."""


def fuse(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Folds every offline norm of ``model`` into its neighbours (SLAB, Lemma 4.1).

    In eval mode the fused model computes what the unfused one does, at every input size. A norm that no layer can
    take stays as one multiply-add, :class:`~slab_det.norms.ChannelAffine`. Other norms, such as
    LayerNorm, stay as they are. ``model.fusion_report`` says which became what.

    Args:
        model: A detector or a backbone, in eval mode, with gamma = 0. The output norms of a backbone can be folded
            only when the detector is given.
        inplace: Change ``model`` itself instead of a copy.

    Returns:
        The fused model.

    Raises:
        FusionError: If the model is in training mode, still has gamma > 0, has statistics that are not finite, or
            hooks on a norm. The model is then unchanged.
    """
    _check(model)
    if not inplace:
        model = copy.deepcopy(model)
    names, others = names_of_norms(model), other_owners(model)
    fates = {}
    for prefix, fold in _prefixed_folds(model):
        norm = _get(model, _join(prefix, fold.norm))
        if not isinstance(norm, OfflineNorm):
            continue
        obstacle = _find_shared_norm(names[norm]) or fold.obstacle or _find_obstacle(model, prefix, fold, others)
        if obstacle:
            fates |= _leave_affine(model, names[norm], norm, obstacle)
        else:
            fates |= _fold(model, prefix, fold, norm)
    for norm, norm_names in names_of_norms(model).items():
        obstacle = _find_shared_norm(norm_names) or 'no rule says which layer reads it'
        fates |= _leave_affine(model, norm_names, norm, obstacle)
    for name, module in model.named_modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)):
            fates[name] = NormFate(name, type(module).__name__, 'kept', reason='not an offline norm of slab_det')
    leave_released_order(model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    model.fusion_report = FusionReport(sorted(fates.values(), key=lambda fate: order[fate.norm]))
    return model


def _check(model: nn.Module) -> None:
    if model.training or any(norm.training for _, norm in named_offline_norms(model)):
        raise FusionError(
            'the model is in training mode, where norms use the statistics of each batch; '
            'call model.eval() before slab_det.fuse'
        )
    mixed = {name: norm.gamma for name, norm in named_progressive_norms(model).items() if norm.gamma > 0}
    if mixed:
        name, gamma = next(iter(mixed.items()))
        raise FusionError(
            f'{len(mixed)} norms still contain LayerNorm, which cannot be folded ({name}: gamma = {gamma:g}); finish '
            'the training (ProgressiveNormHook lowers gamma to 0), or call slab_det.set_gamma(model, 0) '
            'and fine-tune if the model was trained for that'
        )
    for name, norm in named_offline_norms(model):
        scale, shift = norm.inference_affine()
        if not (torch.isfinite(scale).all() and torch.isfinite(shift).all()):
            raise FusionError(
                f'{name}: its inference scale or shift is not finite; its statistics or weights '
                'are damaged, take an earlier checkpoint or recalibrate'
            )
        hooks = next(filter(None, map(find_hooks, norm.modules())), '')
        if hooks:
            raise FusionError(
                f'{name}: it has {hooks}, which would be lost together with the norm; remove them before slab_det.fuse'
            )


def _prefixed_folds(model: nn.Module) -> list[tuple[str, Fold]]:
    """Every fold, with the name of the module that its own names are relative to."""
    return [(name, fold) for name, module in model.named_modules() for fold in find_folds(module)]


def _find_shared_norm(names: list[str]) -> str:
    """Why a norm with these names cannot be folded anywhere; '' if it has one."""
    return f'it is one norm in several places: {", ".join(names)}' if len(names) > 1 else ''


def _find_obstacle(model: nn.Module, prefix: str, fold: Fold, others: dict[str, list[str]]) -> str:
    """Why one of the layers cannot take the norm, and so none may; '' if all can."""
    if not fold.targets:
        return 'no layer reads it'
    for target in fold.targets:
        name, part = split_part(_join(prefix, target))
        layer = model.get_submodule(name)
        obstacle = find_obstacle(layer, fold.side, part) or _find_shared_weight(name, layer, others)
        if obstacle:
            return f'{_join(prefix, target)}: {obstacle}'
    for name in (fold.norm, *fold.targets):
        # A hook on what contains the norm or the layer stands between the two.
        for container in accumulate(name.split('.')[:-1], _join):
            hooks = find_hooks(model.get_submodule(_join(prefix, container)))
            if hooks:
                return f'{_join(prefix, container)} has {hooks}'
    return ''


def _find_shared_weight(name: str, layer: nn.Module, others: dict[str, list[str]]) -> str:
    for parameter in layer._parameters:
        owners = others.get(_join(name, parameter))
        if owners:
            return f'its {parameter} is also {", ".join(owners)}'
    return ''


def _fold(model: nn.Module, prefix: str, fold: Fold, norm: OfflineNorm) -> dict[str, NormFate]:
    if fold.prepare is not None:
        fold.prepare()
    affine = norm.inference_affine()
    targets = [_join(prefix, target) for target in fold.targets]
    for target in targets:
        layer, part = split_part(target)
        if fold.side == 'input':
            fold_into_input(model.get_submodule(layer), *affine, part)
        else:
            fold_into_output(model.get_submodule(layer), *affine)
    name = _join(prefix, fold.norm)
    _replace(model, name, nn.Identity())
    return {name: NormFate(name, type(norm).__name__, 'folded', into=', '.join(targets))}


def _leave_affine(model: nn.Module, names: list[str], norm: OfflineNorm, reason: str) -> dict[str, NormFate]:
    scale, shift = norm.inference_affine()
    # Of a parameter: statistics may have a higher precision than the layers around.
    affine = ChannelAffine(norm.num_features).to(next(norm.parameters())).eval()
    with torch.no_grad():
        affine.scale.copy_(scale)
        affine.shift.copy_(shift)
    for name in names:
        _replace(model, name, affine)
    return {name: NormFate(name, type(norm).__name__, 'affine', reason=reason) for name in names}


def _join(prefix: str, name: str) -> str:
    return f'{prefix}.{name}' if prefix else name


def _get(model: nn.Module, name: str) -> nn.Module | None:
    parent, _, attribute = name.rpartition('.')
    return getattr(model.get_submodule(parent), attribute)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    if not name:
        raise FusionError('the model is itself a norm: there is nothing to fold it into')
    parent, _, attribute = name.rpartition('.')
    setattr(model.get_submodule(parent), attribute, module.train(False))
