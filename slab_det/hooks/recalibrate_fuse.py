"""RecalibrateFuseHook: recalibrates, fuses and verifies the model at the end of its training."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from uuid import uuid4

import torch
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.runner.amp import autocast
from torch.utils.data import DataLoader

from slab_det.common.distributed import broadcast_from_main, raise_on_all_ranks, run_on_main, unwrap
from slab_det.common.errors import CheckpointError
from slab_det.common.progress import Progress
from slab_det.common.random_state import fixed_random_state
from slab_det.hooks.run_end import OwnCheckpoint, build_for_end
from slab_det.norms import named_progressive_norms
from slab_det.recalibration import PIPELINES, recalibrate, recalibration_dataloader

# Images on which the fused model is compared with the unfused one, one from each batch.
NUM_VERIFIED = 2


@HOOKS.register_module()
class RecalibrateFuseHook(Hook):
    """After training: recalibrates the last checkpoint, saves it again, validates it, and writes a fused one beside it.

    The work directory then has the last checkpoint (recalibrated, unfused, with its optimizer), ``fused.pth``,
    ``fused_config.py`` and ``report.json``. If the run ends with gamma > 0, the hook only logs an error.
    With EMAHook the averaged weights are recalibrated and fused. Checkpoints of ``save_best`` stay as they were saved;
    one with gamma > 0 cannot be fused. Resuming a finished run repeats this hook alone, with the same result.

    In a distributed run all processes recalibrate and validate, each on its share of the images. Only the main process
    reads and writes files. An error in one process ends all of them.

    Args:
        num_images: Training images to recalibrate on.
        max_passes: See :func:`slab_det.recalibrate`.
        recalibrate: False keeps the running statistics, for weights that were trained with frozen statistics.
        pipeline: 'train' for these images as training saw them, 'test' for them as inference sees them; see
            :func:`slab_det.recalibration.recalibration_dataloader`.

    Raises:
        ValueError: If a count is below 1 or the pipeline unknown.
        ConfigError, FusionError: Before the first iteration, if the end cannot be done; see
            :func:`slab_det.hooks.run_end.build_for_end`.
        CheckpointError: At the end, if another run in the same folder has replaced the last checkpoint.
    """

    # Before CheckpointHook (VERY_LOW), which publishes the last checkpoint at the end of training.
    priority = 85

    def __init__(
        self,
        num_images: int = 500,
        max_passes: int | None = None,
        recalibrate: bool = True,
        pipeline: str = 'train',
    ) -> None:
        # A wrong argument is refused now, not after the last epoch.
        if num_images < 1 or (max_passes is not None and max_passes < 1):
            raise ValueError(f'num_images={num_images} and max_passes={max_passes} must be at least 1')
        if pipeline not in PIPELINES:
            raise ValueError(f"pipeline='{pipeline}' must be one of {', '.join(PIPELINES)}")
        self.num_images = num_images
        self.max_passes = max_passes
        self.recalibrate = recalibrate
        self.pipeline = pipeline
        # The identity of this run in its checkpoints; None before a training.
        self._run: str | None = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint.setdefault('slab_det', {})['run'] = self._run

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._run = checkpoint.get('slab_det', {}).get('run') if runner._resume else None

    def before_train(self, runner: Runner) -> None:
        # Building draws random numbers, which the training must not miss.
        with fixed_random_state(0):
            run_on_main(build_for_end, runner, self.pipeline)
        # A finished run that is resumed saves nothing more: its checkpoint keeps its identity.
        if not runner._resume or runner.iter < runner.max_iters:
            self._run = uuid4().hex

    def after_train(self, runner: Runner) -> None:
        mixed = [name for name, norm in named_progressive_norms(unwrap(runner.model)).items() if norm.gamma > 0]
        if mixed:
            runner.logger.error(
                f'RecalibrateFuseHook: nothing was recalibrated or fused, because {len(mixed)} norms '
                f'still contain LayerNorm (gamma > 0), {mixed[0]} for one'
            )
            return
        # Only the main process reads it.
        last = run_on_main(OwnCheckpoint, runner, self._run)
        try:
            with raise_on_all_ranks():
                images = recalibration_dataloader(runner.cfg, self.num_images, self.pipeline)
                model = build_for_end(runner, self.pipeline).to(next(runner.model.parameters()).device)
            model.load_state_dict(broadcast_from_main(last and last.content['state_dict']))
            recalibration = None
            if self.recalibrate:
                report = recalibrate(model, images, max_passes=self.max_passes)
                runner.logger.log(logging.INFO if report.converged else logging.WARNING, str(report))
                recalibration = dict(report.to_dict(), pipeline=self.pipeline)
                run_on_main(lambda: last.save(model))
                # With EMAHook the runner's model has other weights than the last checkpoint.
                if not any(isinstance(hook, EMAHook) for hook in runner.hooks):
                    unwrap(runner.model).load_state_dict(model.state_dict())
            metrics = validate(runner, model)
            run_on_main(write_fused, runner, model, images, last and last.path, metrics, recalibration)
        except CheckpointError:
            # Of another run in the folder, which --resume would take; the message says how to go on.
            raise
        except Exception:
            runner.logger.error(
                'RecalibrateFuseHook failed, see below. The training is over and its last checkpoint is whole: once '
                'the cause is removed, the same command with --resume recalibrates and fuses'
            )
            raise


@torch.no_grad()
def validate(runner: Runner, model: BaseModel) -> dict[str, float]:
    """Evaluates ``model`` as the runner's validation loop would, but without hooks, which save and swap weights.

    Returns:
        The metrics; nothing where the config has no validation.
    """
    loop = runner.val_loop
    if loop is None:
        return {}
    with raise_on_all_ranks(), Progress(loop.dataloader, 'Validation', disable=not is_main_process()) as batches:
        for batch in batches:
            with autocast(enabled=loop.fp16):
                outputs = model.val_step(batch)
            loop.evaluator.process(data_samples=outputs, data_batch=batch)
    metrics = loop.evaluator.evaluate(len(loop.dataloader.dataset))
    runner.visualizer.add_scalars({f'recalibrated/{name}': value for name, value in metrics.items()}, step=runner.iter)
    runner.logger.info('Recalibrated: ' + '  '.join(f'{name}: {value:.4f}' for name, value in metrics.items()))
    return metrics


def write_fused(
    runner: Runner, model: BaseModel, images: DataLoader, path: Path, metrics: dict, recalibration: dict | None
) -> None:
    """Fuses ``model``, compares it with the fused model, and writes the fused checkpoint and ``report.json``."""
    # mmdet's models take a second to import, and registering the hooks does not need them.
    from slab_det.common.record import describe_environment
    from slab_det.fusion import save_fused, verify_fusion
    from slab_det.fusion.folding import fuse
    from slab_det.measure.report_file import (
        ReportEntry,
        ap_from_metrics,
        describe_dataset,
        describe_model,
        write_report,
    )

    fused = fuse(model)
    inputs = (model.data_preprocessor(batch, False)['inputs'][:1] for batch in islice(images, NUM_VERIFIED))
    checks = verify_fusion(model, fused, inputs)
    meta = getattr(runner.train_dataloader.dataset, 'metainfo', None)
    fused_path, fused_config = save_fused(fused, runner.cfg, Path(runner.work_dir) / 'fused.pth', meta)
    lines = [
        f'Fused: {fused.fusion_report}',
        *map(str, checks.values()),
        f'Fused model: {fused_config} with {fused_path}',
    ]
    runner.logger.info('\n'.join(lines))
    batch_size = runner.cfg.train_dataloader.batch_size * get_world_size()
    shared = dict(
        **describe_model(runner.cfg.model),
        recalibration=recalibration,
        training=dict(seed=runner.seed, iterations=runner.iter, batch_size=batch_size),
        environment=describe_environment(next(model.parameters()).device),
    )
    unfused_entry = ReportEntry(
        **shared,
        variant='unfused',
        # A config without a file has the name under which the runner dumps it.
        config=str(runner.cfg.filename or Path(runner.work_dir) / f'{runner.timestamp}.py'),
        checkpoint=str(path),
        dataset=runner.val_loop and describe_dataset(runner.val_loop.dataloader.dataset),
        ap=ap_from_metrics(metrics) or None,
    )
    fused_entry = ReportEntry(
        **shared,
        variant='fused',
        config=str(fused_config),
        checkpoint=str(fused_path),
        fusion={**fused.fusion_report.to_dict(), 'difference': {key: x.difference for key, x in checks.items()}},
    )
    write_report(Path(runner.work_dir) / 'report.json', [unfused_entry, fused_entry])
