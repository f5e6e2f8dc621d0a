"""What each part of a Mask R-CNN takes on a CPU, and how near it comes to the fastest matrix product.

    python -m benchmarks.parts --threads 2

mmdet's detector as built, ours deployed in float32 and bfloat16, and ours in int8 in ONNX Runtime, whose profile says
what each node takes, all in the same rounds; from the bytes of an image file to boxes and pasted masks. Rates are of
the multiply-adds that the model has as built, so that a form that computes the same with fewer may pass the fastest
product. Written to benchmarks/results/parts.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from benchmarks.runtimes import FORMS, ROOT, ROWS, SWIN, Call, build, measure, runtime_call, torch_call
from slab_det.deployment.export import runtime as exported
from slab_det.deployment.cpu.linear import linear
from slab_det.measure.cost import count_multiply_adds
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import keep_freed_memory

ROW = 'Swin-T-PRepBN'
PARTS = {
    'backbone': 'backbone',
    'FPN': 'neck',
    'RPN': 'rpn_head',
    'RoIAlign of boxes': 'roi_head.bbox_roi_extractor',
    'box head': 'roi_head.bbox_head',
    'RoIAlign of masks': 'roi_head.mask_roi_extractor',
    'mask head': 'roi_head.mask_head',
}
REST = 'the rest'


def watch(model: nn.Module) -> dict[str, list[float]]:
    """The seconds of each call of each part, which grow as the model runs."""
    seconds: dict[str, list[float]] = {name: [] for name in PARTS}

    def start(name: str, *_: object) -> None:
        seconds[name].append(-time.perf_counter())

    def stop(name: str, *_: object) -> None:
        seconds[name][-1] += time.perf_counter()

    for name, path in PARTS.items():
        part = model.get_submodule(path)
        # Around what deploy() adds to a part.
        part.register_forward_pre_hook(partial(start, name), prepend=True)
        part.register_forward_hook(partial(stop, name))
    return seconds


def count(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Multiply-adds of each part."""
    counts = dict.fromkeys(PARTS, 0)

    def counted(name: str, forward: Callable, *args: object, **kwargs: object) -> object:
        outputs = []
        counts[name] += count_multiply_adds(lambda: outputs.append(forward(*args, **kwargs)))
        return outputs[0]

    parts = {name: model.get_submodule(path) for name, path in PARTS.items()}
    for name, part in parts.items():
        part.forward = partial(counted, name, part.forward)
    run()
    for part in parts.values():
        del part.forward
    return counts


class Profile:
    """The runs of a file in ONNX Runtime, node by node."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / 'profile'
        self.session: onnxruntime.InferenceSession | None = None

    def load(self, path: str, threads: int, precision: str) -> exported.Run:
        """As ONNX Runtime is loaded elsewhere, profiled."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_profiling, options.profile_file_prefix = True, str(self.prefix)
        self.session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        names = [output.name for output in self.session.get_outputs()]
        return lambda image: dict(zip(names, self.session.run(None, {'image': image}), strict=True))

    def parts(self) -> dict[str, list[float]]:
        """The seconds of each part, run by run."""
        events = json.loads(Path(self.session.end_profiling()).read_text())
        nodes = sorted((event for event in events if event.get('cat') == 'Node'), key=lambda event: event['ts'])
        runs = sorted((event for event in events if event['name'] == 'model_run'), key=lambda event: event['ts'])
        seconds: dict[str, list[float]] = {name: [0.0] * len(runs) for name in PARTS}
        for index, run in enumerate(runs):
            last = ''
            for node in nodes:
                if run['ts'] <= node['ts'] < run['ts'] + run['dur'] and (name := part_of(node, last)):
                    last = name
                    seconds[name][index] += node['dur'] / 1e6
        return seconds


def part_of(node: Mapping, last: str) -> str:
    """The part of a node of a profile, or '', where ``last`` is the part before it."""
    if node['args']['op_name'] == 'RoiAlign':
        return 'RoIAlign of masks' if last in ('box head', 'RoIAlign of masks') else 'RoIAlign of boxes'
    # A fused node loses its name.
    if node['args']['op_name'] == 'Gelu':
        return 'backbone'
    return next((name for name, path in PARTS.items() if f'/{path.rpartition(".")[2]}/' in node['name']), '')


