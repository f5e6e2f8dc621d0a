"""Seconds per image of slab_det.absorb, where they go, memory over the model, and the time of a forward.

    python -m benchmarks.absorb.speed --device cuda --images 6 --size 800 1344
    python -m benchmarks.absorb.speed --config benchmarks/bccd/faster_rcnn_swin_small.py --type SLABSwin --size 240 320

Weights and images are random. Parts are timed in a second call, which waits for the device at each: it takes longer.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter

import torch

from benchmarks.absorb.size import MIB, peak_mib
from benchmarks.untrained import build_untrained
from slab_det.absorption import absorb, regression, student, walk

# The first is called once per pass.
PARTS = dict(between=[(student.Absorption, '__init__')], forward=[(walk.Walk, 'run'), (walk.Walk, 'advance')])
PARTS['store'] = [(walk.TensorStore, name) for name in ('put', 'get', 'drop')]
PARTS['moments'] = [(regression.CrossMoments, 'add'), (student.Moments, 'add')]
PARTS['fits'] = [(student, 'choose_fit'), (student, 'fold_affine'), (student, '_check_finite')]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--config', default='configs/mask_rcnn_swin_t.py')
parser.add_argument('--type', default='SwinTransformer', help='of the backbone')
parser.add_argument('--device', default='cpu')
parser.add_argument('--images', type=int, default=6)
parser.add_argument('--size', type=int, nargs=2, default=(800, 1344), metavar=('H', 'W'))
args = parser.parse_args()
seconds, calls, within = defaultdict(float), defaultdict(int), [0.0]
wait = torch.cuda.synchronize if args.device != 'cpu' else lambda: None


def timed(part: str, call: Callable) -> Callable:  # what is called within has its own part
    def wrapper(*arguments: object, **options: object) -> object:
        wait()
        started = perf_counter()
        within.append(0.0)
        result = call(*arguments, **options)
        wait()
        spent = perf_counter() - started
        seconds[part], calls[part] = seconds[part] + spent - within.pop(), calls[part] + 1
        within[-1] += spent
        return result

    return wrapper


model = build_untrained(args.config, {'type': args.type}).to(args.device).requires_grad_(False)
images = torch.randn(args.images, 1, 3, *args.size, device=args.device).unbind()
# Libraries start with their first call.
absorb(model, [torch.randn(1, 3, 64, 64, device=args.device)], progress=False)
for image in images:
    timed('extract_feat', model.extract_feat)(image)
torch.cuda.reset_peak_memory_stats() if args.device != 'cpu' else None
idle = peak_mib() if args.device == 'cpu' else torch.cuda.memory_allocated() / MIB
timed('absorb', absorb)(model, images, progress=False)
above = (peak_mib() if args.device == 'cpu' else torch.cuda.max_memory_allocated() / MIB) - idle
for part, places in PARTS.items():
    for owner, name in places:
        setattr(owner, name, timed(part, getattr(owner, name)))
timed('outside', absorb)(model, images, progress=False)
total, forward, count = seconds.pop('absorb'), seconds.pop('extract_feat'), calls['between'] * args.images
print(f'{args.images} images of {args.size}: {total:.2f} s, {calls["between"]} passes, {above:.0f} MiB over idle')
print(f'{total / count:.3f} s per image and pass, {forward / args.images:.4f} s per forward of backbone and neck')
print('\n'.join(f'  {part}: {s / count:.4f} s, {calls[part] / count:.1f} calls' for part, s in seconds.items()))
