"""Measures on one GPU what docs/latency.md shows: tests, whole detectors, their parts, training steps, absorption.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --parts detectors --families Swin-T PVT-S

Weights are random, with heads made to find 32 objects. "Eager" is PyTorch's eager mode, with autocast in float16;
"compiled" is mmdet's detector with its backbone, neck and RPN under torch.compile; "graph" is the detector that
`slab_det.deploy` returns. The forms of a family are timed in the same rounds. Results are written to
benchmarks/results/gpu.json after each part; a row that is measured again is replaced.
"""

import slab_det  # before mmdet: registers everything

# isort: split

import argparse
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.runtimes import HALF, Row, build
from benchmarks.training_cost import detector_steps
from benchmarks.training_cost import measure as measure_steps
from slab_det.common.record import format_table
from slab_det.families import Frame
from slab_det.inference.gpu.box_kernels import FixedOperators
from slab_det.inference.gpu.graph import GraphCache, make_family, measure_frame
from slab_det.measure.latency import measure_latency
from slab_det.measure.timer import time_call, time_in_turns

TESTS = 'tests/test_cuda.py', 'tests/inference/test_kernels.py'
SIZE, PADDED = (800, 1333), (800, 1344)
DEVICE = 'cuda'
# Of a graph, in one timed call: a launch takes longer than the smallest part.
REPLAYS = 20


def _family(name: str, config: str, backbone: str, **others: str) -> dict[str, Row]:
    """Rows of mmdet's detector, ours with LayerNorm, pruned, absorbed and with PRepBN, and others."""
    names = f'{name}, mmdet', f'{name}, LayerNorm'
    own = Row(f'mask_rcnn_{config}', *names)
    return {
        names[0]: own._replace(type=backbone),
        names[1]: own,
        f'{name}, absorbed, none kept': own._replace(kept=0),
        f'{name}, half of the multiply-adds': own._replace(eighths=HALF),
        f'{name}-PRepBN': Row(f'mask_rcnn_prepbn_{config}', *names),
        **{f'{kind}-{name}': Row(f'mask_rcnn_{prefix}_{config}', *names) for kind, prefix in others.items()},
    }


SWIN, PVT = 'SwinTransformer', 'PyramidVisionTransformer'
FAMILIES = {
    'Swin-T': {
        **_family('Swin-T', 'swin_t', SWIN, Flatten='flatten', SLAB='slab'),
        'Swin-T-UN': Row('mask_rcnn_un_swin_t_3x', 'Swin-T, mmdet', 'Swin-T, LayerNorm'),
    },
    'PVT-S': _family('PVT-S', 'pvt_s', PVT),
    'Swin-S': _family('Swin-S', 'swin_s', SWIN),
    'PVT-T': _family('PVT-T', 'pvt_t', PVT),
}
EAGER = 'eager, float32', 'eager, float16'
# The modes of torch.compile, in float16.
COMPILED = {'compiled, float16': 'max-autotune-no-cudagraphs', 'compiled with graphs, float16': 'reduce-overhead'}
GRAPHS = 'graph, float32', 'graph, float16', 'graph, bfloat16'
FORMS = (*EAGER, *COMPILED, *GRAPHS)
# The keys that identify a row, and the values of the row.
Measured = Iterator[tuple[dict, dict]]


def variants(name: str, row: Row) -> dict[str, nn.Module]:
    """Returns a detector in each form. Eager float16 and torch.compile are for mmdet's own alone."""
    model = build(row).to(DEVICE)
    made = {EAGER[0]: model}
    if name == row.stock:
        made[EAGER[1]] = _autocast(copy.copy(model))
        for form, mode in COMPILED.items():
            compiled = copy.deepcopy(model)
            for part in (compiled.backbone, compiled.neck, compiled.rpn_head):
                part.forward = torch.compile(part.forward, mode=mode, dynamic=False)
            made[form] = _autocast(compiled)
    return made | {form: slab_det.deploy(model, getattr(torch, form.split()[-1])) for form in GRAPHS}


def _autocast(model: nn.Module) -> nn.Module:
    model.forward = torch.autocast('cuda', torch.float16)(model.forward)
    return model


