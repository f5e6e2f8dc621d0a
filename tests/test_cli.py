"""The runner that the command lines build."""

import argparse

import pytest
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.cli import PREAMBLE, build_runner, config_from_arguments


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


def test_options_that_change_nothing_are_named(capsys) -> None:
    config = str(CONFIGS / 'quickstart_mask_rcnn_swin.py')
    options = {'max_iters': 4, 'train_cfg.max_iters': 4, 'modle.backbone.depths': [2, 2], 'randomness.seed': 1}
    arguments = dict(data_root=None, work_dir=None, launcher='none', local_rank=0)
    # The schedule was made of max_iters when the file was parsed.
    cfg = config_from_arguments(argparse.Namespace(config=config, cfg_options={'max_iters': 4}, **arguments))
    assert cfg.train_cfg.max_iters > 4
    capsys.readouterr()
    config_from_arguments(argparse.Namespace(config=config, cfg_options=options, **arguments))
    assert [line.partition(': mmengine')[0] for line in capsys.readouterr().err.splitlines()] == [
        '--cfg-options max_iters',
        '--cfg-options modle',
    ]