def fastest_integer_product(threads: int) -> float:
    """As :func:`fastest_product`, of uint8 and int8 in ONNX Runtime."""
    values = np.random.default_rng(0).integers(0, 127, (2048, 1024), dtype=np.uint8)
    weight = onnx.numpy_helper.from_array(values[:1024].astype(np.int8), 'weight')
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node('MatMulInteger', ['x', 'weight'], ['y'])],
        'product',
        [onnx.helper.make_tensor_value_info('x', onnx.TensorProto.UINT8, values.shape)],
        [onnx.helper.make_tensor_value_info('y', onnx.TensorProto.INT32, values.shape)],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])
    return fastest(lambda: session.run(None, {'x': values}))


@torch.inference_mode()
def fastest_product(dtype: torch.dtype) -> float:
    """G multiply-adds per second of a matrix product of 2048 x 1024 x 1024, the best of 20."""
    x, weight = torch.randn(2048, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return fastest(lambda: linear(x, weight, None))


def fastest(product: Call) -> float:
    """G multiply-adds per second of a product of this size."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return round(2048 * 1024 * 1024 / min(times) / 1e9, 1)


def table(results: Mapping) -> str:
    """Milliseconds, and in brackets G multiply-adds per second."""
    forms = results['forms']
    lines = [f'| | G multiply-adds | {" | ".join(forms)} |', '|---|---:|' + '---:|' * len(forms)]
    for name in [*PARTS, REST]:
        work = results['multiply_adds'].get(name, 0) / 1e9
        cells = [
            f'{form["ms"][name]:.0f}' + f' ({work / form["ms"][name] * 1e3:.0f})' * (work > 0.5)
            for form in forms.values()
        ]
        lines.append(f'| {name} | {f"{work:.1f}" if work > 0.5 else "–"} | {" | ".join(cells)} |')
    total = [f'{form["total_ms"]:.0f} ({form["to_mmdet"]:.2f} of mmdet)' for form in forms.values()]
    lines.append(f'| all | {sum(results["multiply_adds"].values()) / 1e9:.1f} | {" | ".join(total)} |')
    peaks = [f'({form["fastest_product"]:.0f})' for form in forms.values()]
    lines.append(f'| a matrix product | | {" | ".join(peaks)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/parts.json')
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    pixels = torch.randint(0, 256, (800, 1216, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    content = cv2.imencode('.jpg', pixels.numpy())[1].tobytes()
    stock, ours = build(ROWS[SWIN[0]]), build(ROWS[ROW])
    rows = {f'{SWIN[0]}, as built': (stock, 'as built')}
    rows |= {f'{ROW}, {form}': (ours, form) for form in ('deployed', 'deployed, bfloat16')}
    calls, seconds = {}, {}
    for name, (model, form) in rows.items():
        if form != 'as built':
            model = slab_det.deploy(model, None if form == 'deployed' else torch.bfloat16)
        calls[name] = torch_call(model, 'detector', FORMS['as built'], content)
        if model is stock:
            multiply_adds = count(model, calls[name])
        seconds[name] = watch(model)
    int8 = f'{ROW}, ONNX Runtime, int8'
    with tempfile.TemporaryDirectory() as folder:
        profile, file = Profile(Path(folder)), Path(folder, 'model.onnx')
        exported.RUNTIMES['profiled'] = profile.load
        form = FORMS['ONNX Runtime, int8']._replace(runtime='profiled')
        calls[int8] = runtime_call(ours, 'detector', form, content, file, args.threads)
        times = measure(calls, args.rounds, 'Mask R-CNN')
        seconds[int8] = profile.parts()
    products = {name: partial(fastest_product, torch.float32) for name in times}
    products |= {f'{ROW}, deployed, bfloat16': partial(fastest_product, torch.bfloat16)}
    products |= {int8: partial(fastest_integer_product, args.threads)}
    mmdet = next(iter(times.values()))
    forms = {}
    for name, totals in times.items():
        # Of each part the milliseconds per round; RoI heads may run it several times. The first round does not count.
        ms = {
            part: [sum(each) * 1e3 for each in zip(*[iter(calls)] * (len(calls) // (args.rounds + 1)), strict=True)][1:]
            for part, calls in seconds[name].items()
        }
        ms[REST] = [total - sum(parts) for total, *parts in zip(totals, *ms.values(), strict=True)]
        forms[name] = dict(
            ms={part: round(statistics.median(values), 1) for part, values in ms.items()},
            total_ms=statistics.median(totals),
            to_mmdet=round(statistics.median(one / other for one, other in zip(totals, mmdet, strict=True)), 3),
            fastest_product=products[name](),
        )
    results = dict(rounds=args.rounds, threads=args.threads, size=[800, 1216], environment=describe_environment())
    results |= dict(multiply_adds=multiply_adds, forms=forms)
    args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(table(results))


if __name__ == '__main__':
    main()
