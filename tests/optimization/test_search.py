"""optimize measures a small detector in every form, goes on where it stopped, and its folder serves the chosen form."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONFIGS, build_detector_cfg, on_a_full_disk, randomize
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det.compare.agreement import as_detections
from slab_det.data import SyntheticShapes, generate
from slab_det.inference import ServedDetector, forms
from slab_det.inference.folder import FILE
from slab_det.optimization import budget, choice, turns
from slab_det.optimization import search as module
from slab_det.optimization.records import ROUNDS, STATE
from slab_det.runtime.errors import ConfigError, DataError, DeploymentError, SlabDetError

FORK = multiprocessing.get_context('fork')
BACKBONE = dict(norm_cfg=dict(type='LN'), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
ORIGINALS = {
    *('eager', 'deployed', 'deployed-bfloat16', 'onnxruntime', 'onnxruntime-int8'),
    *('openvino', 'openvino-bfloat16', 'openvino-int8'),
}


@pytest.fixture(scope='module', autouse=True)
def _few_rounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(FIRST_ROUNDS=2, LEAST_ROUNDS=2, ROUNDS=3, FEWEST=5, MOST=5, ENGINES=1).items():
            patch.setattr(module, name, value)
        patch.setattr(turns, 'LEAST_ROUNDS', 2)
        patch.setattr(turns, 'PAUSE_SECONDS', 0)
        patch.setattr(choice, 'SURE_ROUNDS', 2)
        patch.setattr(choice, 'QUARTILE_ROUNDS', 2)
        patch.setattr(module, 'CHANNELS', dict(channels75=forms.CHANNELS['channels75']))
        yield


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small.py, small.pth and images in data/ for a LayerNorm detector that finds objects."""
    folder = tmp_path_factory.mktemp('optimized')
    generate(folder / 'data', num_train=9, num_val=2, size=(96, 80))
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model = build_detector_cfg('faster_rcnn', **BACKBONE)
    cfg.model.roi_head.bbox_head.num_classes = 4
    cfg.model.test_cfg.rcnn.max_per_img = 20
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.num_workers = 0
        loader.persistent_workers = False
        loader.dataset.data_root = str(folder / 'data')
    cfg.val_evaluator.metric = cfg.test_evaluator.metric = 'bbox'
    cfg.dump(folder / 'small.py')
    torch.manual_seed(0)
    meta = dict(dataset_meta=dict(classes=SyntheticShapes.METAINFO['classes']))
    torch.save(dict(state_dict=randomize(MODELS.build(cfg.model)).state_dict(), meta=meta), folder / 'small.pth')
    return folder


def run(files: Path, out: Path, **options: object) -> module.OptimizationReport:
    options = dict(progress=False, device='cpu') | options
    return slab_det.optimize(files / 'small.py', files / 'small.pth', files / 'data/images/train', out, **options)


@pytest.fixture(scope='module')
def optimized(files: Path) -> Path:
    """The folder of a finished optimization; tests work on copies."""
    torch.set_num_threads(1)
    return run(files, files / 'out').folder


@pytest.fixture(scope='module')
def chosen(files: Path, optimized: Path) -> Callable[[str], Path]:
    """A function: a folder that recommends this form, whatever is the fastest."""

    @cache
    def choose(key: str) -> Path:
        shutil.copytree(optimized, files / key)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, 'choose', lambda measured, max_loss: (key, [key]))
            return run(files, files / key).folder

    return choose


def entries(folder: Path) -> dict[str, dict]:
    return {entry['key']: entry for entry in json.loads((folder / FILE).read_text())['forms']}


def test_every_form_is_measured_and_the_folder_is_complete(optimized: Path) -> None:
    content = json.loads((optimized / FILE).read_text())
    found = entries(optimized)
    assert not content['failed'] and not content['late']
    assert found.keys() > ORIGINALS
    assert {key for key in found if key.endswith('-channels75')} and {key for key in found if key.endswith('-norms')}
    for key, entry in found.items():
        assert entry['rounds'] >= 2 and entry['median_ms'] > 0 and entry['first_s'] > 0 and entry['memory_mb'] >= 0, key
        assert entry['disk_mb'] > 0 and entry['detections'] > 0 and 0 <= entry['agreement'] <= 1 + 1e-9, key
        assert entry['quartiles'][0] <= entry['ratio'] <= entry['quartiles'][1], key
    # What only rounds differently finds the same.
    for key in ('deployed', 'onnxruntime', 'openvino'):
        assert found[key]['agreement'] == pytest.approx(1, abs=2e-3), key
    assert found['eager']['ratio'] == 1 and found['eager']['expected_loss'] == 0
    names = {path.name for path in optimized.iterdir()}
    kept = {name for entry in found.values() for name in entry['files']}
    assert names == kept | {FILE, 'README.md', 'agreement_ms.svg', 'objects.png', 'work'}
    assert 'config.py' in kept and 'original.pth' in kept
    readme = (optimized / 'README.md').read_text()
    assert all(entry['title'] in readme for entry in found.values())
    assert f"slab_det.load_detector('{optimized}')" in readme


