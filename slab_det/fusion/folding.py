"""fuse: folds the norms of a detector into its linear layers, exact to rounding, and reports what became of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from slab_det.backbones.adopt import adopt, why_not_adopted
from slab_det.checkpoints import check_state_dict
from slab_det.common.errors import SlabDetError, name_some
from slab_det.common.modules import copy_module
from slab_det.common.record import Record
from slab_det.fusion.affine import FOLDABLE_LAYERS, Side, check_foldable, fold_into_input, fold_into_output
from slab_det.fusion.mmdet_rules import find_output_reader
from slab_det.norms import ChannelAffine, OfflineNorm, named_norms, named_offline_norms, named_progressive_norms
from slab_det.norms.folds import CannotFold, Fold, describe_hooks, find_rule

# Norms that are not offline norms of slab_det; _NormBase is the base class of batch and instance norms.
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
OUTCOMES = ('folded', 'absorbed', 'affine', 'kept')


class FusionError(SlabDetError):
    """A model that cannot be fused exactly."""


@dataclass(frozen=True)
class NormFusion(Record):
    """Outcome of the fusion of one norm.

    Attributes:
        norm: Dotted name of the norm in the model.
        kind: Class of the norm.
        outcome: 'folded' into linear layers exactly; 'absorbed' into them by a fit (:func:`slab_det.absorb`); 'affine',
            replaced by one multiply-add; or 'kept', unchanged.
        into: Names of the layers that the norm was folded into.
        side: 'input' or 'output': the side of these layers on which the norm was.
        reason: Why the norm was not folded, or ''.
    """

    norm: str
    kind: str
    outcome: Literal['folded', 'absorbed', 'affine', 'kept']
    into: tuple[str, ...] = ()
    side: Side = 'input'
    reason: str = ''

    def __post_init__(self) -> None:
        # A config holds a list.
        object.__setattr__(self, 'into', tuple(self.into))

    def to_dict(self) -> dict[str, str | list[str]]:
        """The attributes that differ from their defaults."""
        values = {**vars(self), 'into': [*self.into]}
        return {name: value for name, value in values.items() if value not in ('', 'input', [])}


@dataclass
class FusionReport(Record):
    """Outcomes of all norms, in the order of the model's modules.

    Attributes:
        norms: One entry for each norm.
        channels: Number of hidden channels left in each unit that :func:`slab_det.absorb` pruned, by the name of the
            unit: an FFN, an attention (the channels of q, of k and of v), or a layer of a head that writes them.
    """

    norms: list[NormFusion]
    channels: dict[str, int] = field(default_factory=dict)

    def select(self, outcome: str) -> list[NormFusion]:
        """The norms with this outcome."""
        return [norm for norm in self.norms if norm.outcome == outcome]

    def to_dict(self) -> dict:
        """The number of norms with each outcome, and every norm."""
        channels = {'channels': self.channels} if self.channels else {}
        return {**self._count(), 'norms': [norm.to_dict() for norm in self.norms], **channels}

    def lines(self) -> Iterator[str]:
        counts = ', '.join(f'{count} {outcome}' for outcome, count in self._count().items())
        yield f'{len(self.norms)} norms: {counts}'
        for norm in self.norms:
            if not norm.into:
                yield f'  {norm.norm} ({norm.kind}): {norm.outcome} - {norm.reason}'
        if self.channels:
            yield f'hidden channels removed in {len(self.channels)} units'

    def _count(self) -> dict[str, int]:
        # 'absorbed' is left out at 0: only slab_det.absorb makes absorbed norms.
        return {outcome: count for outcome in OUTCOMES if (count := len(self.select(outcome))) or outcome != 'absorbed'}


def check_statistics(model: nn.Module, checkpoint: str) -> None:
    """Raises FusionError if the file ``checkpoint``, which ``model`` has loaded, lacks the statistics of a norm."""
    norms = dict(named_offline_norms(model))
    unset = [name for name, norm in norms.items() if not norm.statistics_loaded]
    if unset:
        raise FusionError(
            f'{checkpoint}: {len(unset)} of {len(norms)} norms have no statistics of data ({name_some(unset)}), and '
            'the fused model would detect nothing; train with this config first'
        )


def fuse(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Folds every offline norm of ``model`` into its neighbours (SLAB, Lemma 4.1).

    In eval mode the fused model computes the same as the unfused model, at every input size. An offline norm that no
    layer can take becomes one multiply-add, :class:`~slab_det.norms.ChannelAffine`. Other norms, such as LayerNorm,
    are kept. ``fusion_report`` of the returned model lists the outcome for each norm.

    Args:
        model: A detector or a backbone, in eval mode, with gamma = 0. The output norms of a backbone fold into the
            neck, and only if a detector is given.
        inplace: Change ``model`` itself instead of a copy.

    Returns:
        The fused model; ``model`` itself with ``inplace``.

    Raises:
        FusionError: If the model is in training mode, still has gamma > 0, or has statistics that are not finite, hooks
            on a norm, or one norm several times. The model is then unchanged.
    """
    check_fusible(model)
    if not inplace:
        model = copy_module(model)
    adopt(model)
    return apply_folds(model, [*earlier_report(model).norms, *plan_folds(model)])


