"""Measures on one GPU what docs/latency.md shows: tests, whole detectors, their parts, training steps, absorption.

    python -m benchmarks.gpu

Weights are random, with heads made to find 32 objects. Eager is PyTorch's eager mode, in float16 its autocast;
"graph" is what `slab_det.deploy` makes. The forms of a family are timed in the same rounds. Results are written to
benchmarks/results/gpu.json after each part; parts for which the time does not suffice are skipped.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import copy
import gc
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import triton
from torch import Tensor, nn

from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.runtimes import Row, build
from benchmarks.training_cost import detector_steps
from benchmarks.training_cost import measure as measure_steps
from slab_det.deployment import detection
from slab_det.deployment.gpu.graph import GraphCache
from slab_det.deployment.gpu.static import Frame, StaticDetector
from slab_det.measure.environment import device_name
from slab_det.measure.latency import LatencyResult, measure_latency
from slab_det.measure.markdown import format_table

SIZE, PADDED = (800, 1333), (800, 1344)
TESTS = 'tests/test_cuda.py', 'tests/deployment/test_kernels.py'
SECONDS_OF_TESTS = 110
# The models of each row by their form.
Models = Mapping[str, Mapping[str, nn.Module]]


def _family(name: str, config: str, backbone: str, **others: str) -> dict[str, Row]:
    """Rows of mmdet's detector, ours with LayerNorm and with PRepBN, and others."""
    names = f'{name}, mmdet', f'{name}, LayerNorm'
    return {
        names[0]: Row(f'mask_rcnn_{config}', *names, type=backbone),
        names[1]: Row(f'mask_rcnn_{config}', *names),
        f'{name}-PRepBN': Row(f'mask_rcnn_prepbn_{config}', *names),
        **{f'{kind}-{name}': Row(f'mask_rcnn_{prefix}_{config}', *names) for kind, prefix in others.items()},
    }


SWIN, PVT = 'SwinTransformer', 'PyramidVisionTransformer'
FAMILIES = {
    'Swin-T': _family('Swin-T', 'swin_t', SWIN, Flatten='flatten', SLAB='slab'),
    'PVT-S': _family('PVT-S', 'pvt_s', PVT),
    'Swin-S': _family('Swin-S', 'swin_s', SWIN),
    'PVT-T': _family('PVT-T', 'pvt_t', PVT),
}
FORMS = 'eager, float32', 'eager, float16', 'graph, float32', 'graph, float16'
WITH_PARTS = 'Swin-T, LayerNorm', 'Swin-T-PRepBN', 'PVT-S, LayerNorm', 'PVT-S-PRepBN'


def variants(name: str, row: Row) -> dict[str, nn.Module]:
    """A detector by its forms. mmdet's own are not deployed: LayerNorm's row shows that."""
    model = build(row).cuda()
    made = {FORMS[0]: model}
    if name == row.stock:
        made[FORMS[1]] = copy.copy(model)
        made[FORMS[1]].forward = torch.autocast('cuda', torch.float16)(model.forward)
        return made
    return made | {form: slab_det.deploy(model, getattr(torch, form.split()[-1])) for form in FORMS[2:]}


def first_call(name: str, model: nn.Module) -> float:
    """Seconds of the first call, with Triton's compilation and the capture."""
    start = time.perf_counter()
    measure_latency({name: model}, size=SIZE, rounds=1, warmup=0, device='cuda')
    return time.perf_counter() - start


def measure_family(rows: Mapping[str, Row], models: Models, args: argparse.Namespace) -> dict[tuple[str, str], dict]:
    """Milliseconds of each row and form, with ratios to mmdet's eager mode in float32 and to LayerNorm in this form."""
    flat = {f'{name}, {form}': model for name in rows for form, model in models.get(name, {}).items()}
    results: dict[str, LatencyResult] = measure_latency(flat, SIZE, rounds=args.rounds, warmup=2, device='cuda')

    def ratio(result: LatencyResult, base: str) -> float | None:
        return round(result.median_ms / results[base].median_ms, 4) if base in results else None

    def values(row: Row, name: str, form: str) -> dict:
        result, cache = results[f'{name}, {form}'], getattr(models[name][form].predict, '_graphs', None)
        graphs = [*cache._graphs.values()] if cache else []
        ratios = dict(
            to_mmdet=ratio(result, f'{row.stock}, {FORMS[0]}'), to_layer_norm=ratio(result, f'{row.layer_norm}, {form}')
        )
        return dict(
            median_ms=round(result.median_ms, 3),
            p95_ms=round(result.p95_ms, 3),
            **{key: value for key, value in ratios.items() if value is not None},
            detections=result.detections,
            graph_mib=[graph and graph.num_bytes >> 20 for graph in graphs],
        )

    return {(name, form): values(row, name, form) for name, row in rows.items() for form in models.get(name, {})}


