"""What the runners of the commands show on the screen."""

from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from pycocotools.coco import COCO

from slab_det.cli.screen import DUMPS, EVALUATION, build_runner
from slab_det.common.errors import ConfigError


@RUNNERS.register_module(force=True)
class OtherRunner(Runner):
    """A runner of somebody's own."""


@pytest.mark.parametrize('verbose', [False, True])
@pytest.mark.parametrize('runner_type', ['Runner', 'OtherRunner'])
def test_screen_has_warnings_and_the_file_has_all(
    runner_type: str, verbose: bool, small_run_cfg, capsys: pytest.CaptureFixture
) -> None:
    cfg: Config = small_run_cfg(f'{runner_type}_{verbose}')
    cfg.runner_type = runner_type
    runner = build_runner(cfg, verbose)
    assert isinstance(runner, RUNNERS.get(runner_type))
    for text in (*DUMPS, *EVALUATION):
        runner.logger.info(f'{text} of the test')
        runner.logger.warning(f'{text} of a warning')
    runner.logger.info('Iter(train) [1/6]')
    COCO().createIndex()
    screen, log = capsys.readouterr().out, Path(runner.logger.log_file).read_text()
    hidden = [*(f'{text} of the test' for text in (*DUMPS, *EVALUATION)), 'creating index...', 'val_dataloader']
    shown = [*(f'{text} of a warning' for text in (*DUMPS, *EVALUATION)), 'Iter(train) [1/6]']
    assert [text for text in hidden if text in screen] == (hidden if verbose else [])
    assert [text for text in shown if text in screen] == shown
    assert [text for text in shown + hidden if text in log] == shown + hidden
    assert (runner.logger.log_file in screen) != verbose


def test_unknown_runner_is_named(small_run_cfg) -> None:
    cfg = small_run_cfg()
    cfg.runner_type = 'NoSuchRunner'
    with pytest.raises(ConfigError, match='NoSuchRunner'):
        build_runner(cfg, False)