def earlier_report(model: nn.Module) -> FusionReport:
    """The part of ``model.fusion_report`` that stays valid: norms replaced and channels removed by earlier calls."""
    report = getattr(model, 'fusion_report', FusionReport([]))
    return FusionReport([fusion for fusion in report.norms if fusion.outcome != 'kept'], report.channels)


def plan_folds(model: nn.Module, absorbed: Collection[nn.Module] = ()) -> list[NormFusion]:
    """Decides the outcome for every norm, in the order of the modules, without changing ``model``.

    Args:
        model: A model for :func:`fuse`.
        absorbed: LayerNorms that :func:`slab_det.absorb` folds into the layers that read them, where possible.
    """
    folds, outputs = _collect_folds(model)
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    fusions = []
    for name, norm in named_norms(model, OfflineNorm, *OTHER_NORMS):
        kind = type(norm).__name__
        if not isinstance(norm, OfflineNorm) and norm not in absorbed:
            fusions.append(NormFusion(name, kind, 'kept', reason='not an offline norm of slab_det'))
            continue
        try:
            fold = folds.get(name, Fold(name))
            readers = fold.before
            if name in outputs:
                readers = (find_output_reader(model, *outputs[name]), *readers)
            if not (readers or fold.after):
                owner = model.get_submodule(name.rpartition('.')[0])
                raise CannotFold(
                    why_not_adopted(owner)
                    or f'{type(owner).__name__} does not say which layer reads it; slab_det.fusion.register_folds can'
                )
            side = 'input' if readers else 'output'
            layers = [layer for reader in readers for layer in _find_layers(model, reader)] or [fold.after]
            for layer in layers:
                _check_layer(model, name, layer, side, names)
        except CannotFold as reason:
            fusions.append(NormFusion(name, kind, 'kept' if norm in absorbed else 'affine', reason=str(reason)))
        else:
            outcome = 'absorbed' if norm in absorbed else 'folded'
            fusions.append(NormFusion(name, kind, outcome, tuple(layers), side))
    return fusions


def apply_folds(model: nn.Module, fusions: list[NormFusion]) -> nn.Module:
    """Folds the norms of ``model``, in place, as :func:`plan_folds` decided; skips norms that are already folded.

    Raises:
        FusionError: If ``model`` has other norms or layers than the model that the plan was made for.
    """
    earlier = earlier_report(model)
    try:
        for fusion in fusions:
            if fusion not in earlier.norms:
                apply_fold(model, fusion)
    except (AttributeError, CannotFold) as error:
        raise FusionError(f'{fusion.norm}: the folds belong to another model: {error}') from error
    left = [name for name, _ in named_offline_norms(model)]
    if left:
        raise FusionError(f'{left[0]}: the folds belong to another model: none is for this norm')
    if not hasattr(model, 'fusion_report'):
        # Unfused weights have many of the fused model's keys and shapes.
        model.register_load_state_dict_pre_hook(check_state_dict)
    model.fusion_report = FusionReport(fusions, dict(earlier.channels))
    return model


