"""AP of trained detectors: in float32, under autocast to bfloat16 and float16, and deployed in float32 and bfloat16.

    python benchmarks/half_precision_ap.py --run 'BCCD, seed 0' WORK_DIR/fused_config.py WORK_DIR/fused.pth data/bccd

Every step is a command of tools/, printed before it runs. Rows and forms of earlier calls stay in the
result file.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from slab_det.measure.environment import describe_environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results' / 'half_precision_ap.json'
FORMS = {
    'float32': [],
    'bfloat16': ['--dtype', 'bfloat16'],
    'float16': ['--dtype', 'float16'],
    'deployed': ['--deploy'],
    'deployed in bfloat16': ['--deploy', '--dtype', 'bfloat16'],
}


def evaluate(config: str, checkpoint: str, data_root: str | None, form: str) -> dict:
    """The report entry that tools/test.py writes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, 'tools/test.py', config, checkpoint, '--work-dir', folder, *FORMS[form]]
        if data_root is not None:
            command += ['--data-root', data_root]
        print('$', shlex.join(command), flush=True)
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, 'report.json').read_text())['entries'][0]


def measure(known: dict, config: str, checkpoint: str, data_root: str | None = None) -> dict:
    """AP in every form that is not ``known`` yet; largest difference to float32 over what averages all categories."""
    entries = {form: evaluate(config, checkpoint, data_root, form) for form in FORMS if form not in known.get('ap', {})}
    ap = known.get('ap', {}) | {form: entry['ap'] for form, entry in entries.items()}
    exact = ap['float32']
    # APs, APm and APl rest on a part of the objects each: listed in the file, but no bound.
    names = [(metric, name) for metric in exact for name in ('AP', 'AP50', 'AP75')]
    difference = {
        form: max(abs(ap[form][metric][name] - exact[metric][name]) for metric, name in names)
        for form in ap
        if form != 'float32'
    }
    first = entries.get('float32')
    described = (
        known
        if first is None
        else dict(
            detector=first['name'],
            attention=first['attention'],
            norm=first['norm'],
            variant=first['variant'],
            images=first['dataset']['images'],
        )
    )
    return described | dict(ap=ap, largest_difference=difference)


def table(rows: dict[str, dict]) -> str:
    """One line per detector and metric."""
    lines = ['| detector | metric | ' + ' | '.join(FORMS) + ' |', '|---|---|' + '---:|' * len(FORMS)]
    for name, row in rows.items():
        for metric in row['ap']['float32']:
            cells = [
                ' / '.join(f'{row["ap"][form][metric][key]:.3f}' for key in ('AP', 'AP50', 'AP75')) for form in FORMS
            ]
            lines.append(f'| {name} ({row["variant"]}) | {metric} AP / 50 / 75 | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--run', nargs='+', action='append', default=[], metavar='NAME CONFIG CHECKPOINT [DATA_ROOT]')
    args = parser.parse_args()
    rows = json.loads(RESULTS.read_text())['results'] if RESULTS.exists() else {}
    for name, *run in args.run:
        rows[name] = measure(rows.get(name, {}), *run)
    RESULTS.write_text(
        json.dumps(
            dict(
                scope='AP of tools/test.py; batch 1; half precision by autocast around forward or by slab_det.deploy',
                environment=describe_environment(),
                results=rows,
            ),
            indent=1,
        )
        + '\n'
    )
    print(f'{table(rows)}\nWritten to {RESULTS}')


if __name__ == '__main__':
    main()
