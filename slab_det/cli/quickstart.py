"""Trains a LayerNorm and a BN+FFNBN detector on generated images, removes norms and hidden channels from both, and
compares AP and latency. Needs no GPU and no download. Prints every command before running it."""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from slab_det.cli import command, find_folder

# The rows of the table. Absorbed: without most norms and channels; pruned: without most channels.
MODELS = ('LayerNorm', 'LayerNorm absorbed', 'BN+FFNBN', 'BN+FFNBN pruned')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--work-dir', default='work_dirs/quickstart', help='output folder (default %(default)s)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='set for both trainings')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Trains two detectors, absorbs both, and writes the comparison of all four into ``args.work_dir``."""
    from mmdet.registry import DATASETS
    from mmengine.logging import MMLogger
    from mmengine.registry import init_default_scope

    from slab_det.cli.config import read_config
    from slab_det.cli.quickstart_results import compare, draw_objects, measure, objects_figure
    from slab_det.cli.screen import log_pycocotools
    from slab_det.measure.figure import ap_latency_figure, save_figure
    from slab_det.measure.report_file import update_report

    start = time.monotonic()
    work_dir = Path(args.work_dir)
    ln_dir = work_dir / 'layernorm'
    # (config, checkpoint) of each detector.
    absorbed, fused, pruned = (
        (work_dir / f'{name}_config.py', work_dir / f'{name}.pth') for name in ('absorbed', 'fused', 'pruned')
    )
    options = ['--cfg-options', *args.cfg_options] if args.cfg_options else []
    quick_options = ('--ffn', 0.75, '--num-images', 40, '--rounds', 0)

    print('Mask R-CNNs with a small Swin, from scratch on generated images: one with LayerNorm, one with BN+FFNBN.')
    print(f'Both then lose norms and three quarters of their FFN channels. Results go below {work_dir}.', flush=True)
    call('train.py', find_config('quickstart_mask_rcnn_swin.py'), '--work-dir', ln_dir, *options)
    trained = (ln_dir / 'quickstart_mask_rcnn_swin.py', Path((ln_dir / 'last_checkpoint').read_text().strip()))
    call('absorb.py', *trained, '--out', absorbed[1], *quick_options)
    call('train.py', find_config('quickstart_mask_rcnn_bn_ffnbn_swin.py'), '--work-dir', work_dir, *options)
    # The table has what each evaluation prints.
    log_pycocotools()
    MMLogger.get_current_instance().setLevel('WARNING')
    cfg = read_config(str(trained[0]))
    init_default_scope('mmdet')
    # The fused config has no training set, so absorption gets the folder of images.
    pictures = Path(DATASETS.build(cfg.train_dataloader.dataset).get_data_info(0)['img_path']).parent
    call('absorb.py', *fused, '--out', pruned[1], '--keep', 'all', '--images', pictures, *quick_options)

    print(f'\nAP on the validation images, and latency in turns, of all four as deployed (log files below {work_dir}):')
    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    files = dict(zip(MODELS, (trained, absorbed, fused, pruned), strict=True))
    models, entries = measure(cfg, dataset, files)
    update_report(work_dir / 'report.json', *entries)
    table = compare(entries)
    (work_dir / 'table.md').write_text(table)
    save_figure(ap_latency_figure(entries), work_dir / 'ap_latency.svg')
    save_figure(objects_figure(draw_objects(models, dataset)), work_dir / 'predictions.png')
    print(f'\n{table}')
    print('Written to ' + ', '.join(str(work_dir / name) for name in ('table.md', 'report.json')))
    print('Pictures:  ' + ', '.join(map(str, (*sorted(work_dir.glob('*.svg')), work_dir / 'predictions.png'))))
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