def apply_fold(model: nn.Module, fusion: NormFusion) -> None:
    """Replaces one norm as decided; for an absorbed norm it only prepares the layers to hold an affine map."""
    if fusion.outcome == 'kept':
        return
    norm, new = model.get_submodule(fusion.norm), nn.Identity().eval()
    if fusion.outcome == 'affine':
        new = _as_affine(model, norm)
    elif fusion.outcome == 'folded':
        fold_affine(model, fusion, *norm.double().inference_affine())
    else:
        # Folds the identity map: slab_det.absorb or a checkpoint sets the weights later.
        ones = torch.ones(norm.normalized_shape, device=next(model.parameters()).device)
        fold_affine(model, fusion, ones, 0 * ones)
    replace_module(model, fusion.norm, new)


def reason_to_keep(name: str, norm: nn.LayerNorm, owner: nn.Module) -> str:
    """Why a LayerNorm of this name, an attribute of ``owner``, cannot be replaced; '' if it can."""
    # This import takes half a second.
    from timm.layers import LayerNorm, LayerNormFp32

    if not name:
        return 'it is the whole model'
    if hooks := describe_hooks(norm):
        return f'it has {hooks}'
    if len(norm.normalized_shape) != 1:
        return f'it normalizes over {len(norm.normalized_shape)} dimensions'
    # These forwards only normalize the last dimension. Any other forward may permute or apply an activation.
    if type(norm).forward not in (nn.LayerNorm.forward, LayerNorm.forward, LayerNormFp32.forward):
        return f'{type(norm).__name__} has a forward of its own, which may do more than normalize the last dimension'
    if isinstance(owner, nn.TransformerEncoderLayer):
        return f'the fused kernel of {type(owner).__name__} reads its weights and never calls it'
    return ''


def check_fusible(model: nn.Module) -> None:
    """Raises FusionError if ``model`` does not meet the conditions of :func:`fuse`."""
    if isinstance(model, OfflineNorm):
        raise FusionError('the model is a single norm, with no layer to fold it into; give a backbone or a detector')
    norms = list(named_offline_norms(model))
    if model.training or any(norm.training for _, norm in norms):
        raise FusionError(
            'the model is in training mode, where norms use the statistics of each batch; call model.eval()'
        )
    mixed = {name: norm.gamma for name, norm in named_progressive_norms(model).items() if norm.gamma > 0}
    if mixed:
        name, gamma = next(iter(mixed.items()))
        raise FusionError(
            f'{len(mixed)} norms still contain LayerNorm, which cannot be folded ({name}: gamma = {gamma:g}); finish '
            'the training, in which ProgressiveNormHook lowers gamma to 0'
        )
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for name, norm in norms:
        if uses[norm] > 1:
            raise FusionError(f'{name}: it is used {uses[norm]} times; give each use a norm of its own')
        if not all(values.isfinite().all() for values in norm.inference_affine()):
            raise FusionError(
                f'{name}: its inference scale or shift is not finite; take an earlier checkpoint or recalibrate'
            )
        if any(map(describe_hooks, norm.modules())):
            raise FusionError(f'{name}: it has hooks, which would be lost together with the norm; remove them first')


