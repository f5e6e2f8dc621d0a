"""Time, memory and disk that absorb takes at real size, beside forwards of the same detector on the same images.

    python -m benchmarks.absorb.size --threads 2

Weights and images are random: neither changes what is computed. Every row is a process of its own. Models that are not
named keep their stored rows.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from slab_det.measure.agreement import detect
from slab_det.measure.environment import describe_environment
from slab_det.measure.untrained import build_untrained

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {'Swin-T': 'mask_rcnn_swin_t', 'Swin-S': 'mask_rcnn_swin_s', 'PVT-S': 'mask_rcnn_pvt_s'}
MIB = 2**20


def peak_mib() -> float:
    """The most memory that this process ever had, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


class FolderSize:
    """The largest size of a folder while the context lasts, in MiB, looked at ten times a second."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.largest = folder, 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self.over.wait(0.1):
            size = 0
            for path in self.folder.rglob('*'):
                try:
                    size += path.stat().st_size
                except FileNotFoundError:  # removed meanwhile
                    pass
            self.largest = max(self.largest, size / MIB)

    def __enter__(self) -> 'FolderSize':
        self.thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.over.set()
        self.thread.join()


def measure(config: str, absorbs: bool, size: tuple[int, int], num_images: int, threads: int) -> dict[str, float]:
    """One row: absorb with every norm gone, or the detector's own forward, on batches of one image."""
    torch.set_num_threads(threads)
    model = build_untrained(ROOT / 'configs' / f'{config}.py', {})
    images = [torch.randn(1, 3, *size) for _ in range(num_images)]
    with tempfile.TemporaryDirectory() as folder, FolderSize(Path(folder)) as disk:
        tempfile.tempdir = folder
        idle, started = peak_mib(), time.perf_counter()
        if absorbs:
            slab_det.absorb(model, images, keep=0, progress=False)
        else:
            detect(model, images)
        seconds = time.perf_counter() - started
    return dict(seconds_per_image=seconds / num_images, idle_mib=idle, peak_mib=peak_mib(), disk_mib=disk.largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='*', default=[*CONFIGS], help=f'of {", ".join(CONFIGS)} (default: all)')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--num-images', type=int, default=3)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/absorb_size.json')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = json.loads(args.out.read_text())['results'] if args.out.exists() else {}
    scope = dict(size=list(args.size), num_images=args.num_images, batch_size=1, dtype='float32', keep=0)
    print('| model | s per image | forward, s | peak above idle, MiB | forward, MiB | ratio | disk, MiB per image |')
    print('|---|---:|---:|---:|---:|---:|---:|')
    for name in args.models:
        rows = {}
        for row in ('forward', 'absorb'):
            # A process that has ended leaves no memory to the next.
            with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
                arguments = CONFIGS[name], row == 'absorb', tuple(args.size), args.num_images, args.threads
                rows[row] = pool.submit(measure, *arguments).result()
        for row in rows.values():
            row['above_idle_mib'] = row['peak_mib'] - row['idle_mib']
        ratio = rows['absorb']['above_idle_mib'] / rows['forward']['above_idle_mib']
        # Seconds count only beside what else ran.
        results[name] = dict(**rows, memory_ratio=ratio, load_average=os.getloadavg()[1])
        cells = [f'{rows[row][key]:.{digits}f}' for key, digits in (('seconds_per_image', 1), ('above_idle_mib', 0))
                 for row in ('absorb', 'forward')]  # fmt: skip
        print(
            f'| {name} | {" | ".join(cells)} | {ratio:.2f} | {rows["absorb"]["disk_mib"] / args.num_images:.0f} |',
            flush=True,
        )
        content = dict(scope=scope, environment=describe_environment(), results=results)
        args.out.write_text(json.dumps(content, indent=1) + '\n')


if __name__ == '__main__':
    main()
