"""Time, memory and disk that absorb takes at real size, beside forwards of the same detector on the same images.

    python -m benchmarks.absorb.size --threads 2

Weights and images are random: neither changes what is computed. Every measurement is a process of its own. What is not
asked for keeps its stored numbers.
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

from benchmarks.untrained import build_untrained
from slab_det.absorption import walk
from slab_det.measure.agreement import detect
from slab_det.measure.environment import describe_environment

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {'Swin-T': 'mask_rcnn_swin_t', 'Swin-S': 'mask_rcnn_swin_s', 'PVT-S': 'mask_rcnn_pvt_s'}
MIB = 2**20
# Of the processes that measure; glibc reads it when they start. For memory each block of 1 MiB or more goes back to
# the system once it is freed. By default pieces stay, as chance has it: the forward of PVT-S took 434, 494 and 531 MiB
# where it needs 343.
ENVIRONMENTS = {'time': {}, 'memory': {'MALLOC_MMAP_THRESHOLD_': str(MIB)}}


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


def measure(config: str, absorbs: bool, size: tuple[int, int], num_images: int, threads: int) -> dict[str, dict]:
    """Absorbs every norm, or runs the detector's own forward, on batches of one image."""
    torch.set_num_threads(threads)
    model = build_untrained(ROOT / 'configs' / f'{config}.py', {})
    images = [torch.randn(1, 3, *size) for _ in range(num_images)]
    # All in files: what memory takes beside them is known.
    walk.MEMORY = 0
    with tempfile.TemporaryDirectory() as folder, FolderSize(Path(folder)) as disk:
        tempfile.tempdir = folder
        idle, started = peak_mib(), time.perf_counter()
        if absorbs:
            slab_det.absorb(model, images, keep=0, progress=False)
        else:
            detect(model, images)
        seconds = time.perf_counter() - started
    memory = dict(above_idle_mib=peak_mib() - idle, disk_mib_per_image=disk.largest / num_images)
    return dict(time=dict(seconds_per_image=seconds / num_images), memory=memory)


def measure_quantity(name: str, quantity: str, args: argparse.Namespace) -> dict:
    """Time or memory of the detector's forward and of absorb, each in a process of its own."""
    found = {}
    os.environ.update(ENVIRONMENTS[quantity])
    for row in ('forward', 'absorb'):
        # A process that has ended leaves no memory to the next.
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
            arguments = CONFIGS[name], row == 'absorb', tuple(args.size), args.num_images, args.threads
            found[row] = pool.submit(measure, *arguments).result()[quantity]
    for variable in ENVIRONMENTS[quantity]:
        del os.environ[variable]
    # Seconds count only beside what else ran.
    return dict(**found, num_images=args.num_images, load_average=os.getloadavg()[1], **describe_environment())


def table(results: dict) -> str:
    """The stored numbers in Markdown."""
    columns = 's per image', 'its own forward, s', 'MiB above idle', "its forward's", 'ratio', 'disk, MiB per image'
    lines = [f'| Mask R-CNN, 800x1333, keep=0 | {" | ".join(columns)} |', '|---' + '|---:' * len(columns) + '|']
    for name, result in results.items():
        if result.keys() < ENVIRONMENTS.keys():
            continue
        seconds, forward = (result['time'][row]['seconds_per_image'] for row in ('absorb', 'forward'))
        peak, own = (result['memory'][row]['above_idle_mib'] for row in ('absorb', 'forward'))
        disk = result['memory']['absorb']['disk_mib_per_image']
        cells = f'{seconds:.0f}', f'{forward:.1f}', f'{peak:.0f}', f'{own:.0f}', f'{peak / own:.2f}', f'{disk:.0f}'
        lines.append(f'| {name} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='*', default=[*CONFIGS], help=f'of {", ".join(CONFIGS)} (default: all)')
    parser.add_argument('--only', choices=ENVIRONMENTS, help='default: both')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--num-images', type=int, default=5)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/absorb_size.json')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = json.loads(args.out.read_text())['results'] if args.out.exists() else {}
    scope = dict(size=list(args.size), batch_size=1, dtype='float32', keep=0)
    for name in args.models:
        for quantity in [args.only] if args.only else ENVIRONMENTS:
            results.setdefault(name, {})[quantity] = measure_quantity(name, quantity, args)
            args.out.write_text(json.dumps(dict(scope=scope, results=results), indent=1) + '\n')
    print(table(results))


if __name__ == '__main__':
    main()
