"""Hidden channels of a model: finds the units of channels that go together, and removes channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import slab_det.families  # noqa: F401 (registers the rules of heads)
from slab_det.fusion.folding import FusionError, join_names
from slab_det.norms.folds import CONV, CONV_TRANSPOSE, LINEAR, CannotFold, describe_hooks, find_rule

# Activations that act on each channel alone.
ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU, nn.Hardswish)
# With the output projection of an nn.MultiheadAttention.
LINEARS = (*LINEAR, NonDynamicallyQuantizableLinear)
BATCH_NORM = nn.BatchNorm2d, nn.SyncBatchNorm, SyncBatchNorm


@dataclass(frozen=True)
class ChannelUnit:
    """Hidden channels that go together; :class:`~slab_det.fusion.Channels` describes the other attributes.

    Attributes:
        name: Dotted name of the unit in the model, as are the names of layers.
        owner: Name of the module whose rule names the unit.
        count: Number of channels; of one of q, k and v in an attention.
        group: Number of consecutive channels that go together, because a group norm mixes them.
        reason: Why no channel can be removed, or ''.
    """

    name: str
    owner: str
    writers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    heads: int = 1
    tokens: tuple[tuple[str, str], ...] = ()
    levels: int = 1
    maps: bool = False
    count: int = 0
    group: int = 1
    reason: str = ''

    @property
    def readers_of_levels(self) -> list[tuple[str, ...]]:
        """The readers of each level; one entry where levels have no readers of their own."""
        number = len(self.readers) // self.levels
        return [self.readers[i : i + number] for i in range(0, len(self.readers), number)]

    @property
    def is_per_level(self) -> bool:
        """Whether each level has readers of its own."""
        return self.levels > 1

    def first(self, count: int) -> Tensor:
        """The indices of the first channels of each head, ``count`` in all."""
        return torch.arange(self.count).view(self.heads, -1)[:, : count // self.heads].flatten()

    def rows(self, stay: Tensor) -> Tensor:
        """The rows of a writer that stay.

        In an attention, v keeps the channels ``stay``, and q and k keep the first channels of each head.
        """
        first = self.first(len(stay))
        return torch.cat([first, self.count + first, 2 * self.count + stay.cpu()]) if self.tokens else stay


def find_channels(model: nn.Module) -> dict[str, ChannelUnit]:
    """Finds the units of hidden channels of a model, by name, in the order of its modules."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    units = {}
    for owner, module in model.named_modules():
        rule = find_rule(module, 'hidden_channels')
        try:
            found = [*rule()] if rule else []
        except CannotFold as reason:
            units[owner] = ChannelUnit(owner, owner, reason=str(reason))
            continue
        for values in found:
            layers = [tuple(join_names(owner, layer) for layer in part) for part in values[1:4]]
            tokens = tuple((join_names(owner, name) or owner, side) for name, side in values.tokens)
            name = join_names(owner, values.name) or owner
            unit = ChannelUnit(name, owner, *layers, values.heads, tokens, values.levels, values.maps)
            units[unit.name] = _with_count(model, unit, uses)
    return units


