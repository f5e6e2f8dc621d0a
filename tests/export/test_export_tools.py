"""export_onnx.py and test.py with exported files, end to end on generated images."""

import json
import re

import numpy as np
import onnx
import pytest
import torch
from conftest import as_trained, find_objects
from mmdet.registry import MODELS
from mmengine.config import Config

from slab_det import export
from slab_det.cli import export_onnx as export_command
from slab_det.data import SyntheticShapes, generate
from slab_det.export import load_runtime
from slab_det.export.loaded_file import METADATA_KEY
from slab_det.measure.report_file import read_report

CLASSES = [*SyntheticShapes.METAINFO['classes']]


@pytest.fixture
def run(small_run_cfg, tmp_path):
    """Config and checkpoint of a detector as a finished training leaves them."""
    cfg = small_run_cfg(depths=(1, 1, 1, 1))
    cfg.model.test_cfg.rpn.update(nms_pre=60, max_per_img=20)
    model = find_objects(as_trained(MODELS.build(cfg.model)))
    meta = dict(dataset_meta=dict(classes=CLASSES))
    torch.save(dict(meta=meta, state_dict=model.state_dict()), tmp_path / 'last.pth')
    cfg.dump(tmp_path / 'config.py')
    return tmp_path / 'config.py', tmp_path / 'last.pth'


def test_detector_is_exported_quantized_and_evaluated(run, call, tmp_path, monkeypatch):
    # Each size takes seconds.
    monkeypatch.setattr(export_command, 'SIZES', export_command.SIZES[:1])
    out, quantized = tmp_path / 'model.onnx', tmp_path / 'model_int8.onnx'
    outcome = call('export_onnx.py', *run, '--out', out, '--size', 96, 128, '--int8', '--num-images', 2)
    assert outcome.out.count('relative difference') == 2 and '96x128' in outcome.out
    assert out.stat().st_size > quantized.stat().st_size
    metadata, in_int8 = load_runtime(out).metadata, load_runtime(quantized).metadata
    # 7 on a CPU without VNNI.
    assert in_int8.pop('int8_weight_bits') in (7, 8)
    assert metadata == in_int8 and metadata['dataset_meta']['classes'] == CLASSES
    resize = dict(type='Resize', scale=[192, 160], keep_ratio=True)
    assert metadata['image'] == dict(channel_order='BGR', range=[0, 255], resize=resize, size_divisor=1)
    normalization = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
    assert metadata['normalization'].pop('channel_order') == 'RGB'
    assert metadata['normalization'] == {name: pytest.approx(values) for name, values in normalization.items()}
    arguments = ('--work-dir', tmp_path / 'test', '--json', tmp_path / 'ap.json', '--threads', 1)
    # mmdet's configs of single-stage detectors have the preprocessor here.
    cfg = Config.fromfile(run[0])
    cfg.data_preprocessor = cfg.model.pop('data_preprocessor')
    cfg.dump(run[0])
    call('test_onnx.py', run[0], quantized, *arguments)
    result = json.loads((tmp_path / 'ap.json').read_text())
    assert result['ap'].keys() == {'bbox', 'segm'} and result['dataset']['images'] == 4
    assert result['file'].endswith('int8.onnx') and result['runtime'] == 'onnxruntime'
    tested = '--work-dir', tmp_path / 'test', '--report', tmp_path / 'report.json', '--threads', 1
    call('test.py', run[0], quantized, *tested)
    (entry,) = read_report(tmp_path / 'report.json')
    assert entry.ap == result['ap'] and entry.name.endswith('-onnxruntime-int8')
    # The same names in another order: label 0 would be compared with another class.
    model = onnx.load(quantized)
    metadata = load_runtime(quantized).metadata | dict(dataset_meta=dict(classes=CLASSES[::-1]))
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(metadata)})
    onnx.save(model, tmp_path / 'reversed.onnx')
    outcome = call('test.py', run[0], tmp_path / 'reversed.onnx', *tested, code=1)
    message = r"error: test dataset: .* not the 4 of .*reversed\.onnx .* label 0 is 'star' there and 'circle' here"
    assert re.search(message, outcome.err.splitlines()[-1]), outcome.err
    option = 'test_dataloader.dataset.pipeline.1.scale=(96,80)'
    outcome = call('test.py', run[0], out, *tested, '--cfg-options', option, code=1)
    message = r"model.onnx was exported for .*'scale': \[192, 160\].* this config has .*\[96, 80\].*other objects"
    assert re.search(message, outcome.err.splitlines()[-1]), outcome.err
    outcome = call('test_onnx.py', run[0], out, '--json', 'config.py/ap.json', code=1)
    assert 'config.py/ap.json: Not a directory' in outcome.err.splitlines()[-1]
    for options, message in (
        (['--deploy'], 'model.onnx says how its detector runs, as onnxruntime: leave out --deploy'),
        (['--dtype', 'bfloat16'], 'onnxruntime-bfloat16 needs .* onnxruntime does not compute bfloat16 on cpu'),
        (['--runtime', 'openvino', '--dtype', 'float16'], 'openvino does not compute float16 on cpu'),
        (['--dtype', 'float16'], 'model.onnx itself says whether it is in float16: leave out --dtype'),
    ):
        refused = call('test.py', run[0], out, *tested, *options, code=1).err
        assert re.search(message, refused.splitlines()[-1]), refused
    damaged = torch.load(run[1], weights_only=True)
    damaged['state_dict']['roi_head.mask_head.conv_logits.bias'][0] = float('nan')
    torch.save(damaged, tmp_path / 'damaged.pth')
    before = out.read_bytes()
    outcome = call('export_onnx.py', run[0], tmp_path / 'damaged.pth', '--out', out, code=1)
    assert '1 weights are NaN or infinite (roi_head.mask_head.conv_logits.bias)' in outcome.err
    assert out.read_bytes() == before


