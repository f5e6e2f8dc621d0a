"""Loads a checkpoint of any known layout into a backbone: all of it that has a place, or nothing."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from os import PathLike, fspath

from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.checkpoints.layouts import Weight, Weights, check_pvt_options, find_format, nothing_matched
from slab_det.checkpoints.norms import check_fused, fit_norms
from slab_det.checkpoints.position_tables import resize_tables
from slab_det.checkpoints.report import LoadReport, name_some
from slab_det.runtime import read_checkpoint
from slab_det.runtime.errors import CheckpointError

EXPECTED_UNUSED = (
    (r'(^|\.)relative_position_index$', 'computed from the window'),
    (r'(^|\.)relative_coords_table$|\.attn_mask$|\.num_batches_tracked$|\.(warm|iter|total_step)$', 'bookkeeping'),
    (r'^head\.', 'classification head'),
    (r'^norm\.', 'final norm of the classifier'),
    (r'^cls_token$', 'class token'),
)
EXPECTED_MISSING = (
    (r'(^|\.)relative_position_index$', 'computed from the window'),
    (r'\.num_batches_tracked$', 'bookkeeping'),
)
# The key of a module's metadata in a state dict that load_pretrained or CheckedLoadHook has fitted to the model.
CHECKED = 'checked_by_slab_det'
OUTPUT_NORM = re.compile(r'^(norm\d+|layers\.\d+\.2)\.')


def load_pretrained(
    backbone: nn.Module, path_or_state_dict: str | PathLike | Mapping, source: str | None = None, prefix: str = ''
) -> LoadReport:
    """Loads pretrained weights into a backbone and logs what matched, was converted, is missing or unused.

    Layouts: ``slab_official`` (Swin, PVT), ``official_pvt`` (V1, V2), ``timm_swin``, ``timm_pvt_v2``,
    ``microsoft_swin``, ``native`` (mmdet's and our own); also the backbone of a whole detector in any of them.
    Everything is checked before the backbone is touched. A training starts here: counters, windows and psi of UN,
    MABN and PowerNorm, which belong to another training, are not loaded. Resuming loads the whole detector.

    Args:
        backbone: SLABSwin, SLABPVT, or mmdet's SwinTransformer, PyramidVisionTransformer or
            PyramidVisionTransformerV2 with any of our norms.
        path_or_state_dict: A file or URL that mmengine can load, a safetensors file, ``timm://NAME`` for the weights
            that timm has under that name, or what such a file holds.
        source: The layout; None detects it from the keys.
        prefix: What stands before the names of the backbone's weights, such as ``ema.backbone.``; all others are
            left out. Without it ``backbone.`` is found.

    Raises:
        CheckpointError: If nothing matches, a shape does not fit, norms cannot hold what the checkpoint has for
            them, or the checkpoint is of another family of models.
        ValueError: If ``source`` is unknown.
    """
    if isinstance(path_or_state_dict, Mapping):
        name, checkpoint = 'state dict', path_or_state_dict
    else:
        name = fspath(path_or_state_dict)
        checkpoint = read_checkpoint(name)
    report = LoadReport(name)
    state = backbone_weights(find_state_dict(checkpoint, name), report, prefix)
    check_fused(checkpoint, state, backbone, name)
    values = fit_weights(state, backbone, report, source, keep_averages=False)
    backbone.load_state_dict(mark_checked(values, ''), strict=False)
    log_report(report)
    return report


def register_load_check(backbone: nn.Module) -> None:
    """Registers :func:`check_state_dict` for every way to load weights into ``backbone`` or a model that holds it."""
    # Its public name came with torch 2.5.
    backbone._register_load_state_dict_pre_hook(check_state_dict, with_module=True)


def check_state_dict(
    backbone: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Mapping, *_: object
) -> None:
    """Converts weights for ``backbone`` in place before ``load_state_dict`` copies them, and refuses a part of them.

    Args:
        backbone: Where the weights will go.
        state_dict: Weights in any known layout under ``prefix``, or none at all for the backbone.
        prefix: What stands before the names of the backbone's weights.
        local_metadata: Says whether :func:`mark_checked` has marked the weights.

    Raises:
        CheckpointError: As :func:`load_pretrained`, and if weights of the backbone are missing.
    """
    given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
    if not given or local_metadata.get(CHECKED):
        return
    targets = backbone.state_dict()
    weights = {key[len(prefix) :]: Weight(value, key) for key, value in given.items()}
    if {key: weight.value.shape for key, weight in weights.items()} == {k: v.shape for k, v in targets.items()}:
        return
    check_fused({}, weights, backbone, 'the state dict')
    report = LoadReport('the state dict')
    values = fit_weights(weights, backbone, report)
    check_complete(report)
    if report.converted:
        log_report(report)
    for key in given.keys() - set(report.unused_unexpected):
        del state_dict[key]
    own_index = {key: value for key, value in targets.items() if key.endswith('relative_position_index')}
    state_dict.update({prefix + key: value for key, value in {**own_index, **values}.items()})


def mark_checked(values: Mapping[str, Tensor], *modules: str) -> OrderedDict[str, Tensor]:
    """``values`` as a state dict whose metadata tells :func:`check_state_dict` of these modules to let it pass."""
    state = OrderedDict(values)
    state._metadata = OrderedDict((name, {CHECKED: True}) for name in modules)
    return state


def check_complete(report: LoadReport) -> None:
    """Raises CheckpointError if weights are missing that should not be."""
    if report.missing_unexpected:
        raise CheckpointError(
            f'{report.source}: {len(report.missing_unexpected)} weights of the model are missing: '
            f'{name_some(report.missing_unexpected)}; use the config that the checkpoint was trained with'
        )


def find_state_dict(checkpoint: object, name: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, wherever they lie, without ``module.`` before their names.

    Args:
        checkpoint: What a file held: weights under ``state_dict``, under ``model``, or at the top.
        name: The file, for the error.

    Raises:
        CheckpointError: If it holds no tensors.
    """
    state = checkpoint
    for wrapper in ('state_dict', 'model'):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    tensors = {}
    if isinstance(state, Mapping):
        tensors = {str(key).removeprefix('module.'): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        held = name_some(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f'{name} holds no weights under `state_dict`, under `model` or at the top, but {held or "nothing"}; '
            'give a checkpoint'
        )
    return tensors


def backbone_weights(state: Mapping[str, Tensor], report: LoadReport, prefix: str = '') -> Weights:
    """The weights of the backbone, without their prefix, if ``state`` is a whole detector's.

    Raises:
        CheckpointError: If a prefix is given and nothing has it.
    """
    # mmengine's Pretrained takes it with and without the dot; find_state_dict has dropped `module.`.
    wanted = f'{prefix.removesuffix(".")}.'.removeprefix('module.') if prefix else 'backbone.'
    if not any(key.startswith(wanted) for key in state):
        if prefix:
            raise CheckpointError(
                f'{report.source} has no weights under the prefix {prefix!r}, but '
                f'{name_some(sorted(state))}; correct the prefix or leave it out'
            )
        return {key: Weight(value, key) for key, value in state.items()}
    report.unused_expected.update({key: 'not of the backbone' for key in state if not key.startswith(wanted)})
    return {key.removeprefix(wanted): Weight(value, key) for key, value in state.items() if key.startswith(wanted)}


def fit_weights(
    weights: Weights, model: nn.Module, report: LoadReport, source: str | None = None, keep_averages: bool = True
) -> dict[str, Tensor]:
    """What ``model.load_state_dict`` should get: converted, complete in the report, and checked.

    Args:
        weights: Weights in any known layout, without prefixes.
        model: The model they are for; left as it is.
        report: Filled with what was found.
        source: The layout; None detects it.
        keep_averages: Whether what UN, MABN and PowerNorm remember of their training belongs to the weights.

    Raises:
        CheckpointError: As :func:`load_pretrained`.
        ValueError: If ``source`` is unknown.
    """
    targets = model.state_dict()
    layout = find_format(set(weights), set(targets), source, report.source)
    report.format = layout.name
    given = sorted(weights)
    try:
        weights = layout.convert(weights)
        report.notes += layout.notes(model, weights)
        check_pvt_options(weights, targets, 'the checkpoint')
        weights = resize_tables(fit_norms(weights, model, report, keep_averages), model)
    except CheckpointError as error:
        raise CheckpointError(f'{report.source}: {error}') from error

    # The index follows from the window, which may be another one than the checkpoint's.
    filled = {
        key: weight for key, weight in weights.items() if key in targets and not key.endswith('relative_position_index')
    }
    _report_unused({key: weight for key, weight in weights.items() if key not in filled}, report)
    if not filled:
        raise nothing_matched(report.source, given, targets)
    check_shapes(filled, targets, report.source)

    report.matched = list(filled)
    report.converted = {key: weight.change for key, weight in filled.items() if weight.change}
    is_classifier = any(key.startswith(('head.', 'norm.')) for key in weights)
    _report_missing(targets, filled, is_classifier, report)
    return {key: weight.value for key, weight in filled.items()}


def check_shapes(weights: Weights, targets: Mapping[str, Tensor], name: str, or_else: str = '') -> None:
    """Raises CheckpointError, naming keys and shapes, if a weight does not fit its place."""
    misfits = [
        f'{weight.key} {tuple(weight.value.shape)} -> {key} {tuple(targets[key].shape)}'
        for key, weight in weights.items()
        if weight.value.shape != targets[key].shape
    ]
    if misfits:
        raise CheckpointError(
            f'{name}: {len(misfits)} shapes do not fit (checkpoint -> model): {"; ".join(misfits[:4])}'
            f'{"; …" if len(misfits) > 4 else ""}; make the config agree with the checkpoint'
            f'{" " if or_else else ""}{or_else}'
        )


def log_report(report: LoadReport) -> None:
    """Prints the report; a warning if something is missing or unused that should not be."""
    logger = MMLogger.get_current_instance()
    (logger.info if report.complete else logger.warning)(f'Loaded {report}')


def _report_unused(unused: Weights, report: LoadReport) -> None:
    for key, weight in unused.items():
        reason = _first_match(EXPECTED_UNUSED, key)
        if reason:
            report.unused_expected[weight.key] = reason
        else:
            report.unused_unexpected.append(weight.key)


def _report_missing(targets: Mapping[str, Tensor], filled: Weights, is_classifier: bool, report: LoadReport) -> None:
    missing = [key for key in targets if key not in filled]
    expected = {key: report.missing_expected.get(key) or _first_match(EXPECTED_MISSING, key) for key in missing}
    if is_classifier:
        # A classifier ends in one norm; those after each stage are detection's.
        expected.update({key: 'output norm, new in detection' for key in missing if OUTPUT_NORM.match(key)})
    report.missing_expected = {key: reason for key, reason in expected.items() if reason}
    report.missing_unexpected = [key for key, reason in expected.items() if not reason]


def _first_match(rules: tuple[tuple[str, str], ...], key: str) -> str | None:
    return next((reason for pattern, reason in rules if re.search(pattern, key)), None)
