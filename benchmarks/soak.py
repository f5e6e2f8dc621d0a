"""One detector serves thousands of images of random sizes: memory stays flat, and the results stay the same.

    python -m benchmarks.soak --images 10000

A small Mask R-CNN with random weights, loaded by slab_det.load_detector in each runtime, in a process of its own.
Images are files and arrays, of sides from 16 to 400, resized to 64x48 and less. Memory of the process and the objects
of one image are looked at twenty times. Counts go into benchmarks/results/soak.json. Linux only: memory is read from
/proc.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config

from slab_det.checkpoints.build import build_detector
from slab_det.deployment.export import export_onnx
from slab_det.fusion import save_fused
from slab_det.measure.environment import describe_environment
from slab_det.runtime.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
RUNTIMES = ('torch', 'onnxruntime', 'openvino')
LOOKS = 20
# Caches of the runtimes and the allocator fill in the first half. Of this share memory may grow in the second.
FLAT = 0.02


def write_files(folder: Path) -> None:
    """A fused detector as it ships: fused_config.py, fused.pth and model.onnx."""
    cfg = Config.fromfile(ROOT / 'configs' / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model.backbone.depths = (1, 1, 1, 1)
    cfg.test_dataloader.dataset.pipeline[1].scale = (64, 48)
    cfg.model.test_cfg.rpn.update(nms_pre=50, max_per_img=20)
    cfg.model.test_cfg.rcnn.max_per_img = 5
    torch.manual_seed(0)
    model = build_detector(cfg)
    slab_det.set_gamma(model, 0)
    slab_det.recalibrate(model, [torch.randn(1, 3, 160, 192)], progress=False)
    fused = slab_det.fuse(model)
    save_fused(fused, cfg, folder / 'fused.pth')
    export_onnx(fused, folder / 'model.onnx')


def draw_image(generator: np.random.Generator) -> np.ndarray | bytes:
    """An image of random size in a random form: array or JPEG, gray or BGR."""
    height, width = np.exp(generator.uniform(np.log(16), np.log(400), 2)).astype(int)
    # Blobs: detectors answer to them.
    shape = (height // 8 + 1, width // 8 + 1, 3)[: generator.integers(2, 4)]
    pixels = cv2.resize(generator.integers(0, 256, shape, dtype=np.uint8), (int(width), int(height)))
    return pixels if generator.random() < 0.5 else cv2.imencode('.jpg', pixels)[1].tobytes()


def resident_mb() -> float:
    """Memory of this process."""
    line = next(line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('VmRSS'))
    return round(int(line.split()[1]) / 1024, 1)


def soak(detector: Callable[[np.ndarray | bytes], DetDataSample], images: int) -> dict:
    """Memory after each part of the images, and whether the same image had the same objects every time."""
    generator = np.random.default_rng(0)
    probe = draw_image(generator)
    wanted, memory, detections, changed = None, [], 0, 0
    start = time.perf_counter()
    for index in Progress(range(images), 'Serving'):
        detections += len(detector(draw_image(generator)).pred_instances)
        if (index + 1) % (images // LOOKS) == 0:
            found = detector(probe).pred_instances
            wanted = found if wanted is None else wanted
            changed += not all(torch.equal(found[key], wanted[key]) for key in wanted.keys())
            memory.append(resident_mb())
    growth = max(memory[LOOKS // 2 :]) / memory[LOOKS // 2 - 1] - 1
    return dict(
        images=images,
        detections=detections,
        seconds=round(time.perf_counter() - start),
        memory_mb=memory,
        growth_of_second_half=round(growth, 4),
        flat=growth <= FLAT,
        probe_detections=len(wanted),
        probe_changed=changed,
    )


def soak_runtime(folder: Path, runtime: str, images: int) -> dict:
    """:func:`soak` of the files of :func:`write_files`, on one thread."""
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    weights, options = ('fused.pth', dict(device='cpu')) if runtime == 'torch' else ('model.onnx', dict(threads=1))
    detector = slab_det.load_detector(folder / 'fused_config.py', folder / weights, runtime, **options)
    return dict(soak(detector, images), environment=describe_environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--images', type=int, default=10000)
    parser.add_argument('--runtimes', nargs='+', choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/soak.json')
    args = parser.parse_args()
    if args.images < LOOKS:
        parser.error(f'--images {args.images}: at least {LOOKS}, as often is memory looked at')
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for runtime in args.runtimes:
            # Memory that one runtime leaves must not be another's.
            with ProcessPoolExecutor(1, get_context('spawn')) as pool:
                result = pool.submit(soak_runtime, Path(folder), runtime, args.images).result()
            results[runtime] = result
            args.out.write_text(json.dumps(results, indent=1) + '\n')
            print(f'{runtime}: {result}', flush=True)


if __name__ == '__main__':
    main()