@pytest.mark.parametrize('key', ['eager', 'deployed', 'onnxruntime', 'variant'])
def test_the_folder_serves_exactly_the_chosen_form(
    key: str, files: Path, optimized: Path, chosen: Callable[[str], Path]
) -> None:
    if key == 'variant':
        key = next(key for key in entries(optimized) if 'channels75' in key)
    folder = chosen(key)
    lines = [json.loads(line) for line in (folder / 'work' / ROUNDS).read_text().splitlines()]
    images = sorted((files / 'data/images/train').iterdir())
    expected = {line['image']: line['found'][key] for line in lines if key in line['found']}
    detector = slab_det.load_detector(folder)
    assert detector.classes == tuple(SyntheticShapes.METAINFO['classes']) and expected
    with ThreadPoolExecutor(2) as pool:
        samples = [*pool.map(detector, [images[i] for i in expected])]
    for sample, values in zip(samples, expected.values(), strict=True):
        found = as_detections(sample)
        assert found.scores.tolist() == values['scores'] and found.regions.tolist() == values['boxes']
    if key == 'variant':
        original = [as_detections(slab_det.load_detector(folder, form='eager')(images[i])) for i in expected]
        assert any(
            one.scores.tolist() != values['scores'] for one, values in zip(original, expected.values(), strict=True)
        )