def _collect_folds(model: nn.Module) -> tuple[dict[str, Fold], dict[str, tuple[str, int]]]:
    """By the full name of the norm: the fold of each norm, and the backbone and output index of each output norm."""
    folds, outputs = {}, {}
    for prefix, module in model.named_modules():
        for name in ('folds', 'output_folds'):
            rule = find_rule(module, name)
            for level, fold in enumerate(rule() if rule else ()):
                norm, after = join_names(prefix, fold.norm), join_names(prefix, fold.after)
                before = (fold.before,) if isinstance(fold.before, str) else fold.before
                folds[norm] = Fold(norm, tuple(join_names(prefix, each) for each in before), after)
                if name == 'output_folds':
                    outputs[norm] = prefix, level
    return folds, outputs


def _find_layers(model: nn.Module, reader: str) -> Iterator[str]:
    """Yields the layers that read the input of a module or of its part; CannotFold if no rule names them."""
    name, part = split_part(reader)
    module = model.get_submodule(name)
    if type(module) in FOLDABLE_LAYERS:
        yield reader
        return
    input_layers = find_rule(module, 'input_layers')
    if input_layers is None:
        raise CannotFold(f'{name} is a {type(module).__name__}, which has no rule for the layers that read its input')
    for layer in input_layers(part) if part else input_layers():
        yield from _find_layers(model, f'{name}.{layer}')


def _check_layer(model: nn.Module, norm: str, target: str, side: Side, names: Mapping[nn.Parameter, list[str]]) -> None:
    """Raises CannotFold unless a norm can be folded into a layer without changing anything else.

    ``names`` holds all names of each parameter of the model.
    """
    name, part = split_part(target)
    layer = model.get_submodule(name)
    # A module that contains the norm or the layer, but not both, runs its hooks between the two.
    for between in sorted({*containers_of(norm)} ^ {*containers_of(name), name}):
        if hooks := describe_hooks(model.get_submodule(between)):
            raise CannotFold(f'{between} has {hooks}')
    check_foldable(layer, side, part, target)
    sharing = [other for parameter in layer.parameters() for other in names[parameter]]
    others = [other for other in sharing if not other.startswith(f'{name}.')]
    if others:
        raise CannotFold(f'{target}: its weights are also {", ".join(others)}')


def fold_affine(model: nn.Module, fusion: NormFusion, scale: Tensor, shift: Tensor) -> None:
    """Folds ``scale * x + shift`` into the layers that ``fusion`` names; see :mod:`slab_det.fusion.affine`."""
    for name, part in map(split_part, fusion.into):
        if fusion.side == 'output':
            fold_into_output(model.get_submodule(name), scale, shift)
            continue
        # Padding tokens never passed the norm: they must keep the unfused bias.
        for container in {*containers_of(name)} - {*containers_of(fusion.norm)}:
            if hasattr(model.get_submodule(container), 'keep_padding'):
                model.get_submodule(container).keep_padding()
        fold_into_input(model.get_submodule(name), scale, shift, part)


@torch.no_grad()
def _as_affine(model: nn.Module, norm: OfflineNorm) -> ChannelAffine:
    # Takes the dtype from a parameter: statistics may have a higher precision.
    affine = ChannelAffine(norm.num_features).to(next(chain(norm.parameters(), model.parameters()))).eval()
    scale, shift = norm.double().inference_affine()
    affine.scale.copy_(scale)
    affine.shift.copy_(shift)
    return affine


def split_part(target: str) -> tuple[str, str]:
    """Splits ``'attn[kv]'`` into 'attn' and 'kv'; the part of a name without brackets is ''."""
    name, _, part = target.removesuffix(']').partition('[')
    return name, part


def join_names(prefix: str, name: str) -> str:
    """Joins the name of a module, '' for the model itself, and a name relative to it."""
    return f'{prefix}.{name}' if prefix and name else name


def containers_of(name: str) -> list[str]:
    """The names of the modules that contain a module, without the model: 'a' and 'a.b' for 'a.b.c'."""
    return list(accumulate(name.split('.')[:-1], join_names))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module of ``model`` with this dotted name by ``module``."""
    parent, _, attribute = name.rpartition('.')
    setattr(model.get_submodule(parent), attribute, module)
