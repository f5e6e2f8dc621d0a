"""Measures the batch-1 latency of models side by side, with everything that the numbers depend on."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import cv2
import mmcv
import numpy as np
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.detectors import BaseDetector
from mmdet.structures import DetDataSample
from torch import nn

from slab_det.checkpoints import is_fused
from slab_det.deployment import is_deployed
from slab_det.measure.cost import ModelCost, measure_cost
from slab_det.measure.environment import describe_environment
from slab_det.measure.markdown import format_table
from slab_det.runtime.errors import LatencyError
from slab_det.runtime.progress import Progress

DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
# Set by keep_freed_memory: glibc reads them when a child process starts, and results show whether they are set.
MALLOC_SETTINGS = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': '16000000000'}


@dataclass(frozen=True)
class LatencyResult:
    """Latency of one model in milliseconds per image at batch 1, and what the number depends on.

    Attributes:
        name: Name of the model.
        scope: One of ``SCOPES``.
        timed: What is inside the timed region, in words.
        size, warmup, rounds: Arguments of :func:`measure_latency`.
        image: File name of the input, or 'seeded noise'.
        detections: Objects found in the last round; None if no detector's heads run. Heads are cheap where they find
            nothing, so compare detectors at equal counts.
        device: Name of the device.
        dtype: What the model computes in: the dtype of an autocast region or of the weights.
        autocast: Whether the model ran in an autocast region, which casts the weights inside the timed region.
        threads: Threads of torch, and of image decoding and resizing, on the CPU.
        kept_memory: Whether the process keeps freed memory, see :func:`keep_freed_memory`.
        interleaved: Names of all models measured in the same rounds.
        fused: Whether the norms are folded away.
        deployed: Whether slab_det.deploy made the model.
        compiled: Whether torch.compile was applied to backbone and neck.
        median_ms, mean_ms, std_ms, p95_ms: Over the rounds of all repeats; p95 is the 95th percentile.
        repeat_medians_ms: The median of each repeat.
        cost: Multiply-adds, parameters and norms left in the same call; None if they were not asked for.
        environment: See :func:`slab_det.measure.environment.describe_environment`.
    """

    name: str
    scope: str
    timed: str
    size: tuple[int, int]
    image: str
    detections: int | None
    device: str
    dtype: str
    autocast: bool
    threads: int
    kept_memory: bool
    warmup: int
    rounds: int
    interleaved: tuple[str, ...]
    fused: bool
    deployed: bool
    compiled: bool
    median_ms: float
    mean_ms: float
    std_ms: float
    p95_ms: float
    repeat_medians_ms: tuple[float, ...]
    cost: ModelCost | None
    environment: dict

    def to_dict(self) -> dict:
        """The attributes as JSON types."""
        return json.loads(json.dumps(asdict(self)))


def measure_latency(
    models: Mapping[str, nn.Module],
    size: tuple[int, int] = (800, 1333),
    rounds: int = 100,
    warmup: int = 20,
    scope: str = 'detector',
    device: str | torch.device = 'cpu',
    dtype: str = 'float32',
    threads: int | None = None,
    image: str | None = None,
    compile: bool = False,
    progress: bool = False,
    repeat: int = 1,
    cost: bool = False,
    keep_memory: bool = False,
) -> dict[str, LatencyResult]:
    """Times one image through every model, round by round, in this process.

    Every round runs all models once, and every second round runs them in reverse order, so that clock speed, heat and
    other processes affect all models alike. The models stay on ``device`` afterwards, in eval mode and, with
    ``compile``, compiled.

    Args:
        models: Detectors by name; for scope 'backbone' also bare backbones.
        size: (height, width) to which the image is resized; each model's data_preprocessor then normalises and pads it
            as in testing (to a multiple of 32 where a model has none).
        rounds: Timed rounds, in every repeat.
        warmup: Rounds before them, not counted.
        scope: 'backbone', 'backbone+neck', 'detector' or 'end-to-end', see ``SCOPES``.
        device: 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'float16' or 'bfloat16': autocast. Weights in half precision, and a model from
            slab_det.deploy, keep their dtype.
        threads: CPU threads of torch during the measurement; None leaves them.
        image: Path of an image; None takes noise from a fixed seed.
        compile: Apply torch.compile to backbone and neck first.
        progress: Draw a progress bar on stderr.
        repeat: Number of whole measurements, warm-up and rounds; their medians show the spread from run to run.
        cost: Also count multiply-adds, parameters and norms, in one more call of every model.
        keep_memory: Call :func:`keep_freed_memory` first, which cannot be undone.

    Returns:
        One result per name, in the order of ``models``.

    Raises:
        LatencyError: For an unknown scope or dtype, no rounds, a device that PyTorch does not see or that the model was
            not deployed on, or an image that cannot be decoded.
    """
    for what, value, known in (('scope', scope, SCOPES), ('dtype', dtype, DTYPES)):
        if value not in known:
            raise LatencyError(f'{what} {value!r} is not one of {", ".join(known)}')
    if min(rounds, repeat) < 1:
        raise LatencyError(f'rounds={rounds} and repeat={repeat} measure nothing; give at least 1 of each')
    device = find_device(device)
    photo = _read_image(image, size)
    torch_threads, image_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(threads or torch_threads)
    cv2.setNumThreads(threads or torch_threads)
    try:
        measured = {
            name: _MeasuredModel(model, SCOPES[scope], photo, tuple(size), device, dtype)
            for name, model in models.items()
        }
        # Everything that may raise comes before, as this cannot be undone.
        if keep_memory:
            keep_freed_memory()
        costs = {name: model.cost() if cost else None for name, model in measured.items()}
        if compile:
            for model in measured.values():
                model.compile()
        times = _take_turns(measured, rounds, warmup, repeat, progress)
        environment = describe_environment(device)
    finally:
        torch.set_num_threads(torch_threads)
        cv2.setNumThreads(image_threads)
    return {
        name: LatencyResult(
            name=name,
            scope=scope,
            timed=SCOPES[scope].timed,
            size=tuple(size),
            image='seeded noise' if image is None else str(image),
            device=environment['device'],
            threads=environment['threads'],
            kept_memory=MALLOC_SETTINGS.keys() <= os.environ.keys(),
            warmup=warmup,
            rounds=rounds,
            interleaved=tuple(models),
            compiled=compile,
            cost=costs[name],
            environment=environment,
            **model.describe(),
            median_ms=float(np.median(times[name])),
            mean_ms=float(np.mean(times[name])),
            std_ms=float(np.std(times[name])),
            p95_ms=float(np.percentile(times[name], 95)),
            repeat_medians_ms=tuple(float(np.median(repetition)) for repetition in times[name]),
        )
        for name, model in measured.items()
    }


def latency_table(results: Sequence[LatencyResult]) -> str:
    """A Markdown table with ratios to the first result, and the scope of the numbers below it.

    In repeated measurements a ratio is the median of the ratios within the repeats, so that a slow minute of the
    machine affects both of its numbers.

    Raises:
        LatencyError: If the results come from several calls of :func:`measure_latency`.
    """
    first = results[0]
    # What differs between the models stands in their rows or names; the scope below the table omits it.
    mixed = {key: None for key in ('dtype', 'autocast', 'deployed') if len({getattr(r, key) for r in results}) > 1}
    scopes = {(result.interleaved, describe_scope(result.to_dict() | mixed)) for result in results}
    if len(scopes) > 1:
        raise LatencyError(
            f'{", ".join(result.name for result in results)} were measured differently and cannot be compared; measure '
            'them in one call'
        )
    rows = [_table_row(result, first) for result in results]
    repeats = f', {len(first.repeat_medians_ms)} repeats' if len(first.repeat_medians_ms) > 1 else ''
    rounds = f'warm-up {first.warmup}, {first.rounds} rounds interleaved{repeats}'
    table = format_table([*rows[0]], [[*row.values()] for row in rows])
    lines = [table, '', f'{describe_scope(first.to_dict() | mixed)}, {rounds}', f'timed: {first.timed}']
    if first.detections is not None:
        found = ', '.join(f'{result.name} {result.detections}' for result in results)
        lines.append(f'objects found in {first.image}: {found}')
    return '\n'.join(lines)


def _table_row(result: LatencyResult, first: LatencyResult) -> dict[str, str]:
    """The cells of one row by their titles."""
    ratios, repeats = repeat_ratios(result, first), result.repeat_medians_ms
    row = {
        'model': result.name,
        'dtype': result.dtype,
        'median ms': f'{result.median_ms:.2f}',
        'mean ± std': f'{result.mean_ms:.2f} ± {result.std_ms:.2f}',
        'p95': f'{result.p95_ms:.2f}',
        'ratio': f'{median(ratios):.3f}',
    }
    if len(repeats) > 1:
        row[f'medians of {len(repeats)} repeats'] = f'{min(repeats):.2f} – {max(repeats):.2f}'
        row['their ratios'] = f'{min(ratios):.3f} – {max(ratios):.3f}'
    if result.cost:
        row['G multiply-adds'] = f'{result.cost.multiply_adds / 1e9:.3f}'
        row['M parameters'] = f'{result.cost.parameters / 1e6:.2f}'
        row['norms left'] = str(result.cost.norms_left)
    return row


def repeat_ratios(result: LatencyResult, base: LatencyResult) -> tuple[float, ...]:
    """The ratio of the medians of two models within each repeat of one interleaved measurement."""
    return tuple(mine / theirs for mine, theirs in zip(result.repeat_medians_ms, base.repeat_medians_ms, strict=True))


def describe_scope(latency: Mapping) -> str:
    """What a latency depends on, as one line; takes :meth:`LatencyResult.to_dict`, also read from a report."""
    height, width = latency['size']
    threads = latency['threads']
    how = [
        latency['dtype'] and latency['dtype'] + ' autocast' * bool(latency.get('autocast')),
        'freed memory kept' if latency.get('kept_memory') else '',
        'deployed' if latency.get('deployed') else '',
        'torch.compile' if latency.get('compiled') else '',
        latency['device'],
        f'{threads} thread{"s" if threads != 1 else ""}',
    ]
    return f'{latency["scope"]}, batch 1, {height}x{width} (HxW), {", ".join(filter(None, how))}'


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation, from now on, in this process and those that it starts.

    By default glibc gives large blocks back to the system, and each layer gets fresh pages, which are zeroed when they
    are first touched. Their number depends on earlier allocations, so that two equal models may differ in time
    (docs/latency.md, Memory). In threads other than the first, glibc gives blocks above 64 MiB back nevertheless.

    Raises:
        LatencyError: Where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    # M_MMAP_MAX = -4: all blocks come from the heap. M_TRIM_THRESHOLD = -1: its end is never cut off.
    if mallopt is None or not (mallopt(-4, 0) and mallopt(-1, -1)):
        raise LatencyError('only glibc can be told to keep freed memory; leave out keep_memory (--keep-memory)')
    os.environ.update(MALLOC_SETTINGS)


class _MeasuredModel:
    """One model and one image, preprocessed as in the test loop. A call is one round."""

    def __init__(
        self, model: nn.Module, scope: Scope, image: bytes, size: tuple[int, int], device: torch.device, dtype: str
    ) -> None:
        self.model, self.scope, self.device, self.image, self.size = model, scope, device, image, size
        weights = [*getattr(model, 'backbone', model).parameters(), *model.parameters()]
        if is_deployed(model) and weights and weights[0].device.type != device.type:
            raise LatencyError(
                f'cannot measure on {device} a model that was deployed on {weights[0].device}; '
                f"call model.to('{device}') before slab_det.deploy"
            )
        model.to(device)
        # mmdet's Swin returns None from eval().
        model.eval()
        self.weights_dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
        # A deployed model casts inside; half-precision weights compute in their own dtype.
        has_dtype = is_deployed(model) or self.weights_dtype != torch.float32
        self.dtype = self.weights_dtype if has_dtype else DTYPES[dtype]
        self.autocast = self.weights_dtype != self.dtype
        self.preprocess = getattr(model, 'data_preprocessor', None) or DetDataPreprocessor(
            mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True, pad_size_divisor=32
        ).to(device)
        self.predictions: list[DetDataSample] | None = None
        self.load()

    def __call__(self) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.autocast):
            self.scope.run(self)

    def load(self) -> None:
        """Decodes, resizes, normalises and pads the image, and moves it to the device."""
        # (height, width, 3) uint8 in BGR, upright, as mmdet's LoadImageFromFile reads it.
        pixels = mmcv.imfrombytes(self.image)
        (height, width), ori_shape = self.size, pixels.shape[:2]
        # Width before height, as mmcv's Resize leaves it.
        scale_factor = (width / ori_shape[1], height / ori_shape[0])
        metainfo = {'img_id': 0, 'img_shape': self.size, 'ori_shape': ori_shape, 'scale_factor': scale_factor}
        pixels = mmcv.imresize(pixels, (width, height))
        data = {
            'inputs': [torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))],
            # Segmentors and classifiers make their own samples.
            'data_samples': [DetDataSample(metainfo=metainfo)] if isinstance(self.model, BaseDetector) else None,
        }
        data = self.preprocess(data, training=False)
        self.inputs, self.samples = data['inputs'].to(self.weights_dtype), data['data_samples']

    def predict(self) -> None:
        self.predictions = self.model(self.inputs, self.samples, mode='predict')

    def describe(self) -> dict:
        """The attributes of the result that the model decides."""
        found = 'pred_instances' in (self.predictions or [()])[0]
        return {
            'detections': len(self.predictions[0].pred_instances) if found else None,
            'dtype': str(self.dtype).removeprefix('torch.'),
            'autocast': self.autocast,
            'fused': is_fused(self.model),
            'deployed': is_deployed(self.model),
        }

    def cost(self) -> ModelCost:
        return measure_cost(self._submodules(self.scope.parts), self)

    def compile(self) -> None:
        for part in self._submodules(self.scope.parts or ('backbone', 'neck')):
            part.compile()

    def _submodules(self, names: Sequence[str]) -> list[nn.Module]:
        """The submodules of these names; the model itself if it has none of them, as a bare backbone."""
        found = [getattr(self.model, name, None) for name in names]
        return [part for part in found if part is not None] or [self.model]


class Scope(NamedTuple):
    """A part of the work from an image file to predictions.

    Attributes:
        timed: What is inside the timed region, in words.
        run: Runs one round.
        parts: Names of the submodules that run; empty for the whole detector.
    """

    timed: str
    run: Callable[[_MeasuredModel], object]
    parts: tuple[str, ...] = ()


SCOPES = {
    'backbone': Scope(
        'backbone forward on a normalised, padded image',
        lambda measured: getattr(measured.model, 'backbone', measured.model)(measured.inputs),
        ('backbone',),
    ),
    'backbone+neck': Scope(
        'backbone and neck forward on a normalised, padded image',
        lambda measured: measured.model.extract_feat(measured.inputs),
        ('backbone', 'neck'),
    ),
    'detector': Scope(
        'prediction on a normalised, padded image: backbone, neck, all heads, NMS, masks pasted to full size; '
        'without image decoding, resizing and normalisation',
        _MeasuredModel.predict,
    ),
    'end-to-end': Scope(
        'from the bytes of the image file in memory to predictions on the original image: decoding, resizing, '
        'normalisation, padding, copy to the device, backbone, neck, all heads, NMS, masks pasted to full size',
        lambda measured: (measured.load(), measured.predict()),
    ),
}


@torch.inference_mode()
def _take_turns(
    models: Mapping[str, _MeasuredModel], rounds: int, warmup: int, repeat: int, progress: bool
) -> dict[str, list[list[float]]]:
    """The times of every model in milliseconds, one list per repeat."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(repeat)] for name in models}
    for step in Progress(range(repeat * (warmup + rounds)), 'Measuring', disable=not progress):
        repetition, index = divmod(step, warmup + rounds)
        for name in list(models)[:: -1 if index % 2 else 1]:
            elapsed = _time(models[name])
            if index >= warmup:
                times[name][repetition].append(elapsed)
    return times


def _time(measured: _MeasuredModel) -> float:
    """Wall time of one round in milliseconds, until the device has finished."""
    wait = partial(torch.cuda.synchronize, measured.device) if measured.device.type == 'cuda' else lambda: None
    wait()
    start = time.perf_counter()
    measured()
    wait()
    return (time.perf_counter() - start) * 1e3


def _read_image(path: str | None, size: tuple[int, int]) -> bytes:
    """The bytes of an image file; without a path of a JPEG of noise, (height, width), the same in every run."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator).numpy()
        return cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    content = Path(path).read_bytes()
    if mmcv.imfrombytes(content) is None:
        raise LatencyError(f'image {path} cannot be decoded')
    return content


def find_device(name: str | torch.device) -> torch.device:
    """The device of a name.

    Raises:
        LatencyError: If PyTorch does not see it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LatencyError(
            f'device {str(name)!r} is not there: torch {torch.__version__} sees the CPU and '
            f'{torch.cuda.device_count()} CUDA devices; use --device cpu'
        ) from error
    return device
