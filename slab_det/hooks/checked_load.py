"""CheckedLoadHook: a checkpoint is never half loaded in silence."""
from __future__ import annotations

from collections.abc import Sequence

from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, Runner

from slab_det.checkpoints.detector import check_detector_checkpoint


@HOOKS.register_module()
class CheckedLoadHook(Hook):
    """Checks what ``load_from``, ``--resume`` or tools/test.py loads, prints a report, converts a foreign backbone.

    Nothing matching, a shape that does not fit and a fused checkpoint for an unfused model are errors. Missing weights
    are errors when resuming and testing; training that starts from ``load_from`` only reports them.

    Args:
        reinitialize: Prefixes of keys that are not loaded, such as ``('roi_head.bbox_head.fc_cls',)`` for another
            number of classes.
    """

    # Before EMAHook, which loads the same weights.
    priority = 'VERY_HIGH'

    def __init__(self, reinitialize: Sequence[str] = ()) -> None:
        self.reinitialize = tuple(reinitialize)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Checks ``checkpoint`` against the runner's model.

        Raises:
            CheckpointError: If it must not be loaded.
        """
        model = runner.model
        while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
            model = model.module
        # A config may describe training; only train() builds its loop, and does so before it loads.
        is_training = isinstance(runner._train_loop, BaseLoop)
        check_detector_checkpoint(model, checkpoint, runner._load_from or 'the checkpoint',
                                  complete=runner._resume or not is_training, reinitialize=self.reinitialize)