def first_calls(models: dict[tuple[str, str], nn.Module]) -> dict[tuple[str, str], float]:
    """Seconds of the first image of each model, which compiles kernels and captures graphs; drops what does not run."""
    seconds = {}
    for key, model in list(models.items()):
        first = partial(measure_latency, {key: model}, SIZE, rounds=1, warmup=0, device=DEVICE)
        try:
            seconds[key] = round(time_call(first, DEVICE)[0] / 1e3, 3)
        except Exception as error:
            # torch.compile may fail to capture; the other forms must not be lost with it.
            if key[1] not in COMPILED:
                raise
            print(f'{key[0]}, {key[1]}: {type(error).__name__}: {error}')
            del models[key]
    return seconds


def measure_detectors(args: argparse.Namespace) -> Measured:
    """Milliseconds of each form, with ratios to mmdet's eager mode in float32 and to LayerNorm in the same form."""
    for family in args.families:
        rows = FAMILIES[family]
        models = {(name, form): model for name, row in rows.items() for form, model in variants(name, row).items()}
        seconds = first_calls(models)
        results = measure_latency(models, SIZE, rounds=args.rounds, warmup=2, device=DEVICE)
        for (name, form), result in results.items():
            bases = dict(to_mmdet=(rows[name].stock, FORMS[0]), to_layer_norm=(rows[name].layer_norm, form))
            ratios = {
                key: round(result.median_ms / results[base].median_ms, 4)
                for key, base in bases.items()
                if base in results
            }
            cache = getattr(models[name, form].predict, '_graphs', None)
            # Each model has one graph.
            graphs = [cache.num_bytes() >> 20] if cache else []
            times = dict(median_ms=round(result.median_ms, 3), p95_ms=round(result.p95_ms, 3))
            yield (
                dict(name=name, form=form),
                dict(
                    **times,
                    **ratios,
                    first_call_s=seconds[name, form],
                    detections=result.detections,
                    graph_mib=graphs,
                    rounds=args.rounds,
                ),
            )


def replay(cache: GraphCache) -> None:
    """Replays the captured graph ``REPLAYS`` times."""
    (captured,) = cache._graphs.values()
    for _ in range(REPLAYS):
        captured.graph.replay()


