"""AP of detectors in int8: by ONNX Runtime's quantizer, which slab-det export takes, and by NNCF.

    python benchmarks/int8.py bccd --data-root data/bccd --detector LayerNorm CONFIG CHECKPOINT \\
        --detector absorbed work_dirs/absorb/fused_config.py work_dirs/absorb/fused.pth

Both are calibrated on the same 100 training images and leave the same layers in float32. NNCF (pip install nncf) works
by its preset for transformers, with smooth quantization. Added to benchmarks/results/int8.json.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from benchmarks.absorb.run import CONFIGS, ROOT
from slab_det.cli import read_config
from slab_det.data import set_data_root
from slab_det.deployment.export import quantize_onnx
from slab_det.deployment.export.quantize import FLOAT_LAYERS
from slab_det.deployment.export.runtime import ExportedDetector
from slab_det.measure.agreement import LOSS, agreement, detect
from slab_det.recalibration.images import recalibration_dataloader

FORMS = {
    'float32': ('float', 'onnxruntime'),
    'int8': ('int8', 'onnxruntime'),
    'int8 in OpenVINO': ('int8', 'openvino'),
    'NNCF': ('nncf', 'onnxruntime'),
    'NNCF in OpenVINO': ('nncf', 'openvino'),
    'NNCF, controlled': ('controlled', 'onnxruntime'),
}
# AP that the control may cost by the agreement of the int8 detections with those of the float ones.
MAX_LOSS = 0.003


def quantize_by_nncf(source: Path, target: Path, batches: list, control: list | None = None) -> None:
    """As :func:`slab_det.deployment.export.quantize_onnx`, by NNCF.

    With ``control``, batches too, layers go back to float32 one by one until the detections on them agree.
    """
    import nncf
    from nncf.quantization.advanced_parameters import (
        AdvancedAccuracyRestorerParameters,
        AdvancedQuantizationParameters,
        AdvancedSmoothQuantParameters,
    )

    # Without weights that the graph still computes, whose names NNCF does not find.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, 'prepared.onnx'))
        onnxruntime.InferenceSession(str(source), options, providers=['CPUExecutionProvider'])
        model = onnx.load(options.optimized_model_filepath)
    names = [node.name for node in model.graph.node if any(part in node.name for part in FLOAT_LAYERS)]
    # Statistics before RoIAlign's maps meet fail where a level gets no box.
    pooled = {output for node in model.graph.node if node.op_type == 'RoiAlign' for output in node.output}
    names += [node.name for node in model.graph.node if node.op_type == 'Concat' and pooled.intersection(node.input)]
    properties = {entry.key: entry.value for entry in onnx.load(source).metadata_props}
    images = nncf.Dataset(batches, lambda batch: {'image': image_of(batch)})
    options = dict(
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
        ignored_scope=nncf.IgnoredScope(names=names, types=['RoiAlign'], validate=False),
    )
    advanced = AdvancedQuantizationParameters(smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=0.95))
    if control is None:
        quantized = nncf.quantize(model, images, advanced_parameters=advanced, **options)
    else:
        found = detect(ExportedDetector(str(source)), control)
        reference = {batch['data_samples'][0].img_id: one for batch, one in zip(control, found, strict=True)}

        def validate(candidate: onnx.ModelProto, batches: Iterable) -> tuple[float, list[float]]:
            batches = list(batches)
            wanted = [reference[batch['data_samples'][0].img_id] for batch in batches]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, 'candidate.onnx')
                save(candidate, file, properties)
                found = detect(ExportedDetector(str(file)), batches)
            print(f'agreement {agreement(wanted, found):.4f} on {len(found)} images', flush=True)
            return agreement(wanted, found), [agreement([a], [b]) for a, b in zip(wanted, found, strict=True)]

        quantized = nncf.quantize_with_accuracy_control(
            model,
            images,
            nncf.Dataset(control),
            validate,
            max_drop=(MAX_LOSS / LOSS) ** 0.5,
            advanced_quantization_parameters=advanced,
            advanced_accuracy_restorer_parameters=AdvancedAccuracyRestorerParameters(
                ranking_subset_size=len(control) // 2, num_ranking_workers=1
            ),
            **options,
        )
    save(quantized, target, properties)


def save(model: onnx.ModelProto, path: Path, properties: dict[str, str]) -> None:
    onnx.helper.set_model_props(model, properties)
    onnx.save(model, path)


def image_of(batch: dict) -> np.ndarray:
    return batch['inputs'][0][None].float().numpy()


def call(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT)


def table(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """AP per data set and detector."""
    lines = [f'| | {" | ".join(FORMS)} |', '|---|' + '---:|' * len(FORMS)]
    for dataset, detectors in results.items():
        for name, forms in detectors.items():
            cells = [
                ', '.join(f'{value:.3f}' for value in forms[form].values()) if form in forms else '–' for form in FORMS
            ]
            kinds = ', '.join(next(iter(forms.values()))).replace('bbox', 'box').replace('segm', 'mask')
            lines.append(f'| {dataset}, {name}: {kinds} AP | {" | ".join(cells)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True, metavar='DIR')
    parser.add_argument('--detector', nargs=3, action='append', metavar=('NAME', 'CONFIG', 'CHECKPOINT'), required=True)
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=list(FORMS))
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/int8'))
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/int8.json')
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    cfg = read_config(str(ROOT / CONFIGS[args.dataset]))
    set_data_root(cfg, args.data_root)
    folder = args.work_dir.resolve() / args.dataset
    dataset = cfg.val_dataloader.dataset
    photographs = sorted(Path(dataset.data_root, dataset.data_prefix['img']).resolve().iterdir())[:3]
    for name, config, checkpoint in args.detector:
        cells = results.setdefault(args.dataset, {}).setdefault(name, {})
        files = {kind: folder / name / f'{kind}.onnx' for kind in ('float', 'int8', 'nncf', 'controlled')}
        for form in args.forms:
            kind, runtime = FORMS[form]
            if form in cells:
                continue
            if not files['float'].exists():
                files['float'].parent.mkdir(parents=True, exist_ok=True)
                detector = Path(config).resolve(), Path(checkpoint).resolve()
                call('tools/export_onnx.py', *detector, '--out', files['float'], '--check-images', *photographs)
            if not files[kind].exists():
                # A hundred to calibrate, and fifty others to control.
                batches = list(recalibration_dataloader(cfg, 200, 'test'))
                calibrate, control = batches[::2], batches[1::4]
                if kind == 'int8':
                    quantize_onnx(files['float'], files[kind], [image_of(batch) for batch in calibrate])
                else:
                    control = control if kind == 'controlled' else None
                    quantize_by_nncf(files['float'], files[kind], calibrate, control)
            report = folder / name / 'report.json'
            arguments = ['--data-root', Path(args.data_root).resolve(), '--runtime', runtime, '--json', report]
            arguments += ['--work-dir', folder / 'test']
            call('tools/test_onnx.py', ROOT / CONFIGS[args.dataset], files[kind], *arguments)
            cells[form] = {key: values['AP'] for key, values in json.loads(report.read_text())['ap'].items()}
            args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(table(results))


if __name__ == '__main__':
    main()