def test_a_call_that_was_interrupted_goes_on(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = module.Records.add, 0

    def interrupt(self: module.Records, *args: object) -> None:
        nonlocal count
        if count == 3:
            raise KeyboardInterrupt
        count += 1
        add(self, *args)

    out = tmp_path / 'out'
    monkeypatch.setattr(forms, 'ON_CPU', dict(eager=('float32',), torch=('float32',)))
    monkeypatch.setattr(module._Search, '_try_variants', lambda self: None)
    monkeypatch.setattr(module.Records, 'add', interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(files, out)
    assert not (out / FILE).exists()
    before = (out / 'work' / ROUNDS).read_text()
    assert before.count('\n') == 3
    monkeypatch.setattr(module.Records, 'add', add)
    made = (out / 'work' / 'original.pth').stat().st_mtime_ns
    run(files, out)
    after = (out / 'work' / ROUNDS).read_text()
    assert after.startswith(before) and entries(out).keys() >= {'eager', 'deployed'}
    assert (out / 'work' / 'original.pth').stat().st_mtime_ns == made
    # A finished one has nothing left to do, unless it is about something else.
    monkeypatch.setattr(turns, 'load_detector', None)
    run(files, out, max_loss=0.4)
    assert (out / 'work' / ROUNDS).read_text() == after


def test_a_late_call_says_so_and_goes_on(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, 'ON_CPU', dict(eager=('float32',), torch=('float32',)))
    monkeypatch.setattr(module, 'NORMS', {})
    out = tmp_path / 'out'
    report = run(files, out, minutes=1e-6)
    assert {*entries(out)} == {'eager'} and report.content['recommended'] == 'eager'
    assert 'No faster form was found in the time' in str(report)
    late = 'Out of time: deployed, float32 was not measured, which takes about 1 min: give at least --minutes 2; '
    assert late in (out / 'README.md').read_text()
    # Time for the forms of the original detector alone: a step is left out that has no time, and not begun.
    monkeypatch.setattr(budget, 'COSTS', budget.COSTS | dict(absorb=(1e4, 0)))
    report = run(files, out)
    assert ', 75% of the multiply-adds was not measured, which takes about 8' in str(report)
    assert {*entries(out)} == {'eager', 'deployed'} and not [*(out / 'work').glob('*_blocks')]
    # What took long once takes long again; variants wait for all forms of the original detector.
    monkeypatch.setattr(budget.TimeBudget, 'fits', lambda self, seconds: False)
    monkeypatch.setattr(forms, 'ON_CPU', dict(eager=('float32',), torch=('float32', 'bfloat16')))
    state = json.loads((out / 'work' / STATE).read_text())
    assert 0 < state['seconds']['load'] < 60
    (out / 'work' / STATE).write_text(json.dumps(state | dict(seconds=dict(load=1e3, absorb=0.1), engines=[])))
    report = run(files, out)
    assert 'deployed, bfloat16 was not measured, which takes about 17 min; removing channels and norms was' in str(
        report
    )
    assert {*entries(out)} == {'eager', 'deployed'}


def test_a_long_export_takes_no_time_from_other_forms(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files = module.Variants.files

    def take_all_time(self: module.Variants, form: forms.Form) -> tuple[Path, Path]:
        if form.is_exported:
            self.budget.deadline = 0
        return make_files(self, form)

    monkeypatch.setattr(forms, 'ON_CPU', dict(eager=('float32',), onnxruntime=('float32',), torch=('float32',)))
    monkeypatch.setattr(module.Variants, 'files', take_all_time)
    report = run(files, tmp_path / 'out')
    assert {*entries(tmp_path / 'out')} == {'eager', 'deployed'}
    assert 'Out of time: ONNX Runtime, float32 was not measured; ' in str(report)


def test_the_time_for_labels_is_not_part_of_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(budget.time, 'monotonic', lambda: now)
    time = budget.TimeBudget(60, {})
    assert time.fits(60) and not time.fits(61)
    with time.pause():
        now += 1000
    assert time.fits(60) and not time.fits(61)
    time.prediction = 2.0
    assert time.estimate('absorb') == 24
    with time.step('absorb', parts=5):
        now += 50
    assert time.estimate('absorb') == 10 and time.fits(10) and not time.fits(11)


def serve(folder: Path, image: Path, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(2)
    queue.put(slab_det.load_detector(folder)(image).pred_instances.scores.tolist())


def test_a_forked_process_serves_too(files: Path, chosen: Callable[[str], Path]) -> None:
    folder, image = chosen('deployed'), next((files / 'data/images/train').iterdir())
    torch.set_num_threads(2)
    expected = slab_det.load_detector(folder)(image).pred_instances.scores
    queue = FORK.Queue()
    process = FORK.Process(target=serve, args=(folder, image, queue), daemon=True)
    process.start()
    # Without mend_threads it would wait forever.
    assert queue.get(timeout=60) == pytest.approx(expected.tolist(), rel=1e-4)
    process.join(timeout=60)


def test_a_machine_that_lacks_what_the_form_needs_is_refused(
    chosen: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chosen('onnxruntime')
    with monkeypatch.context() as patch:
        patch.setattr(forms, 'find_spec', lambda name: None if name == 'onnxruntime' else name)
        with pytest.raises(DeploymentError) as refused:
            slab_det.load_detector(folder)
        assert re.search(
            r'the form onnxruntime needs the package onnxruntime \(pip install .*\); '
            rf"load_detector\('{folder}', form=\.\.\.\) runs here with form='[\w-]+' \(\d\.\d\d of the time",
            str(refused.value),
        ), refused.value
        form = re.search(r"form='([\w-]+)' \(", str(refused.value))[1]
        assert len(slab_det.load_detector(folder, form=form)(np.full((80, 96, 3), 90, np.uint8)).pred_instances) >= 0
    content = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(content | dict(device='cuda')))
    with pytest.raises(DeploymentError, match='no form of the folder runs here: run slab-det optimize on this machine'):
        slab_det.load_detector(folder, form='deployed')
    (folder / FILE).write_text(json.dumps(content))
    (folder / 'original.onnx').rename(folder / 'elsewhere')
    with pytest.raises(DeploymentError, match='needs the file original.onnx, which is not there; load_detector'):
        slab_det.load_detector(folder)
    (folder / 'elsewhere').rename(folder / 'original.onnx')


def test_options_of_a_folder(chosen: Callable[[str], Path], tmp_path: Path) -> None:
    folder = chosen('onnxruntime')
    assert slab_det.load_detector(folder, threads=1)
    for options in (dict(runtime='openvino'), dict(dtype=torch.bfloat16), dict(device='cpu')):
        with pytest.raises(DeploymentError, match=f'as onnxruntime: leave {[*options][0]}= out'):
            slab_det.load_detector(folder, **options)
    with pytest.raises(DeploymentError, match="no files of a form 'other'; its forms are .*onnxruntime"):
        slab_det.load_detector(folder, form='other')
    with pytest.raises(DeploymentError, match=f'holds no {FILE}'):
        slab_det.load_detector(folder.parent)
    with pytest.raises(ConfigError, match='lacks weights'):
        slab_det.load_detector(folder / 'config.py')
    (tmp_path / FILE).write_text('{}')
    with pytest.raises(DeploymentError, match='run it again'):
        slab_det.load_detector(tmp_path)


def test_what_a_user_may_do_wrong(files: Path, tmp_path: Path, optimized: Path) -> None:
    with pytest.raises(DataError, match='holds no image'):
        (tmp_path / 'empty').mkdir()
        slab_det.optimize(files / 'small.py', files / 'small.pth', tmp_path / 'empty', tmp_path / 'out', progress=False)
    assert not (tmp_path / 'out').exists()
    with pytest.raises(SlabDetError, match='holds files of something else; give a new folder'):
        run(files, files)
    with pytest.raises(SlabDetError, match='is a file; give a new folder'):
        run(files, files / 'small.py')
    with pytest.raises(SlabDetError, match='minutes=0 must be above 0'):
        run(files, tmp_path / 'out', minutes=0)
    with pytest.raises(ConfigError, match='there is no such config'):
        slab_det.optimize('none.py', files / 'small.pth', files / 'data', tmp_path / 'out')


def test_a_detector_that_finds_nothing_is_refused(files: Path, tmp_path: Path) -> None:
    cfg = Config.fromfile(files / 'small.py')
    cfg.model.test_cfg.rcnn.score_thr = 1.0
    with pytest.raises(DataError, match='the detector finds nothing in 3 images, .*: give images of its objects'):
        slab_det.optimize(cfg, files / 'small.pth', files / 'data/images/train', tmp_path / 'out', progress=False)


def test_a_full_disk_is_named(files: Path, tmp_path: Path) -> None:
    # Reading a config writes a copy of it, for which the limit is too low too.
    cfg, images = Config.fromfile(files / 'small.py'), files / 'data/images/train'
    message = on_a_full_disk(
        lambda: slab_det.optimize(cfg, files / 'small.pth', images, tmp_path / 'out', device='cpu')
    )
    assert message == f'{tmp_path}/out/work/original.pth: File too large'


def test_missing_extras_are_named(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, 'find_spec', lambda name: None)
    monkeypatch.setattr(module._Search, '_try_variants', lambda self: None)
    report = run(files, tmp_path / 'out')
    assert report.content['failed']['openvino-int8'].startswith('needs the packages onnx and openvino (pip install')
    assert 'pip install' in str(report) and {*entries(report.folder)} >= {'eager', 'deployed', 'deployed-bfloat16'}


def label_with_detections(files: Path, detector: ServedDetector) -> None:
    """Makes the validation set's objects what a detector finds, so that its AP is above 0."""
    path = next((files / 'data').rglob('instances_val.json'))
    labels = json.loads(path.read_text())
    labels['annotations'] = []
    for image in labels['images']:
        found = as_detections(detector(next((files / 'data').rglob(f'val/{Path(image["file_name"]).name}'))))
        for (x, y, w, h), label in zip(found.regions[:10].tolist(), found.labels.tolist(), strict=False):
            corners = [x, y, x + w, y, x + w, y + h, x, y + h]
            number, category = len(labels['annotations']) + 1, labels['categories'][label]['id']
            box = dict(bbox=[x, y, w, h], area=w * h, segmentation=[corners], iscrowd=0)
            labels['annotations'].append(dict(box, id=number, image_id=image['id'], category_id=category))
    path.write_text(json.dumps(labels))


def test_the_commands(files: Path, optimized: Path, tmp_path: Path, call: Callable) -> None:
    shutil.copytree(optimized, tmp_path / 'out')
    options = ('--images', files / 'data/images/train', '--out', 'out', '--device', 'cpu', '--max-loss', 100)
    message = call('optimize.py', files / 'small.py', files / 'small.pth', *options, '--eval', code=1).err
    assert 'the original detector has an AP of 0 on the validation images' in message
    label_with_detections(files, slab_det.load_detector(optimized, form='eager'))
    printed = call('optimize.py', files / 'small.py', files / 'small.pth', *options, '--eval').out
    content = json.loads(Path('out', FILE).read_text())
    key = content['recommended']
    best = entries(Path('out'))[key]
    assert best['title'] in printed and 'box AP' in printed and "load_detector('out')" in printed
    assert {key for key, entry in entries(Path('out')).items() if entry['ap']} == {'eager', key}
    assert entries(Path('out'))['eager']['ap']['bbox']['AP'] > 0.5
    tested = call('test.py', 'out', '--work-dir', 'tested').out
    assert f'| {100 * best["ap"]["bbox"]["AP"]:.1f} / ' in tested
    refused = call('test.py', 'out', '--deploy', code=1).err
    assert f'error: out says how its detector runs, as {key}: leave out --deploy' in refused
