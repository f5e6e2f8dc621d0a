"""What users get wrong: one message that names the cause and what to do, exit code 1, and nothing half done.

The first table goes through the command lines as they are typed, the second through the Python interface. The tests of
each room have the arguments that its classes refuse.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import randomize
from mmcv import imwrite
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import HOOKS
from torch import nn

import slab_det
from slab_det.backbones import SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.checkpoints.build import build_detector
from slab_det.conversion import calibrate_norms
from slab_det.fusion import save_fused
from slab_det.measure.report import Report, write_report
from slab_det.norms import PRepBN
from slab_det.recalibration.images import recalibration_dataloader
from slab_det.runtime.checkpoint_files import read_checkpoint
from slab_det.runtime.errors import ConfigError, DataError, SlabDetError

# Beside COCO's, what a dataset can have wrong: images and annotations.
IMAGE = {'id': 1, 'file_name': 'a.png', 'width': 96, 'height': 80}
BOX = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [8, 8, 40, 40], 'area': 1600, 'iscrowd': 0}
DATA = {
    'crowds': ([IMAGE], [{**BOX, 'iscrowd': 1}]),
    'no-images': ([], []),
    'unpacked': ([{**IMAGE, 'file_name': 'b.png'}], [BOX]),
}


class RunsCode:
    """What unpickling turns into a call."""

    def __reduce__(self):
        return os.mkdir, ('ran',)


def write_data(root: Path, images: list, annotations: list) -> None:
    (root / 'images').mkdir(parents=True)
    imwrite(np.zeros((80, 96, 3), np.uint8), str(root / 'images' / 'a.png'))
    content = {'images': images, 'annotations': annotations, 'categories': [{'id': 1, 'name': 'cat'}]}
    (root / 'annotations.json').write_text(json.dumps(content))


def save_state(path: Path, model: nn.Module, **others: object) -> None:
    torch.save({'state_dict': model.state_dict(), **others}, path)


@pytest.fixture(scope='module')
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('template') / 'world'


@pytest.fixture
def world(template: Path, tmp_path: Path, small_run_cfg, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with configs, checkpoints, reports and data, good and bad ones, as the current directory."""
    # Half of the time would go into asking compilers for their versions and into line breaks of dumped configs.
    monkeypatch.setattr('mmengine.runner.runner.collect_env', dict)
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
    if not template.exists():
        template.mkdir()
        write_world(template, small_run_cfg)
    # Links: whatever a tool writes atomically replaces them here only.
    shutil.copytree(template, tmp_path / 'world', copy_function=os.link)
    monkeypatch.setenv('SLAB_DET_CACHE', str(template.parent / 'cache'))
    monkeypatch.chdir(tmp_path / 'world')
    return tmp_path / 'world'


def write_world(folder: Path, small_run_cfg: Callable[..., Config]) -> None:
    def write(name: str, **backbone: object) -> tuple[Config, nn.Module]:
        cfg = small_run_cfg(max_iters=4, **{'embed_dims': 8, 'depths': (1, 1, 1, 1), **backbone})
        for key in ('work_dir', 'experiment_name'):
            cfg.pop(key)
        cfg.default_hooks.checkpoint.max_keep_ckpts = 1
        for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
            loader.dataset.generator = dict(num_train=2, num_val=1, size=(96, 80))
        cfg.custom_hooks[1].num_images = 2
        cfg.dump(folder / f'{name}.py')
        model = MODELS.build(cfg.model)
        randomize(model, 0)
        model.eval()
        return cfg, model

    cfg, model = write('small')
    slab_det.set_gamma(model, 0.5)
    save_state(folder / 'mixed.pth', model)
    slab_det.set_gamma(model, 0.0)
    save_state(folder / 'small.pth', model)
    save_fused(slab_det.fuse(model), cfg, folder / 'fused.pth')
    for name, backbone in (
        ('layernorm', {'norm_cfg': {'type': 'LN'}}),
        ('wider', {'embed_dims': 16}),
        ('un4', {'norm_cfg': {'type': 'UN', 'window_size': 4}}),
        ('un8', {'norm_cfg': {'type': 'UN', 'window_size': 8}}),
    ):
        # As of a training, as far as it is looked at.
        save_state(
            folder / f'{name}.pth',
            write(name, **backbone)[1],
            meta={'epoch': 0, 'iter': 2},
            message_hub={},
            optimizer={},
        )
    torch.save(
        {'state_dict': {'conv1.weight': torch.ones(64, 3, 7, 7), 'layer1.0.conv1.weight': torch.ones(64, 64)}},
        folder / 'resnet.pth',
    )
    torch.save({'state_dict': RunsCode()}, folder / 'bomb.pth')
    (folder / 'truncated.pth').write_bytes((folder / 'small.pth').read_bytes()[:-2000])

    for name, content in DATA.items():
        write_data(folder / 'data' / name, *content)
    coco = cfg.copy()
    for loader in (coco.train_dataloader, coco.val_dataloader, coco.test_dataloader):
        loader.dataset = dict(
            type='CocoDataset',
            data_root='data/coco',
            ann_file='annotations.json',
            data_prefix=dict(img='images/'),
            metainfo=dict(classes=('cat',)),
            pipeline=loader.dataset.pipeline,
        )
    coco.val_evaluator = coco.test_evaluator = dict(type='CocoMetric', ann_file='data/coco/annotations.json')
    coco.dump(folder / 'coco.py')

    (folder / 'broken.py').write_text('model = dict(\n')
    (folder / 'nothing.py').write_text('a = 1\n')
    (folder / 'notes.txt').write_text('not a config\n')
    (folder / 'cut_off.json').write_text('{"schema": 1, "entr')
    write_report(folder / 'no_entries.json', Report([]))


