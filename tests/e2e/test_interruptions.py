"""A run that is killed and resumed ends as if it had not been; the full count is in benchmarks/interruptions.py."""

import pytest
import torch

from benchmarks.interruptions import Interruptions, KillPoint, WholeFiles

MAX_ITERS = 6


@pytest.fixture(scope='module')
def runs(module_run_cfg, tmp_path_factory) -> Interruptions:
    """A training whose loss, data and layers all draw random numbers, run once to the end."""
    cfg = module_run_cfg('unused', MAX_ITERS, drop_path_rate=0.3)
    cfg.train_cfg.val_interval = 4
    cfg.default_hooks.checkpoint.max_keep_ckpts = 1
    cfg.default_hooks.logger.interval = 1
    cfg.custom_hooks[1].tol = 0.0
    folder = tmp_path_factory.mktemp('interruptions')
    cfg.dump(folder / 'small.py')
    return Interruptions(folder / 'small.py', folder)


@pytest.mark.parametrize(
    'point',
    [
        KillPoint('decay', f'Iter(train) [3/{MAX_ITERS}]'),
        KillPoint('recalibration', 'Recalibration, pass 2'),
        KillPoint('fused checkpoint', 'Recalibration, pass 1', '.fused.pth.*.tmp'),
    ],
    ids=lambda point: point.kind,
)
def test_a_killed_run_ends_as_the_uninterrupted_one(runs, point):
    kill = runs.kill(point)
    assert (kill.largest_difference, kill.gamma, kill.same_report) == (0, 0, True), kill
    assert not kill.torn, kill
    assert bool(kill.unfinished) == (point.writes is not None), kill
    assert kill.resumed_from == f'iter_{2 if point.kind == "decay" else MAX_ITERS}', kill


def test_the_comparison_sees_a_torn_file(tmp_path):
    files = WholeFiles(tmp_path)
    torch.save(dict(a=torch.ones(100)), tmp_path / 'iter_2.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_2.pth'))
    files.check()
    assert files.checks == 2 and not files.torn
    (tmp_path / 'iter_4.pth').write_bytes((tmp_path / 'iter_2.pth').read_bytes()[:-50])
    (tmp_path / 'last_checkpoint').write_text('')
    (tmp_path / 'report.json').write_text('{"schema": 1, "entr')
    files.check()
    assert sorted(message.partition(':')[0] for message in files.torn) == [
        'iter_4.pth',
        'last_checkpoint',
        'report.json',
    ]
