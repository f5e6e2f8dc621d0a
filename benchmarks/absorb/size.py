"""Time, memory and disk that absorb takes at real size, beside forwards of the same detector on the same images.

    python -m benchmarks.absorb.size --threads 2

Weights and images are random: neither changes what is computed. Every measurement is a process of its own. Models that
are not asked for keep their stored numbers.
"""

import slab_det  # noqa: F401 (before mmdet: registers everything)

# isort: split

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.untrained import build_untrained
from slab_det.absorption import store as storing
from slab_det.common.record import format_table
from slab_det.compare.detections import detect

CONFIGS = {'Swin-T': 'mask_rcnn_swin_t', 'Swin-S': 'mask_rcnn_swin_s', 'PVT-S': 'mask_rcnn_pvt_s'}
MIB = 2**20
# Environment variables of the processes that measure; glibc reads them when a process starts. For memory, each block
# of 1 MiB or more goes back to the system once it is freed. By default pieces stay, by chance: the forward of PVT-S
# took 434, 494 and 531 MiB where it needs 343.
VARIABLES = {'time': {}, 'memory': {'MALLOC_MMAP_THRESHOLD_': str(MIB)}}


def peak_mib() -> float:
    """The most memory that this process ever had, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def measure(
    config: str, absorbs: bool, size: tuple[int, int], num_images: int, threads: int
) -> tuple[float, float, float]:
    """Absorbs every norm, or runs the detector's own forward, on batches of one image.

    Returns:
        Seconds per image, MiB above the memory before, and MiB of files per image.
    """
    torch.set_num_threads(threads)
    model = build_untrained(ROOT / 'configs' / f'{config}.py', {})
    images = [torch.randn(1, 3, *size) for _ in range(num_images)]
    # Everything is stored in files: memory for it would come on top by a known amount.
    storing.MEMORY = 0
    put, disk = storing.TensorStore.put, [0.0]

    def watched(store: storing.TensorStore, name: str, value: object) -> None:
        put(store, name, value)
        disk.append(sum(path.stat().st_size for path in Path(tempfile.tempdir).rglob('*.pt')) / MIB)

    storing.TensorStore.put = watched
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        idle, started = peak_mib(), time.perf_counter()
        if absorbs:
            slab_det.absorb(model, images, 1, 'remove', progress=False)
        else:
            detect(model, images)
        seconds = time.perf_counter() - started
    return seconds / num_images, peak_mib() - idle, max(disk) / num_images


def measure_quantity(name: str, quantity: str, args: argparse.Namespace) -> dict:
    """Time or memory of the detector's forward and of absorb, each in a process of its own."""
    found = []
    os.environ.update(VARIABLES[quantity])
    for absorbs in (False, True):
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
            arguments = CONFIGS[name], absorbs, tuple(args.size), args.num_images, args.threads
            found.append(pool.submit(measure, *arguments).result())
    for variable in VARIABLES[quantity]:
        del os.environ[variable]
    # Other processes change seconds.
    values = dict(num_images=args.num_images, load_average=os.getloadavg()[1])
    forward, absorb = found
    if quantity == 'time':
        return dict(forward=forward[0], absorb=absorb[0], **values)
    return dict(forward=forward[1], absorb=absorb[1], disk=absorb[2], **values)


def table(results: Results) -> str:
    """The models of which both time and memory are stored."""
    titles = 's per image', 'its own forward, s', 'MiB above idle', "its forward's", 'ratio', 'disk, MiB per image'
    lines = []
    for time_row in results.select(quantity='time'):
        for memory in results.select(quantity='memory', name=time_row['name']):
            line = [time_row['name'], f'{time_row["absorb"]:.0f}', f'{time_row["forward"]:.1f}']
            line += [f'{memory["absorb"]:.0f}', f'{memory["forward"]:.0f}']
            lines.append([*line, f'{memory["absorb"] / memory["forward"]:.2f}', f'{memory["disk"]:.0f}'])
    return format_table(('Mask R-CNN, 800x1333, every norm absorbed', *titles), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='*', default=[*CONFIGS], help=f'of {", ".join(CONFIGS)} (default: all)')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--num-images', type=int, default=5)
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--out', type=Path, default=FOLDER / 'absorb_size.json')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = Results(args.out, size=list(args.size), batch_size=1, dtype='float32', keep=0)
    for name in args.models:
        for quantity in VARIABLES:
            results.add(dict(name=name, quantity=quantity), measure_quantity(name, quantity, args))
    print(table(results))


if __name__ == '__main__':
    main()