TRAIN = ['train.py', 'small.py', '--work-dir', 'run']


# A command, and what its message names and tells to do.
COMMANDS = [
    ('train.py coco.py', 'train annotation file data/coco/annotations.json not found.*--data-root'),
    (
        'train.py coco.py --data-root data/crowds',
        r'annotations\.json: all of its 1 annotations are crowds.*Set iscrowd to 0',
    ),
    ('train.py coco.py --data-root data/no-images', 'holds no images'),
    ('train.py coco.py --data-root data/unpacked', r'images/b\.png for one \(1 of 1.*Unpack the images'),
    ('train.py small.py --cfg-options train_dataloader.dataset.type=Coko', "no dataset is called 'Coko'"),
    ('train.py nowhere.py', r'nowhere\.py'),
    ('train.py notes.txt', r'notes\.txt is no config.*\.py'),
    ('test.py broken.py small.pth', r'broken\.py: SyntaxError.*correct the config'),
    ('latency.py nothing.py', r'nothing\.py is no config of a detector.*model=dict'),
    ('train.py small.py --cfg-options model.backbone.norm_cfg.type=PReBN', r'small\.py: .*PReBN.*correct the config'),
    (
        'latency.py small.py --checkpoint small.pth --cfg-options model.backbone.depht=2',
        "unexpected keyword argument 'depht'.*correct the config",
    ),
    ('train.py small.py --cfg-options custom_hooks.0.total=-1', 'total=-1 fraction is no length.*use 0 to 1'),
    ('train.py small.py --cfg-options custom_hooks.1.pipeline=val', "pipeline='val'.*one of train, test"),
    ('train.py small.py --cfg-options custom_hooks.1.num_images=0', 'num_images=0.*at least 1'),
    ('train.py small.py --cfg-options optim_wrapper.optimizer.type=AdamQ', 'AdamQ is not in.*correct'),
    ('train.py small.py --launcher pytorch', r'--launcher pytorch: RANK is not set.*torchrun or tools/dist_train\.sh'),
    (
        'train.py small.py --auto-scale-lr --cfg-options auto_scale_lr=None',
        r'small\.py has no auto_scale_lr\.base_batch_size',
    ),
    ('train.py small.py --work-dir notes.txt/run', r'notes\.txt.*choose a folder'),
    ('train.py small.py --resume nowhere.pth', r'no checkpoint nowhere\.pth.*check its name'),
    ('train.py small.py --resume wider.pth', r'wider\.pth: \d+ shapes do not fit.*make the config agree'),
    ('test.py small.py resnet.pth', r'resnet\.pth looks like ResNet: nothing matches'),
    ('test.py small.py fused.pth', r'fused\.pth is fused.*use the fused config'),
    ('test.py fused_config.py small.pth', r'small\.pth is not fused.*tools/fuse\.py'),
    ('fuse.py un4.py layernorm.pth --out x.pth', r'layernorm\.pth: 16 of 16 norms have no statistics.*train it'),
    (
        'train.py un8.py --resume un4.pth',
        r'un4\.pth cannot be resumed from: .*averages of training.*config in its work_dir',
    ),
    ('train.py small.py --resume layernorm.pth', r'layernorm\.pth cannot be resumed from.*load_from=FILE'),
    (
        'test.py small.py truncated.pth',
        r'truncated\.pth: cannot be read as a checkpoint.*get it again, or take an earlier',
    ),
    ('fuse.py small.py bomb.pth --out x.pth', r'bomb\.pth: holds posix\.mkdir.*Not loaded'),
    ('fuse.py small.py mixed.pth --out x.pth', r'gamma = 0\.5.*finish the training'),
    (
        'fuse.py layernorm.py layernorm.pth --out x.pth',
        r'layernorm\.py has no norm to fold.*tools/convert_checkpoint\.py',
    ),
    ('fuse.py small.py small.pth --out x.pth --size 0 32', '--size 0 32.*at least 1'),
    ('convert_checkpoint.py small.pth x.pth --config small.py --num-images 0', 'no LayerNorm to convert'),
    ('convert_checkpoint.py layernorm.pth x.pth --config layernorm.py --num-images -3', 'num_images=-3.*at least one'),
    (
        'convert_checkpoint.py layernorm.pth x.pth --config layernorm.py --num-images 0 --schedule nowhere.py',
        r'nowhere\.py',
    ),
    ('latency.py small.py --checkpoint small.pth --device cuda:7', "'cuda:7' is not there.*--device cpu"),
    ('latency.py small.py --checkpoint small.pth --rounds 0', 'rounds=0'),
    (
        'latency.py small.py --checkpoint small.pth small.pth',
        '1 configs but 2 checkpoints.*write "none"',
    ),
    ('latency.py small.py small.py --checkpoint small.pth small.pth', r'small\.py is listed twice'),
    ('latency.py small.py --checkpoint small.pth --image notes.txt', r'image notes\.txt cannot be decoded'),
    ('report.py no_entries.json --out table', 'no entr'),
    ('report.py cut_off.json --out table', r'cut_off\.json is not JSON'),
    ('test.py small.py small.pth --out x.txt', r'--out x\.txt.*\.pkl'),
    ('test.py small.py small.pth --tta --latency', '--latency.*leave out --tta'),
    ('fuse.py small.py nowhere.pth --out x.pth', 'checkpoint nowhere.pth not found'),
    ('test.py small.py nowhere.pth', 'checkpoint nowhere.pth not found'),
    ('recalibrate.py small.py small.pth --out ./small.pth', 'is a folder or the checkpoint itself'),
    ('convert_checkpoint.py nowhere.pth x.pth --config layernorm.py --to native', 'checkpoint nowhere.pth not found'),
    ('report.py nowhere.json --out x', 'nowhere.json not found'),
]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with what changes when it is written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob('*')
        if path.is_file()
    }


