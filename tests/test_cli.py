"""The runner that the command lines build."""

import pytest
from mmengine.config import Config

from slab_det.cli import PREAMBLE, build_runner


@pytest.mark.parametrize('verbose', [False, True])
def test_screen_gets_warnings_and_what_differs_between_runs(small_run_cfg, capsys, verbose: bool) -> None:
    cfg: Config = small_run_cfg(f'verbose_{verbose}')
    runner = build_runner(cfg, verbose)
    for message in PREAMBLE:
        runner.logger.warning(f'{message} of a warning')
    runner.logger.info('Iteration 1')
    screen, log = capsys.readouterr().out, open(runner.logger.log_file).read()
    for message in PREAMBLE:
        # Options of parameters come with the optimizer, when the training begins.
        count = 1 + ('paramwise' not in message)
        assert (screen.count(message), log.count(message)) == (count if verbose else 1, count), message
    assert 'Iteration 1' in screen and (runner.logger.log_file in screen) != verbose
