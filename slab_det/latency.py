"""Batch-1 latency of detectors, measured side by side and stored with all that the number depends on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import mmcv
import numpy as np
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.structures import DetDataSample
from rich.console import Console
from rich.progress import track
from torch import nn

from slab_det.detectors import is_fused
from slab_det.environment import describe_environment
from slab_det.errors import LatencyError

DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}


@dataclass(frozen=True)
class Scope:
    """A part of a detector to time.

    Attributes:
        timed: What is inside the timed region, in words.
        forward: (model, inputs (1, 3, H, W), data samples) -> outputs.
        parts: The submodules that torch.compile can take as one graph.
    """

    timed: str
    forward: Callable[[nn.Module, torch.Tensor, list[DetDataSample]], object]
    parts: tuple[str, ...]


SCOPES = {
    'backbone': Scope(
        'backbone forward on a normalised, padded image',
        lambda model, inputs, samples: getattr(model, 'backbone', model)(inputs),
        ('backbone',),
    ),
    'backbone+neck': Scope(
        'backbone and neck forward on a normalised, padded image',
        lambda model, inputs, samples: model.extract_feat(inputs),
        ('backbone', 'neck'),
    ),
    'detector': Scope(
        'detector.predict on a normalised, padded image: backbone, neck, RPN, RoI heads, NMS, masks pasted '
        'to full size; without image decoding, resizing and normalisation',
        lambda model, inputs, samples: model.predict(inputs, samples, rescale=True),
        ('backbone', 'neck'),
    ),
}


@dataclass(frozen=True)
class LatencyResult:
    """Latency of one model and the scope of the number; milliseconds per image at batch 1.

    Attributes:
        name: Which model.
        scope: 'backbone', 'backbone+neck' or 'detector'.
        timed: What is inside the timed region, in words.
        size: (height, width) of the image after resizing, before padding.
        input_shape: (1, 3, H, W) as the backbone sees it.
        image: File name of the input, or 'seeded noise'.
        detections: Objects found in the last round; None unless the scope is 'detector'. Heads are cheap
            where nothing is found, so compare detectors at like counts.
        device: Name of the device.
        device_type: 'cpu' or 'cuda'.
        dtype: Of the autocast region; 'float32' is without autocast. Casting the weights is timed.
        threads: Of torch on the CPU.
        warmup: Rounds before the first that counts.
        rounds: Rounds that count.
        interleaved: Names of all models measured in the same rounds.
        fused: Whether the norms are folded away.
        compiled: Whether torch.compile was applied to backbone and neck.
        environment: See :func:`slab_det.environment.describe_environment`.
    """

    name: str
    scope: str
    timed: str
    size: tuple[int, int]
    input_shape: tuple[int, int, int, int]
    image: str
    detections: int | None
    device: str
    device_type: str
    dtype: str
    threads: int
    warmup: int
    rounds: int
    interleaved: tuple[str, ...]
    fused: bool
    compiled: bool
    median_ms: float
    mean_ms: float
    std_ms: float
    p95_ms: float
    min_ms: float
    environment: dict

    def to_dict(self) -> dict:
        """The same as JSON types."""
        fields = asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


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
) -> dict[str, LatencyResult]:
    """Times one image through every model, round by round, in this process.

    Every round runs all models once and every second round runs them in reverse order, so that clock speed,
    heat and neighbours touch all of them alike. CUDA is timed by events, the CPU by ``time.perf_counter``.

    The models are moved to ``device`` and left there, in eval mode and, with ``compile``, compiled.

    Args:
        models: Detectors by name; for scope 'backbone' bare backbones will do.
        size: (height, width) to which the image is resized; each model's data_preprocessor then normalises
            and pads it as in testing (to a multiple of 32 where a model has none).
        rounds: Timed rounds.
        warmup: Rounds run before, not counted.
        scope: 'backbone', 'backbone+neck' or 'detector', see ``SCOPES``.
        device: 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', or 'float16' or 'bfloat16' under autocast.
        threads: CPU threads of torch during the measurement; None leaves them.
        image: Path of an image; None takes noise from a fixed seed.
        compile: Apply torch.compile to backbone and neck before.
        progress: Draw a progress bar on stderr.

    Returns:
        One result per name, in the order of ``models``.

    Raises:
        LatencyError: For an unknown scope or dtype, a device that is not there, an unreadable image or counts
            that make no sense.
    """
    device = _check_request(models, size, rounds, warmup, scope, device, dtype)
    pixels, ori_shape = _load_pixels(image, size)
    inputs = {}
    for name, model in models.items():
        model.to(device)
        model.eval()
        inputs[name] = _prepare(model, pixels, ori_shape, device)
        if compile:
            for part in SCOPES[scope].parts:
                getattr(model, part, model).compile()

    stopwatch = _time_cuda if device.type == 'cuda' else _time_cpu
    times: dict[str, list[float]] = {name: [] for name in models}
    with _threads(threads), torch.inference_mode():
        for index in _rounds(warmup + rounds, progress):
            for name in list(models)[:: -1 if index % 2 else 1]:

                def run(model: nn.Module = models[name], data: tuple = inputs[name]) -> None:
                    with torch.autocast(device.type, DTYPES[dtype], enabled=dtype != 'float32'):
                        SCOPES[scope].forward(model, *data)

                elapsed = stopwatch(run)
                if index >= warmup:
                    times[name].append(elapsed)
        environment = describe_environment(device)

    return {
        name: LatencyResult(
            name=name,
            scope=scope,
            timed=SCOPES[scope].timed,
            size=tuple(size),
            input_shape=tuple(inputs[name][0].shape),
            image='seeded noise' if image is None else image,
            detections=len(inputs[name][1][0].pred_instances) if scope == 'detector' else None,
            device=environment['device'],
            device_type=device.type,
            dtype=dtype,
            threads=environment['threads'],
            warmup=warmup,
            rounds=rounds,
            interleaved=tuple(models),
            fused=is_fused(model),
            compiled=compile,
            **_statistics(times[name]),
            environment=environment,
        )
        for name, model in models.items()
    }


def latency_table(results: Sequence[LatencyResult]) -> str:
    """A Markdown table of results measured together, with ratios to the first, and their scope below it."""
    first = results[0]
    lines = [
        '| model | median ms | mean ± std | p95 | min | ratio |',
        '|---|---:|---:|---:|---:|---:|',
        *(
            f'| {result.name} | {result.median_ms:.2f} | {result.mean_ms:.2f} ± {result.std_ms:.2f} '
            f'| {result.p95_ms:.2f} | {result.min_ms:.2f} | {result.median_ms / first.median_ms:.3f} |'
            for result in results
        ),
        '',
        describe_scope(first.to_dict()) + f', warm-up {first.warmup}, {first.rounds} rounds interleaved',
        f'timed: {first.timed}',
    ]
    if first.detections is not None:
        found = ', '.join(f'{result.name} {result.detections}' for result in results)
        lines.append(f'objects found in {first.image}: {found}')
    return '\n'.join(lines)


def describe_scope(latency: Mapping) -> str:
    """What two latencies must share to be compared, as one line; takes ``LatencyResult.to_dict()``."""
    height, width = latency['size']
    device = latency['device']
    if latency['device_type'] == 'cpu':
        device += f', {latency["threads"]} thread{"s" if latency["threads"] != 1 else ""}'
    compiled = ', torch.compile' if latency['compiled'] else ''
    return f'{latency["scope"]}, batch 1, {height}x{width} (HxW), {latency["dtype"]}{compiled}, {device}'


def _check_request(
    models: Mapping[str, nn.Module],
    size: tuple[int, int],
    rounds: int,
    warmup: int,
    scope: str,
    device: str | torch.device,
    dtype: str,
) -> torch.device:
    if not models:
        raise LatencyError('no model to measure')
    if scope not in SCOPES:
        raise LatencyError(f'scope {scope!r} is not one of {", ".join(SCOPES)}')
    if dtype not in DTYPES:
        raise LatencyError(f'dtype {dtype!r} is not one of {", ".join(DTYPES)}')
    if rounds < 1 or warmup < 0 or len(size) != 2 or min(size) < 1:
        raise LatencyError(f'cannot measure rounds={rounds}, warmup={warmup}, size={tuple(size)} (height, width)')
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise LatencyError(f'device {device!r} is not cpu, cuda or cuda:N') from error
    if device.type not in ('cpu', 'cuda'):
        raise LatencyError(f'device {str(device)!r} cannot be timed; use cpu, cuda or cuda:N')
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        raise LatencyError(
            f'device {str(device)!r} is not there: torch {torch.__version__} sees '
            f'{torch.cuda.device_count()} CUDA devices; use --device cpu'
        )
    return device


def _load_pixels(image: str | None, size: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int]]:
    """(3, H, W) uint8 in BGR, and the (height, width) of the original."""
    height, width = size
    if image is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), (
            height,
            width,
        )
    try:
        pixels = mmcv.imread(image)
    except FileNotFoundError as error:
        raise LatencyError(f'image {image} not found') from error
    if pixels is None:
        raise LatencyError(f'image {image} cannot be decoded')
    resized = mmcv.imresize(pixels, (width, height))
    return torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1))), pixels.shape[:2]


def _prepare(
    model: nn.Module, pixels: torch.Tensor, ori_shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, list[DetDataSample]]:
    """The input as the test loop would make it: tensor (1, 3, H, W) on the device, and one data sample."""
    img_shape = tuple(pixels.shape[1:])
    sample = DetDataSample(
        metainfo={
            'img_id': 0,
            'img_shape': img_shape,
            'ori_shape': ori_shape,
            # (width, height), as mmcv's Resize leaves it.
            'scale_factor': (img_shape[1] / ori_shape[1], img_shape[0] / ori_shape[0]),
        }
    )
    preprocess = getattr(model, 'data_preprocessor', None) or DetDataPreprocessor(
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True, pad_size_divisor=32
    ).to(device)
    data = preprocess({'inputs': [pixels], 'data_samples': [sample]}, training=False)
    return data['inputs'], data['data_samples']


def _rounds(count: int, progress: bool) -> Iterator[int]:
    return track(range(count), 'Measuring', console=Console(stderr=True), disable=not progress, transient=True)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_cpu(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _time_cuda(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The queue must be empty: otherwise the kernels of the round before hide this round's launches.
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _statistics(times: Sequence[float]) -> dict[str, float]:
    values = np.asarray(times)
    return {
        'median_ms': float(np.median(values)),
        'mean_ms': float(values.mean()),
        'std_ms': float(values.std()),
        'p95_ms': float(np.percentile(values, 95)),
        'min_ms': float(values.min()),
    }
