"""What docs/gpu.md says, in one call on one GPU: tests, whole detectors, their parts, training steps, absorption.

    python -m benchmarks.gpu

Weights are random, with heads made to find 32 objects. "As built" is PyTorch's eager mode, in float16 its autocast;
"graph" is what `slab_det.deploy` makes. The forms of a family are timed in the same rounds. Results are written to
benchmarks/results/gpu.json after each part; what the time does not suffice for is named there as skipped.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import copy
import gc
import importlib.util
import json
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

from benchmarks.runtimes import ROOT, Row, build
from benchmarks.training_cost import detector_steps
from benchmarks.training_cost import measure as measure_steps
from slab_det.deployment import detection
from slab_det.deployment.gpu.graph import GraphCache
from slab_det.deployment.gpu.static import Frame, static_form
from slab_det.measure.environment import describe_environment, device_name
from slab_det.measure.latency import DTYPES, LatencyResult, measure_latency, repeat_ratios

SIZE, PADDED = (800, 1333), (800, 1344)
TESTS = 'tests/test_cuda.py', 'tests/deployment/test_kernels.py'
SECONDS_OF_TESTS = 110
ABSORPTION = 'benchmarks.absorb.speed'
# Of each row in each form.
Models = Mapping[str, Mapping[str, nn.Module]]


def _family(name: str, config: str, backbone: str, **others: str) -> dict[str, Row]:
    """mmdet's detector, ours with LayerNorm, with PRepBN, and others."""
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
FORMS = 'as built, float32', 'as built, float16', 'graph, float32', 'graph, float16'
WITH_PARTS = 'Swin-T, LayerNorm', 'Swin-T-PRepBN', 'PVT-S, LayerNorm', 'PVT-S-PRepBN'


def variants(name: str, row: Row) -> dict[str, nn.Module]:
    """A detector in its forms; of mmdet's ours in a graph are LayerNorm's."""
    model = build(row).cuda()
    made = {FORMS[0]: model}
    if name == row.stock:
        made[FORMS[1]] = copy.copy(model)
        made[FORMS[1]].forward = torch.autocast('cuda', torch.float16)(model.forward)
        return made
    return made | {form: slab_det.deploy(model, DTYPES[form.split()[-1]]) for form in FORMS[2:]}


def first_call(name: str, model: nn.Module) -> float:
    """Seconds of the first call, with Triton's compilation and the capture."""
    start = time.perf_counter()
    measure_latency({name: model}, size=SIZE, rounds=1, warmup=0, device='cuda')
    return time.perf_counter() - start