def test_a_detector_is_exported_and_evaluated_in_float16(run, call, tmp_path, monkeypatch):
    monkeypatch.setattr(export_command, 'SIZES', export_command.SIZES[:1])
    out, report = tmp_path / 'half.onnx', tmp_path / 'report.json'
    printed = call('export_onnx.py', *run, '--out', out, '--dtype', 'float16').out
    assert 'The file in ONNX Runtime, float16, against' in printed and printed.count('relative difference') == 1
    call('test.py', run[0], out, '--work-dir', tmp_path / 'test', '--report', report, '--threads', 1)
    (entry,) = read_report(report)
    assert entry.name.endswith('-onnxruntime-float16') and entry.ap.keys() == {'bbox', 'segm'}


def test_folder_of_the_training_images_calibrates_int8_as_the_config_does(run, call, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(export_command, 'SIZES', export_command.SIZES[:1])
    monkeypatch.setattr(export, 'quantize_onnx', lambda source, target, images, bits: given.append([*images]) or [])
    cfg = Config.fromfile(run[0])
    pictures = generate(**cfg.train_dataloader.dataset.generator) / 'images/train'
    # A config with validation alone.
    cfg.test_dataloader = cfg.test_cfg = cfg.test_evaluator = None
    cfg.dump(tmp_path / 'val.py')
    options = '--scope', 'backbone', '--int8', '--num-images', 2
    call('export_onnx.py', *run, '--out', tmp_path / 'a.onnx', *options)
    call('export_onnx.py', tmp_path / 'val.py', run[1], '--out', tmp_path / 'b.onnx', *options, '--images', pictures)
    assert [image.shape for image in given[0]] == [(1, 3, 160, 192)] * 2
    assert all(map(np.array_equal, *given))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--out', 'model.pth'], 'must end in .onnx'),
        (['--out', 'model.onnx', '--images', 'photos'], 'add --int8'),
        (['--out', 'model.onnx', '--opset', 12], '--opset 12: give 16 to 20'),
        (['--out', 'model.onnx', '--int8', '--dtype', 'float16'], 'leave out --dtype float16'),
        (['--out', 'config.py/model.onnx'], 'config.py/model.onnx: Not a directory'),
        (['--out', 'model.onnx', '--check-images', 'nothing.jpg'], 'nothing.jpg is not a readable image'),
        (['--out', 'model.onnx', '--check-images', __file__], 'test_export_tools.py is not a readable image'),
    ],
)
def test_invalid_arguments_raise_one_line(run, call, options, message):
    outcome = call('export_onnx.py', *run, *options, '--scope', 'backbone', code=1)
    assert message in outcome.err