@torch.no_grad()
def capture_parts(model: nn.Module) -> dict[str, GraphCache]:
    """Captures each part of a deployed Mask R-CNN, and the whole; caches keep alive the tensors that graphs read."""
    family, caches = make_family(model, FixedOperators()), {}
    family.merge_weights()
    frame = measure_frame(dict(img_shape=SIZE, scale_factor=(1.0, 1.0))).to(DEVICE)

    def run(part: str, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[Tensor, ...]:
        caches[part] = GraphCache(lambda *tensors: tuple(function(*tensors)))
        return caches[part](*inputs)

    def propose(limits: Tensor, *features: Tensor) -> Sequence[Tensor]:
        return family.propose(features, limits)

    def detect(corners: Tensor, scores: Tensor, limits: Tensor, *features: Tensor) -> Sequence[Tensor]:
        return family.classify(features, (corners, scores), Frame(limits), family.score_thr)

    def mask(corners: Tensor, scores: Tensor, labels: Tensor, *features: Tensor) -> Sequence[Tensor]:
        return [logits.sigmoid() for logits in family.find_masks(features, corners, scores, labels)]

    image = torch.randn(1, 3, *PADDED, device=DEVICE)
    maps = run('backbone', model.backbone, image)
    features = run('neck', lambda *maps: model.neck(maps), *maps)
    corners, scores = run('RPN, proposals', propose, frame[0], *features)
    corners, scores, labels, _ = run('boxes', detect, corners, scores, frame[0], *features)
    run('masks', mask, corners, scores, labels, *features)
    run('whole graph', family.run, image, frame)
    return caches


def measure_parts(args: argparse.Namespace) -> Measured:
    """Milliseconds of each part of deployed detectors in float16, in rounds of all rows and parts."""
    calls = {}
    for family in ('Swin-T', 'PVT-S'):
        for name in (f'{family}, LayerNorm', f'{family}-PRepBN'):
            model = slab_det.deploy(build(FAMILIES[family][name]).to(DEVICE), torch.float16)
            calls |= {(name, part): partial(replay, cache) for part, cache in capture_parts(model).items()}
    times = time_in_turns(calls, 8, device=DEVICE)
    medians = {key: round(float(np.median(values)) / REPLAYS, 3) for key, values in times.items()}
    for row in dict.fromkeys(name for name, _ in calls):
        ms = {part: value for (name, part), value in medians.items() if name == row}
        yield dict(name=row, form='graph, float16'), dict(ms=ms)


def measure_training(args: argparse.Namespace) -> Measured:
    """Time and memory of training steps of a Mask R-CNN with Swin-T, with each norm."""
    for name, values in measure_steps(detector_steps(PADDED, 2, DEVICE), 6).items():
        yield dict(name=name), values


def measure_absorption(args: argparse.Namespace, num_images: int = 6) -> Measured:
    """Seconds per image and memory to absorb every norm, and seconds per forward of backbone and neck."""
    model = build(FAMILIES['Swin-T']['Swin-T, LayerNorm']).to(DEVICE).requires_grad_(False)
    images = torch.randn(num_images, 1, 3, *PADDED, device=DEVICE).unbind()
    # Warm-up: libraries initialize in their first call.
    slab_det.absorb(model, [torch.randn(1, 3, 64, 64, device=DEVICE)], 1, 'remove', progress=False)

    def seconds(run: Callable[[], object]) -> float:
        return round(time_call(run, DEVICE)[0] / 1e3 / num_images, 4)

    forward = seconds(lambda: [model.extract_feat(image) for image in images])
    torch.cuda.reset_peak_memory_stats()
    idle = torch.cuda.memory_allocated()
    absorb = seconds(lambda: slab_det.absorb(model, images, 1, 'remove', progress=False))
    above = (torch.cuda.max_memory_allocated() - idle) / 2**20
    values = dict(seconds_per_image=absorb, forward_seconds=forward, above_idle_mib=round(above))
    yield dict(name='Swin-T, LayerNorm'), values


def run_pytest(file: str) -> list[str]:
    """What pytest prints about a file."""
    command = [sys.executable, '-m', 'pytest', '-q', file]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return run.stdout.strip().splitlines()


def measure_tests(args: argparse.Namespace) -> Measured:
    """The last line of pytest for the tests that need a GPU, and the names of those that failed."""
    for file in TESTS:
        lines = run_pytest(file)
        failed = [line for line in lines if line.startswith(('FAILED', 'ERROR'))]
        yield dict(name=file), dict(summary=lines[-1], failed=failed)


PARTS: Mapping[str, Callable[[argparse.Namespace], Measured]] = {
    'tests': measure_tests,
    'detectors': measure_detectors,
    'parts': measure_parts,
    'training': measure_training,
    'absorption': measure_absorption,
}


def tables(results: Results) -> dict[str, str]:
    """The tables of docs/latency.md and benchmarks/README.md."""
    cells = {(row['name'], row['form']): row for row in results.select(part='detectors')}

    def milliseconds(cell: dict | None) -> str:
        ratio = f' ({cell["to_mmdet"]:.2f})' if cell and 'to_mmdet' in cell else ''
        return f'{cell["median_ms"]:.2f}{ratio}' if cell else '–'

    def ratio(cell: dict | None) -> str:
        return f'{cell["to_layer_norm"]:.2f}' if cell and 'to_layer_norm' in cell else '–'

    # The forms that were measured.
    forms, graphs = ([form for form in kinds if any(form == key[1] for key in cells)] for kinds in (FORMS, GRAPHS))
    detectors = [
        (name, *(milliseconds(cells.get((name, f))) for f in forms), *(ratio(cells.get((name, f))) for f in graphs))
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    over = [f'{"over LayerNorm, " if form == graphs[0] else ""}{form.split()[-1]}' for form in graphs]
    parts = [(row['name'], row['ms']) for row in results.select(part='parts')]
    training = [
        (row['name'], f'{row["median_ms"]:.0f}', f'{row["time_ratio"]:.2f}', f'{row["memory_ratio"]:.2f}')
        for row in results.select(part='training')
    ]
    return {
        'detectors': format_table(('', *forms, *over), detectors),
        'parts': format_table(
            ('', *dict.fromkeys(title for _, ms in parts for title in ms)),
            [(name, *(f'{value:.2f}' for value in ms.values())) for name, ms in parts],
        ),
        'training': format_table(('', 'ms', 'time', 'peak memory'), training),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=[*PARTS])
    parser.add_argument('--families', nargs='+', choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument('--out', type=Path, default=FOLDER / 'gpu.json')
    args = parser.parse_args()
    results = Results(args.out, DEVICE, size=SIZE, batch=1)
    for part in args.parts:
        for identity, values in PARTS[part](args):
            results.add(dict(part=part, **identity), values)
    for title, table in tables(results).items():
        print(f'\n{title}\n\n{table}')


if __name__ == '__main__':
    main()
