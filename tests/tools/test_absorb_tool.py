"""tools/absorb.py as a user calls it, on a small LayerNorm detector and generated images."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, find_objects, layer_norms, randomize
from mmdet.registry import MODELS
from mmengine.config import Config

from slab_det.absorption.absorption import LEAST_RETAINED_AP
from slab_det.checkpoints import build_detector
from slab_det.compare.detections import detect
from slab_det.compare.ruler import retained_ap
from slab_det.data import SyntheticShapes, generate
from slab_det.recalibration import image_folder_dataloader

BACKBONE = dict(norm_cfg=dict(type='LN'), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
NORMS = 1 + 2 * 4 + 3 + 4
QUICK = ('--num-images', 5)
STAY = ['backbone.norm0', 'backbone.norm3']


@pytest.fixture
def detector(tmp_path: Path, small_detector_cfg: Callable[..., Config]) -> Path:
    """small.pth, beside its config small.py and images in data/."""
    generate(tmp_path / 'data', num_train=5, num_val=2, size=(96, 80))
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model = small_detector_cfg('faster_rcnn', **BACKBONE)
    cfg.model.roi_head.bbox_head.num_classes = 4
    # Enough for some to be found again in the mirrored image.
    cfg.model.test_cfg.rcnn.max_per_img = 100
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        for step in loader.dataset.pipeline:
            if step.type == 'Resize':
                step.scale = (96, 80)
        loader.num_workers = 0
        loader.persistent_workers = False
    cfg.val_evaluator.metric = cfg.test_evaluator.metric = 'bbox'
    cfg.dump(tmp_path / 'small.py')
    model = find_objects(randomize(MODELS.build(cfg.model)))
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'small.pth')
    return name_classes(tmp_path / 'small.pth', ('a', 'b', 'c', 'd'))


def name_classes(checkpoint: Path, classes: tuple[str, ...]) -> Path:
    """Writes class names into a checkpoint."""
    torch.save({**torch.load(checkpoint), 'meta': dict(dataset_meta=dict(classes=classes))}, checkpoint)
    return checkpoint


def test_a_detector_is_absorbed_and_measured_beside_its_teacher(detector: Path, call, tmp_path: Path) -> None:
    options = ('--channels', 1, '--norms', *STAY, '--eval', '--json', 'report.json')
    command = ('absorb.py', 'small.py', detector, '--data-root', 'data', '--out', 'fused.pth', *options, *QUICK)
    # AP would be about other names than the detector's.
    refused = call(*command, code=1).err.splitlines()[-1]
    assert re.search(r'error: val dataset: .*\(circle, .*\) are not the 4 of .*small\.pth \(a, b, c, d\)', refused), (
        refused
    )
    assert not Path('fused.pth').exists()
    name_classes(detector, SyntheticShapes.METAINFO['classes'])
    result = call(*command)
    rows = re.findall(r'^\| ([^|]+) \| (\d+) \| ([\d.]+)% \| ([\d.]+) \|$', result.out, re.MULTILINE)
    assert [row[:2] for row in rows] == [('teacher', str(NORMS)), ('student', '2')], result.out
    assert float(rows[0][2]) == 100
    assert f'{NORMS - 2} LayerNorms absorbed, 2 kept' in result.out
    assert 'AP retained, by' in result.out and 'fused.pth' in result.out
    tune = Config.fromfile(re.search(r'slab-det train (\S+)', result.out)[1])
    assert tune.model.type == 'mmdet.DistilledDetector' and Path(tune.load_from) == Path('fused.pth').resolve()

    student, teacher = (
        build_detector(Config.fromfile(f'{name}.py'), f'{weights}.pth')
        for name, weights in (('fused_config', 'fused'), ('small', 'small'))
    )
    report = json.loads(Path('report.json').read_text())
    kept = [norm['norm'] for norm in report['norms'] if norm['outcome'] == 'kept']
    assert layer_norms(student) == kept == STAY
    assert all(norm['reason'] for norm in report['norms'] if norm['outcome'] == 'kept')
    assert student.dataset_meta == dict(classes=SyntheticShapes.METAINFO['classes'])
    loader = image_folder_dataloader(Config.fromfile('small.py'), 'data/images/train', 5)
    held_out = [*loader][4::5]
    parts = detect(teacher, held_out, mirrored=True), *(detect(model, held_out) for model in (teacher, student))
    value = retained_ap(*parts).value
    assert [row['retained_ap'] for row in report['rows'].values()] == [1.0, pytest.approx(value, abs=1e-3)]
    assert all(row['ap'].keys() == {'bbox'} for row in report['rows'].values())


def test_a_student_is_written_before_it_is_measured(detector: Path, call, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(*args: object) -> None:
        raise RuntimeError('interrupted')

    name_classes(detector, SyntheticShapes.METAINFO['classes'])
    monkeypatch.setattr('slab_det.measure.evaluate.evaluate', evaluate)
    options = ('--out', 'fused.pth', '--channels', 1, '--norms', 'remove', '--eval', *QUICK)
    with pytest.raises(RuntimeError, match='interrupted'):
        call('absorb.py', 'small.py', detector, '--data-root', 'data', *options)
    assert all(Path(name).exists() for name in ('fused.pth', 'fused_config.py', 'fused_tune_config.py'))


def test_a_folder_of_pictures_is_enough(detector: Path, call) -> None:
    shutil.move('data/images/train', 'pictures')
    shutil.rmtree('data')
    # As mmdet 2 stored class names.
    torch.save({**torch.load(detector), 'meta': dict(CLASSES=('a', 'b', 'c', 'd'))}, detector)
    cfg = Config.fromfile('small.py')
    # A config for inference only: no training settings, and hooks that count epochs.
    for key in ('train_cfg', 'train_dataloader', 'val_cfg', 'val_dataloader', 'val_evaluator', 'param_scheduler'):
        cfg.pop(key)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1)
    cfg.log_processor = dict(type='LogProcessor', by_epoch=True)
    cfg.dump('deployed.py')
    command = ('absorb.py', 'deployed.py', detector, '--images', 'pictures', '--out', 'fused.pth', *QUICK)
    command += ('--channels', 1, '--norms', *STAY, '--work-dir', 'work')
    result = call(*command)
    student = build_detector(Config.fromfile('fused_config.py'), 'fused.pth')
    assert layer_norms(student) == STAY
    assert 'on pictures: slab-det train ' in result.out
    tune, losses = run_printed_command(result.out, call)
    assert {'loss_features', 'loss_dense', 'loss_roi'} < losses and not any('rpn' in name for name in losses)
    last = build_detector(Config.fromfile('fused_config.py'), 'tuned/iter_2.pth')
    assert last.dataset_meta == student.dataset_meta == dict(classes=('a', 'b', 'c', 'd'))
    weights = (model.backbone.stages[0].blocks[0].ffn.layers[0][0].weight for model in (last, student))
    assert not torch.equal(*weights)
    finished = {*Path('work').iterdir()}
    assert finished, 'the work dir has blocks to resume from'
    moved = shutil.move('pictures', 'moved')
    result = call('train.py', tune, '--work-dir', 'again', code=1)
    assert 'pictures is not a folder' in result.err.splitlines()[-1], result.err
    shutil.move(moved, 'pictures')
    call(*command, '--int8')
    assert {*Path('work').iterdir()} > finished, 'an int8 student has its own files'


def run_printed_command(printed: str, call) -> tuple[str, set[str]]:
    """Runs two iterations of the only command that absorb offers; returns its config and the names of its losses."""
    ((command, tune),) = re.findall(r'slab-det (\S+) (\S+)', printed)
    schedule = ('train_cfg.max_iters=2', 'train_dataloader.batch_size=2', 'train_dataloader.num_workers=0')
    schedule += (
        'train_dataloader.persistent_workers=False',
        'default_hooks.checkpoint.interval=2',
        'default_hooks.logger.interval=1',
    )
    call(f'{command}.py', tune, '--work-dir', 'tuned', '--cfg-options', *schedule)
    losses = json.loads(next(Path('tuned').glob('*/vis_data/scalars.json')).read_text().splitlines()[0])
    return tune, {key for key in losses if key.startswith('loss_')}


def test_by_default_channels_go_while_drafts_retain_the_ap(detector: Path, call) -> None:
    # The checkpoint has weights alone, so the class names come from the config.
    torch.save(torch.load(detector)['state_dict'], detector)
    result = call('absorb.py', 'small.py', detector, '--data-root', 'data', '--out', 'pruned.pth', *QUICK)
    tried = re.findall(
        r'^(0.\d+) of the multiply-adds left: ([\d.]+)% of the AP retained in a draft$', result.out, re.MULTILINE
    )
    assert tried and f'0 LayerNorms absorbed, {NORMS} kept' in result.out
    left = [float(share) for share, value in tried if float(value) >= 100 * LEAST_RETAINED_AP]
    if left:
        # Whole groups of channels go, so that less than the share may be left.
        (share,) = re.search(r'AP retained, .* images: [\d.]+%; (?s:.*)million left, (\d+)%', result.out).groups()
        assert int(share) / 100 <= min(left), result.out
    else:
        assert 'no hidden channel was removed' in result.out + result.err
    pruned = build_detector(Config.fromfile('pruned_config.py'), 'pruned.pth')
    assert len(layer_norms(pruned)) == NORMS and pruned.dataset_meta['classes'] == SyntheticShapes.METAINFO['classes']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('--images', 'empty'), 'empty holds no image'),
        (('--images', 'nowhere'), 'nowhere is not a folder'),
        (('--images', 'data', '--pipeline', 'train'), 'needs the annotations'),
        (('--data-root', 'data', '--norms', 'backbone.norm9'), 'norms: backbone.norm9 cannot be absorbed; these can'),
        (('--data-root', 'data', '--channels', 'half'), "channels='half': give the share of multiply-adds"),
        (('--images', 'data', '--channels', '1'), "channels=1 and norms='keep' leave nothing to absorb"),
        (('--images', 'broken'), 'broken: 2 of 2 images cannot be used; the first: broken/0.jpg cannot be read'),
        (('--data-root', 'data', '--norms', 'remove', 'backbone.norm0'), 'norms: remove '),
        (('--out', 'small.pth'), 'the input checkpoint'),
        # Output paths are checked before the images are read, which would fail too.
        (('--images', 'nowhere', '--out', 'small.py/fused.pth'), 'small.py/fused.pth: Not a directory'),
        (('--images', 'nowhere', '--json', 'small.py/report.json'), 'small.py/report.json: Not a directory'),
    ],
)
def test_errors_are_one_line(arguments: tuple, message: str, detector: Path, call) -> None:
    Path('empty').mkdir()
    Path('broken').mkdir()
    for index in range(2):
        Path(f'broken/{index}.jpg').write_bytes(b'no JPEG')
    result = call('absorb.py', 'small.py', detector, '--out', 'fused.pth', *arguments, code=1)
    assert message in result.err.splitlines()[-1], result.err
    assert result.err.splitlines()[-1].startswith('error: ')
    assert not Path('fused.pth').exists()


def test_a_share_of_the_multiply_adds_is_left_and_norms_stay(detector: Path, call) -> None:
    options = ('--channels', 0.5, '--data-root', 'data', '--json', 'report.json', *QUICK)
    result = call('absorb.py', 'small.py', detector, '--out', 'pruned.pth', *options)
    before, after = json.loads(Path('report.json').read_text())['multiply_adds']
    assert 0.4 < after / before <= 0.5
    assert f'{after / 1e6:.1f} of {before / 1e6:.1f} million left, {after / before:.0%}' in result.out
    pruned = build_detector(Config.fromfile('pruned_config.py'), 'pruned.pth')
    assert len(layer_norms(pruned)) == NORMS
    assert sum(map(torch.numel, pruned.parameters())) < sum(map(torch.numel, build(detector).parameters()))
    channels = [len(model.neck.fpn_convs[0].conv.weight) for model in (pruned, build(detector))]
    assert channels[0] < channels[1]
    assert run_printed_command(result.out, call)[1] > {'loss_dense', 'loss_roi', 'loss_rpn_cls', 'loss_bbox'}


def build(checkpoint: Path):
    return build_detector(Config.fromfile('small.py'), str(checkpoint))


def test_a_broken_picture_is_named_and_the_others_are_absorbed_on(detector: Path, call) -> None:
    picture = next(Path('data/images/train').iterdir())
    broken = picture.with_name('broken.jpg')
    broken.write_bytes(picture.read_bytes()[:50])
    options = ('--images', 'data/images/train', '--channels', 0.9, '--num-images', 6, '--json', 'report.json')
    result = call('absorb.py', 'small.py', detector, '--out', 'fused.pth', *options)
    assert '1 of 6 images cannot be used and are left out' in result.out + result.err
    assert f'{broken} cannot be read' in result.out + result.err
    assert json.loads(Path('report.json').read_text())['num_images'] == 1, 'one of the five is held out'
