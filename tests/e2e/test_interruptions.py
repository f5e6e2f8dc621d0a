"""A run that is killed and resumed ends as if it had not been; the full count is in benchmarks/interruptions.py."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from benchmarks.interruptions import Interruptions, KillPoint, WholeFiles

MAX_ITERS = 6


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> Interruptions:
    """A training whose loss, data and layers all draw random numbers, run once to the end."""
    folder = tmp_path_factory.mktemp('interruptions')
    cfg = Config.fromfile(Path(__file__).parents[2] / 'configs' / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model.backbone.update(
        embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), window_sizes=(10, 6, 7, 7), drop_path_rate=0.3
    )
    cfg.model.neck.in_channels = [8, 16, 32, 64]
    cfg.model.test_cfg.rpn.max_per_img = cfg.model.train_cfg.rpn_proposal.max_per_img = 50
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.generator = dict(num_train=10, num_val=2, size=(96, 80))
        loader.num_workers = 0
        loader.persistent_workers = False
    cfg.train_dataloader.batch_size = 2
    cfg.train_cfg.update(max_iters=MAX_ITERS, val_interval=4)
    cfg.default_hooks.checkpoint.update(interval=2, max_keep_ckpts=1)
    cfg.default_hooks.logger.interval = 1
    cfg.custom_hooks[1].update(num_images=4, max_passes=3, tol=0.0)
    cfg.dump(folder / 'small.py')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SLAB_DET_CACHE', str(folder / 'cache'))
        yield Interruptions(folder / 'small.py', folder)


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
