"""Checks a whole detector's checkpoint before a runner or an inferencer loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from slab_det.checkpoints.layouts import Weight, Weights, nothing_matched
from slab_det.checkpoints.load import (
    CHECKED,
    check_complete,
    check_shapes,
    find_state_dict,
    fit_weights,
    log_report,
    mark_checked,
)
from slab_det.checkpoints.norms import check_fused
from slab_det.checkpoints.report import LoadReport
from slab_det.runtime.errors import CheckpointError


def check_detector_checkpoint(
    model: nn.Module,
    checkpoint: dict,
    name: str = 'the checkpoint',
    complete: bool = False,
    reinitialize: Sequence[str] = (),
) -> LoadReport:
    """Checks ``checkpoint`` against ``model`` and logs the report; a foreign backbone is converted in place.

    Args:
        model: A detector; nothing is loaded into it here.
        checkpoint: What a file held. Afterwards mmengine's loading of it cannot go wrong.
        name: The file, for report and errors.
        complete: Whether every weight of the model must be there, as for resuming and testing.
        reinitialize: Prefixes of keys that stay as the model has them, such as ``roi_head.bbox_head.fc_cls`` for
            another number of classes.

    Raises:
        CheckpointError: If nothing matches, a shape does not fit, only one of both is fused, or, with ``complete``,
            weights are missing.
    """
    report = LoadReport(name)
    targets = model.state_dict()
    state = find_state_dict(checkpoint, name)
    check_fused(checkpoint, state, model, name)
    dropped = tuple(reinitialize)
    kept = {key: Weight(value, key) for key, value in state.items() if not key.startswith(dropped)}
    report.unused_expected.update({key: 'reinitialized' for key in state if key not in kept})

    values = _backbone_values(kept, model, report)
    values.update(_other_values(kept, targets, report))
    if not values:
        if any(key.startswith('backbone.') for key in targets):
            raise CheckpointError(
                f'{nothing_matched(name, state, targets)}. Weights of a backbone alone belong into '
                "model.backbone.init_cfg=dict(type='Pretrained', checkpoint=...)"
            )
        raise nothing_matched(name, state, targets)
    _report_missing(targets, values, dropped, report)
    if complete:
        check_complete(report)
    log_report(report)
    own_index = {key: value for key, value in targets.items() if key.endswith('relative_position_index')}
    # mmengine fills whatever it finds a place for, also what was left out on purpose.
    left_out = (state.keys() & targets.keys()) - values.keys() - own_index.keys()
    is_native = report.format == 'native' and values.keys() <= checkpoint.get('state_dict', {}).keys()
    if not is_native or report.converted or report.missing_unexpected or left_out or dropped:
        # The index is the model's own whatever the file has, and strict loading misses it.
        checkpoint['state_dict'] = mark_checked({**values, **own_index}, '', 'backbone')
    return report


def register_detector_check(detector: nn.Module) -> None:
    """Registers :func:`check_detector_state_dict` for every way to load weights into ``detector``."""
    # Its public name came with torch 2.5.
    detector._register_load_state_dict_pre_hook(check_detector_state_dict, with_module=True)


def check_detector_state_dict(
    detector: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Mapping, *_: object
) -> None:
    """Refuses a state dict that would not fill ``detector`` before ``load_state_dict`` copies any of it.

    Args:
        detector: Where the weights will go.
        state_dict: Weights under ``prefix``, or none at all for the detector.
        prefix: What stands before the names of the detector's weights.
        local_metadata: Says whether :func:`check_detector_checkpoint` has passed the weights already.

    Raises:
        CheckpointError: As :func:`check_detector_checkpoint`.
    """
    given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    targets = detector.state_dict()
    fits = {key: value.shape for key, value in given.items()} == {key: value.shape for key, value in targets.items()}
    if given and not fits and not local_metadata.get(CHECKED):
        check_detector_checkpoint(detector, dict(state_dict=given), 'the state dict', complete=True)


def _backbone_values(weights: Weights, model: nn.Module, report: LoadReport) -> dict[str, Tensor]:
    """The backbone's part in its own layout, under ``backbone.``; what became of it goes into ``report``."""
    prefix = 'backbone.'
    inner = {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
    backbone = getattr(model, 'backbone', None)
    report.format = 'native'
    if not inner or not isinstance(backbone, nn.Module):
        return {}
    part = LoadReport(report.source)
    values = fit_weights(inner, backbone, part)
    report.format = part.format
    report.matched += [prefix + key for key in part.matched]
    for name in ('converted', 'missing_expected', 'gammas'):
        getattr(report, name).update({prefix + key: value for key, value in getattr(part, name).items()})
    report.unused_expected.update(part.unused_expected)
    report.unused_unexpected += part.unused_unexpected
    report.notes += part.notes
    return {prefix + key: value for key, value in values.items()}


def _other_values(weights: Weights, targets: Mapping[str, Tensor], report: LoadReport) -> dict[str, Tensor]:
    """Neck and heads: names and shapes are the model's or the checkpoint is not for it."""
    handled = 'backbone.' if report.matched else ()
    others = {key: weight for key, weight in weights.items() if not key.startswith(handled)}
    filled = {key: weight for key, weight in others.items() if key in targets}
    check_shapes(
        filled, targets, report.source, 'or name what should start anew in CheckedLoadHook(reinitialize=[...])'
    )
    report.matched += filled
    report.unused_unexpected += [key for key in others if key not in filled]
    return {key: weight.value for key, weight in filled.items()}


def _report_missing(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], dropped: tuple[str, ...], report: LoadReport
) -> None:
    for key in targets:
        if key in values or key in report.missing_expected:
            continue
        if key.startswith(dropped):
            report.missing_expected[key] = 'reinitialized'
        elif key.endswith('.num_batches_tracked'):
            report.missing_expected[key] = 'bookkeeping'
        else:
            report.missing_unexpected.append(key)
