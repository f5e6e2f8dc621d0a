"""Latency of one detector in PyTorch, ONNX Runtime and OpenVINO on a CPU, against mmdet's stock Swin-T, interleaved.

    python benchmarks/cpu_runtimes.py --threads 2

Needs `pip install -e ".[onnx,openvino]"`. Weights are random; int8 is calibrated on noise, which costs the same. AP:
tools/test_onnx.py. Exported files also normalise and pad, PyTorch gets the image normalised.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from mmdet.structures import DetDataSample
from torch import nn

from slab_det.deployment.export import SCOPES, ExportedDetector, export_onnx, load_runtime, quantize_onnx, random_images
from slab_det.measure.environment import describe_environment
from slab_det.measure.untrained import build_untrained

ROOT = Path(__file__).resolve().parents[1]
STOCK = 'mmdet, PyTorch'
FUSED = 'fused, PyTorch'
# Name, runtime, precision, quantized.
RUNTIME_ROWS = (
    ('ONNX Runtime', 'onnxruntime', 'f32', False),
    ('ONNX Runtime int8', 'onnxruntime', 'f32', True),
    ('OpenVINO', 'openvino', 'f32', False),
    ('OpenVINO bf16', 'openvino', 'bf16', False),
    ('OpenVINO int8', 'openvino', 'f32', True),
    ('OpenVINO int8+bf16', 'openvino', 'bf16', True),
)
CALIBRATION_SIZE = (320, 416)
# The runtimes' threads spin for a while after a call; the next one should not share the cores with them.
PAUSE_SECONDS = 0.1

Call = Callable[[], object]


def torch_call(model: nn.Module, scope: str, pixels: torch.Tensor) -> Call:
    """One image through a detector."""
    inputs, samples = pixels[0], [new_sample(pixels)]
    data = model.data_preprocessor(dict(inputs=[inputs], data_samples=samples), False)

    def run() -> object:
        with torch.inference_mode():
            if scope == 'detector':
                return model.predict(data['inputs'], data['data_samples'])
            return model.rpn_head(model.extract_feat(data['inputs']))

    return run


def runtime_call(file: Path, runtime: str, precision: str, scope: str, pixels: torch.Tensor, threads: int) -> Call:
    """The same through an exported file; masks are pasted in both."""
    if scope == 'detector':
        detector = ExportedDetector(str(file), runtime=runtime, threads=threads, precision=precision)
        return lambda: detector([pixels[0]], [new_sample(pixels)])
    loaded = load_runtime(file, runtime, threads, precision)
    return lambda: loaded.run(pixels.numpy())


def new_sample(pixels: torch.Tensor) -> DetDataSample:
    size = tuple(pixels.shape[2:])
    return DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0)))


def contestants(config: str, scope: str, pixels: torch.Tensor, threads: int, folder: Path) -> dict[str, Call]:
    """Every row, ready to run."""
    fused = build_untrained(ROOT / 'configs' / f'{config}.py', {})
    stock = build_untrained(ROOT / 'configs' / 'mask_rcnn_swin_t.py', dict(type='SwinTransformer'))
    plain, quantized = folder / f'{scope}.onnx', folder / f'{scope}_int8.onnx'
    export_onnx(fused, plain, scope)
    quantize_onnx(plain, quantized, random_images([CALIBRATION_SIZE]))
    calls = {
        STOCK: torch_call(stock, scope, pixels),
        FUSED: torch_call(fused, scope, pixels),
    }
    for name, runtime, precision, is_int8 in RUNTIME_ROWS:
        calls[name] = runtime_call(quantized if is_int8 else plain, runtime, precision, scope, pixels, threads)
    return calls


def measure(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, round by round, every second round in reverse, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name in list(calls)[:: -1 if index % 2 else 1]:
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            calls[name]()
            if index:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def summarize(times: Mapping[str, list[float]]) -> dict[str, dict]:
    """Median, minimum, and the median over rounds of the ratio to the stock detector of the same round."""
    return {
        name: dict(
            median_ms=round(statistics.median(values), 1),
            min_ms=round(min(values), 1),
            ratio=round(statistics.median(a / b for a, b in zip(values, times[STOCK], strict=True)), 3),
            times_ms=[round(value, 1) for value in values],
        )
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', default='mask_rcnn_prepbn_swin_t', help='name in configs/ (default %(default)s)')
    parser.add_argument('--scopes', nargs='+', choices=list(SCOPES), default=list(SCOPES))
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/cpu_runtimes.json')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pixels = torch.from_numpy(random_images([tuple(args.size)])[0])
    results = dict(
        config=args.config,
        size=list(args.size),
        rounds=args.rounds,
        threads=args.threads,
        batch=1,
        stock='configs/mask_rcnn_swin_t.py with backbone.type=SwinTransformer, eager float32',
        environment=describe_environment(),
        runtimes={name: version(name) for name in ('onnx', 'onnxruntime', 'openvino')},
        scopes={},
    )
    for scope in args.scopes:
        with tempfile.TemporaryDirectory() as folder:
            rows = summarize(measure(contestants(args.config, scope, pixels, args.threads, Path(folder)), args.rounds))
        results['scopes'][scope] = rows
        print(
            f'{scope}, batch 1, {args.size[0]}x{args.size[1]}, {args.threads} threads\n'
            '| row | median ms | min | ratio |\n|---|---:|---:|---:|'
        )
        for name, row in rows.items():
            print(f'| {name} | {row["median_ms"]} | {row["min_ms"]} | {row["ratio"]:.3f} |')
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + '\n')
    print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
