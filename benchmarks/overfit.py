"""Learns 8 COCO images by heart with the quick start's SLAB-Swin Mask R-CNN: box AP50 on them should pass 0.8.

python benchmarks/overfit.py --data-root data/coco
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from pathlib import Path

from mmdet.datasets import CocoDataset
from mmengine.config import Config
from mmengine.runner import Runner

from slab_det.data import check_data, set_data_root
from slab_det.measure.reporting import ap_from_metrics, read_report

ROOT = Path(__file__).resolve().parents[1]
NUM_IMAGES = 8


def write_subset(ann_file: Path, out: Path) -> None:
    """The annotations of the first images that have any."""
    coco = json.loads(ann_file.read_text())
    annotated = {annotation['image_id'] for annotation in coco['annotations']}
    coco['images'] = [image for image in coco['images'] if image['id'] in annotated][:NUM_IMAGES]
    kept = {image['id'] for image in coco['images']}
    coco['annotations'] = [annotation for annotation in coco['annotations'] if annotation['image_id'] in kept]
    out.write_text(json.dumps(coco))


def overfit_config(data_root: str, work_dir: Path) -> Config:
    """The quick start's detector with 80 classes; training and evaluation read the same images."""
    coco = Config.fromfile(ROOT / 'configs' / 'mask_rcnn_slab_swin_t.py')
    set_data_root(coco, data_root)
    check_data(coco, ('train',))
    images = coco.train_dataloader.dataset
    subset = (work_dir / 'subset.json').resolve()
    write_subset(Path(images.data_root) / images.ann_file, subset)

    cfg = Config.fromfile(ROOT / 'configs' / 'quickstart_mask_rcnn_slab_swin.py')
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        pipeline = [
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='Resize', scale=(320, 320), keep_ratio=True),
            loader.dataset.pipeline[-1],
        ]
        prefix = str((Path(images.data_root) / images.data_prefix.img).resolve())
        loader.dataset = dict(
            type='CocoDataset',
            ann_file=str(subset),
            data_prefix=dict(img=prefix),
            pipeline=pipeline,
            test_mode=loader is not cfg.train_dataloader,
        )
    cfg.train_dataloader.batch_size = 2
    cfg.val_evaluator = cfg.test_evaluator = dict(type='CocoMetric', ann_file=str(subset), metric=['bbox', 'segm'])
    num_classes = len(CocoDataset.METAINFO['classes'])
    cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = num_classes
    cfg.work_dir = str(work_dir)
    return cfg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-root', default='data/coco')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/overfit'))
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    runner = Runner.from_cfg(overfit_config(args.data_root, args.work_dir))
    runner.train()
    recalibrated = read_report(args.work_dir / 'report.json').entries[0].ap
    last_validation = {
        key.removeprefix('val/'): value.current()
        for key, value in runner.message_hub.log_scalars.items()
        if key.startswith('val/coco/')
    }
    result = dict(
        before_recalibration=ap_from_metrics(last_validation),
        recalibrated=recalibrated,
        iterations=runner.iter,
        images=NUM_IMAGES,
    )
    (ROOT / 'benchmarks' / 'results' / 'overfit.json').write_text(json.dumps(result, indent=1) + '\n')
    print(json.dumps(result, indent=1))


if __name__ == '__main__':
    main()
