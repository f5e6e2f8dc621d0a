"""The whole way on generated images: train, recalibrate, fuse, test, measure, report. No GPU, no download.

Runs the commands that you would type, and prints each of them first.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
CONFIGS = TOOLS.parent / 'configs'


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--work-dir', default='work_dirs/quickstart', help='(default %(default)s)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='for the training')
    return parser.parse_args()


def call(tool: str, *arguments: object) -> None:
    """Runs one tool as a user would and stops the quick start with its exit code if it fails."""
    command = ['python', relative(TOOLS / tool), *map(str, arguments)]
    print(f'\n$ {shlex.join(command)}', flush=True)
    code = subprocess.run([sys.executable, *command[1:]], check=False).returncode
    if code:
        raise SystemExit(code)


def relative(path: Path) -> str:
    """The path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> None:
    args = parse_arguments()
    start = time.monotonic()
    work_dir = Path(args.work_dir)
    config = relative(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    layer_norm_twin = relative(CONFIGS / 'quickstart_mask_rcnn_swin.py')
    options = ['--cfg-options', *args.cfg_options] if args.cfg_options else []

    call('train.py', config, '--work-dir', work_dir, *options)
    checkpoint = (work_dir / 'last_checkpoint').read_text().strip()
    fused = (work_dir / 'fused_config.py', work_dir / 'fused.pth')
    for model in ((config, checkpoint), fused):
        call(
            'test.py',
            *model,
            # A folder of its own: the runner dumps its config there, which must not replace fused_config.py.
            *('--work-dir', work_dir / 'test', '--report', work_dir / 'report.json'),
            *('--latency', '--show-dir', 'predictions'),
        )
    # Side by side in one process. The twin is not trained: it would find nothing, so heads are left out.
    latency = work_dir / 'latency.json'
    call(
        'latency.py',
        *(layer_norm_twin, config, fused[0]),
        *('--checkpoint', 'none', checkpoint, fused[1]),
        # The images' own size.
        *('--scope', 'backbone+neck', '--size', 160, 192, '--json', latency),
    )
    # The last file wins: the table shows the latencies measured side by side.
    call('report.py', work_dir / 'report.json', latency, '--out', work_dir)
    pictures = sorted(work_dir.glob('test/*/predictions/*'))
    print(f'\nPicture:     {work_dir / "ap_latency.png"}')
    print('Predictions: ' + ', '.join(map(str, pictures[-3:])))
    print(f'Took {(time.monotonic() - start) / 60:.1f} minutes.')


if __name__ == '__main__':
    main()
