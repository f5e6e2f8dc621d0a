"""Builds the runner that a command tests with."""

from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from slab_det.runtime.errors import ConfigError, config_errors


class ReadOnlyRunner(Runner):
    """A runner that writes no config: the test of a checkpoint must not replace the config of its training."""

    def dump_config(self) -> None:
        """Writes nothing."""


def build_test_runner(cfg: Config) -> Runner:
    """Builds the runner of a config with its test loop, so that errors in the config come before the test.

    Raises:
        ConfigError: If there is nothing to test on, or model, data or evaluator cannot be built.
    """
    with config_errors(cfg.filename):
        runner = RUNNERS.build(cfg) if 'runner_type' in cfg else ReadOnlyRunner.from_cfg(cfg)
        if runner.test_loop is None:
            raise ConfigError(f'{cfg.filename} has no test_dataloader, test_cfg and test_evaluator; add them')
    return runner
