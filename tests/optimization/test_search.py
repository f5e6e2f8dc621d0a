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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CONFIGS, build_detector_cfg, find_objects, on_a_full_disk, pretend_machine, randomize
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det import precisions
from slab_det.common import memory
from slab_det.common.errors import ConfigError, DataError, DeploymentError, ExportError, SlabDetError
from slab_det.common.files import locked
from slab_det.common.own_files import OwnFiles
from slab_det.compare.detections import as_detections
from slab_det.data import SyntheticShapes, generate
from slab_det.inference import ServedDetector, forms
from slab_det.inference.folder import OPTIMIZE_JSON, find_stored
from slab_det.inference.forms import BASE
from slab_det.machine import MACHINE
from slab_det.optimization import choice, standing, turns
from slab_det.optimization import images as images_module
from slab_det.optimization import search as module
from slab_det.optimization.evaluation import Evaluation
from slab_det.optimization.records import ROUNDS_FILE, STATE_FILE

FORK = multiprocessing.get_context('fork')
BACKBONE = dict(norm_cfg=dict(type='LN'), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
ORIGINALS = {'eager', 'deployed', 'onnxruntime', 'onnxruntime-int8', 'openvino', 'openvino-int8'}


@pytest.fixture(scope='module', autouse=True)
def _few_rounds_without_bfloat16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        pretend_machine('avx2', patch)
        for name, value in dict(ROUNDS=3, ENGINES=1).items():
            patch.setattr(module, name, value)
        patch.setattr(images_module, 'MOST_FITTED', 5)
        # A tenth of the time; of the memory of forms the tests need nothing exact.
        patch.setattr(memory, 'gc', SimpleNamespace(collect=lambda: 0))
        for user in (module, turns, standing, choice):
            patch.setattr(user, 'SURE_ROUNDS', 2)
        patch.setattr(turns, 'QUARTILE_ROUNDS', 2)
        patch.setattr(turns, 'PAUSE_SECONDS', 0)
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
    model = find_objects(randomize(MODELS.build(cfg.model)))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / 'small.pth')
    return folder


def run(files: Path, out: Path, **options: object) -> module.OptimizationReport:
    options = dict(progress=False, device='cpu') | options
    return slab_det.optimize(files / 'small.py', files / 'small.pth', files / 'data/images/train', out, **options)


