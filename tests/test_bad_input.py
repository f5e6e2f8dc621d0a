"""What users get wrong: one message that names the cause and what to do, exit code 1, and nothing half done.

The command lines as they are typed; the tests of each subpackage have the arguments that its classes refuse.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coco_files import dataset_cfg, make_content, write_split
from conftest import RunsCode, randomize
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

import slab_det
from slab_det.fusion import save_fused
from slab_det.hooks import NormStateHook, RecalibrateFuseHook
from slab_det.measure.report_file import read_report, write_report
from slab_det.runtime.checkpoint_files import read_checkpoint


@pytest.fixture(scope='module')
def world(tmp_path_factory: pytest.TempPathFactory, module_run_cfg: Callable[..., Config]) -> Path:
    """A folder with configs, checkpoints, reports and data, good and bad ones."""
    folder = tmp_path_factory.mktemp('world')

    def write(name: str, **backbone: object) -> tuple[Config, nn.Module]:
        cfg = module_run_cfg(max_iters=4, **{'embed_dims': 8, 'depths': (1, 1, 1, 1), **backbone})
        for key in ('work_dir', 'experiment_name'):
            cfg.pop(key)
        cfg.default_hooks.checkpoint.max_keep_ckpts = 1
        for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
            loader.dataset.generator = dict(num_train=2, num_val=1, size=(96, 80))
        cfg.custom_hooks[1].num_images = 2
        cfg.dump(folder / f'{name}.py')
        model = MODELS.build(cfg.model)
        randomize(model, 0)
        # As of a training, as far as it is looked at.
        training = dict(meta={'epoch': 0, 'iter': 2}, message_hub={}, optimizer={})
        torch.save(dict(state_dict=model.state_dict(), **training), folder / f'{name}.pth')
        return cfg, model.eval()

    cfg, model = write('small')
    slab_det.set_gamma(model, 0.5)
    torch.save(dict(state_dict=model.state_dict()), folder / 'mixed.pth')
    slab_det.set_gamma(model, 0.0)
    torch.save(dict(state_dict=model.state_dict()), folder / 'small.pth')
    save_fused(slab_det.fuse(model), cfg, folder / 'fused.pth')
    for name in ('own_config', 'own_tune_config'):
        shutil.copy(folder / 'small.py', folder / f'{name}.py')
    write('layernorm', norm_cfg={'type': 'LN'})
    resnet = {'conv1.weight': torch.ones(64, 3, 7, 7), 'layer1.0.conv1.weight': torch.ones(64, 64)}
    torch.save({'state_dict': resnet}, folder / 'resnet.pth')
    torch.save({'state_dict': RunsCode(os.mkdir, 'ran')}, folder / 'bomb.pth')

    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.dataset = dict(type='CocoDataset', data_root='data/coco', ann_file='annotations.json')
    cfg.dump(folder / 'coco.py')

    crowds = make_content()
    for item in crowds['annotations']:
        item['iscrowd'] = 1
    write_split(folder / 'pets', 'train', crowds)
    write_split(folder / 'pets', 'val')
    for split, loader in (('train', cfg.train_dataloader), ('val', cfg.val_dataloader), ('val', cfg.test_dataloader)):
        loader.dataset = dataset_cfg(Path('pets'), split)
    cfg.dump(folder / 'crowds.py')
    cfg.test_dataloader.dataset.metainfo.classes = ('dog', 'cat')
    cfg.dump(folder / 'swapped.py')

    (folder / 'bad_backbone.py').write_text("_base_ = 'small.py'\nmodel = dict(backbone=dict(embed_dim=8))\n")
    no_test = ''.join(f'test_{part} = None\n' for part in ('cfg', 'dataloader', 'evaluator'))
    (folder / 'no_test.py').write_text(f"_base_ = 'small.py'\n{no_test}")
    (folder / 'mmdet2.py').write_text(
        "model = dict(type='A')\ndata = dict(train=dict())\nevaluation = dict(metric='bbox')\n"
    )
    (folder / 'broken.py').write_text('model = dict(\n')
    (folder / 'nothing.py').write_text('a = 1\n')
    (folder / 'notes.txt').write_text('not a config\n')
    (folder / 'cut_off.json').write_text('{"schema": 1, "entr')
    write_report(folder / 'no_entries.json', [])
    return folder


@pytest.fixture
def run(world: Path, call: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A function: what ``python tools/COMMAND`` leaves behind in that folder."""
    monkeypatch.chdir(world)
    shutil.rmtree('run', ignore_errors=True)
    return lambda command, code=1: call(*command.split(), code=code)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