def measure_family(
    rows: Mapping[str, Row], models: Mapping[str, Mapping[str, nn.Module]], args: argparse.Namespace
) -> dict:
    """For each row and form milliseconds, and ratios to mmdet's as built in float32 and to LayerNorm in this form."""
    flat = {f'{name}, {form}': model for name in rows for form, model in models.get(name, {}).items()}
    options = dict(size=SIZE, rounds=args.rounds, repeat=args.repeat, warmup=2, device='cuda')
    results: dict[str, LatencyResult] = measure_latency(flat, **options)

    def ratio(result: LatencyResult, base: str) -> float | None:
        return round(median(repeat_ratios(result, results[base])), 4) if base in results else None

    def cell(row: Row, name: str, form: str) -> dict:
        result, cache = results[f'{name}, {form}'], getattr(models[name][form].predict, '_graphs', None)
        graphs = [*cache._graphs.values()] if cache else []
        return dict(
            median_ms=round(result.median_ms, 3),
            p95_ms=round(result.p95_ms, 3),
            to_mmdet=ratio(result, f'{row.stock}, {FORMS[0]}'),
            to_layer_norm=ratio(result, f'{row.layer_norm}, {form}'),
            detections=result.detections,
            graph_mib=[graph and graph.num_bytes >> 20 for graph in graphs],
        )

    return {name: {form: cell(rows[name], name, form) for form in models[name]} for name in rows if name in models}


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
    static, caches = static_form(model, fused=True), {}
    stage, head, cfg = static.stages[0], model.rpn_head, model.roi_head.test_cfg
    meta = dict(img_shape=SIZE, scale_factor=(1.0, 1.0))
    frame = torch.tensor(Frame.numbers(meta), device='cuda').unbind()

    def run(part: str, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[Tensor, ...]:
        caches[part] = GraphCache(lambda *tensors: tuple(function(*tensors)))
        return caches[part](*inputs)

    def propose(limits: Tensor, *features: Tensor) -> Sequence[Tensor]:
        priors = static.boxes.priors(head, features)
        return detection.propose(static.boxes, head, *static.rpn(features), priors, limits)

    def detect(corners: Tensor, scores: Tensor, limits: Tensor, *features: Tensor) -> Sequence[Tensor]:
        regions, _ = static.boxes.pool(stage.bbox_roi_extractor, features, corners, scores)
        found = (corners, scores), limits, None, cfg.score_thr
        return detection.detect_regions(static.boxes, stage.bbox_head, cfg, *static.box_heads[0](regions), *found)

    def mask(corners: Tensor, scores: Tensor, labels: Tensor, *features: Tensor) -> Sequence[Tensor]:
        regions, _ = static.boxes.pool(stage.mask_roi_extractor, features, corners, scores)
        return (static.mask_heads[0](regions, labels).sigmoid(),)

    image = torch.randn(1, 3, *PADDED, device='cuda')
    maps = run('backbone', model.backbone, image)
    features = run('neck', lambda *maps: model.neck(maps), *maps)
    proposals = run('RPN, proposals', propose, frame[0], *features)
    corners, scores, labels, _ = run('boxes', detect, *proposals, frame[0], *features)
    run('masks', mask, corners, scores, labels, *features)
    run('whole graph', lambda image, *frame: static(image, Frame(*frame)), image, *frame)
    return caches


def measure_parts(models: Mapping[str, nn.Module]) -> dict[str, dict[str, float]]:
    """Milliseconds of each part, in rounds of all rows and parts."""
    captured = {name: capture_parts(model) for name, model in models.items()}
    rounds = [
        {name: {part: replay(cache) for part, cache in caches.items()} for name, caches in captured.items()}
        for _ in range(8)
    ]
    return {
        name: {part: round(median(one[name][part] for one in rounds), 3) for part in caches}
        for name, caches in captured.items()
    }


def start_tests(path: str) -> Callable[[], str]:
    """Starts the tests of a file; returns what waits for their summary."""
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


def measure_absorption(limit: float) -> list[str]:
    """What the benchmark of absorption prints."""
    command = sys.executable, '-m', ABSORPTION, '--device', 'cuda', '--images', '6', '--size', *map(str, PADDED)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return [line for line in done.stdout.splitlines() if 'WARNING' not in line]


class Report:
    """The results so far, which are written after each part.

    Args:
        path: Of the JSON file.
        seconds: How long all parts may take together.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.results: dict = dict(size=SIZE, batch=1, skipped=[], failed={})

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def run(self, name: str, needs: float, part: Callable[[], object]) -> object:
        """Runs a part unless there are not the seconds that it needs; None if it was skipped or failed."""
        result, start = None, time.monotonic()
        if self.left() < needs:
            self.results['skipped'].append(name)
            print(f'{name}: skipped, {self.left():.0f} s left', flush=True)
        else:
            try:
                result = part()
                print(f'{name}: {time.monotonic() - start:.1f} s, {self.left():.0f} s left', flush=True)
            except Exception as error:
                self.results['failed'][name] = f'{type(error).__name__}: {error}'[:500]
                print(f'{name}: failed', flush=True)
                traceback.print_exc(file=sys.stdout)
        self.write()
        return result

    def add(self, key: str, name: str, needs: float, part: Callable[[], object]) -> None:
        """Runs a part, and keeps its result."""
        result = self.run(f'{key}, {name}', needs, part)
        if result is not None:
            self.results.setdefault(key, {})[name] = result
            self.write()

    def write(self) -> None:
        """Writes what there is."""
        self.path.write_text(json.dumps(self.results, indent=1) + '\n')


def tables(results: Mapping) -> dict[str, str]:
    """The tables of docs/gpu.md."""
    made = {}
    if 'detectors' in results:
        rows = {name: cells for family in results['detectors'].values() for name, cells in family.items()}

        def show(cell: dict | None) -> str:
            ratio = f' ({cell["to_mmdet"]:.2f})' if cell and cell['to_mmdet'] else ''
            return f'{cell["median_ms"]:.2f}{ratio}' if cell else '–'

        def norms(cells: dict) -> list[str]:
            ratios = [cells.get(form, {}).get('to_layer_norm') for form in FORMS[2:]]
            return [f'{ratio:.2f}' if ratio else '–' for ratio in ratios]

        made['detectors'] = grid(
            ('', *FORMS, 'over LayerNorm, float32', 'float16'),
            [(name, *(show(cells.get(form)) for form in FORMS), *norms(cells)) for name, cells in rows.items()],
        )
    if 'parts' in results:
        parts = results['parts']['float16']
        titles = next(iter(parts.values()))
        made['parts'] = grid(('', *titles), [(n, *(f'{cells[t]:.2f}' for t in titles)) for n, cells in parts.items()])
    if 'training' in results:
        steps = results['training']['Swin-T'].items()
        cells = [(n, f'{s["median_ms"]:.0f}', f'{s["time_ratio"]:.2f}', f'{s["memory_ratio"]:.2f}') for n, s in steps]
        made['training'] = grid(('', 'ms', 'time', 'peak memory'), cells)
    return made


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f'| {" | ".join(cells)} |' for cells in (titles, *rows)]
    lines.insert(1, '|---|' + '---:|' * (len(titles) - 1))
    return '\n'.join(line.replace('|  |', '| |') for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--repeat', type=int, default=4)
    parser.add_argument('--seconds', type=float, default=300, help='what does not fit is skipped (default %(default)s)')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/gpu.json')
    args = parser.parse_args()
    report = Report(args.out, args.seconds)
    environment = dict(describe_environment('cuda'), cpu=device_name('cpu'), triton=triton.__version__)
    report.results |= dict(rounds=args.rounds, repeat=args.repeat, environment=environment)
    print(environment, flush=True)
    tests = {path: start_tests(path) for path in TESTS}
    # Models are built and graphs captured meanwhile.
    models: dict[str, dict[str, nn.Module]] = {}
    for rows in FAMILIES.values():
        for name, row in rows.items():
            for form, model in (report.run(f'build, {name}', 60, partial(variants, name, row)) or {}).items():
                key = f'{name}, {form}'
                report.add('first call', key, 60, partial(first_call, key, model))
                if key in report.results.get('first call', {}):
                    models.setdefault(name, {})[form] = model
    for path, wait in tests.items():
        report.add('tests', path, -600, wait)
    for family in ('Swin-T', 'PVT-S'):
        report.add('detectors', family, 30, partial(measure_family, FAMILIES[family], models, args))
    chosen = {name: models[name][FORMS[3]] for name in WITH_PARTS if FORMS[3] in models.get(name, {})}
    report.add('parts', 'float16', 20, partial(measure_parts, chosen))
    for family in ('Swin-S', 'PVT-T'):
        report.add('detectors', family, 60, partial(measure_family, FAMILIES[family], models, args))
    models = chosen = model = None
    gc.collect()
    torch.cuda.empty_cache()
    report.add('training', 'Swin-T', 40, lambda: measure_steps(detector_steps(PADDED, 2, 'cuda'), 6))
    if importlib.util.find_spec(ABSORPTION):
        report.add('absorption', 'Swin-T', 20, lambda: measure_absorption(report.left()))
    for title, table in tables(report.results).items():
        print(f'\n{title}\n\n{table}')
    print(f'\n{report.results.get("tests")}, skipped {report.results["skipped"]}, failed {report.results["failed"]}')


if __name__ == '__main__':
    main()