def _with_count(model: nn.Module, unit: ChannelUnit, uses: Mapping[int, int]) -> ChannelUnit:
    """Returns the unit with its number of channels, or with the reason why none can be removed."""
    writers, between, readers = (
        [model.get_submodule(name) for name in names] for names in (unit.writers, unit.between, unit.readers)
    )
    rows, _ = output_parameters(writers[0]) or (torch.empty(0), None)
    count, reason = len(rows) // (3 if unit.tokens else 1), ''
    group = max([1, *(layer.num_channels // layer.num_groups for layer in between if type(layer) is nn.GroupNorm)])
    for layer in between:
        kinds = (SingleRoIExtractor,) if unit.maps else (*ELEMENTWISE, *BATCH_NORM, nn.GroupNorm)
        if type(layer) not in kinds and not _is_depthwise(layer):
            reason = f'a {type(layer).__name__} stands between its layers'
    for layer in (*writers, *readers):
        if output_parameters(layer) is None or getattr(layer, 'groups', 1) > 1 or not _has_disjoint_windows(layer):
            reason = f'one of its layers is a {type(layer).__name__}, or computes its weight'
    if any(uses[id(p)] > 1 for layer in (*writers, *between, *readers) for p in layer.parameters()):
        reason = 'its layers share weights with others'
    if any(map(describe_hooks, model.get_submodule(unit.owner).modules())):
        reason = 'it has hooks, which may expect all channels'
    return ChannelUnit(**vars(unit) | dict(count=0 if reason else count, group=group, reason=reason))


def _is_depthwise(layer: nn.Module) -> bool:
    return type(layer) in CONV and layer.groups == layer.in_channels == layer.out_channels


def _has_disjoint_windows(layer: nn.Module) -> bool:
    """Whether each output of a layer, if it is a transposed convolution, reads one position of the input."""
    if type(layer) not in CONV_TRANSPOSE:
        return True
    side = layer.kernel_size[0]
    return layer.kernel_size == layer.stride == (side, side) and {*layer.padding, *layer.output_padding} == {0}


def output_parameters(layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """The parameters whose rows are the outputs of a layer; None for a layer of another kind."""
    names = ('in_proj_weight', 'in_proj_bias') if type(layer) is nn.MultiheadAttention else ('weight', 'bias')
    kinds = *LINEARS, *CONV, *CONV_TRANSPOSE, nn.MultiheadAttention
    if type(layer) not in kinds or not {*names} <= layer._parameters.keys():
        return None
    weight, bias = map(layer._parameters.get, names)
    if weight is None:
        return None
    return weight.transpose(0, 1) if type(layer) in CONV_TRANSPOSE else weight, bias


def input_weight(layer: nn.Module) -> Tensor:
    """The weight of a reader, (outputs, inputs); a transposed convolution has an output per position of its kernel."""
    weight = layer.weight.detach()
    return weight.permute(1, 2, 3, 0).flatten(0, 2) if type(layer) in CONV_TRANSPOSE else weight.flatten(1)


@torch.no_grad()
def set_input_weight(layer: nn.Module, matrix: Tensor) -> None:
    """Writes what :func:`input_weight` reads."""
    if type(layer) in CONV_TRANSPOSE:
        inputs, *others = layer.weight.shape
        layer.weight.copy_(matrix.view(*others, inputs).permute(3, 0, 1, 2))
    else:
        layer.weight.copy_(matrix.view_as(layer.weight))


@torch.no_grad()
def keep_channels(model: nn.Module, unit: ChannelUnit, stay: Tensor) -> None:
    """Removes all but some hidden channels from their writers and readers, in place.

    Args:
        model: The model.
        unit: A unit that :func:`find_channels` found in it, without ``reason``.
        stay: Indices of the channels that stay, (K,), in ascending order, an equal number for each head, in whole
            groups. In an attention they are those of v; of q and k stay the first channels of each head.
    """
    rows = unit.rows(stay)
    for name in (*unit.writers, *unit.between):
        layer = model.get_submodule(name)
        for key, parameter in layer.named_parameters(recurse=False):
            side = 1 if type(layer) in CONV_TRANSPOSE and key == 'weight' else 0
            _set_parameter(layer, key, parameter.index_select(side, rows.to(parameter.device)))
        for key, buffer in layer.named_buffers(recurse=False):
            if buffer.ndim:
                setattr(layer, key, buffer[rows.to(buffer.device)])
        if type(layer) is nn.GroupNorm:
            layer.num_channels, layer.num_groups = len(rows), len(rows) // unit.group
        elif type(layer) in BATCH_NORM:
            layer.num_features = len(rows)
        elif type(layer) in LINEARS:
            layer.out_features = len(rows)
        elif type(layer) in (*CONV, *CONV_TRANSPOSE, SingleRoIExtractor):
            layer.out_channels = len(rows)
        if name in unit.between and type(layer) in CONV:
            layer.in_channels = layer.groups = len(rows)
    for layer in map(model.get_submodule, unit.readers):
        side = 0 if type(layer) in CONV_TRANSPOSE else 1
        # A linear layer may read the map of a region, all positions of a channel one after another.
        columns = columns_of(stay, layer.weight.shape[side] // unit.count).to(layer.weight.device)
        _set_parameter(layer, 'weight', layer.weight.index_select(side, columns))
        setattr(layer, 'in_features' if type(layer) in LINEARS else 'in_channels', len(columns))
    if unit.tokens:
        model.get_submodule(unit.owner).keep_head_dims(len(stay) // unit.heads, rows)


def resize_channels(model: nn.Module, counts: Mapping[str, int]) -> None:
    """Removes hidden channels from an unpruned model, in place, so that it can load the weights of a pruned one.

    Args:
        model: The model.
        counts: Number of channels that are left, by the name of the unit.

    Raises:
        FusionError: If ``model`` has other units.
    """
    units = find_channels(model)
    for name, count in counts.items():
        unit = units.get(name)
        if unit is None or not count <= unit.count or count % (unit.heads * unit.group):
            why = 'it is not there' if unit is None else unit.reason or f'it has {unit.count} channels'
            raise FusionError(f'{name}: the config leaves {count} channels of another model: {why}')
        keep_channels(model, unit, unit.first(count))


def columns_of(channels: Tensor, columns: int) -> Tensor:
    """The columns of channels with ``columns`` columns each."""
    return (channels[:, None] * columns + torch.arange(columns, device=channels.device)).flatten()


def _set_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    setattr(layer, name, nn.Parameter(value, requires_grad=getattr(layer, name).requires_grad))