# A command, and the culprit and the remedy that its message names.
COMMANDS = [
    ('train.py coco.py', 'data/coco/annotations.json.*--data-root'),
    ('train.py crowds.py', r'pets/annotations/train\.json.* 20 of its 20 .* "iscrowd".* Correct them'),
    ('test.py swapped.py small.pth', r"label 0 is 'cat' .* 'dog' here.*categories. of pets/annotations/val\.json"),
    ('train.py fused_config.py', r'fused_config\.py.*train_dataloader'),
    (
        'train.py mmdet2.py',
        r'mmdet2\.py.* mmdet 2.*data is now train_dataloader.*evaluation is now val_evaluator=dict\(',
    ),
    ('train.py small.py --cfg-options model.roi_head.mask_head.num_classes=80', r'mask_head.*80.* 4 .*circle'),
    ('train.py small.py --cfg-options train_dataloader.dataset.type=Coko', "dataset.*'Coko'"),
    ('train.py notes.txt', r'notes\.txt.*\.py'),
    ('test.py broken.py small.pth', r'broken\.py: SyntaxError'),
    ('latency.py nothing.py', r'nothing\.py.*model=dict'),
    ('train.py small.py --cfg-options custom_hooks.0.total=-1', 'total=-1.* must not be negative'),
    ('train.py small.py --auto-scale-lr --cfg-options auto_scale_lr=None', r'small\.py.*\.base_batch_size'),
    ('train.py small.py --work-dir notes.txt/run', r'notes\.txt/run: Not a directory'),
    ('test.py small.py resnet.pth', r'resnet\.pth: nothing matches'),
    ('test.py small.py fused.pth', r'fused\.pth:.*fused config'),
    ('test.py fused_config.py small.pth', r'small\.pth:.*slab-det fuse'),
    ('train.py small.py --resume layernorm.pth', r'layernorm\.pth.*load_from=FILE'),
    ('fuse.py small.py bomb.pth --out x.pth', r'bomb\.pth: .*posix\.mkdir'),
    ('fuse.py small.py small.pth --out x.pth --size 0 32', '--size 0 32: .* 1'),
    ('fuse.py layernorm.py layernorm.pth --out x.pth', r'layernorm\.py.*slab-det absorb'),
    ('fuse.py small.py layernorm.pth --out x.pth', r'layernorm\.pth: .* statistics'),
    ('convert_checkpoint.py small.pth x.pth --config bad_backbone.py', r'bad_backbone\.py: TypeError'),
    ('latency.py small.py --checkpoint small.pth --device cuda:7', "'cuda:7'.*give device 'cpu'"),
    ('latency.py small.py --checkpoint small.pth small.pth', '1 configs.* 2 checkpoints.*"none"'),
    ('latency.py small.py small.py --checkpoint small.pth small.pth', 'twice'),
    ('latency.py small.py --checkpoint small.pth --deploy', r'slab_det\.fuse.*--fuse'),
    ('test.py small.py small.pth --deploy', r'slab_det\.fuse.*--fuse'),
    ('latency.py small.py --threads -1', '--threads -1: .*from 1 to'),
    ('latency.py small.py --threads 0', '--threads 0: '),
    ('latency.py small.py --threads 100000000', '--threads 100000000: .*this process may use'),
    ('latency.py small.py --size 0 0', '--size 0 0: .*at least 1'),
    ('latency.py small.py --size 1000000 1000000', '--size 1000000 1000000: more than .* pixels'),
    ('latency.py small.py --rounds 0', 'rounds=0 must be at least 1'),
    ('test.py small.py small.pth --latency --size -1 32', '--size -1 32: .*at least 1'),
    ('test.py small.py small.pth --wait-time nan', '--wait-time nan: give seconds'),
    ('fuse.py small.py small.pth --out x.pth --size 100000 100000', '--size 100000 100000: more than'),
    ('fuse.py small.py notes.txt --out x.pth', r'notes\.txt: cannot be read as a checkpoint'),
    ('export_onnx.py small.py small.pth --out x.onnx --size 0 0', '--size 0 0: '),
    ('test_onnx.py small.py x.onnx --threads -1 --work-dir run', '--threads -1: .*from 0 to'),
    ('optimize.py layernorm.py layernorm.pth --images data --out x --threads 0', '--threads 0: '),
    ('optimize.py layernorm.py layernorm.pth --images data --out x --minutes 0', 'minutes=0 must be above 0'),
    pytest.param('train.py small.py --amp', r'small\.py: AmpOptimWrapper .*GPU.*leave out --amp', marks=NO_GPU),
    pytest.param(
        'train.py small.py --cfg-options optim_wrapper.type=AmpOptimWrapper',
        r'GPU.*optim_wrapper\.type=OptimWrapper',
        marks=NO_GPU,
    ),
    ('latency.py small.py --checkpoint small.pth --image notes.txt', r'notes\.txt'),
    ('report.py no_entries.json --out table', 'no entr'),
    ('test.py small.py nowhere.pth --report cut_off.json', r'cut_off\.json'),
    ('test.py small.py small.pth --out x.txt', r'--out x\.txt.*\.pkl'),
    ('test.py small.py small.pth --tta --latency', '--latency.*--tta'),
    ('test.py small.py small.pth --tta', '--tta.* boxes'),
    ('test.py no_test.py small.pth', r'no_test\.py.*test_dataloader'),
    ('test.py small.py small.pth --cfg-options test_evaluator.type=Koko', r'small\.py: KeyError.*Koko'),
    ('recalibrate.py small.py small.pth --out x.pth --max-passes 0', 'max_passes.* 1'),
    # Nothing of the user's is overwritten.
    ('recalibrate.py small.py small.pth --out ./small.pth', r'small\.pth'),
    ('fuse.py own_config.py small.pth --out own.pth', r'own_config\.py'),
    ('convert_checkpoint.py small.pth ./small.pth --config small.py', r'small\.pth'),
    ('absorb.py own_tune_config.py small.pth --out own.pth', r'own_tune_config\.py'),
]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with what changes when it is written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob('*')
        if path.is_file()
    }


