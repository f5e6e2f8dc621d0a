"""fuse: a detector without normalization, exact to rounding."""
from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from slab_det.errors import SlabDetError
from slab_det.layers.attention import use_sdpa
from slab_det.layers.offline_norm import ChannelAffine, OfflineNorm, named_offline_norms
from slab_det.layers.repbn import named_progressive_norms

from .folds import FOLD_RULES, Fold, split_part
from .report import FusionReport, NormFate
from .rules import find_obstacle, fold_into_input, fold_into_output


class FusionError(SlabDetError):
    """A model that cannot be fused exactly."""


def fuse(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Folds every offline norm of ``model`` into its neighbours (SLAB, Lemma 4.1).

    In eval mode the fused model computes what the unfused one does, at every input size. A norm that no layer can
    take stays as one multiply-add, :class:`~slab_det.layers.offline_norm.ChannelAffine`. Other norms, such as
    LayerNorm, stay as they are. ``model.fusion_report`` says which became what.

    Args:
        model: A detector or a backbone, in eval mode, with gamma = 0. The output norms of a backbone can be folded
            only when the detector is given.
        inplace: Change ``model`` itself instead of a copy.

    Returns:
        The fused model.

    Raises:
        FusionError: If the model is in training mode, still has gamma > 0, or has statistics that are not finite.
            The model is then unchanged.
    """
    _check(model)
    if not inplace:
        model = copy.deepcopy(model)
    fates = {}
    for name, fold in _named_folds(model):
        norm_name = _join(name, fold.norm)
        norm = _get(model, norm_name)
        if not isinstance(norm, OfflineNorm):
            continue
        targets = [_join(name, target) for target in fold.targets]
        obstacle = fold.obstacle or _obstacle(model, targets, fold)
        if obstacle:
            fates[norm_name] = _leave_affine(model, norm_name, norm, obstacle)
        else:
            fates[norm_name] = _fold(model, norm_name, norm, targets, fold)
    for norm_name, norm in list(named_offline_norms(model)):
        fates[norm_name] = _leave_affine(model, norm_name, norm, 'no rule says which layer reads it')
    for name, module in model.named_modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)):
            fates[name] = NormFate(name, type(module).__name__, 'kept', reason='not an offline norm of slab_det')
    use_sdpa(model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    model.fusion_report = FusionReport(sorted(fates.values(), key=lambda fate: order[fate.norm]))
    return model


def _check(model: nn.Module) -> None:
    if model.training or any(norm.training for _, norm in named_offline_norms(model)):
        raise FusionError('the model is in training mode, where norms use the statistics of each batch; '
                          'call model.eval() before slab_det.fuse')
    mixed = {name: norm.gamma for name, norm in named_progressive_norms(model).items() if norm.gamma > 0}
    if mixed:
        name, gamma = next(iter(mixed.items()))
        raise FusionError(
            f'{len(mixed)} norms still contain LayerNorm, which cannot be folded ({name}: gamma = {gamma:g}); finish '
            'the training (ProgressiveNormHook lowers gamma to 0), or call slab_det.set_gamma(model, 0) '
            'and fine-tune if the model was trained for that')
    for name, norm in named_offline_norms(model):
        scale, shift = norm.inference_affine()
        if not (torch.isfinite(scale).all() and torch.isfinite(shift).all()):
            raise FusionError(f'{name}: its inference scale or shift is not finite; its statistics or weights '
                              'are damaged, take an earlier checkpoint or recalibrate')


def _named_folds(model: nn.Module) -> list[tuple[str, Fold]]:
    return [(name, fold) for name, module in model.named_modules() if type(module) in FOLD_RULES
            for fold in FOLD_RULES[type(module)](module)]


def _obstacle(model: nn.Module, targets: list[str], fold: Fold) -> str:
    """Why one of the layers cannot take the norm, and so none may; '' if all can."""
    if not targets:
        return 'no layer reads it'
    for target in targets:
        layer, part = split_part(target)
        obstacle = find_obstacle(model.get_submodule(layer), fold.side, part)
        if obstacle:
            return f'{target}: {obstacle}'
    return ''


def _fold(model: nn.Module, norm_name: str, norm: OfflineNorm, targets: list[str], fold: Fold) -> NormFate:
    if fold.prepare is not None:
        fold.prepare()
    affine = norm.inference_affine()
    for target in targets:
        layer, part = split_part(target)
        if fold.side == 'input':
            fold_into_input(model.get_submodule(layer), *affine, part)
        else:
            fold_into_output(model.get_submodule(layer), *affine)
    _replace(model, norm_name, nn.Identity())
    return NormFate(norm_name, type(norm).__name__, 'folded', into=', '.join(targets))


def _leave_affine(model: nn.Module, norm_name: str, norm: OfflineNorm, reason: str) -> NormFate:
    scale, shift = norm.inference_affine()
    affine = ChannelAffine(norm.num_features).to(norm.statistics()[1]).eval()
    with torch.no_grad():
        affine.scale.copy_(scale)
        affine.shift.copy_(shift)
    _replace(model, norm_name, affine)
    return NormFate(norm_name, type(norm).__name__, 'affine', reason=reason)


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
