"""Batch-1 latency of models, measured side by side and stored with everything that the numbers depend on."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from slab_det.runtime.errors import LatencyError
from slab_det.runtime.progress import Progress

DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
# torch.compile's own names; its list would have to be loaded with all of inductor.
COMPILE_MODES = ('default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs')
# glibc reads these when a process starts; keep_freed_memory sets them for child processes, and as its mark.
MALLOC_SETTINGS = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': '16000000000'}


@dataclass(frozen=True)
class LatencyResult:
    """Latency of one model and the scope of the number; milliseconds per image at batch 1.

    Attributes:
        name: Which model.
        scope: One of ``SCOPES``.
        timed: What is inside the timed region, in words.
        size, warmup, rounds, compile_mode: Arguments of :func:`measure_latency`; no torch.compile is None.
        image: File name of the input, or 'seeded noise'.
        detections: Objects found in the last round; None where no heads of a detector run. Heads are cheap where
            nothing is found, so compare detectors at equal counts.
        device: Name of the device.
        dtype: What the model computes in: the dtype of an autocast region or of the weights.
        autocast: Whether ``dtype`` is that of an autocast region, which casts the weights inside the timed region.
        threads: Threads of torch, and of image decoding and resizing, on the CPU.
        kept_memory: Whether the process keeps freed memory, see :func:`keep_freed_memory`.
        interleaved: Names of all models measured in the same rounds.
        fused: Whether the norms are folded away.
        deployed: Whether the model is the form that slab_det.deploy makes.
        median_ms: Median over the rounds of all repeats; likewise mean, standard deviation and 95th percentile.
        repeat_medians_ms: The median of each repeat.
        cost: Multiply-adds, parameters and norms left of the same call; None where it was not asked for.
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
    compile_mode: str | None
    median_ms: float
    mean_ms: float
    std_ms: float
    p95_ms: float
    repeat_medians_ms: tuple[float, ...]
    cost: ModelCost | None
    environment: dict

    def to_dict(self) -> dict:
        """The same as JSON types."""
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
    compile: bool | str = False,
    progress: bool = False,
    repeat: int = 1,
    cost: bool = False,
    keep_memory: bool = False,
) -> dict[str, LatencyResult]:
    """Times one image through every model, round by round, in this process.

    Every round runs all models once and every second round runs them in reverse order, so that clock speed, heat and
    neighbours touch all models alike. The models are moved to ``device`` and left there, in eval mode and, with
    ``compile``, compiled.

    Args:
        models: Detectors by name; bare backbones will do for scope 'backbone'.
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
        compile: Apply torch.compile to backbone and neck first; a string is its mode.
        progress: Draw a progress bar on stderr.
        repeat: How many times the whole measurement, warm-up and rounds, is made: the medians of the repeats show the
            spread from run to run.
        cost: Also count multiply-adds, parameters and norms, by one more call of every model.
        keep_memory: Call :func:`keep_freed_memory` first, which cannot be undone.

    Returns:
        One result per name, in the order of ``models``.

    Raises:
        LatencyError: For an unknown scope, dtype or mode, a device that is not there or not that of a deployed model,
            an image that cannot be decoded, or counts that make no sense.
        TypeError: If ``models`` have no names.
    """
    if not hasattr(models, 'items'):
        raise TypeError(f"measure_latency takes models by name, not a {type(models).__name__}: give {{'name': model}}")
    mode = 'default' if compile is True else compile or None
    choices = (('scope', scope, SCOPES), ('dtype', dtype, DTYPES), ('compile mode', mode or 'default', COMPILE_MODES))
    for what, value, known in choices:
        if value not in known:
            raise LatencyError(f'{what} {value!r} is not one of {", ".join(known)}')
    if rounds < 1 or warmup < 0 or repeat < 1 or len(size) != 2 or min(size) < 1:
        raise LatencyError(
            f'cannot measure rounds={rounds}, warmup={warmup}, repeat={repeat}, size={tuple(size)} (height, width)'
        )
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
        if keep_memory:
            # This cannot be undone, so everything that may raise comes before.
            keep_freed_memory()
        costs = {name: model.cost() if cost else None for name, model in measured.items()}
        if mode:
            for model in measured.values():
                model.compile(mode)
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
            compile_mode=mode,
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

    Where the measurement was repeated, a ratio is the median of the ratios within the repeats, so that a slow minute
    of the machine is in both of its numbers.

    Raises:
        LatencyError: If the results are not of one call of :func:`measure_latency`.
    """
    first = results[0]
    # A form that only some of the models have stands in their rows or names, not in the scope below the table.
    forms = ('dtype', 'autocast', 'deployed', 'compile_mode')
    mixed = {key: None for key in forms if len({getattr(result, key) for result in results}) > 1}
    scopes = {(result.interleaved, describe_scope(result.to_dict() | mixed)) for result in results}
    if len(scopes) > 1:
        raise LatencyError(
            f'{", ".join(result.name for result in results)} were measured differently and cannot be compared; measure '
            'them in one call'
        )
    rows = [_table_row(result, first) for result in results]
    lines = [f'| {" | ".join(cells)} |' for cells in (rows[0], *(row.values() for row in rows))]
    lines.insert(1, '|---|' + '---:|' * (len(rows[0]) - 1))
    repeats = f', {len(first.repeat_medians_ms)} repeats' if len(first.repeat_medians_ms) > 1 else ''
    rounds = f'warm-up {first.warmup}, {first.rounds} rounds interleaved{repeats}'
    lines += ['', f'{describe_scope(first.to_dict() | mixed)}, {rounds}', f'timed: {first.timed}']
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
    """The ratio of the medians within each repeat of one interleaved measurement."""
    return tuple(mine / theirs for mine, theirs in zip(result.repeat_medians_ms, base.repeat_medians_ms, strict=True))


def describe_scope(latency: Mapping) -> str:
    """What a latency was measured on, as one line; takes ``LatencyResult.to_dict()``, or its stored form."""
    height, width = latency['size']
    threads, mode = latency['threads'], latency.get('compile_mode')
    how = [
        latency['dtype'] and latency['dtype'] + ' autocast' * bool(latency.get('autocast')),
        'freed memory kept' if latency.get('kept_memory') else '',
        'deployed' if latency.get('deployed') else '',
        mode and ('torch.compile' if mode == 'default' else f'torch.compile ({mode})'),
        latency['device'],
        f'{threads} thread{"s" if threads != 1 else ""}',
    ]
    return f'{latency["scope"]}, batch 1, {height}x{width} (HxW), {", ".join(filter(None, how))}'


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next allocation, from now on, in this process and those that it starts.

    By default glibc gives large blocks back to the system, and each layer gets fresh pages, which are zeroed when they
    are first touched. How many depends on what else was allocated before, so that two equal models may differ by it
    (docs/measuring.md, Memory). In threads other than the first, glibc gives blocks above 64 MiB back all the same.

    Raises:
        LatencyError: Where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    # M_MMAP_MAX = -4: all blocks come from the heap. M_TRIM_THRESHOLD = -1: its end is never cut off.
    if mallopt is None or not (mallopt(-4, 0) and mallopt(-1, -1)):
        raise LatencyError('only glibc can be told to keep freed memory; leave out keep_memory (--keep-memory)')
    os.environ.update(MALLOC_SETTINGS)


class _MeasuredModel:
    """One model and one image, preprocessed as in the test loop; a call is one round."""

    def __init__(
        self, model: nn.Module, scope: Scope, image: bytes, size: tuple[int, int], device: torch.device, dtype: str
    ) -> None:
        self.model, self.scope, self.device, self.image, self.size = model, scope, device, image, size
        weights = [*getattr(model, 'backbone', model).parameters(), *model.parameters()]
        if is_deployed(model) and weights and weights[0].device.type != device.type:
            raise LatencyError(
                f'cannot measure on {device} a model that was deployed on {weights[0].device}: its form is for that '
                f"device; call model.to('{device}') before slab_det.deploy"
            )
        model.to(device)
        # mmdet's Swin returns None from eval().
        model.eval()
        self.weights_dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
        # A deployed model casts inside; half-precision weights compute in their own dtype.
        chosen = is_deployed(model) or self.weights_dtype != torch.float32
        self.dtype = self.weights_dtype if chosen else DTYPES[dtype]
        self.autocast = self.weights_dtype != self.dtype
        self.compiled = False
        self.preprocess = getattr(model, 'data_preprocessor', None) or DetDataPreprocessor(
            mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True, pad_size_divisor=32
        ).to(device)
        self.predictions: list[DetDataSample] | None = None
        self.load()

    def __call__(self) -> None:
        if self.compiled and self.device.type == 'cuda':
            # Backbone and neck belong to one step: CUDA graphs may reuse the memory of the step before.
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, self.dtype, enabled=self.autocast):
            self.scope.run(self)

    def load(self) -> None:
        """Decodes, resizes, normalises and pads the image, and brings it to the device."""
        # (height, width, 3) uint8 in BGR, upright, as mmdet's LoadImageFromFile reads it.
        pixels = mmcv.imfrombytes(self.image)
        (height, width), ori_shape = self.size, pixels.shape[:2]
        # Width before height, as mmcv's Resize leaves it.
        scale_factor = (width / ori_shape[1], height / ori_shape[0])
        metainfo = {'img_id': 0, 'img_shape': self.size, 'ori_shape': ori_shape, 'scale_factor': scale_factor}
        pixels = mmcv.imresize(pixels, (width, height))
        data = {
            'inputs': [torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))],
            # Other models make their own.
            'data_samples': [DetDataSample(metainfo=metainfo)] if isinstance(self.model, BaseDetector) else None,
        }
        data = self.preprocess(data, training=False)
        self.inputs, self.samples = data['inputs'].to(self.weights_dtype), data['data_samples']

    def predict(self) -> None:
        self.predictions = self.model(self.inputs, self.samples, mode='predict')

    def describe(self) -> dict:
        """What the result says about the model itself."""
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

    def compile(self, mode: str) -> None:
        for part in self._submodules(self.scope.parts or ('backbone', 'neck')):
            part.compile(mode=mode)
        self.compiled = True

    def _submodules(self, names: Sequence[str]) -> list[nn.Module]:
        """The submodules of these names that there are, or the model, as a bare backbone is its own part."""
        found = [getattr(self.model, name, None) for name in names]
        return [part for part in found if part is not None] or [self.model]


class Scope(NamedTuple):
    """A part of the way from a file to predictions.

    Attributes:
        timed: What is inside the timed region, in words.
        run: One round.
        parts: The submodules that run; empty for the whole detector.
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
            elapsed = _time(models[name], models[name].device)
            if index >= warmup:
                times[name][repetition].append(elapsed)
    return times


def _time(run: Callable[[], None], device: torch.device) -> float:
    """Wall time in milliseconds, until the device is done."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _read_image(path: str | None, size: tuple[int, int]) -> bytes:
    """The content of an image file; without a path a JPEG of (height, width) noise that is the same in every run."""
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