@pytest.fixture(scope='module')
def optimized(files: Path) -> Path:
    """The folder of a finished optimization; tests work on copies."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # Whatever is the fastest: an absorbed detector in int8 takes a third of a minute more.
        patch.setattr(module._Search, '_choose_engines', lambda self: [forms.Form('torch')])
        return run(files, files / 'out').folder


@pytest.fixture(scope='module')
def chosen(files: Path, optimized: Path) -> Callable[[str], Path]:
    """A function: a folder that recommends this form, whatever is the fastest."""

    @cache
    def choose(key: str) -> Path:
        shutil.copytree(optimized, files / key)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(standing, 'choose', lambda *_: (key, [key]))
            patch.setattr(module, 'draw_pictures', lambda *_: None)
            patch.setattr(module._Search, '_try_variant', lambda self, engines, variant: None)
            return run(files, files / key).folder

    return choose


def rounds(folder: Path) -> Path:
    """The file with the rounds of the only records of a folder."""
    (path,) = folder.glob(f'work/*/{ROUNDS_FILE}')
    return path


def entries(folder: Path) -> dict[str, dict]:
    return {entry['key']: entry for entry in json.loads((folder / OPTIMIZE_JSON).read_text())['forms']}


def test_every_form_is_measured_and_the_folder_is_complete(optimized: Path) -> None:
    content = json.loads((optimized / OPTIMIZE_JSON).read_text())
    found = entries(optimized)
    assert {*content['failed']} == {'deployed-bfloat16', 'openvino-bfloat16'} and not content['not_measured']
    assert found.keys() > ORIGINALS
    assert {key for key in found if key.endswith('-channels75')} and {key for key in found if key.endswith('-norms')}
    for key, entry in found.items():
        assert entry['rounds'] >= 2 and entry['median_ms'] > 0 and entry['first_s'] > 0 and entry['memory_mb'] >= 0, key
        assert entry['disk_mb'] > 0 and entry['detections'] > 0 and 0 <= entry['retained_ap'], key
        assert entry['quartiles'][0] <= entry['ratio'] <= entry['quartiles'][1], key
    # Fewer channels come before int8, whose calibration is long.
    order = [*json.loads(rounds(optimized).with_name(STATE_FILE).read_text())['forms']]
    variant = next(i for i, key in enumerate(order) if key.endswith('-channels75'))
    assert {*order[:variant]} == {key for key in ORIGINALS if 'int8' not in key} and order[:2] == ['eager', 'deployed']
    # What only rounds differently finds the same.
    for key in ('deployed', 'onnxruntime', 'openvino'):
        assert found[key]['retained_ap'] == pytest.approx(1, abs=2e-3), key
    assert found['eager']['ratio'] == 1 and found['eager']['expected_loss'] == 0
    names = {path.name for path in optimized.iterdir()}
    kept = {name for entry in found.values() for name in entry['files']}
    assert names == kept | {OPTIMIZE_JSON, 'README.md', 'ap_ms.svg', 'objects.png', 'work', '.slab_det_optimize'}
    assert 'original_config.py' in kept and 'original.pth' in kept
    readme = (optimized / 'README.md').read_text()
    assert all(entry['title'] in readme for entry in found.values())
    # The folder may be moved.
    assert "slab_det.load_detector('.')" in readme and str(optimized) not in readme


@pytest.mark.parametrize('key', ['eager', 'deployed', 'onnxruntime', 'variant'])
def test_the_folder_serves_exactly_the_chosen_form(
    key: str, files: Path, optimized: Path, chosen: Callable[[str], Path]
) -> None:
    if key == 'variant':
        key = next(key for key in entries(optimized) if 'channels75' in key)
    folder = chosen(key)
    lines = [json.loads(line) for line in rounds(folder).read_text().splitlines()]
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


def keep_in_float32(monkeypatch: pytest.MonkeyPatch, *runtimes: str) -> None:
    """Leaves the forms of some runtimes in float32 alone."""
    rows = [row for row in forms.TABLE if row.runtime in runtimes and row.precision == 'float32']
    monkeypatch.setattr(forms, 'TABLE', rows)


@pytest.fixture
def two_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and deployed detectors alone, without absorbed ones and pictures."""
    monkeypatch.setattr(module, 'draw_pictures', lambda *_: None)
    keep_in_float32(monkeypatch, 'eager', 'torch')
    monkeypatch.setattr(module._Search, '_try_variant', lambda self, engines, variant: None)


