"""Loads checkpoints of any known layout: read a file, fit its weights to the model, load all of them or none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath

from mmengine.logging import MMLogger
from torch import Tensor, is_tensor, nn

from slab_det.checkpoints.layouts import Weight, Weights, find_layout, nothing_matched
from slab_det.checkpoints.load_report import LoadReport
from slab_det.checkpoints.norms import check_fused, fit_norms
from slab_det.checkpoints.position_tables import resize_tables
from slab_det.common.errors import CheckpointError, name_some
from slab_det.runtime import read_checkpoint

# Patterns of keys that may be missing or unused, and why.
EXPECTED_MISSING = {
    r'(^|\.)relative_position_index$': 'computed from the window',
    r'\.num_batches_tracked$': 'bookkeeping',
}
EXPECTED_UNUSED = {
    **EXPECTED_MISSING,
    r'(^|\.)relative_coords_table$|\.attn_mask$|\.(warm|iter|total_step)$': 'bookkeeping',
    r'^head\.': 'classification head',
    r'^norm\.': 'final norm of the classifier',
    r'^cls_token$': 'class token',
    r'\.unread_scale$': 'not read by the released code',
}
_WRAPPERS = re.compile(r'^(module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.')
# A classifier has one norm at its end; only a detector has one after each stage.
OUTPUT_NORM = {r'^(norm\d+|layers\.\d+\.2)\.': 'output norm, new in detection'}


def load_pretrained(backbone: nn.Module, path_or_state_dict: str | PathLike | Mapping, prefix: str = '') -> LoadReport:
    """Loads pretrained weights into a backbone and logs what matched, was converted, is missing or unused.

    Every layout of :mod:`slab_det.checkpoints.layouts` is recognised, also for the backbone of a whole detector. The
    backbone is changed only if everything fits.

    Args:
        backbone: SLABSwin, SLABPVT, SLABViT, SLABCSwin, or mmdet's SwinTransformer, PyramidVisionTransformer or
            PyramidVisionTransformerV2 with any of our norms.
        path_or_state_dict: What :func:`slab_det.runtime.read_checkpoint` reads: a file, an address of mmengine, or
            ``timm://NAME`` for the weights that timm has under that name; or the content of such a file.
        prefix: Prefix of the backbone's weights in the checkpoint, such as ``ema.backbone.``. The default is
            ``backbone.`` if a name begins with it; otherwise all weights are the backbone's.

    Returns:
        What happened to every key of the backbone and of the checkpoint.

    Raises:
        CheckpointError: If nothing matches, a shape does not fit, weights are NaN or infinite, or a norm cannot be
            converted to the backbone's.
    """
    is_loaded = isinstance(path_or_state_dict, Mapping)
    if not isinstance(path_or_state_dict, (Mapping, str, PathLike)):
        kind = type(path_or_state_dict).__name__
        raise CheckpointError(f'{kind}: give the name of a file, an address, or a state dict')
    name = 'state dict' if is_loaded else fspath(path_or_state_dict)
    state = find_state_dict(path_or_state_dict if is_loaded else read_checkpoint(name), name)
    # mmengine's Pretrained takes the prefix with and without the dot; find_state_dict has dropped `module.`.
    wanted = _WRAPPERS.sub('', f'{prefix.removesuffix(".")}.') if prefix else 'backbone.'
    if not any(key.startswith(wanted) for key in state):
        if prefix:
            raise CheckpointError(
                f'{name} has no weights under the prefix {prefix!r}, but {name_some(sorted(state))}; correct the '
                'prefix or leave it out'
            )
        wanted = ''
    report = LoadReport(name, unused={key: 'not of the backbone' for key in state if not key.startswith(wanted)})
    weights = {key[len(wanted) :]: Weight(value, key) for key, value in state.items() if key.startswith(wanted)}
    backbone.load_state_dict({**backbone.state_dict(), **fit_weights(weights, backbone, report)})
    log_report(report)
    return report


def check_detector_checkpoint(
    model: nn.Module,
    checkpoint: dict,
    name: str = 'the checkpoint',
    reinitialize: Sequence[str] = (),
) -> LoadReport:
    """Converts ``checkpoint``, in place, to what ``model`` can load, and logs a report; the caller then loads it.

    Args:
        model: A detector; it stays unchanged.
        checkpoint: The content of a file. Keys that its ``state_dict`` lacks get the model's own values: the report
            names them as missing, mmengine does not.
        name: The file's name, for report and errors.
        reinitialize: Prefixes of keys that stay as the model has them, such as ``roi_head.bbox_head.fc_cls`` for
            another number of classes.

    Raises:
        CheckpointError: If nothing matches, a shape does not fit, weights are NaN or infinite, or only one of
            checkpoint and model is fused.
    """
    dropped = tuple(reinitialize)
    state = find_state_dict(checkpoint, name)
    report = LoadReport(name, unused={key: 'reinitialized' for key in state if key.startswith(dropped)})
    weights = {key: Weight(value, key) for key, value in state.items() if key not in report.unused}
    values = fit_weights(weights, model, report)
    report.missing.update({key: 'reinitialized' for key in report.missing if key.startswith(dropped)})
    log_report(report)
    if dropped or not has_shapes_of(model, checkpoint.get('state_dict', {})):
        checkpoint['state_dict'] = {**model.state_dict(), **values}
    return report


def check_state_dict(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Refuses weights that are incomplete or must be converted; a pre-hook of ``load_state_dict``.

    PyTorch reports surplus weights. A state dict without any weight under ``prefix`` is accepted.

    Raises:
        CheckpointError: As :func:`load_pretrained`, and if weights of the model are missing or must be converted.
    """
    given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    if not given or has_shapes_of(model, given):
        return
    report = LoadReport('the state dict')
    values = fit_weights({key: Weight(value, prefix + key) for key, value in given.items()}, model, report)
    report.check_complete()
    converted = [key for key, value in values.items() if given.get(key) is not value]
    if converted:
        raise CheckpointError(
            f'the state dict has the layout {report.format} or other norms than the model: {name_some(converted)} must '
            'be converted. Load a backbone with slab_det.load_pretrained(backbone, FILE); for load_from of a detector '
            "add default_hooks=dict(checked_load=dict(type='CheckedLoadHook')) to the config"
        )


