"""AP of exported detectors in float32 and int8, as slab-det export quantizes them.

    python -m benchmarks.int8 bccd --data-root data/bccd --detector LayerNorm CONFIG CHECKPOINT \\
        --detector absorbed work_dirs/absorb/fused_config.py work_dirs/absorb/fused.pth

The int8 models are calibrated on 100 training images. Rows are added to benchmarks/results/int8.json.
"""

import slab_det  # noqa: F401 (before mmdet: registers everything)

# isort: split

import argparse
import hashlib
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.absorb.run import CONFIGS
from benchmarks.results import FOLDER, ROOT, Results
from slab_det.cli.config import read_config
from slab_det.common.record import format_table
from slab_det.export import quantize_onnx
from slab_det.measure.report_file import read_report
from slab_det.preflight import set_data_root
from slab_det.recalibration.images import recalibration_dataloader

# File and runtime.
FORMS = {
    'float32': ('float', 'onnxruntime'),
    'int8': ('int8', 'onnxruntime'),
    'int8 in OpenVINO': ('int8', 'openvino'),
}


def call(*command: object) -> None:
    """Runs a Python program with its arguments."""
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT)


def table(rows: list[dict]) -> str:
    """AP of each detector, from 0 to 100, box AP before mask AP."""
    lines: dict[str, list[str]] = {}
    forms = [*dict.fromkeys(row['form'] for row in rows)]
    for row in rows:
        ap = {label: f'{100 * row[kind]:.1f}' for kind, label in (('bbox', 'box'), ('segm', 'mask')) if kind in row}
        title = f'{row["name"]}: {", ".join(ap)} AP'
        cells = lines.setdefault(title, [title, *['–'] * len(forms)])
        cells[1 + forms.index(row['form'])] = ', '.join(ap.values())
    return format_table(('', *forms), lines.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True, metavar='DIR')
    parser.add_argument('--detector', nargs=3, action='append', metavar=('NAME', 'CONFIG', 'CHECKPOINT'), required=True)
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/int8'))
    args = parser.parse_args()
    results = Results(FOLDER / 'int8.json')
    cfg = read_config(str(ROOT / CONFIGS[args.dataset]))
    set_data_root(cfg, args.data_root)
    dataset = cfg.val_dataloader.dataset
    photographs = sorted(Path(dataset.data_root, dataset.data_prefix['img']).resolve().iterdir())[:3]

    def measure(folder: Path, detector: list[Path], form: str) -> dict:
        kind, runtime = FORMS[form]
        files = {kind: folder / f'{kind}.onnx' for kind in ('float', 'int8')}
        if not files['float'].exists():
            folder.mkdir(parents=True, exist_ok=True)
            call('tools/export_onnx.py', *detector, '--out', files['float'], '--check-images', *photographs)
        if not files[kind].exists():
            loader = recalibration_dataloader(cfg, 100, 'test')
            images = [batch['inputs'][0][None].float().numpy() for batch in loader]
            quantize_onnx(files['float'], files['int8'], images)
        report = folder / 'report.json'
        arguments = ['--data-root', Path(args.data_root).resolve(), '--runtime', runtime, '--report', report]
        report.unlink(missing_ok=True)
        call('tools/test.py', detector[0], files[kind], *arguments, '--work-dir', folder / 'test')
        (entry,) = read_report(report)
        return {kind: values['AP'] for kind, values in entry.ap.items()}

    for name, *paths in args.detector:
        detector = [Path(path).resolve() for path in paths]
        # Another checkpoint with the same name gets its own folder.
        digest = hashlib.sha256(detector[1].read_bytes()).hexdigest()[:12]
        folder = args.work_dir.resolve() / args.dataset / f'{name}-{digest}'
        for form in FORMS:
            identity = dict(name=f'{args.dataset}, {name}', form=form)
            results.measure_once(identity, partial(measure, folder, detector, form))
    print(table(results.rows))


if __name__ == '__main__':
    main()