def test_a_form_that_comes_back_gets_the_rounds_of_the_others(
    files: Path, tmp_path: Path, two_forms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_at_first(measured: dict[str, choice.Measured]) -> dict[str, str]:
        is_early = 'deployed' in measured and measured[BASE.key].rounds < module.ROUNDS
        return {'deployed': BASE.key} if is_early else {}

    # More than the original detector has when the deployed one was measured first.
    monkeypatch.setattr(module, 'ROUNDS', 6)
    monkeypatch.setattr(standing, 'find_dropped', drop_at_first)
    report = run(files, tmp_path / 'out')
    assert [entry['rounds'] >= module.ROUNDS for entry in report.content['forms']] == [True, True]


def test_an_interrupted_call_leaves_a_folder_and_goes_on(
    files: Path, tmp_path: Path, two_forms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, count = module.Records.add, 0

    def interrupt(self: module.Records, *args: object) -> None:
        nonlocal count
        if count == 6:
            raise KeyboardInterrupt
        count += 1
        add(self, *args)

    out = tmp_path / 'out'
    monkeypatch.setattr(module.Records, 'add', interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(files, out)
    before = rounds(out).read_text()
    # Three held-out images, two rounds of the original detector, and what both find in an image.
    assert before.count('\n') == 6
    # The original detector was measured, and is served.
    assert {*entries(out)} == {'eager'} and 'objects.png' not in (out / 'README.md').read_text()
    assert slab_det.load_detector(out)(np.full((80, 96, 3), 90, np.uint8))
    monkeypatch.setattr(module.Records, 'add', add)
    made = rounds(out).with_name('original.pth').stat().st_mtime_ns
    run(files, out)
    after = rounds(out).read_text()
    assert after.startswith(before) and entries(out).keys() == {'eager', 'deployed'}
    assert rounds(out).with_name('original.pth').stat().st_mtime_ns == made
    # A finished one has nothing left to do, unless it is about something else.
    monkeypatch.setattr(turns, 'load_detector', None)
    run(files, out, max_loss=0.4)
    assert rounds(out).read_text() == after


def test_no_step_begins_after_the_deadline(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keep_in_float32(monkeypatch, 'eager', 'torch', 'onnxruntime')
    out, loaded, load = tmp_path / 'out', [], turns.Turns._load

    def load_slowly(self: turns.Turns, form: forms.Form) -> None:
        load(self, form)
        loaded.append(form.key)
        if form.runtime == 'torch':
            self.deadline = 0

    monkeypatch.setattr(turns.Turns, '_load', load_slowly)
    report = run(files, out, minutes=1e-6, progress=True)
    assert {*entries(out)} == {'eager'} == {*loaded} and report.content['recommended'] == 'eager'
    assert 'No faster form was found in the time; the same command goes on.' in str(report)
    late = (
        'Not measured in the time: deployed, float32; ONNX Runtime, float32; eager, 75% of the multiply-adds; eager, '
        'no LayerNorm. '
    )
    assert late in (out / 'README.md').read_text()
    assert re.search(r'eager: ready after \d+ s\n  2 rounds with eager: \d+ s\n', capsys.readouterr().out)
    # The deadline passes while a form is loaded: it is measured, and nothing else begins.
    report = run(files, out)
    assert entries(out).keys() == {'eager', 'deployed'} and loaded == ['eager', 'eager', 'deployed']
    assert entries(out)['deployed']['rounds'] == 2 and not [*out.glob('work/*/blocks')]
    assert 'Not measured in the time: ONNX Runtime, float32; ' in str(report)


def test_a_file_that_somebody_removed_is_not_made_after_the_deadline(
    files: Path, chosen: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, exported = tmp_path / 'out', []
    shutil.copytree(chosen('onnxruntime'), folder)
    path = rounds(folder).with_name('original.onnx')
    path.unlink()
    monkeypatch.setattr(standing, 'choose', lambda *_: ('onnxruntime', ['onnxruntime']))
    monkeypatch.setattr(turns.Variants, '_export', lambda self, *_: exported.append(self))
    message = rf'^{path} is missing: put it back, or remove {path.parent} to measure all forms anew$'
    with pytest.raises(SlabDetError, match=message):
        run(files, folder, minutes=1e-6)
    assert not exported
    shutil.copyfile(folder / 'original.onnx', path)
    run(files, folder, minutes=1e-6)


def test_each_step_of_a_form_begins_before_the_deadline_and_is_done_once(
    files: Path, optimized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, now, begun, ready = tmp_path / 'out', 0.0, [], rounds(optimized).parent
    monkeypatch.setattr(forms, 'TABLE', [row for row in forms.TABLE if row.runtime in ('eager', 'onnxruntime')])
    monkeypatch.setattr(module._Search, '_choose_engines', lambda self: [forms.Form('onnxruntime')])
    monkeypatch.setattr(module, 'draw_pictures', lambda *_: None)
    for each in (module, turns):
        monkeypatch.setattr(each, 'time', SimpleNamespace(monotonic=lambda: now))

    def pretend(kind: str, target: Path, *sources: str) -> None:
        """A step of 40 s that copies the files of the finished optimization."""
        nonlocal now
        begun.append((kind, target.name, now))
        for source in sources:
            shutil.copyfile(ready / source, target.with_name(source.replace('channels75', target.stem)))
        shutil.copyfile(ready / f'{"original" if target.suffix == ".onnx" else "channels75"}{kind}', target)
        now += 40

    steps = dict(
        _absorb=lambda self, form, path: pretend('.pth', path, 'channels75_config.py'),
        _export=lambda self, config, checkpoint, path: pretend('.onnx', path),
        _calibrate=lambda self, plain, path: pretend('.int8.onnx', path),
    )
    for name, step in steps.items():
        monkeypatch.setattr(turns.Variants, name, step)
    calls, before = 0, -1
    while len(begun) > before:
        calls, before, start = calls + 1, len(begun), now
        report = run(files, out, minutes=1)
        # The third of a call would begin after 80 s.
        assert all(start <= when < start + 60 for *_, when in begun[before:]), begun
        assert {*report.content['not_measured']} or len(begun) == before
        assert slab_det.load_detector(out)(np.full((80, 96, 3), 90, np.uint8))
    kinds = [(kind, name) for kind, name, _ in begun]
    # The variant without LayerNorms has fewer channels too where these lose no more than they may.
    norms = kinds[-1][1].removesuffix('.onnx')
    assert kinds == [
        ('.onnx', 'original.onnx'),
        ('.pth', 'channels75.pth'),
        ('.onnx', 'channels75.onnx'),
        ('.int8.onnx', 'original.int8.onnx'),
        ('.pth', f'{norms}.pth'),
        ('.onnx', f'{norms}.onnx'),
    ]
    assert norms.endswith('norms') and calls == len(kinds) / 2 + 1
    measured = {'eager', *(f'onnxruntime{part}' for part in ('', '-int8', '-channels75', f'-{norms}'))}
    assert {*entries(out)} == measured


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
        patch.setattr(precisions, 'find_spec', lambda name: None if name == 'onnxruntime' else name)
        with pytest.raises(DeploymentError) as refused:
            slab_det.load_detector(folder)
        assert re.search(
            r'the form onnxruntime needs the package onnxruntime \(pip install .*\); '
            rf"load_detector\('{folder}', form=\.\.\.\) runs here with form='[\w-]+' \(\d\.\d\d of the time",
            str(refused.value),
        ), refused.value
        form = re.search(r"form='([\w-]+)' \(", str(refused.value))[1]
        assert len(slab_det.load_detector(folder, form=form)(np.full((80, 96, 3), 90, np.uint8)).pred_instances) >= 0
    content = json.loads((folder / OPTIMIZE_JSON).read_text())
    (folder / OPTIMIZE_JSON).write_text(json.dumps(content | dict(device='cuda')))
    with pytest.raises(DeploymentError, match='no form of the folder runs here: run slab-det optimize on this machine'):
        slab_det.load_detector(folder, form='deployed')
    (folder / OPTIMIZE_JSON).write_text(json.dumps(content))
    (folder / 'original.onnx').rename(folder / 'elsewhere')
    with pytest.raises(DeploymentError, match='needs the file original.onnx, which is not there; load_detector'):
        slab_det.load_detector(folder)
    (folder / 'elsewhere').rename(folder / 'original.onnx')


def test_options_of_a_folder(chosen: Callable[[str], Path], tmp_path: Path) -> None:
    folder = chosen('onnxruntime')
    assert slab_det.load_detector(folder, threads=1)
    with pytest.raises(ExportError, match='give a whole number from 0 to'):
        slab_det.load_detector(folder, threads=10**6)
    for options in (dict(runtime='openvino'), dict(dtype=torch.bfloat16), dict(device='cpu')):
        with pytest.raises(DeploymentError, match=f'as onnxruntime: leave {[*options][0]}= out'):
            slab_det.load_detector(folder, **options)
    with pytest.raises(DeploymentError, match="no files of a form 'other'; its forms are .*onnxruntime"):
        slab_det.load_detector(folder, form='other')
    with pytest.raises(DeploymentError, match=f'holds no {OPTIMIZE_JSON}'):
        slab_det.load_detector(folder.parent)
    with pytest.raises(ConfigError, match='lacks weights'):
        slab_det.load_detector(folder / 'original_config.py')
    (tmp_path / OPTIMIZE_JSON).write_text('{}')
    with pytest.raises(DeploymentError, match='run it again'):
        slab_det.load_detector(tmp_path)


def test_threads_of_a_folder_are_those_that_the_machine_has(
    chosen: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chosen('onnxruntime')
    content = json.loads((folder / OPTIMIZE_JSON).read_text())
    (folder / OPTIMIZE_JSON).write_text(json.dumps(content | dict(threads=8)))
    monkeypatch.setattr(MACHINE, 'processors', 2)
    image = np.full((80, 96, 3), 90, np.uint8)
    assert find_stored(folder).threads == 2 and slab_det.load_detector(folder)(image) is not None
    # PyTorch's threads are those of the process: they change only if asked.
    torch.set_num_threads(2)
    slab_det.load_detector(folder, form='eager')
    assert torch.get_num_threads() == 2
    slab_det.load_detector(folder, form='eager', threads=1)
    assert torch.get_num_threads() == 1
    slab_det.load_detector(folder, form='eager', threads=None)
    assert torch.get_num_threads() == 1
    with pytest.raises(SlabDetError, match='threads=3: give a whole number from 1 to 2'):
        slab_det.load_detector(folder, form='eager', threads=3)
    (folder / OPTIMIZE_JSON).write_text(json.dumps(content))


def test_what_a_user_may_do_wrong(files: Path, tmp_path: Path, optimized: Path) -> None:
    with pytest.raises(DataError, match='holds no image'):
        (tmp_path / 'empty').mkdir()
        slab_det.optimize(files / 'small.py', files / 'small.pth', tmp_path / 'empty', tmp_path / 'out', progress=False)
    assert not (tmp_path / 'out').exists()
    with pytest.raises(SlabDetError, match='holds files that slab-det optimize did not write; give a new folder'):
        run(files, files)
    with pytest.raises(SlabDetError, match='is a file; give a new folder'):
        run(files, files / 'small.py')
    with pytest.raises(SlabDetError, match='minutes=0 must be above 0'):
        run(files, tmp_path / 'out', minutes=0)
    with pytest.raises(ConfigError, match='there is no such config'):
        slab_det.optimize('none.py', files / 'small.pth', files / 'data', tmp_path / 'out')
    impossible = files / 'small.py' / 'out'
    with pytest.raises(OSError) as refused:
        run(files, impossible)
    assert refused.value.filename == str(impossible)


def test_a_folder_of_somebody_else_stays_as_it_is(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_forms: None
) -> None:
    (tmp_path / 'work').mkdir()
    for name in ('README.md', 'config.py', 'work/state.json', 'work/weights.pth'):
        (tmp_path / name).write_text('mine')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SlabDetError, match='did not write; give a new folder'):
        run(files, Path('.'))
    assert {path.read_text() for path in tmp_path.rglob('*') if path.is_file()} == {'mine'}


@pytest.mark.parametrize('count', [1, 5])
def test_too_few_images_are_refused_before_the_work(files: Path, tmp_path: Path, count: int) -> None:
    with pytest.raises(DataError, match=f'{count} images?, but at least 6 are needed'):
        run(files, tmp_path / 'out', num_images=count)
    assert not (tmp_path / 'out').exists()


def test_a_device_on_which_no_form_runs_is_refused_before_the_work(files: Path, tmp_path: Path) -> None:
    with pytest.raises(SlabDetError, match="^device='meta': no form runs on it; give 'cpu' or 'cuda'$"):
        run(files, tmp_path / 'out', device='meta')
    assert not (tmp_path / 'out').exists()


def test_a_gpu_that_would_not_be_measured_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'find_device', torch.device)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    # Ends the call behind the check.
    monkeypatch.setattr(module, 'list_forms', lambda device: ())
    with pytest.raises(SlabDetError, match="^device='cuda:1' is not .* CUDA_VISIBLE_DEVICES=1$"):
        run(files, tmp_path / 'out', device='cuda:1')
    for device in ('cuda', 'cuda:0'):
        with pytest.raises(SlabDetError, match="^device='cuda': no form runs on it"):
            run(files, tmp_path / 'out', device=device)


def test_six_images_are_enough(files: Path, tmp_path: Path, two_forms: None) -> None:
    report = run(files, tmp_path / 'out', num_images=6)
    assert report.content['images'] == dict(held_out=2, fitted=4, sizes=report.content['images']['sizes'])
    assert {*entries(tmp_path / 'out')} == {'eager', 'deployed'}


def test_two_programs_do_not_work_in_one_folder(files: Path, tmp_path: Path) -> None:
    out = tmp_path / 'out'
    OwnFiles(out, module.COMMAND)
    with locked(out / module.WORK), pytest.raises(SlabDetError, match='another program optimizes into'):
        run(files, out)


def test_each_detector_has_records_of_its_own(files: Path, tmp_path: Path, two_forms: None) -> None:
    out, weights = tmp_path / 'out', torch.load(files / 'small.pth')
    run(files, out)
    before = {path: path.read_bytes() for path in out.glob('work/*/*') if path.is_file()}
    weights['state_dict']['roi_head.bbox_head.fc_cls.bias'] += 0.1
    torch.save(weights, tmp_path / 'other.pth')
    options = dict(progress=False, device='cpu')
    slab_det.optimize(files / 'small.py', tmp_path / 'other.pth', files / 'data/images/train', out, **options)
    assert {path: path.read_bytes() for path in before} == before and len([*(out / 'work').iterdir()]) == 2
    served = slab_det.load_detector(out, form='eager').model.state_dict()['roi_head.bbox_head.fc_cls.bias']
    assert torch.equal(served, weights['state_dict']['roi_head.bbox_head.fc_cls.bias'])


def test_a_later_call_decides_again(
    files: Path, optimized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(optimized, tmp_path / 'out')
    engines = []

    def remember(search: module._Search, forms: list, variant: tuple) -> None:
        # Each further round changes the ratios a little.
        measured, known = search.standing.measured(), search.standing.forms
        ratios = {key: measured[key].ratio for key in measured if key != 'eager' and not known[key].variant}
        engines.append(([form.key for form in forms], ratios))

    monkeypatch.setattr(module, 'draw_pictures', lambda *_: None)
    monkeypatch.setattr(module._Search, '_try_variant', remember)
    report = run(files, tmp_path / 'out', max_loss=0)
    assert report.recommended['loss'] <= 0
    assert {key for keys, _ in engines for key in keys} <= {e['key'] for e in report.content['forms'] if e['loss'] <= 0}
    engines.clear()
    run(files, tmp_path / 'out', max_loss=1000)
    # The channels of int8 and of float32 forms are other ones: the last choice is among all of the original detector.
    keys, ratios = engines[-1]
    assert keys[0] == min(ratios, key=ratios.get)
    assert {*entries(tmp_path / 'out')} == {*entries(optimized)}, 'what was measured stays'


def test_a_detector_that_finds_nothing_is_refused(files: Path, tmp_path: Path) -> None:
    cfg = Config.fromfile(files / 'small.py')
    cfg.model.test_cfg.rcnn.score_thr = 1.0
    with pytest.raises(DataError, match='the detector finds nothing in 3 images .*: give images of its objects'):
        slab_det.optimize(cfg, files / 'small.pth', files / 'data/images/train', tmp_path / 'out', progress=False)


def test_a_full_disk_is_named(files: Path, tmp_path: Path) -> None:
    # Reading a config writes a copy of it, for which the limit is too low too.
    cfg, images = Config.fromfile(files / 'small.py'), files / 'data/images/train'
    message = on_a_full_disk(
        lambda: slab_det.optimize(cfg, files / 'small.pth', images, tmp_path / 'out', device='cpu')
    )
    assert re.fullmatch(rf'{tmp_path}/out/work/[0-9a-f]+/original.pth: File too large', message), message


def test_missing_extras_are_named(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions, 'find_spec', lambda name: None)
    monkeypatch.setattr(module._Search, '_try_variant', lambda self, engines, variant: None)
    # PyTorch computes bfloat16 everywhere, if slowly.
    pretend_machine('avx512', monkeypatch)
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


def test_a_form_that_finds_nothing_has_lost_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([({}, []), (dict(bbox=dict(AP=0.5)), [dict(bbox=dict(AP=0.4))] * 2), ({}, [{}, {}])])
    monkeypatch.setattr('slab_det.optimization.evaluation.evaluate_groups', lambda *_: next(found))
    other = SimpleNamespace(key='other', title='other')
    evaluation = Evaluation(None, SimpleNamespace(save=list), lambda form: None, print)
    with pytest.raises(DataError, match='finds nothing in the validation images'):
        evaluation.measure(BASE)
    evaluation.measure(BASE)
    evaluation.measure(other)
    assert evaluation.losses('other') == (50, 50, 50)


def test_the_commands(files: Path, optimized: Path, tmp_path: Path, call: Callable, two_forms: None) -> None:
    shutil.copytree(optimized, tmp_path / 'out')
    options = ('--images', files / 'data/images/train', '--out', 'out', '--device', 'cpu', '--max-loss', 100)
    message = call('optimize.py', files / 'small.py', files / 'small.pth', *options, '--eval', code=1).err
    assert 'the original detector has an AP of 0 on the validation images' in message
    label_with_detections(files, slab_det.load_detector(optimized, form='eager'))
    printed = call('optimize.py', files / 'small.py', files / 'small.pth', *options, '--eval').out
    content = json.loads(Path('out', OPTIMIZE_JSON).read_text())
    key = content['recommended']
    best = entries(Path('out'))[key]
    assert best['title'] in printed and 'box AP' in printed and "load_detector('out')" in printed
    assert {key for key, entry in entries(Path('out')).items() if entry['ap']} == {'eager', key}
    assert entries(Path('out'))['eager']['ap']['bbox']['AP'] > 0.5
    low, high = best['ap_loss_range']
    assert low <= best['ap_loss'] <= high and f'({0 - high:+.1f} to {0 - low:+.1f} at two standard errors' in printed
    tested = call('test.py', 'out', '--work-dir', 'tested').out
    assert f'| {100 * best["ap"]["bbox"]["AP"]:.1f} / ' in tested
    refused = call('test.py', 'out', '--deploy', code=1).err
    assert f'error: out says how its detector runs, as {key}: leave out --deploy' in refused