@pytest.mark.parametrize(
    ('command', 'expected'), COMMANDS, ids=lambda value: value if value.partition(' ')[0].endswith('.py') else ''
)
def test_a_wrong_command_is_one_message_and_nothing_half_done(command, expected, world, run):
    if command.startswith(('train', 'test')) and '--work-dir' not in command:
        command += ' --work-dir run'
    before = contents(world)
    result = run(command)
    lines = result.err.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('error: ')]
    assert len(starts) == 1, result.err
    message = '\n'.join(lines[starts[0] :])
    assert re.search(expected, message, re.S), message
    assert len(lines) - starts[0] == 1 or 'slab-det quickstart' in message, message
    assert 'Traceback' not in result.out + result.err
    after = contents(world)
    assert {path: after.get(path) for path in before} == before, 'a file was changed or removed'
    # Logs of a run that began may stay.
    new = [path for path in after.keys() - before.keys() if not re.match(r'run/(\d{8}_\d{6}/.*|\w+\.py)$', path)]
    assert not new, new
    assert not (world / 'ran').exists(), 'the checkpoint ran code'


def test_a_latency_that_cannot_be_measured_leaves_the_ap(world, run):
    result = run('test.py small.py small.pth --work-dir run --latency --image nowhere.jpg')
    assert 'nowhere.jpg' in result.err.splitlines()[-1], result.err
    (entry,) = read_report('run/report.json')
    assert entry.ap.keys() == {'bbox', 'segm'} and entry.latency is None


