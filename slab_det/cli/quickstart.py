"""Trains a LayerNorm detector on generated images, finds its fastest form on this machine, and compares it with a
detector trained with BN+FFNBN. Needs no GPU and no download. Prints every command before running it."""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from slab_det.cli import command, find_folder

# The rows of the table of trainings.
MODELS = ('LayerNorm', 'BN+FFNBN')
# The minutes in which forms are measured.
MINUTES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--work-dir', default='work_dirs/quickstart', help='output folder (default %(default)s)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='set for both trainings')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Trains two detectors and optimizes the first; writes tables and pictures into ``args.work_dir``."""
    from mmdet.registry import DATASETS
    from mmengine.logging import MMLogger
    from mmengine.registry import init_default_scope

    from slab_det.cli.config import read_config
    from slab_det.cli.quickstart_results import compare, draw_objects, measure, predictions_figure
    from slab_det.cli.screen import log_pycocotools
    from slab_det.measure.figure import save_figure
    from slab_det.measure.report_file import update_report

    start = time.monotonic()
    work_dir = Path(args.work_dir)
    ln_dir, optimized = work_dir / 'layernorm', work_dir / 'optimized'
    options = ['--cfg-options', *args.cfg_options] if args.cfg_options else []

    print('A Mask R-CNN with a small Swin, from scratch on generated images: first with LayerNorm, as mmdet has it.')
    print('optimize finds its fastest form on this machine. Then one is trained with BN+FFNBN.')
    print(f'Results go below {work_dir}.', flush=True)
    call('train.py', find_config('quickstart_mask_rcnn_swin.py'), '--work-dir', ln_dir, *options)
    # (config, checkpoint) of each detector.
    trained = (ln_dir / 'quickstart_mask_rcnn_swin.py', Path((ln_dir / 'last_checkpoint').read_text().strip()))
    fused = work_dir / 'fused_config.py', work_dir / 'fused.pth'
    cfg = read_config(str(trained[0]))
    init_default_scope('mmdet')
    pictures = Path(DATASETS.build(cfg.train_dataloader.dataset).get_data_info(0)['img_path']).parent
    search = ('--images', pictures, '--minutes', MINUTES, '--eval')
    call('optimize.py', *trained, '--out', optimized, *search)
    call('train.py', find_config('quickstart_mask_rcnn_bn_ffnbn_swin.py'), '--work-dir', work_dir, *options)

    print(f'\nAP on the validation images, and latency in turns, of both as deployed (log files below {work_dir}):')
    # The table has what each evaluation prints.
    log_pycocotools()
    MMLogger.get_current_instance().setLevel('WARNING')
    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    models, entries = measure(cfg, dataset, dict(zip(MODELS, (trained, fused), strict=True)))
    update_report(work_dir / 'report.json', *entries)
    table = compare(entries)
    (work_dir / 'table.md').write_text(table)
    save_figure(predictions_figure(draw_objects(models, dataset)), work_dir / 'predictions.png')
    print(f'\n{table}')
    print(f'The LayerNorm detector in its fastest form: {optimized}, see its README.md')
    print(f'Tables:   {work_dir}/table.md, {work_dir}/report.json')
    print('Pictures: ' + ', '.join(map(str, sorted([*work_dir.glob('*.png'), *optimized.glob('*.[ps][nv]g')]))))
    print(f'Took {(time.monotonic() - start) / 60:.1f} minutes.')


def call(tool: str, *arguments: object) -> None:
    """Runs a program of tools/ in its own process, and exits with its exit code if it fails."""
    command = ['python', relative(find_folder('tools') / tool), *map(str, arguments)]
    print(f'\n$ {shlex.join(command)}', flush=True)
    done = subprocess.run([sys.executable, *command[1:]], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def relative(path: Path) -> str:
    """Returns the path relative to the current folder, if it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def find_config(name: str) -> str:
    """Returns the path of a config; an installed package keeps its configs in subfolders."""
    return relative(next(find_folder('configs').rglob(name)))


if __name__ == '__main__':
    main()