@pytest.mark.parametrize(('command', 'expected'), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_wrong_command_is_one_message_and_nothing_half_done(command, expected, world, call):
    tool, *arguments = command.split()
    if tool in ('train.py', 'test.py') and '--work-dir' not in arguments:
        arguments[1:1] = ['--work-dir', 'run']
    before = contents(world)
    result = call_in(world, call, [tool, *arguments])
    assert result.code == 1, f'exit code {result.code}\n{result.out[-2000:]}\n{result.err[-2000:]}'
    lines = result.err.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('error: ')]
    assert len(starts) == 1, result.err
    message = '\n'.join(lines[starts[0] :])
    assert re.search(expected, message, re.S), message
    assert len(lines) - starts[0] == 1 or 'make quickstart' in message, message
    assert 'Traceback' not in result.out + result.err
    after = contents(world)
    assert {path: after.get(path) for path in before} == before, 'a file was changed or removed'
    # Logs of a run that began may stay.
    new = [path for path in after.keys() - before.keys() if not re.match(r'run/(\d{8}_\d{6}/.*|\w+\.py)$', path)]
    assert not new, new
    assert not (world / 'ran').exists(), 'the checkpoint ran code'


def call_in(folder: Path, call: Callable, command: list[str]) -> object:
    os.chdir(folder)
    return call(command[0], *command[1:])


