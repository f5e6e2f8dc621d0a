"""Measures the batch-1 latency of models in alternating rounds, and records the conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.detectors import BaseDetector
from mmdet.structures import DetDataSample
from torch import nn

from slab_det.common.errors import SlabDetError
from slab_det.common.memory import keeps_freed_memory
from slab_det.common.modules import input_channels, is_deployed
from slab_det.common.numbers import check_size, check_threads
from slab_det.common.record import Record, describe_environment, format_ratio, format_table
from slab_det.compare.kernels import warn_of_precision
from slab_det.machine import find_device
from slab_det.measure import SCOPES
from slab_det.measure.cost import ModelCost, measure_cost
from slab_det.measure.timer import compare_times, time_in_turns
from slab_det.precisions import precisions_of


@dataclass(frozen=True)
class LatencyResult(Record):
    """Latency of one model in milliseconds per image at batch 1, and the conditions of the measurement.

    Attributes:
        scope: One of :data:`slab_det.measure.SCOPES`.
        timed: The work inside the timed region, in words.
        size, warmup, rounds: Arguments of :func:`measure_latency`.
        image: File name of the input, or 'seeded noise'.
        detections: Objects found in the last round; None without heads. Heads take longer with more objects, so compare
            detectors at equal counts.
        device: Name of the device.
        dtype: The dtype of the computation, followed by ' autocast' if the weights are float32 and cast in every round.
        threads: CPU threads of torch and OpenCV.
        kept_memory: Whether glibc keeps freed memory for the next allocation (docs/latency.md, Memory).
        median_ms, mean_ms, std_ms, p95_ms: Over the rounds; p95 is the 95th percentile.
        ratio: The time divided by the first model's time in the same round; the median over the rounds.
        ratio_quartiles: First and third quartile of this ratio over the rounds.
        cost: Multiply-adds, parameters and norms in the timed scope; None if they were not counted.
        environment: See :func:`slab_det.common.record.describe_environment`.
    """

    scope: str
    timed: str
    size: tuple[int, int]
    image: str
    detections: int | None
    device: str
    dtype: str
    threads: int
    kept_memory: bool
    warmup: int
    rounds: int
    median_ms: float
    mean_ms: float
    std_ms: float
    p95_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    cost: ModelCost | None
    environment: dict


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
    progress: bool = False,
    cost: bool = False,
) -> dict[str, LatencyResult]:
    """Times one image through every model, round by round, in this process.

    A round runs every model once, and every second round runs them in reverse order, so that clock speed, heat and
    other processes affect all models alike. The models stay on ``device`` afterwards, in eval mode.

    Args:
        models: Detectors by name; for scope 'backbone' also bare backbones.
        size: (height, width) to which the image is resized. The data_preprocessor of each model then normalises and
            pads the image; for a model without data_preprocessor, to a multiple of 32.
        rounds: Timed rounds.
        warmup: Untimed rounds before the timed ones.
        scope: 'backbone', 'backbone+neck', 'detector' or 'end-to-end', see :data:`slab_det.measure.SCOPES`.
        device: 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', or 'float16' or 'bfloat16' for autocast. A model in half precision or from slab_det.deploy
            ignores it and keeps its dtype.
        threads: CPU threads of torch and OpenCV during the measurement; None takes torch's number.
        image: Path of an image; None takes noise from a fixed seed.
        progress: Draw a progress bar on stderr.
        cost: Count multiply-adds, parameters and norms too, in one extra call of every model.

    Returns:
        One result per name, in the order of ``models``.

    Raises:
        SlabDetError: For an unknown scope or dtype, no rounds, an impossible size or number of threads, a device that
            PyTorch does not see, a model that was deployed on another device, or an image that cannot be decoded.
    """
    for what, value, known in (('scope', scope, SCOPES), ('dtype', dtype, precisions_of('eager'))):
        if value not in known:
            raise SlabDetError(f'{what} {value!r} is not one of {", ".join(known)}')
    check_rounds(rounds, warmup)
    check_size(size, name='size=')
    check_threads(threads, name='threads=')
    device, content = find_device(device), _read_image(image, size)
    torch_threads, image_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(threads or torch_threads)
    cv2.setNumThreads(threads or torch_threads)
    try:
        timed = {
            name: _TimedModel(model, scope, content, tuple(size), device, getattr(torch, dtype))
            for name, model in models.items()
        }
        costs = {name: measure_cost(model.parts(), model) if cost else None for name, model in timed.items()}
        with torch.inference_mode():
            times = time_in_turns(timed, rounds, warmup, device, progress=progress)
        environment = describe_environment(device)
    finally:
        torch.set_num_threads(torch_threads)
        cv2.setNumThreads(image_threads)
    base, results = next(iter(times.values())), {}
    for name, values in times.items():
        compared = compare_times(values, base)
        results[name] = LatencyResult(
            scope=scope,
            timed=SCOPES[scope],
            size=tuple(size),
            image='seeded noise' if image is None else str(image),
            detections=timed[name].num_detections,
            device=environment['device'],
            dtype=str(timed[name].dtype).removeprefix('torch.') + ' autocast' * timed[name].autocast,
            threads=environment['threads'],
            kept_memory=keeps_freed_memory(),
            warmup=warmup,
            rounds=rounds,
            median_ms=float(np.median(values)),
            mean_ms=float(np.mean(values)),
            std_ms=float(np.std(values)),
            p95_ms=float(np.percentile(values, 95)),
            ratio=compared.ratio,
            ratio_quartiles=compared.quartiles,
            cost=costs[name],
            environment=environment,
        )
    return results


def check_rounds(rounds: int, warmup: int) -> None:
    """Raises SlabDetError for numbers of rounds that :func:`measure_latency` cannot time."""
    if rounds < 1 or warmup < 0:
        raise SlabDetError(f'rounds={rounds} must be at least 1, warmup={warmup} at least 0')


def latency_table(results: Mapping[str, LatencyResult]) -> str:
    """Returns a Markdown table with ratios to the first model, and the conditions of the measurement below it.

    Args:
        results: The results of one call of :func:`measure_latency`.
    """
    first, rows = next(iter(results.values())), []
    for name, result in results.items():
        row = {
            'model': name,
            'dtype': result.dtype,
            'median ms': f'{result.median_ms:.2f}',
            'mean ± std': f'{result.mean_ms:.2f} ± {result.std_ms:.2f}',
            'p95': f'{result.p95_ms:.2f}',
            'ratio (quartiles)': format_ratio(result.ratio, result.ratio_quartiles),
        }
        if result.cost:
            row['G multiply-adds'] = f'{result.cost.multiply_adds / 1e9:.3f}'
            row['M parameters'] = f'{result.cost.parameters / 1e6:.2f}'
            row['norms left'] = str(result.cost.norms_left)
        rows.append(row)
    # Each row has its own dtype.
    scope = describe_scope(first.to_dict() | {'dtype': ''})
    lines = [format_table([*rows[0]], [[*row.values()] for row in rows]), '']
    lines += [f'{scope}, warm-up {first.warmup}, {first.rounds} rounds interleaved', f'timed: {first.timed}']
    if first.detections is not None:
        found = ', '.join(f'{name} {result.detections}' for name, result in results.items())
        lines.append(f'objects found in {first.image}: {found}')
    return '\n'.join(lines)


def describe_scope(latency: Mapping) -> str:
    """Formats the conditions from ``LatencyResult.to_dict()`` as one line."""
    height, width = latency['size']
    threads = latency['threads']
    memory = 'freed memory kept' if latency.get('kept_memory') else ''
    cpu = f'{threads} thread{"s" if threads != 1 else ""}'
    how = ', '.join(filter(None, (latency['dtype'], memory, latency['device'], cpu)))
    return f'{latency["scope"]}, batch 1, {height}x{width} (HxW), {how}'


class _TimedModel:
    """A model with its input image; each call is one round. Arguments as in :func:`measure_latency`."""

    def __init__(
        self,
        model: nn.Module,
        scope: str,
        content: bytes,
        size: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.scope, self.content, self.size, self.device = model, scope, content, size, device
        weights = [*getattr(model, 'backbone', model).parameters(), *model.parameters()]
        if is_deployed(model) and weights and weights[0].device.type != device.type:
            raise SlabDetError(
                f'cannot measure on {device} a model that was deployed on {weights[0].device}; '
                f"call model.to('{device}') before slab_det.deploy"
            )
        model.to(device)
        # mmdet's Swin returns None from eval().
        model.eval()
        self.weights_dtype = weights[0].dtype if weights else torch.float32
        # A deployed model casts its inputs itself; half-precision weights need no autocast.
        has_dtype = is_deployed(model) or self.weights_dtype != torch.float32
        self.dtype = self.weights_dtype if has_dtype else dtype
        self.autocast = self.weights_dtype != self.dtype
        warn_of_precision(model, self.dtype)
        self.is_gray = input_channels(model) == 1
        normalize = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True)
        normalize = dict(mean=[127.5], std=[57.5]) if self.is_gray else normalize
        self.preprocess = getattr(model, 'data_preprocessor', None) or DetDataPreprocessor(
            **normalize, pad_size_divisor=32
        ).to(device)
        self.num_detections: int | None = None
        self.load()

    def __call__(self) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.autocast):
            if self.scope == 'backbone':
                getattr(self.model, 'backbone', self.model)(self.inputs)
            elif self.scope == 'backbone+neck':
                self.model.extract_feat(self.inputs)
            else:
                if self.scope == 'end-to-end':
                    self.load()
                first = self.model(self.inputs, self.samples, mode='predict')[0]
                self.num_detections = len(first.pred_instances) if 'pred_instances' in first else None

    def load(self) -> None:
        """Decodes, resizes, normalises and pads the image, and moves it to the device."""
        # (height, width, 3) uint8 in BGR, or (height, width) in gray, upright, as mmdet's LoadImageFromFile reads it.
        pixels = mmcv.imfrombytes(self.content, 'grayscale' if self.is_gray else 'color')
        (height, width), ori_shape = self.size, pixels.shape[:2]
        # Width before height, as mmcv's Resize leaves it.
        scale_factor = (width / ori_shape[1], height / ori_shape[0])
        metainfo = {'img_id': 0, 'img_shape': self.size, 'ori_shape': ori_shape, 'scale_factor': scale_factor}
        pixels = np.atleast_3d(mmcv.imresize(pixels, (width, height)))
        data = {
            'inputs': [torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))],
            # mmpretrain's classifiers create their own data samples.
            'data_samples': [DetDataSample(metainfo=metainfo)] if isinstance(self.model, BaseDetector) else None,
        }
        data = self.preprocess(data, training=False)
        self.inputs, self.samples = data['inputs'].to(self.weights_dtype), data['data_samples']

    def parts(self) -> list[nn.Module]:
        """Returns the modules of the scope."""
        found = [getattr(self.model, name, None) for name in self.scope.split('+')]
        return [part for part in found if part is not None] or [self.model]


def _read_image(path: str | None, size: tuple[int, int]) -> bytes:
    """Returns the bytes of an image file, or of a JPEG with seeded noise if ``path`` is None."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator).numpy()
        return cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    content = Path(path).read_bytes()
    if mmcv.imfrombytes(content) is None:
        raise SlabDetError(f'image {path} cannot be decoded')
    return content
