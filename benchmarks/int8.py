"""AP of detectors in int8: by ONNX Runtime's quantizer, which slab-det export takes, and by NNCF.

    python -m benchmarks.int8 bccd --data-root data/bccd --detector LayerNorm CONFIG CHECKPOINT \\
        --detector absorbed work_dirs/absorb/fused_config.py work_dirs/absorb/fused.pth

Both are calibrated on the same 100 training images and leave the same layers in float32. NNCF (pip install nncf) works
by its preset for transformers, with smooth quantization. Added to benchmarks/results/int8.json.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from benchmarks.absorb.run import CONFIGS, ROOT
from slab_det.cli.config import read_config
from slab_det.data import set_data_root
from slab_det.deployment.export import quantize_onnx
from slab_det.deployment.export.quantize import FLOAT_LAYERS, fold_constants
from slab_det.recalibration.images import recalibration_dataloader

FORMS = {
    'float32': ('float', 'onnxruntime'),
    'int8': ('int8', 'onnxruntime'),
    'int8 in OpenVINO': ('int8', 'openvino'),
    'NNCF': ('nncf', 'onnxruntime'),
    'NNCF in OpenVINO': ('nncf', 'openvino'),
}


def quantize_by_nncf(source: Path, target: Path, images: list[np.ndarray]) -> None:
    """As :func:`slab_det.deployment.export.quantize_onnx`, by NNCF."""
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, AdvancedSmoothQuantParameters

    # NNCF does not find the names of weights that the graph computes.
    with tempfile.TemporaryDirectory() as folder:
        fold_constants(source, Path(folder, 'prepared.onnx'))
        model = onnx.load(Path(folder, 'prepared.onnx'))
    names = [node.name for node in model.graph.node if any(part in node.name for part in FLOAT_LAYERS)]
    # Statistics before RoIAlign's maps meet fail where a level gets no box.
    pooled = {output for node in model.graph.node if node.op_type == 'RoiAlign' for output in node.output}
    names += [node.name for node in model.graph.node if node.op_type == 'Concat' and pooled.intersection(node.input)]
    quantized = nncf.quantize(
        model,
        nncf.Dataset(images, lambda image: {'image': image}),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(images),
        ignored_scope=nncf.IgnoredScope(names=names, types=['RoiAlign'], validate=False),
        advanced_parameters=AdvancedQuantizationParameters(
            smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=0.95)
        ),
    )
    properties = onnx.load(source).metadata_props
    onnx.helper.set_model_props(quantized, {entry.key: entry.value for entry in properties})
    onnx.save(quantized, target)


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
        # Another checkpoint of this name has other files.
        digest = hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest()[:12]
        files = {kind: folder / f'{name}-{digest}' / f'{kind}.onnx' for kind in ('float', 'int8', 'nncf')}
        for form in args.forms:
            kind, runtime = FORMS[form]
            if form in cells:
                continue
            if not files['float'].exists():
                files['float'].parent.mkdir(parents=True, exist_ok=True)
                detector = Path(config).resolve(), Path(checkpoint).resolve()
                call('tools/export_onnx.py', *detector, '--out', files['float'], '--check-images', *photographs)
            if not files[kind].exists():
                loader = recalibration_dataloader(cfg, 100, 'test')
                images = [batch['inputs'][0][None].float().numpy() for batch in loader]
                (quantize_onnx if kind == 'int8' else quantize_by_nncf)(files['float'], files[kind], images)
            report = files[kind].with_name('report.json')
            arguments = ['--data-root', Path(args.data_root).resolve(), '--runtime', runtime, '--json', report]
            arguments += ['--work-dir', folder / 'test']
            call('tools/test_onnx.py', ROOT / CONFIGS[args.dataset], files[kind], *arguments)
            cells[form] = {key: values['AP'] for key, values in json.loads(report.read_text())['ap'].items()}
            args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(table(results))


if __name__ == '__main__':
    main()