@pytest.mark.parametrize(('flag', 'value'), [('--dtype', 'float8'), ('--scope', 'neck'), ('--size', '64')])
def test_a_wrong_flag_shows_the_usage(flag, value, world, call):
    result = call_in(world, call, ['latency.py', 'small.py', flag, value])
    assert result.code == 2 and 'usage: latency.py' in result.err
    assert f'error: argument {flag}' in result.err.splitlines()[-1]


def test_a_full_disk_at_the_last_checkpoint_leaves_the_one_before(world, call, monkeypatch):
    sync = os.fsync

    def sync_until_full(descriptor: int) -> None:
        if '/.iter_4.pth' in os.readlink(f'/proc/self/fd/{descriptor}'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', sync_until_full)
        result = call_in(world, call, TRAIN)
    assert result.code == 1 and 'Traceback' not in result.err
    assert re.fullmatch(
        r'error: \S*/run/iter_4\.pth: No space left on device; free some space.*--resume.*', result.err.splitlines()[-1]
    )
    run = world / 'run'
    # max_keep_ckpts=1: mmengine alone would have removed it before.
    assert Path((run / 'last_checkpoint').read_text()) == run / 'iter_2.pth'
    assert read_checkpoint(run / 'iter_2.pth')['meta']['iter'] == 2
    assert not [path.name for path in run.iterdir() if 'iter_4' in path.name or path.name.endswith('.tmp')]

    result = call_in(world, call, [*TRAIN, '--resume'])
    assert result.code == 0, result.err
    assert sorted(path.name for path in run.glob('*.pth')) == ['fused.pth', 'iter_4.pth']


def test_resuming_a_run_that_has_no_checkpoint_yet_keeps_its_pretrained_weights(world, call):
    """Killed before the first checkpoint, a fine-tune would go on from random weights in mmengine."""
    options = (
        'load_from=mixed.pth train_cfg.max_iters=1 custom_hooks.0.total=5 custom_hooks.0.unit=iter '
        'optim_wrapper.optimizer.lr=0'
    )
    result = call_in(world, call, [*TRAIN, '--resume', '--cfg-options', *options.split()])
    assert result.code == 0, result.err
    assert 'run has no checkpoint yet' in result.out
    weight = 'neck.lateral_convs.0.conv.weight'
    trained, start = (
        read_checkpoint(path)['state_dict'][weight] for path in (world / 'run/iter_1.pth', world / 'mixed.pth')
    )
    assert torch.equal(trained, start)


SWIN = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))


def swin(**arguments: object) -> SLABSwin:
    return SLABSwin(**{**SWIN, **arguments})


def finished_swin() -> SLABSwin:
    model = swin(norm_cfg=dict(type='PRepBN'))
    slab_det.set_gamma(model, 0.0)
    model.eval()
    return model


CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    'fuse a norm alone': (lambda: slab_det.fuse(_gamma_0(PRepBN(4)).eval()), SlabDetError, 'itself a norm'),
    'recalibrate zero times': (
        lambda: slab_det.recalibrate(finished_swin(), [torch.ones(1, 3, 64, 64)], max_passes=0),
        SlabDetError,
        'max_passes must be at least 1',
    ),
    'calibrate a finished decay': (lambda: calibrate_norms(finished_swin(), []), SlabDetError, r'at gamma = 0'),
    'load as an unknown layout': (
        lambda: load_pretrained(swin(), swin().state_dict(), source='torchvision'),
        ValueError,
        'torchvision.*native',
    ),
    'no passes': (
        lambda: HOOKS.build(dict(type='RecalibrateFuseHook', max_passes=0)),
        ValueError,
        'max_passes=0.*at least 1',
    ),
    'detector of a typo': (
        lambda: build_detector(Config(dict(model=dict(type='MaskRCN')))),
        ConfigError,
        'MaskRCN is not in.*correct the config',
    ),
    'recalibration without a training set': (
        lambda: recalibration_dataloader(Config(dict(test_dataloader=dict(dataset=dict(pipeline=[])))), 4),
        DataError,
        'no train_dataloader; give the one',
    ),
}


def _gamma_0(norm: PRepBN) -> PRepBN:
    norm.gamma = 0.0
    return norm


@pytest.mark.parametrize('name', CALLS)
def test_a_wrong_call_is_one_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, kind, expected = CALLS[name]
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert re.search(expected, message), message
    assert '\n' not in message
    assert not list(tmp_path.iterdir())
