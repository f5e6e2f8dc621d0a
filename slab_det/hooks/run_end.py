"""What RecalibrateFuseHook needs at the end of a run: the detector of the config, and the run's own checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from mmengine.hooks import CheckpointHook
from mmengine.model import BaseModel, MMFullyShardedDataParallel
from mmengine.runner import Runner, save_checkpoint
from mmengine.runner.checkpoint import get_state_dict, weights_to_cpu

from slab_det.checkpoints import build_detector
from slab_det.common.config import detector_config, type_name
from slab_det.common.distributed import unwrap
from slab_det.common.errors import CheckpointError, ConfigError, name_some
from slab_det.common.pipeline import find_test_pipeline
from slab_det.norms import named_offline_norms, set_gamma
from slab_det.runtime import find_latest_checkpoint, read_checkpoint

INSTEAD = (
    'remove RecalibrateFuseHook from custom_hooks, and after the training call slab_det.recalibrate(model, images) and '
    'slab_det.fuse(model)'
)


def build_for_end(runner: Runner, pipeline: str) -> BaseModel:
    """Builds the detector on which the end of the run works, from the runner's config, at gamma 0 and in eval mode.

    RecalibrateFuseHook calls it before the first iteration, so that a run whose end cannot be done does not begin, and
    at the end.

    Args:
        runner: The runner of the training.
        pipeline: See :class:`~slab_det.hooks.RecalibrateFuseHook`.

    Raises:
        ConfigError: If the config lacks the detector or its images, describes another model than the runner trains, or
            has no norm to fuse.
        DataError: If the config has no test pipeline, and ``pipeline`` is 'test'.
        FusionError: If the norms of the detector cannot be fused.
    """
    # mmdet's models take a second to import, and registering the hooks does not need them.
    from slab_det.fusion.folding import check_fusible, plan_folds

    cfg = runner.cfg
    if missing := [key for key in ('model', 'train_dataloader') if not isinstance(cfg.get(key), dict)]:
        raise ConfigError(
            f"RecalibrateFuseHook builds the detector and its images from the runner's config, which has no "
            f'{" and no ".join(missing)}: give Runner(cfg=...) the whole config, as Runner.from_cfg does, or {INSTEAD}'
        )
    detector = detector_config(cfg.model)
    if not isinstance(detector.get('backbone'), dict):
        raise ConfigError(
            f'RecalibrateFuseHook cannot fuse a {type_name(detector["type"])}, which has no backbone of its own: '
            f'{INSTEAD}; of a semi-supervised detector take model.teacher'
        )
    if pipeline == 'test':
        find_test_pipeline(cfg)
    model = build_detector(cfg)
    set_gamma(model, 0.0)
    # Only a collective call returns the weights of FSDP, under the same names.
    if not isinstance(runner.model, MMFullyShardedDataParallel):
        _check_same_model(model, unwrap(runner.model))
    if not any(named_offline_norms(model)):
        raise ConfigError(
            'RecalibrateFuseHook finds no norm that it could fuse: name one in the config, such as '
            "backbone.norm_cfg=dict(type='TokenBN'), or remove the hook from custom_hooks; a LayerNorm detector "
            'loses its norms after its training by slab-det absorb --norms remove'
        )
    check_fusible(model)
    plan_folds(model)
    return model


def _check_same_model(built: BaseModel, trained: BaseModel) -> None:
    shapes, other = ({key: value.shape for key, value in m.state_dict().items()} for m in (built, trained))
    different = [key for key in {**shapes, **other} if shapes.get(key) != other.get(key)]
    if different:
        raise ConfigError(
            f"the model that this run trains is not the one that the runner's config builds, which RecalibrateFuseHook "
            f'would fuse: {len(different)} weights differ ({name_some(different)}). Name the norms in the config '
            f'(backbone.norm_cfg) and let the runner build the model, or {INSTEAD}'
        )


class OwnCheckpoint:
    """The checkpoint of the last iteration, which this run has written itself.

    Two runs in one folder write files of the same names, of which ``meta.iter`` is the same too.

    Args:
        runner: The runner, after its last iteration. If no CheckpointHook saved that iteration, it is saved now.
        run: The identity of the run, as ``checkpoint['slab_det']['run']`` has it.

    Attributes:
        path: Its file.
        content: What it holds.

    Raises:
        CheckpointError: If another run has replaced it. This run's weights are then saved under another name.
    """

    def __init__(self, runner: Runner, run: str | None) -> None:
        self.runner, self.run = runner, run
        saved = [hook.last_ckpt for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        found = [find_latest_checkpoint(runner.work_dir)] if runner._resume else []
        for path in (*saved, *found):
            if path is not None and Path(path).is_file():
                self._read(Path(path))
                is_own = self.content.get('slab_det', {}).get('run') == run
                if is_own and self.content.get('meta', {}).get('iter') == runner.iter:
                    return
                if path in saved and not is_own:
                    self._refuse()
        self._read(self._save_as(f'iter_{runner.iter}.pth'))

    def save(self, model: BaseModel) -> None:
        """Writes it anew, with the weights and statistics of ``model`` in place of its own; raises as the class."""
        if self._identity() != self._file:
            self._refuse()
        self.content['state_dict'] = weights_to_cpu(get_state_dict(model))
        save_checkpoint(self.content, str(self.path))
        self._file = self._identity()

    def _read(self, path: Path) -> None:
        self.path = path
        self._file = self._identity()
        self.content = read_checkpoint(path)

    def _identity(self) -> tuple[int, int]:
        """Changes with each writing of the file, which is a renaming."""
        status = os.stat(self.path)
        return status.st_ino, status.st_mtime_ns

    def _save_as(self, name: str) -> Path:
        runner, meta = self.runner, dict(epoch=self.runner.epoch, iter=self.runner.iter)
        runner.save_checkpoint(runner.work_dir, name, by_epoch=False, meta=meta)
        return Path(runner.work_dir) / name

    def _refuse(self) -> None:
        own = self._save_as(f'iter_{self.runner.iter}_{str(self.run)[:8]}.pth')
        raise CheckpointError(
            f'{self.path} is of another run, which trains in the same work_dir: it is not fused as the result of this '
            f'one. This run is saved as {own}: the same command with --resume {own} and a --work-dir of its own '
            'recalibrates and fuses it'
        )
