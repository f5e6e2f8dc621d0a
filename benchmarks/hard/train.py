"""Trains hard teachers: a classifier of crops, then a Mask R-CNN that starts from its backbone; adds the AP.

    python -m benchmarks.hard.train --data-root data/hard --seeds 0 1 2
    python -m benchmarks.hard.train --data-root data/hard --seeds 0 --run bn_ffnbn
    python -m benchmarks.hard.train --data-root data/hard --seeds 0 --config benchmarks/hard/mask_rcnn_swin_320.py \\
        --iterations 400 --work-dir work_dirs/hard_320 --backbone work_dirs/hard/ln-48-700/seed0/detector/iter_700.pth

With --backbone the detector starts from the backbone of another detector, and no classifier is trained. The teacher
lies in WORK_DIR/RUN-WIDTH-ITERATIONS/seedN/detector: its config merged/config.py and its last checkpoint. The same
command goes on after an interruption, from a checkpoint of each 100 iterations. Rows are added to
benchmarks/results/hard_teachers.json.
"""

import slab_det  # noqa: F401 (before mmdet: registers everything)

# isort: split

import argparse
import json
import os
from pathlib import Path

from mmengine.config import Config

from benchmarks.norms.run import RUNS, STOP_AT_NAN, read_ap, train
from benchmarks.results import FOLDER, ROOT, Results


def schedule(iterations: int, lr_end: float) -> dict:
    """Warm-up, then a cosine: fixed in advance, so that a resumed run is the same run."""
    warmup = max(1, min(100, iterations // 10))
    end = dict(begin=warmup, end=iterations, T_max=iterations - warmup, eta_min=lr_end)
    return dict(
        train_cfg=dict(max_iters=iterations, val_interval=max(1, iterations // 4)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=warmup),
            dict(type='CosineAnnealingLR', by_epoch=False, **end),
        ],
        default_hooks=dict(checkpoint=dict(interval=100, max_keep_ckpts=2)),
    )


def classifier_config(args: argparse.Namespace, seed: int, classes: list[str]) -> Config:
    """The classifier of crops; the last stage has eight times the width."""
    config = Config.fromfile(ROOT / 'benchmarks/hard/classifier.py')
    config.merge_from_dict(
        dict(
            model=dict(
                data_preprocessor=dict(num_classes=len(classes)),
                backbone=dict(embed_dims=args.width, **RUNS[args.run][1]),
                head=dict(num_classes=len(classes), in_channels=8 * args.width),
            ),
            randomness=dict(seed=seed),
            **schedule(args.classifier_iterations, lr_end=1e-5),
        )
    )
    return config


def detector_config(args: argparse.Namespace, seed: int, classes: list[str], start: dict) -> Config:
    """The Mask R-CNN whose backbone is initialized by ``start``."""
    config = Config.fromfile(ROOT / args.config)
    _, backbone, hooks = RUNS[args.run]
    if backbone['norm_cfg']['type'] != 'LN':
        hooks = [*hooks, dict(type='RecalibrateFuseHook', num_images=100, pipeline='test')]
    dataset = dict(dataset=dict(metainfo=dict(classes=classes)))
    config.merge_from_dict(
        dict(
            model=dict(
                backbone=dict(embed_dims=args.width, init_cfg=start, **backbone),
                neck=dict(in_channels=[args.width * 2**stage for stage in range(4)]),
                roi_head={head: dict(num_classes=len(classes)) for head in ('bbox_head', 'mask_head')},
            ),
            train_dataloader=dataset,
            val_dataloader=dataset,
            test_dataloader=dataset,
            custom_hooks=[STOP_AT_NAN, *hooks],
            randomness=dict(seed=seed),
            **schedule(args.iterations, lr_end=8e-6),
        )
    )
    return config


def read_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--run', choices=RUNS, default='ln', help='the norms (default %(default)s)')
    parser.add_argument('--width', type=int, default=48, help='embed_dims, a multiple of 3 (default %(default)s)')
    parser.add_argument('--iterations', type=int, default=1600, help='of the detector (default %(default)s)')
    parser.add_argument('--classifier-iterations', type=int, default=400, help='default %(default)s')
    parser.add_argument('--config', default='benchmarks/hard/mask_rcnn_swin.py', help='default %(default)s')
    parser.add_argument('--backbone', metavar='CHECKPOINT', help='detector whose backbone starts this one')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/hard'))
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    args.work_dir, args.data_root = args.work_dir.resolve(), str(Path(args.data_root).resolve())
    os.chdir(ROOT)
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    truth = json.loads(Path(args.data_root, 'annotations/instances_train.json').read_text())
    classes = [category['name'] for category in truth['categories']]
    results = Results(FOLDER / 'hard_teachers.json', classes=classes, train_images=len(truth['images']))
    lengths = dict(iterations=args.iterations, classifier_iterations=args.classifier_iterations)
    for seed in args.seeds:
        folder = args.work_dir / f'{args.run}-{args.width}-{args.iterations}' / f'seed{seed}'
        start = dict(type='Pretrained', checkpoint=args.backbone, prefix='backbone.')
        if not args.backbone:
            train(classifier_config(args, seed, classes), folder / 'classifier', args.data_root)
            start = dict(type='Pretrained', checkpoint=(folder / 'classifier' / 'last_checkpoint').read_text().strip())
        train(detector_config(args, seed, classes, start), folder / 'detector', args.data_root)
        identity = dict(name=RUNS[args.run][0], width=args.width, **lengths, seed=seed)
        if args.backbone:
            identity |= dict(config=Path(args.config).stem, classifier_iterations=0)
        print(results.add(identity, read_ap(folder / 'detector', 'segm')), flush=True)


if __name__ == '__main__':
    main()
