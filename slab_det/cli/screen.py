"""What the commands show on the screen: what a person reads. The log file of a run keeps everything."""

import logging
from typing import Any

from mmdet.datasets.api_wrappers import coco_api, cocoeval_mp
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from pycocotools import coco, cocoeval

from slab_det.common.errors import ConfigError

# The first words of the messages of mmengine that fill hundreds of lines before the first iteration.
DUMPS = (
    f'\n{"-" * 60}\nSystem environment:',
    'Config:\n',
    'Hooks will be executed in the following order:\n',
    'paramwise_options -- ',
)
# The first words of the messages of mmdet's CocoMetric; the line after them names their numbers.
EVALUATION = (
    'Converting ground truth to coco format...',
    'Evaluating bbox...',
    'Evaluating segm...',
    'bbox_mAP_copypaste: ',
    'segm_mAP_copypaste: ',
)


class QuietScreen:
    """Mixin for a runner: environment, config, hook table and options of each parameter go to the log file alone.

    Warnings and errors always reach the screen.
    """

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Returns mmengine's logger, whose first handler is the screen."""
        logger = super().build_logger(*args, **kwargs)
        logger.handlers[0].addFilter(_is_for_screen)
        logger.info(f'Environment, config, hooks and COCO tables: in {logger.log_file}, or here with --verbose')
        return logger


def _is_for_screen(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return record.levelno > logging.INFO or not (
        getattr(record, 'only_in_file', False) or text.startswith(DUMPS + EVALUATION)
    )


def build_runner(cfg: Config, verbose: bool, *mixins: type) -> Runner:
    """Builds the runner of a config.

    Args:
        cfg: The config of a run.
        verbose: Whether the screen gets all that the log file gets; otherwise see :class:`QuietScreen`.
        mixins: Classes whose methods go before those of the runner's class.

    Raises:
        ConfigError: If ``cfg.runner_type`` is not registered.
    """
    name = cfg.get('runner_type', 'Runner')
    kind = RUNNERS.get(name) if isinstance(name, str) else name
    if kind is None:
        raise ConfigError(f'runner_type={name!r} is not registered; register it in a module that custom_imports names')
    log_pycocotools()
    bases = (*mixins, kind) if verbose else (QuietScreen, *mixins, kind)
    return type(kind.__name__, bases, {}).from_cfg(cfg)


def log_pycocotools() -> None:
    """Lets pycocotools, and the classes that mmdet derives from it, log what they print; quiet screens do not show it.

    Each evaluation prints some thirty lines, and no log file would have them.
    """
    for module in (coco, cocoeval, coco_api, cocoeval_mp):
        module.print = _log


def _log(*words: object) -> None:
    MMLogger.get_current_instance().info(' '.join(map(str, words)), extra={'only_in_file': True})