def replay(cache: GraphCache, times: int = 20) -> float:
    """Milliseconds of a captured graph on the device."""
    (captured,) = cache._graphs.values()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        captured.graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e3


@torch.no_grad()
def capture_parts(model: nn.Module) -> dict[str, GraphCache]:
    """A graph of each part of a deployed Mask R-CNN, and of the whole; the caches keep what graphs read."""
    static, caches = StaticDetector(model, fused=True), {}
    head, roi_head, cfg = model.rpn_head, model.roi_head, model.roi_head.test_cfg
    meta = dict(img_shape=SIZE, scale_factor=(1.0, 1.0))
    frame = torch.tensor(Frame.numbers(meta), device='cuda').unbind()

    def run(part: str, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[Tensor, ...]:
        caches[part] = GraphCache(lambda *tensors: tuple(function(*tensors)))
        return caches[part](*inputs)

    def propose(limits: Tensor, *features: Tensor) -> Sequence[Tensor]:
        priors = static.boxes.priors(head, features)
        return detection.propose(static.boxes, head, *static.rpn(features), priors, limits)

    def detect(corners: Tensor, scores: Tensor, limits: Tensor, *features: Tensor) -> Sequence[Tensor]:
        regions, _ = static.boxes.pool(roi_head.bbox_roi_extractor, features, corners, scores)
        found = (corners, scores), limits, None, cfg.score_thr
        return detection.detect_regions(static.boxes, roi_head.bbox_head, cfg, *static.box_head(regions), *found)

    def mask(corners: Tensor, scores: Tensor, labels: Tensor, *features: Tensor) -> Sequence[Tensor]:
        regions, _ = static.boxes.pool(roi_head.mask_roi_extractor, features, corners, scores)
        return (static.mask_head(regions, labels).sigmoid(),)

    image = torch.randn(1, 3, *PADDED, device='cuda')
    maps = run('backbone', model.backbone, image)
    features = run('neck', lambda *maps: model.neck(maps), *maps)
    proposals = run('RPN, proposals', propose, frame[0], *features)
    corners, scores, labels, _ = run('boxes', detect, *proposals, frame[0], *features)
    run('masks', mask, corners, scores, labels, *features)
    run('whole graph', lambda image, *frame: static(image, Frame(*frame)), image, *frame)
    return caches


def measure_parts(models: Mapping[str, nn.Module]) -> dict[tuple[str, str], dict]:
    """Milliseconds of each part of deployed detectors in float16, in rounds of all rows and parts."""
    captured = {name: capture_parts(model) for name, model in models.items()}
    rounds = [
        {name: {part: replay(cache) for part, cache in caches.items()} for name, caches in captured.items()}
        for _ in range(8)
    ]
    return {
        (name, FORMS[3]): dict(ms={part: round(median(one[name][part] for one in rounds), 3) for part in caches})
        for name, caches in captured.items()
    }


def start_tests(path: str) -> Callable[[], str]:
    """Starts the tests of a file; returns a function that waits for them and returns their summary."""
    output, started = tempfile.TemporaryFile('w+'), time.monotonic()
    command = sys.executable, '-m', 'pytest', '-q', '--maxfail=10', '--tb=short', '--durations=8', path
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def wait() -> str:
        late = ''
        try:
            process.wait(max(started + SECONDS_OF_TESTS - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            late = f' (killed after {SECONDS_OF_TESTS} s)'
        output.seek(0)
        text = output.read().strip()
        print(f'{path}\n{text}', flush=True)
        return (text or 'no output').splitlines()[-1].strip('= ') + late

    return wait


def measure_absorption(num_images: int = 6) -> dict[str, float]:
    """Seconds and memory of an absorption of every norm, and seconds of a forward of backbone and neck."""
    model = build(FAMILIES['Swin-T']['Swin-T, LayerNorm']).cuda().requires_grad_(False)
    images = torch.randn(num_images, 1, 3, *PADDED, device='cuda').unbind()
    # Libraries start with their first call.
    slab_det.absorb(model, [torch.randn(1, 3, 64, 64, device='cuda')], keep=0, progress=False)

    def seconds(run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return round((time.perf_counter() - start) / num_images, 4)

    forward = seconds(lambda: [model.extract_feat(image) for image in images])
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    absorb = seconds(lambda: slab_det.absorb(model, images, keep=0, progress=False))
    above = (torch.cuda.max_memory_allocated() - idle) / 2**20
    return dict(seconds_per_pass=absorb, forward_seconds=forward, above_idle_mib=round(above))


class Parts:
    """Runs the parts one after another and stores their rows.

    Args:
        results: Where rows are added.
        seconds: How long all parts may take together.
    """

    def __init__(self, results: Results, seconds: float) -> None:
        self.results, self.end = results, time.monotonic() + seconds
        self.missing: list[str] = []

    def run(self, name: str, needs: float, part: Callable[[], object]) -> object:
        """Runs a part; returns None if it fails, or if fewer seconds are left than it needs."""
        left, result = self.end - time.monotonic(), None
        if left >= needs:
            try:
                result = part()
            except Exception:
                traceback.print_exc(file=sys.stdout)
        if result is None:
            self.missing.append(name)
        print(f'{name}: {"failed or skipped" if result is None else "done"}, {left:.0f} s were left', flush=True)
        return result

    def add(self, part: str, name: str, needs: float, measure: Callable[[], Mapping]) -> None:
        """Runs a part, and stores the values that it returns by the name and form of a row."""
        for (row, form), values in (self.run(f'{part}, {name}', needs, measure) or {}).items():
            self.results.add(dict(part=part, name=row, form=form), values)


def tables(results: Results) -> dict[str, str]:
    """The tables of docs/latency.md and benchmarks/README.md."""
    cells = {(row['name'], row['form']): row for row in results.select(part='detectors')}

    def milliseconds(cell: dict | None) -> str:
        ratio = f' ({cell["to_mmdet"]:.2f})' if cell and 'to_mmdet' in cell else ''
        return f'{cell["median_ms"]:.2f}{ratio}' if cell else '–'

    def ratio(cell: dict | None) -> str:
        return f'{cell["to_layer_norm"]:.2f}' if cell and 'to_layer_norm' in cell else '–'

    detectors = [
        (name, *(milliseconds(cells.get((name, f))) for f in FORMS), *(ratio(cells.get((name, f))) for f in FORMS[2:]))
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    parts = [(row['name'], row['ms']) for row in results.select(part='parts')]
    training = [
        (row['name'], f'{row["median_ms"]:.0f}', f'{row["time_ratio"]:.2f}', f'{row["memory_ratio"]:.2f}')
        for row in results.select(part='training')
    ]
    return {
        'detectors': format_table(('', *FORMS, 'over LayerNorm, float32', 'float16'), detectors),
        'parts': format_table(
            ('', *dict.fromkeys(title for _, ms in parts for title in ms)),
            [(name, *(f'{value:.2f}' for value in ms.values())) for name, ms in parts],
        ),
        'training': format_table(('', 'ms', 'time', 'peak memory'), training),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--seconds', type=float, default=300, help='what does not fit is skipped (default %(default)s)')
    parser.add_argument('--out', type=Path, default=FOLDER / 'gpu.json')
    args = parser.parse_args()
    args.out.unlink(missing_ok=True)
    host = dict(cpu=device_name('cpu'), triton=triton.__version__)
    results = Results(args.out, 'cuda', size=SIZE, batch=1, rounds=args.rounds, **host)
    parts = Parts(results, args.seconds)
    tests = {path: start_tests(path) for path in TESTS}
    # Models are built and graphs captured meanwhile.
    models: dict[str, dict[str, nn.Module]] = {}
    for rows in FAMILIES.values():
        for name, row in rows.items():
            for form, model in (parts.run(f'build, {name}', 60, partial(variants, name, row)) or {}).items():
                key = f'{name}, {form}'
                seconds = parts.run(f'first call, {key}', 60, partial(first_call, key, model))
                if seconds is not None:
                    results.add(dict(part='first call', name=name, form=form), dict(seconds=seconds))
                    models.setdefault(name, {})[form] = model
    for path, wait in tests.items():
        results.add(dict(part='tests', name=path), dict(summary=wait()))
    for family in ('Swin-T', 'PVT-S'):
        parts.add('detectors', family, 30, partial(measure_family, FAMILIES[family], models, args))
    chosen = {name: models[name][FORMS[3]] for name in WITH_PARTS if FORMS[3] in models.get(name, {})}
    parts.add('parts', 'float16', 20, partial(measure_parts, chosen))
    for family in ('Swin-S', 'PVT-T'):
        parts.add('detectors', family, 60, partial(measure_family, FAMILIES[family], models, args))
    models = chosen = model = None
    gc.collect()
    torch.cuda.empty_cache()
    steps = parts.run('training', 40, lambda: measure_steps(detector_steps(PADDED, 2, 'cuda'), 6))
    for name, values in (steps or {}).items():
        results.add(dict(part='training', name=name), values)
    absorption = parts.run('absorption', 20, measure_absorption)
    if absorption:
        results.add(dict(part='absorption', name='Swin-T, LayerNorm'), absorption)
    for title, table in tables(results).items():
        print(f'\n{title}\n\n{table}')
    print(f'\nfailed or skipped: {", ".join(parts.missing) or "nothing"}')


if __name__ == '__main__':
    main()