def test_a_test_leaves_the_config_of_a_run_as_it_is(world, run):
    """Of one that was resumed, with and without test-time augmentation."""
    cfg = Config.fromfile(world / 'small.py')
    cfg.model.type, cfg.test_evaluator.metric, cfg.resume = 'FasterRCNN', 'bbox', True
    cfg.model.roi_head.mask_head = cfg.model.roi_head.mask_roi_extractor = None
    (world / 'run').mkdir()
    cfg.dump('run/boxes.py')
    config = Path('run/boxes.py').read_text()
    torch.save(dict(state_dict=randomize(MODELS.build(cfg.model)).state_dict()), 'run/boxes.pth')
    for option in ('', '--tta'):
        run(f'test.py run/boxes.py run/boxes.pth --work-dir run {option}', code=0)
    assert Path('run/boxes.py').read_text() == config
    entries = read_report('run/report.json')
    assert [entry.name for entry in entries] == ['SLAB-Swin-8x1111', 'SLAB-Swin-8x1111-TTA']
    assert all(entry.ap.keys() == {'bbox'} for entry in entries)


def test_resuming_a_run_that_has_no_checkpoint_yet_keeps_its_pretrained_weights(world, run):
    """Killed before the first checkpoint, a fine-tune would go on from random weights in mmengine."""
    result = run(
        'train.py small.py --work-dir tuned --resume --cfg-options load_from=mixed.pth train_cfg.max_iters=1 '
        'custom_hooks.0.total=5 custom_hooks.0.unit=iter optim_wrapper.optimizer.lr=0',
        code=0,
    )
    assert 'tuned has no checkpoint yet' in result.out
    weight = 'neck.lateral_convs.0.conv.weight'
    trained, start = (
        read_checkpoint(path)['state_dict'][weight] for path in (world / 'tuned/iter_1.pth', world / 'mixed.pth')
    )
    assert torch.equal(trained, start)


# Recalibration follows the last iteration.
@pytest.mark.parametrize(('hook', 'moment', 'done'), [(NormStateHook, '_iter', 2), (RecalibrateFuseHook, '', 4)])
def test_ctrl_c_says_how_to_go_on(hook, moment, done, run, monkeypatch):
    def interrupt(hook, runner, *args, **kwargs):
        if runner.iter == done:
            raise KeyboardInterrupt

    monkeypatch.setattr(hook, f'after_train{moment}', interrupt)
    result = run('train.py small.py --work-dir stopped', code=130)
    assert 'Traceback' not in result.err
    message = (
        rf'Interrupted after {done} of 4 iterations: add --resume to the command to continue from \S*/iter_{done}\.pth'
    )
    assert re.fullmatch(message, result.err.splitlines()[-1]), result.err


def test_custom_hooks_that_replace_those_of_the_base_are_told_of(run, world):
    """Also where the config has none of slab_det's default hooks."""
    (world / 'bare.py').write_text(
        "_base_ = ['./small.py']\n"
        "custom_hooks = []\nlr_config = dict(policy='step')\n"
        "default_hooks = dict(_delete_=True, checkpoint=dict(type='CheckpointHook', by_epoch=False))\n"
    )
    result = run('train.py bare.py --work-dir bare', code=0)
    assert 'keys of mmdet 2, which mmdet 3 does not read, so they change nothing: lr_config is now' in result.out
    assert not (world / 'bare' / 'fused.pth').exists()
    log = next((world / 'bare').glob('*/*.log')).read_text()
    for hook in ('ProgressiveNormHook', 'RecalibrateFuseHook'):
        assert log.count(f'this run has no {hook}') == 1, log[-3000:]
    # The same config, with a loss of NaN.
    result = run('train.py bare.py --work-dir nan --cfg-options optim_wrapper.optimizer.lr=1e30')
    assert re.match(r'error: iteration \d: the loss is not finite \(', result.err.splitlines()[-1]), result.err
