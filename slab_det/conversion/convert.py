"""Makes a LayerNorm model one whose LayerNorms can be trained away."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
from mmcv.cnn import build_norm_layer
from mmdet.registry import MODELS
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from slab_det.backbones.base import check_norm_cfg
from slab_det.deployment import is_deployed
from slab_det.fusion.folds import find_hooks
from slab_det.fusion.fuse import replace_module
from slab_det.norms import OfflineNorm, PRepBN, copy_module, named_offline_norms, named_progressive_norms
from slab_det.recalibration import Moments, collect_moments
from slab_det.runtime.errors import SlabDetError


class ConversionError(SlabDetError):
    """Norms that cannot be converted or calibrated."""


@dataclass
class ConversionReport:
    """What :func:`convert_norms` did; a norm with several names counts once, under the first.

    Attributes:
        converted: Names of the norms that were replaced.
        kept: Name and reason of every LayerNorm that was not.
        explained: For each calibrated norm the share of its LayerNorm's variance, over tokens and channels, that the
            affine map reproduces: 1 is all of it.
    """

    converted: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    explained: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f'{len(self.converted)} norms converted, {len(self.kept)} kept']
        lines += [f'  {name}: kept, {reason}' for name, reason in self.kept.items()]
        if self.explained:
            worst = min(self.explained, key=self.explained.get)
            mean = sum(self.explained.values()) / len(self.explained)
            lines.append(
                f'  an affine map explains {mean:.1%} of their variance on average, '
                f'least at {worst}: {self.explained[worst]:.1%}'
            )
        return '\n'.join(lines)


def convert_norms(
    model: nn.Module,
    norm_cfg: dict | None = None,
    calibrate: Iterable | None = None,
    inplace: bool = False,
    skip: Iterable[str] = (),
    rms_norms: tuple[type[nn.Module], ...] = (nn.RMSNorm,),
) -> nn.Module:
    """Replaces every LayerNorm and RMSNorm over the last dimension by an offline norm that keeps its weight and bias.

    A PRepBN starts at gamma = 1 and computes what the norm did; :class:`slab_det.hooks.ProgressiveNormHook` trains
    it down to gamma = 0. ``model.conversion_report`` says what became of each norm.

    Args:
        model: Any model with ``nn.LayerNorm`` or RMSNorms: mmdet's, timm's, a whole detector, a language model.
        norm_cfg: The new norm; None means ``dict(type='PRepBN')``. The LayerNorm's eps becomes its ``ln_eps``; an
            RMSNorm becomes its ``ln`` as it is.
        calibrate: Batches for :func:`calibrate_norms`, which brings the RepBN branch near the LayerNorm, so that the
            mixture moves little while gamma falls. PRepBN only.
        inplace: Change ``model`` itself instead of a copy.
        skip: Names of norms, or of modules that hold them, that stay as they are.
        rms_norms: The classes of RMSNorms; libraries of language models have classes of their own.

    Raises:
        ConversionError: If no norm was converted, the new norm is unknown or none of ours, calibration is asked for
            another norm than PRepBN, or the model is deployed.
        RecalibrationError: If calibration has no data, or data that are not finite.

        After any error ``model`` is as it was.
    """
    if is_deployed(model):
        raise ConversionError('the model is deployed, which cannot be trained; convert the one that it was made of')
    norm_cfg = dict(norm_cfg or dict(type='PRepBN'))
    try:
        check_norm_cfg('norm_cfg', norm_cfg)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    if not inplace:
        model = copy_module(model)
    # The LayerNorm of a PRepBN is converted already.
    inner = {module for _, norm in named_offline_norms(model) for module in norm.modules()}
    aliases: dict[nn.Module, list[str]] = {}
    for name, norm in model.named_modules(remove_duplicate=False):
        if (isinstance(norm, nn.LayerNorm) or type(norm) in rms_norms) and norm not in inner:
            aliases.setdefault(norm, []).append(name)
    report, replaced, skip = ConversionReport(), {}, tuple(skip)
    for norm, names in aliases.items():
        # A reason to keep a norm under one of its names keeps it under all: the norm stays shared.
        owners = (model.get_submodule(name.rpartition('.')[0]) for name in names)
        skipped = any(name == part or name.startswith(f'{part}.') for name in names for part in skip)
        reasons = (
            'skipped' if skipped else reason_to_keep(name, norm, owner)
            for name, owner in zip(names, owners, strict=True)
        )
        reason = next(filter(None, reasons), None)
        if reason is None:
            report.converted.append(names[0])
            replaced[norm] = _build_converted(norm, norm_cfg, model)
        else:
            report.kept[names[0]] = reason
    if not replaced:
        raise ConversionError(f'the model has no LayerNorm to convert{describe_others(model, report.kept)}')
    if calibrate is not None and not all(isinstance(new, PRepBN) for new in replaced.values()):
        raise ConversionError(f'only PRepBN holds a LayerNorm to calibrate by, {norm_cfg["type"]} does not')
    _replace(model, replaced)
    try:
        if calibrate is not None:
            report.explained = calibrate_norms(model, calibrate)
    except BaseException:
        _replace(model, {new: norm for norm, new in replaced.items()})
        raise
    model.conversion_report = report
    return model


@MODELS.register_module()
def ConvertedModel(model: dict, norm_cfg: dict) -> nn.Module:  # noqa: N802 (a config's type)
    """Builds a model, such as a backbone of another library, and gives all of its norms to :func:`convert_norms`."""
    return convert_norms(MODELS.build(model), norm_cfg, inplace=True)


def reason_to_keep(name: str, norm: nn.Module, owner: nn.Module) -> str | None:
    """Why a LayerNorm or RMSNorm of this name, an attribute of ``owner``, cannot be replaced; None if it can."""
    # Takes half a second.
    from timm.layers import LayerNorm, LayerNormFp32

    if not name:
        return 'it is the whole model'
    if hooks := find_hooks(norm):
        return f'it has {hooks}'
    if len(_normalized_shape(norm)) != 1:
        return f'it normalizes over {len(_normalized_shape(norm))} dimensions'
    # These normalize the last dimension and do no more. Any other forward may permute or apply an activation.
    if isinstance(norm, nn.LayerNorm) and type(norm).forward not in (
        nn.LayerNorm.forward,
        LayerNorm.forward,
        LayerNormFp32.forward,
    ):
        return f'{type(norm).__name__} has a forward of its own, which may do more than normalize the last dimension'
    if isinstance(owner, nn.TransformerEncoderLayer) and not owner.norm_first:
        return f'the fused kernel of {type(owner).__name__} reads its weights and never calls it'
    return None


def describe_others(model: nn.Module, kept: dict[str, str]) -> str:
    """What a model without LayerNorms to replace has instead, in brackets for a message.

    Args:
        model: The model.
        kept: Reasons of its LayerNorms to stay, by name; each reason is given once.
    """
    names = defaultdict(list)
    for name, reason in kept.items():
        names[reason].append(name)
    parts = [f'{first}{f" and {len(more)} more" * bool(more)}: {reason}' for reason, (first, *more) in names.items()]
    others = Counter(type(m).__name__ for m in model.modules() if isinstance(m, (nn.GroupNorm, nn.RMSNorm, _NormBase)))
    if others:
        parts.append(f'its {", ".join(f"{count} {kind}" for kind, count in others.items())} are no LayerNorms')
    return f' ({"; ".join(parts)})' if parts else ''


def _normalized_shape(norm: nn.Module) -> tuple[int, ...]:
    # RMSNorms outside torch have a weight and no such attribute.
    return norm.normalized_shape if hasattr(norm, 'normalized_shape') else norm.weight.shape


@torch.no_grad()
def _build_converted(norm: nn.Module, norm_cfg: dict, model: nn.Module) -> OfflineNorm:
    new = build_norm_layer(norm_cfg, _normalized_shape(norm)[0])[1]
    if not isinstance(new, OfflineNorm):
        raise ConversionError(f'{type(new).__name__} is no offline norm of slab_det; choose PRepBN')
    target = new
    if isinstance(new, PRepBN):
        if not isinstance(norm, nn.LayerNorm):
            # Each library has a name of its own for eps.
            new.ln = norm
        elif norm_cfg.get('ln_eps') is None:
            new.ln.eps = norm.eps
        target = new.ln
    given = dict(norm.named_parameters())
    for name, parameter in given.items():
        getattr(target, name).copy_(parameter).requires_grad_(parameter.requires_grad)
    if given and not any(parameter.requires_grad for parameter in given.values()):
        # A frozen stage gives no gradient to what only the new norm has, and DDP would wait for it.
        new.requires_grad_(False)
    example = next(chain(given.values(), model.parameters()), None)
    if example is not None:
        new.to(device=example.device, dtype=example.dtype)
    return new.train(norm.training)


def _replace(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        # Not named_children(): a module may hold a norm under several names.
        for name, child in parent._modules.items():
            if child in replaced:
                replace_module(parent, name, replaced[child])


def calibrate_norms(model: nn.Module, batches: Iterable) -> dict[str, float]:
    """Starts the RepBN branch of every PRepBN as the best affine approximation of its LayerNorm on ``batches``.

    For each channel, over all tokens x of the data and y = LN(x), ``E (s x + t - y)^2`` is smallest for

        s = Cov(x, y) / Var(x),    t = E y - s E x.

    RepBN is ``alpha (x - mu) / sigma + beta + eta x`` with mu = E x and sigma^2 = Var(x) + eps, so it is this map for

        alpha = (s - eta) sigma,    beta = E y - eta E x,

    with any eta. The eta taken makes the sum of alpha^2 smallest, ``eta = sum(sigma^2 s) / sum(sigma^2)``: what
    is common to all channels passes through eta, which no later change of statistics disturbs. A channel that is
    constant but for rounding has s = 0.

    gamma does not change. In a distributed run each rank gives its own batches, and all end with the same start.

    Args:
        model: A model whose PRepBNs are at gamma = 1, so that every LayerNorm sees what it saw in training.
        batches: What a data loader yields, or image tensors (B, 3, H, W); at least as many tokens as channels are wise.

    Returns:
        For each norm the share of the variance of y that the affine map explains.

    Raises:
        ConversionError: If there is no PRepBN, or one is below gamma = 1.
        RecalibrationError: If data are missing or not finite.
        RankError: On all other ranks, if one cannot go on.
    """
    norms = named_progressive_norms(model)
    if not norms:
        raise ConversionError("the model has no PRepBN to calibrate; use norm_cfg=dict(type='PRepBN')")
    mixed = next((name for name, norm in norms.items() if norm.gamma < 1), None)
    if mixed:
        raise ConversionError(
            f'{mixed} is at gamma = {norms[mixed].gamma:g}: its LayerNorm is partly gone; calibrate '
            'right after loading LayerNorm weights, at gamma = 1'
        )
    layer_norms = {name: norm.ln for name, norm in norms.items()}
    moments, _ = collect_moments(model, layer_norms, lambda x, y: (x, y), batches, 'Calibration')
    return {name: _start_as_affine(norm, moments[name]) for name, norm in norms.items()}


@torch.no_grad()
def _start_as_affine(norm: PRepBN, moments: Moments) -> float:
    """Sets the RepBN branch as :func:`calibrate_norms` derives, and returns the share of variance it explains."""
    mean_x, mean_y = moments.mean
    (sxx, sxy), (_, syy) = moments.scatter
    repbn = norm.repbn
    var = sxx / moments.count
    sigma2 = var + repbn.eps
    # Rounding noise of a constant channel must not become a slope. Any larger variance has its true one: alpha / sigma
    # holds it, because sigma^2 contains eps already.
    varies = var > 1e-12 * (mean_x.square() + var)
    slope = torch.where(varies, sxy / sxx.where(varies, 1.0), 0.0)
    eta = (sigma2 * slope).sum() / sigma2.sum()
    repbn.set_statistics(mean_x, var)
    repbn.eta.fill_(eta)
    repbn.weight.copy_((slope - eta) * sigma2.sqrt())
    repbn.bias.copy_(mean_y - eta * mean_x)
    residual = syy - 2 * slope * sxy + slope.square() * sxx
    return 1.0 - float(residual.sum() / syy.sum().clamp(min=torch.finfo(torch.float64).tiny))
