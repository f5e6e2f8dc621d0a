"""A trained LayerNorm detector becomes a PRepBN detector with a config for its fine-tune."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.fileio import put_text
from mmengine.runner import save_checkpoint
from torch import nn

import slab_det
from slab_det.checkpoints.build import build_detector
from slab_det.conversion.convert import ConversionError, ConversionReport, convert_norms
from slab_det.norms import named_progressive_norms
from slab_det.runtime.config import drop_pretrained, import_slab_det, type_name

# The keys that a schedule decides. Every other key stays as in the detector's config.
SCHEDULE_KEYS = ('train_cfg', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'custom_hooks')


def convert_detector(
    cfg: Config, checkpoint: str, out: str | Path, schedule: Config, calibrate: Iterable | None = None
) -> tuple[Path, Path, ConversionReport]:
    """Writes a PRepBN checkpoint and, beside it, ``<stem>_config.py``, which fine-tunes it.

    Args:
        cfg: The config that the LayerNorm detector was trained with.
        checkpoint: Its weights.
        out: Where the new checkpoint goes, ending in .pth.
        schedule: A config with any of ``SCHEDULE_KEYS``, for example configs/_base_/schedules/finetune_prepbn.py.
        calibrate: Batches for :func:`slab_det.conversion.convert.calibrate_norms`; None leaves RepBN at its default
            start.

    Returns:
        The checkpoint's path, the config's path, and what became of each norm, by its name in the detector.

    Raises:
        ConversionError: If the backbone has no LayerNorm, or cannot be built with PRepBN by its config.
        CheckpointError: If the checkpoint does not fit.
    """
    out = Path(out)
    model = build_detector(cfg, checkpoint)
    others = [name for name, _ in model.named_children() if name != 'backbone']
    report = convert_norms(model, calibrate=calibrate, inplace=True, skip=others).conversion_report
    new_cfg = finetune_config(cfg, schedule, _norm_cfg(model), out)
    _check_rebuilt(new_cfg, model)
    out.parent.mkdir(parents=True, exist_ok=True)
    meta = dict(slab_det_version=slab_det.__version__)
    if model.dataset_meta is not None:
        # DetInferencer expects the key to be absent where there are no class names.
        meta['dataset_meta'] = model.dataset_meta
    config_path = out.with_name(f'{out.stem}_config.py')
    put_text(new_cfg.pretty_text, str(config_path))
    save_checkpoint(dict(meta=meta, state_dict=model.state_dict()), str(out))
    return out, config_path, report


def finetune_config(cfg: Config, schedule: Config, norm_cfg: dict, checkpoint: Path) -> Config:
    """The config of the fine-tune: ``SCHEDULE_KEYS`` are those of ``schedule``, everything else is as in ``cfg``.

    Custom hooks of ``cfg`` stay unless ``schedule`` brings one of their type. Where one of both counts epochs and the
    other iterations, checkpoints, logs and the sampler count as ``schedule`` does.

    Args:
        cfg: The config of the LayerNorm detector.
        schedule: See :func:`convert_detector`.
        norm_cfg: The new norms of the backbone.
        checkpoint: What the run starts from.
    """
    values = copy.deepcopy(cfg).to_dict()
    backbone = values['model']['backbone']
    drop_pretrained(values['model'])
    backbone['norm_cfg'] = norm_cfg
    if backbone.get('out_norm_cfg'):
        backbone['out_norm_cfg'] = 'same'
    own_hooks = values.get('custom_hooks') or []
    was_by_epoch = _is_by_epoch(values)
    values.update({key: value for key, value in schedule.to_dict().items() if key in SCHEDULE_KEYS})
    hooks = schedule.to_dict().get('custom_hooks') or []
    brought = {type_name(hook['type']) for hook in hooks}
    values['custom_hooks'] = [hook for hook in own_hooks if type_name(hook['type']) not in brought] + hooks
    for name, hook in (
        ('checked_load', 'CheckedLoadHook'),
        ('exact_resume', 'ExactResumeHook'),
        ('norm_state', 'NormStateHook'),
        ('pool_statistics', 'PoolStatisticsHook'),
    ):
        values.setdefault('default_hooks', {}).setdefault(name, dict(type=hook))
    if _is_by_epoch(values) != was_by_epoch:
        _count_anew(values)
    import_slab_det(values)
    # An absolute path is found from wherever the fine-tune is started.
    values['load_from'] = str(checkpoint.resolve())
    values['resume'] = False
    values.pop('work_dir', None)
    return Config(values)


def _is_by_epoch(values: dict) -> bool:
    """Whether the run counts epochs."""
    return 'max_epochs' in (values.get('train_cfg') or {})


def _count_anew(values: dict) -> None:
    """Makes checkpoints, logs and the sampler count as the training loop of this config does, in place."""
    by_epoch = _is_by_epoch(values)
    checkpoint = values['default_hooks'].setdefault('checkpoint', dict(type='CheckpointHook'))
    checkpoint.update(by_epoch=by_epoch, interval=1 if by_epoch else values['train_cfg'].get('val_interval', 1000))
    checkpoint.pop('save_begin', None)
    values['log_processor'] = {'type': 'LogProcessor', **(values.get('log_processor') or {}), 'by_epoch': by_epoch}
    sampler = values['train_dataloader'].get('sampler')
    if sampler and by_epoch and type_name(sampler['type']) == 'InfiniteSampler':
        # An epoch of it would never end.
        sampler['type'] = 'DefaultSampler'
    elif sampler and not by_epoch and type_name(sampler['type']) == 'DefaultSampler':
        # An iteration-based loop would start the workers anew after every pass.
        sampler['type'] = 'InfiniteSampler'
        sampler.pop('round_up', None)


def _norm_cfg(model: nn.Module) -> dict:
    """The PRepBN that a config must name so that every norm has the eps of its LayerNorm."""
    all_eps = {norm.ln.eps for norm in named_progressive_norms(model).values()}
    if len(all_eps) > 1:
        raise ConversionError(
            f'the LayerNorms have different eps ({sorted(all_eps)}), which one norm_cfg cannot say; '
            'convert the model in Python with slab_det.convert_norms'
        )
    return dict(type='PRepBN', ln_eps=all_eps.pop())


def _check_rebuilt(cfg: Config, model: nn.Module) -> None:
    """Raises ConversionError unless the config builds a detector with the keys and shapes of ``model``."""
    shapes, rebuilt = (
        {key: value.shape for key, value in m.state_dict().items()}
        for m in (model, MODELS.build(copy.deepcopy(cfg.model)))
    )
    different = sorted(key for key in shapes.keys() | rebuilt.keys() if shapes.get(key) != rebuilt.get(key))
    if different:
        raise ConversionError(
            f'{cfg.model.backbone.type} with norm_cfg=dict(type="PRepBN") has other weights than the converted one '
            f'({", ".join(different[:3])}, …): some of its norms do not follow norm_cfg; convert the model in Python '
            'with slab_det.convert_norms(model, skip=[…])'
        )