def has_shapes_of(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether ``state`` has the keys and shapes of the model's own state dict."""
    return {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in model.state_dict().items()}


def find_state_dict(checkpoint: object, name: str) -> dict[str, Tensor]:
    """Finds the tensors of a checkpoint, and removes from their names what wrappers for training added.

    The tensors stand under ``state_dict``, ``state_dict_ema``, ``model`` or ``model_ema``, or at the top. DDP adds
    ``module.``, and torch.compile ``_orig_mod.``.

    Raises:
        CheckpointError: If there are no tensors.
    """
    state = checkpoint
    for wrapper in ('state_dict', 'state_dict_ema', 'model', 'model_ema'):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    held = state if isinstance(state, Mapping) else {}
    tensors = {_WRAPPERS.sub('', str(key)): value for key, value in held.items() if isinstance(value, Tensor)}
    if not tensors:
        inner = [key for key, part in held.items() if isinstance(part, Mapping) and any(map(is_tensor, part.values()))]
        remedy = f'save one of them alone, {name_some(map(str, inner))}' if inner else 'give a file that holds weights'
        raise CheckpointError(
            f'{name} holds no weights under `state_dict`, under `model` or at the top, but '
            f'{name_some(map(str, held)) or type(state).__name__}; {remedy}'
        )
    return tensors


def fit_weights(weights: Weights, model: nn.Module, report: LoadReport) -> dict[str, Tensor]:
    """Converts weights of a backbone or detector, in any layout, to the names and shapes of ``model``.

    Every key is added to ``report``. Weights that the model computes itself are left out. Raises CheckpointError as
    :func:`load_pretrained`.
    """
    targets = model.state_dict()
    prefix = 'backbone.' if isinstance(getattr(model, 'backbone', None), nn.Module) else ''
    try:
        given = _convert(weights, model, prefix, report)
    except CheckpointError as error:
        raise CheckpointError(f'{report.source}: {error}') from error
    # The model computes relative_position_index from its own window, which may differ from the checkpoint's.
    filled = {key: w for key, w in given.items() if key in targets and not key.endswith('relative_position_index')}
    misfits = [
        f'{weight.key} {tuple(weight.value.shape)} -> {key} {tuple(targets[key].shape)}'
        for key, weight in filled.items()
        if weight.value.shape != targets[key].shape
    ]
    if misfits:
        remedy = ', or name what should start anew in CheckedLoadHook(reinitialize=[...])' if prefix else ''
        raise CheckpointError(
            f'{report.source}: {len(misfits)} shapes do not fit (checkpoint -> model): {name_some(misfits)}; make the '
            f'config agree with the checkpoint{remedy}'
        )
    damaged = [key for key, weight in filled.items() if not weight.value.isfinite().all()]
    parameters = dict(model.named_parameters()).keys()
    if spoiled := [key for key in damaged if key in parameters]:
        raise CheckpointError(
            f'{report.source}: {len(spoiled)} weights are NaN or infinite ({name_some(spoiled)}): take an earlier '
            'checkpoint of that training, or train again with a lower learning rate'
        )
    # An overflow in half precision spoils statistics; training goes on from them, and recalibration replaces them.
    report.not_finite = damaged
    report.matched = list(filled)
    report.converted = {key: weight.change for key, weight in filled.items() if weight.change}
    # load_pretrained has put a classifier's head into report.unused where weights have a prefix.
    is_classifier = any(key.startswith((f'{prefix}head.', f'{prefix}norm.')) for key in (*weights, *report.unused))
    rules = EXPECTED_MISSING | OUTPUT_NORM if is_classifier else EXPECTED_MISSING
    for key in targets:
        if key not in filled and key not in report.missing:
            report.missing[key] = _reason(key.removeprefix(prefix), rules)
    for key, weight in given.items():
        if key not in filled:
            report.unused[weight.key] = _reason(key.removeprefix(prefix), EXPECTED_UNUSED)
    return {key: weight.value for key, weight in filled.items()}


def _convert(weights: Weights, model: nn.Module, prefix: str, report: LoadReport) -> Weights:
    """Gives weights the layout, norms and position tables of ``model``; keys of its backbone begin with ``prefix``."""
    targets = model.state_dict().keys()
    backbone = {key[len(prefix) :]: weight for key, weight in weights.items() if key.startswith(prefix)}
    given = {key: weight for key, weight in weights.items() if not key.startswith(prefix)}
    report.format = 'native'
    if backbone:
        layout = find_layout(backbone, [key[len(prefix) :] for key in targets if key.startswith(prefix)])
        report.format = layout.name
        given.update({prefix + key: weight for key, weight in layout.to_native(backbone).items()})
    check_fused(given, model, prefix)
    given = resize_tables(fit_norms(given, model, report), model)
    if not given.keys() & targets:
        remedy = "; a backbone's own weights belong in model.backbone.init_cfg=dict(type='Pretrained', checkpoint=...)"
        raise nothing_matched(weights, targets, remedy if prefix else '', is_detector=bool(prefix))
    return given


def _reason(key: str, rules: Mapping[str, str]) -> str:
    """The reason of the first pattern that is found in ``key``; '' if none is."""
    return next((reason for pattern, reason in rules.items() if re.search(pattern, key)), '')


def log_report(report: LoadReport) -> None:
    """Logs the report, as a warning if it is not complete."""
    logger = MMLogger.get_current_instance()
    (logger.info if report.complete else logger.warning)(f'Loaded {report}')
