"""Batch-1 latency of models, measured side by side and stored with everything that the numbers depend on."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import cv2
import mmcv
import numpy as np
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.structures import DetDataSample
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from slab_det.checkpoints import is_fused
from slab_det.checkpoints.build import is_deployed
from slab_det.deployment import COMPILE_MODES
from slab_det.measure.cost import ModelCost, measure_cost
from slab_det.measure.environment import describe_environment
from slab_det.runtime.errors import LatencyError

DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
NOISE = 'seeded noise'


@dataclass(frozen=True)
class LatencyResult:
    """Latency of one model and the scope of the number; milliseconds per image at batch 1.

    Attributes:
        name: Which model.
        scope: One of ``SCOPES``.
        timed: What is inside the timed region, in words.
        size: (height, width) of the image after resizing, before padding.
        image: File name of the input, or 'seeded noise'.
        detections: Objects found in the last round; None where no heads run. Heads are cheap where nothing is found,
            so compare detectors at equal counts.
        device: Name of the device.
        device_type: 'cpu' (timed by ``time.perf_counter``) or 'cuda' (timed by CUDA events).
        dtype: What the model computes in: the dtype of an autocast region or of the weights.
        autocast: Whether ``dtype`` is that of an autocast region, which casts the weights inside the timed region.
        tf32: Whether matrix products and convolutions may use TF32.
        channels_last: Whether weights and input have the memory format channels_last.
        threads: Threads of torch, and of image decoding and resizing, on the CPU.
        kept_memory: Whether the process keeps freed memory, see :func:`keep_freed_memory`.
        warmup: Rounds before the first that counts, in every repeat.
        rounds: Rounds that count, in every repeat.
        interleaved: Names of all models measured in the same rounds.
        fused: Whether the norms are folded away.
        deployed: Whether the model is the form that slab_det.deploy makes.
        compile_mode: Mode of torch.compile on backbone and neck; None without.
        median_ms: Median over the rounds of all repeats; likewise mean, standard deviation and 95th percentile.
        repeat_medians_ms: The median of each repeat.
        cost: Multiply-adds, parameters, memory and norms left of the same call; None where it was not asked for.
        environment: See :func:`slab_det.measure.environment.describe_environment`.
    """

    name: str
    scope: str
    timed: str
    size: tuple[int, int]
    image: str
    detections: int | None
    device: str
    device_type: str
    dtype: str
    autocast: bool
    tf32: bool
    channels_last: bool
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
        return _as_json(asdict(self))


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
    channels_last: bool = False,
    tf32: bool = False,
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
        rounds: Timed rounds.
        warmup: Rounds before them, not counted.
        scope: 'backbone', 'backbone+neck', 'detector' or 'end-to-end', see ``SCOPES``.
        device: 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'float16' or 'bfloat16': autocast, unless the weights have that dtype already. A model from
            slab_det.deploy keeps the dtype that it was deployed in.
        threads: CPU threads of torch during the measurement; None leaves them.
        image: Path of an image; None takes noise from a fixed seed.
        compile: Apply torch.compile to backbone and neck first; a string is its mode.
        progress: Draw a progress bar on stderr.
        repeat: How many times the whole measurement, warm-up and rounds, is made: the medians of the repeats show the
            spread from run to run.
        channels_last: Put weights and input into torch.channels_last first.
        tf32: Let matrix products and convolutions on a GPU use TF32. Without it neither does, whatever torch's
            switches say outside.
        cost: Also count multiply-adds, parameters, memory and norms, by three more calls of every model.
        keep_memory: Call :func:`keep_freed_memory` first, which cannot be undone.

    Returns:
        One result per name, in the order of ``models``.

    Raises:
        LatencyError: For an unknown scope, dtype or mode, a device that is not there, weights of another dtype, an
            unreadable image or counts that make no sense.
    """
    device = _check_request(models, size, rounds, warmup, scope, device, dtype, compile, repeat, tf32)
    photo = EncodedImage.read(image, size)
    mode = 'default' if compile is True else compile or None
    with _threads(threads), _tf32(tf32):
        runs = {
            name: _Run(name, model, SCOPES[scope], photo, size, device, dtype, channels_last)
            for name, model in models.items()
        }
        if keep_memory:
            # Only now, when nothing can be refused any more.
            keep_freed_memory()
        costs = {name: run.cost() if cost else None for name, run in runs.items()}
        if mode:
            for run in runs.values():
                run.compile(mode)
        with torch.inference_mode():
            times = _take_turns(runs, rounds, warmup, repeat, progress)
        environment = describe_environment(device)

    return {
        name: LatencyResult(
            name=name,
            scope=scope,
            timed=SCOPES[scope].timed,
            size=tuple(size),
            image=photo.name,
            detections=run.detections(),
            device=environment['device'],
            device_type=device.type,
            dtype=next(word for word, kind in DTYPES.items() if kind == run.dtype),
            autocast=run.autocast,
            tf32=tf32,
            channels_last=channels_last,
            threads=environment['threads'],
            kept_memory=_keeps_freed_memory(),
            warmup=warmup,
            rounds=rounds,
            interleaved=tuple(models),
            fused=is_fused(run.model),
            deployed=is_deployed(run.model),
            compile_mode=mode,
            **_statistics(times[name]),
            cost=costs[name],
            environment=environment,
        )
        for name, run in runs.items()
    }


def latency_table(results: Sequence[LatencyResult]) -> str:
    """A Markdown table with ratios to the first result, and the scope of the numbers below it.

    Where the measurement was repeated, a ratio is the median of the ratios within the repeats, so that a slow minute
    of the machine is in both of its numbers.

    Raises:
        LatencyError: If the results are not of one call of :func:`measure_latency`.
    """
    first = results[0]
    for result in results:
        for key in ('interleaved', 'scope', 'size', 'device', 'threads', 'tf32', 'kept_memory'):
            ours, theirs = getattr(first, key), getattr(result, key)
            if ours != theirs:
                raise LatencyError(
                    f'{first.name!r} and {result.name!r} were measured differently ({key} {ours} and {theirs}) and '
                    'cannot be compared; measure them in one call'
                )
    repeats = len(first.repeat_medians_ms)
    columns: list[tuple[str, Callable[[LatencyResult], str]]] = [
        ('model', lambda result: result.name),
        ('dtype', lambda result: result.dtype),
        ('median ms', lambda result: f'{result.median_ms:.2f}'),
        ('mean ± std', lambda result: f'{result.mean_ms:.2f} ± {result.std_ms:.2f}'),
        ('p95', lambda result: f'{result.p95_ms:.2f}'),
        ('ratio', lambda result: f'{median(repeat_ratios(result, first)):.3f}'),
    ]
    if repeats > 1:
        columns += [
            (f'medians of {repeats} repeats', lambda result: _range(result.repeat_medians_ms, '.2f')),
            ('their ratios', lambda result: _range(repeat_ratios(result, first), '.3f')),
        ]
    if all(result.cost for result in results):
        columns += [
            ('G multiply-adds', lambda result: f'{result.cost.multiply_adds / 1e9:.3f}'),
            ('M parameters', lambda result: f'{result.cost.parameters / 1e6:.2f}'),
            ('peak MiB', lambda result: f'{result.cost.peak_bytes / 2**20:.0f}'),
            ('norms left', lambda result: str(result.cost.norms_left)),
        ]
    rows = [[cell(result) for _, cell in columns] for result in results]
    lines = [f'| {" | ".join(cells)} |' for cells in [[title for title, _ in columns], *rows]]
    lines.insert(1, '|---|' + '---:|' * (len(columns) - 1))
    shared = first.to_dict()
    for key in ('dtype', 'autocast', 'channels_last', 'deployed', 'compile_mode'):
        # Only some of the models are run so: their names say which.
        if len({getattr(result, key) for result in results}) > 1:
            shared[key] = None
    rounds = f'warm-up {first.warmup}, {first.rounds} rounds interleaved' + f', {repeats} repeats' * (repeats > 1)
    lines += ['', f'{describe_scope(shared)}, {rounds}', f'timed: {first.timed}']
    if first.detections is not None:
        found = ', '.join(f'{result.name} {result.detections}' for result in results)
        lines.append(f'objects found in {first.image}: {found}')
    if uncounted := sorted({name for result in results if result.cost for name in result.cost.uncounted}):
        lines.append(f'not counted in multiply-adds: {", ".join(uncounted)}')
    return '\n'.join(lines)


def repeat_ratios(result: LatencyResult, base: LatencyResult) -> tuple[float, ...]:
    """The ratio of the medians within each repeat of one interleaved measurement."""
    return tuple(mine / theirs for mine, theirs in zip(result.repeat_medians_ms, base.repeat_medians_ms, strict=True))


def describe_scope(latency: Mapping) -> str:
    """What a latency was measured on, as one line; takes ``LatencyResult.to_dict()``, also of earlier versions."""
    height, width = latency['size']
    device = latency['device']
    if latency['device_type'] == 'cpu':
        device += f', {latency["threads"]} thread{"s" if latency["threads"] != 1 else ""}'
    # Version 0.1 wrote `compiled` beside the mode, and before it had modes without one.
    mode = latency.get('compile_mode') or ('default' if latency.get('compiled') else None)
    how = [
        latency['dtype'] and latency['dtype'] + ' autocast' * bool(latency.get('autocast')),
        'TF32' if latency.get('tf32') else '',
        'channels_last' if latency.get('channels_last') else '',
        'freed memory kept' if latency.get('kept_memory') else '',
        'deployed' if latency.get('deployed') else '',
        mode and ('torch.compile' if mode == 'default' else f'torch.compile ({mode})'),
        device,
    ]
    return f'{latency["scope"]}, batch 1, {height}x{width} (HxW), {", ".join(filter(None, how))}'


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next allocation, from now on and in the whole process.

    By default glibc gives large blocks back to the system, and each layer gets fresh pages, which are zeroed when they
    are first touched. How many depends on what else was allocated before, so that two equal models may differ by it
    (docs/deploy.md, Memory). In threads other than the first, glibc gives blocks above 64 MiB back all the same.

    Raises:
        LatencyError: Where the C library is not glibc.
    """
    global _asked_to_keep
    mallopt = None if sys.platform == 'win32' else getattr(ctypes.CDLL(None), 'mallopt', None)
    # M_MMAP_MAX = -4: all blocks come from the heap. M_TRIM_THRESHOLD = -1: its end is never cut off.
    if mallopt is None or not (mallopt(-4, 0) and mallopt(-1, -1)):
        raise LatencyError('only glibc can be told to keep freed memory; leave out keep_memory (--keep-memory)')
    _asked_to_keep = True


_asked_to_keep = False


def _keeps_freed_memory() -> bool:
    """Whether :func:`keep_freed_memory` was called, or glibc's variables said so when the process started."""
    return _asked_to_keep or (os.environ.get('MALLOC_MMAP_MAX_') == '0' and 'MALLOC_TRIM_THRESHOLD_' in os.environ)


@dataclass(frozen=True)
class EncodedImage:
    """An image as its file holds it.

    Attributes:
        name: Path of the file, or ``NOISE``.
        content: The bytes of the file.
    """

    name: str
    content: bytes

    @classmethod
    def read(cls, path: str | None, size: tuple[int, int]) -> EncodedImage:
        """The image at ``path``, or a JPEG of (height, width) noise that is the same in every run.

        Raises:
            LatencyError: If the file is missing or is no image.
        """
        if path is None:
            generator = torch.Generator().manual_seed(0)
            pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator).numpy()
            return cls(NOISE, cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes())
        try:
            image = cls(str(path), Path(path).read_bytes())
        except OSError as error:
            said = f'image {path} not found' if isinstance(error, FileNotFoundError) else str(error)
            raise LatencyError(said) from error
        image.decode()
        return image

    def decode(self) -> np.ndarray:
        """(height, width, 3) uint8 in BGR, upright, as mmdet's LoadImageFromFile reads it."""
        pixels = mmcv.imfrombytes(self.content)
        if pixels is None:
            raise LatencyError(f'image {self.name} cannot be decoded')
        return pixels


class MeasuredInput:
    """One image on its way into one model, as the test loop brings it there.

    Args:
        model: Its data_preprocessor normalises and pads; where it has none, to a multiple of 32.
        image: The image.
        size: (height, width) that it is resized to.
        device: Where the model is.
        dtype: What backbone and neck take.
        memory_format: Memory format of the tensor.

    Attributes:
        tensor: (1, 3, H, W).
        samples: One data sample.
        predictions: The detector's last output; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        image: EncodedImage,
        size: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.image, self.size = image, tuple(size)
        self.dtype, self.memory_format = dtype, memory_format
        self.preprocess = getattr(model, 'data_preprocessor', None) or DetDataPreprocessor(
            mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True, pad_size_divisor=32
        ).to(device)
        self.predictions: list[DetDataSample] | None = None
        self.load()

    def load(self) -> None:
        """Decodes, resizes, normalises and pads the image, and brings it to the device."""
        pixels = self.image.decode()
        (height, width), ori_shape = self.size, pixels.shape[:2]
        pixels = mmcv.imresize(pixels, (width, height))
        sample = DetDataSample(
            metainfo={
                'img_id': 0,
                'img_shape': self.size,
                'ori_shape': ori_shape,
                # (width, height), as mmcv's Resize leaves it.
                'scale_factor': (width / ori_shape[1], height / ori_shape[0]),
            }
        )
        inputs = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        data = self.preprocess({'inputs': [inputs], 'data_samples': [sample]}, training=False)
        self.tensor: Tensor = data['inputs'].to(self.dtype, memory_format=self.memory_format)
        self.samples: list[DetDataSample] = data['data_samples']


@dataclass(frozen=True)
class Scope:
    """A part of the way from a file to predictions.

    Attributes:
        timed: What is inside the timed region, in words.
        forward: (model, input) -> outputs; a detector leaves them in ``input.predictions`` too.
        parts: The submodules that run; empty for the whole detector.
    """

    timed: str
    forward: Callable[[nn.Module, MeasuredInput], object]
    parts: tuple[str, ...] = ()


def _predict(model: nn.Module, given: MeasuredInput) -> None:
    given.predictions = model.predict(given.tensor, given.samples, rescale=True)


def _load_and_predict(model: nn.Module, given: MeasuredInput) -> None:
    given.load()
    _predict(model, given)


SCOPES = {
    'backbone': Scope(
        'backbone forward on a normalised, padded image',
        lambda model, given: getattr(model, 'backbone', model)(given.tensor),
        ('backbone',),
    ),
    'backbone+neck': Scope(
        'backbone and neck forward on a normalised, padded image',
        lambda model, given: model.extract_feat(given.tensor),
        ('backbone', 'neck'),
    ),
    'detector': Scope(
        'detector.predict on a normalised, padded image: backbone, neck, RPN, RoI heads, NMS, masks pasted '
        'to full size; without image decoding, resizing and normalisation',
        _predict,
    ),
    'end-to-end': Scope(
        'from the bytes of the image file in memory to predictions on the original image: decoding, resizing, '
        'normalisation, padding, copy to the device, backbone, neck, RPN, RoI heads, NMS, masks pasted to full size',
        _load_and_predict,
    ),
}


class _Run:
    """One model with its input, ready to be called."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        scope: Scope,
        image: EncodedImage,
        size: tuple[int, int],
        device: torch.device,
        dtype: str,
        channels_last: bool,
    ) -> None:
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        model.to(device)
        if channels_last:
            model.to(memory_format=memory_format)
        # mmdet's Swin returns None from eval().
        model.eval()
        weights = _weights_dtype(model)
        self.model, self.scope, self.device = model, scope, device
        # slab_det.deploy has chosen the dtype, and casts inside the model.
        self.dtype = weights if is_deployed(model) else DTYPES[dtype]
        if weights not in (torch.float32, self.dtype):
            raise LatencyError(f'{name} has weights in {weights}; dtype {dtype!r} cannot be measured on it')
        self.autocast = weights != self.dtype
        self.compiled = False
        self.input = MeasuredInput(model, image, size, device, weights, memory_format)

    def __call__(self) -> None:
        if self.compiled and self.device.type == 'cuda':
            # Backbone and neck belong to one step: CUDA graphs may reuse the memory of the step before.
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, self.dtype, enabled=self.autocast):
            self.scope.forward(self.model, self.input)

    def cost(self) -> ModelCost:
        def call() -> None:
            self()
            # Otherwise the objects found would count as memory that the model keeps.
            self.input.predictions = None

        return measure_cost(self._submodules(self.scope.parts) or [self.model], call, self.device)

    def compile(self, mode: str) -> None:
        for part in self._submodules(self.scope.parts or ('backbone', 'neck')):
            part.compile(mode=mode)
        self.compiled = True

    def detections(self) -> int | None:
        return None if self.input.predictions is None else len(self.input.predictions[0].pred_instances)

    def _submodules(self, names: Sequence[str]) -> list[nn.Module]:
        """The submodules of these names; a bare backbone is its own part."""
        return [getattr(self.model, name, self.model) for name in names]


def _weights_dtype(model: nn.Module) -> torch.dtype:
    weights = chain(getattr(model, 'backbone', model).parameters(), model.parameters())
    return next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)


def _take_turns(
    runs: Mapping[str, _Run], rounds: int, warmup: int, repeat: int, progress: bool
) -> dict[str, list[list[float]]]:
    """The times of every model in milliseconds, one list per repeat."""
    stopwatch = _time_cuda if next(iter(runs.values())).device.type == 'cuda' else _time_cpu
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(repeat)] for name in runs}
    steps = range(repeat * (warmup + rounds))
    for step in track(steps, 'Measuring', console=Console(stderr=True), disable=not progress, transient=True):
        repetition, index = divmod(step, warmup + rounds)
        for name in list(runs)[:: -1 if index % 2 else 1]:
            elapsed = stopwatch(runs[name])
            if index >= warmup:
                times[name][repetition].append(elapsed)
    return times


def _check_request(
    models: Mapping[str, nn.Module],
    size: tuple[int, int],
    rounds: int,
    warmup: int,
    scope: str,
    device: str | torch.device,
    dtype: str,
    compile: bool | str,
    repeat: int,
    tf32: bool,
) -> torch.device:
    if not models:
        raise LatencyError('no model to measure')
    if scope not in SCOPES:
        raise LatencyError(f'scope {scope!r} is not one of {", ".join(SCOPES)}')
    if dtype not in DTYPES:
        raise LatencyError(f'dtype {dtype!r} is not one of {", ".join(DTYPES)}')
    if isinstance(compile, str) and compile not in COMPILE_MODES:
        raise LatencyError(f'compile mode {compile!r} is not one of {", ".join(COMPILE_MODES)}')
    if rounds < 1 or warmup < 0 or repeat < 1 or len(size) != 2 or min(size) < 1:
        raise LatencyError(
            f'cannot measure rounds={rounds}, warmup={warmup}, repeat={repeat}, size={tuple(size)} (height, width)'
        )
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
    if tf32 and device.type != 'cuda':
        raise LatencyError(f'TF32 is a format of NVIDIA GPUs; on device {str(device)!r} leave out tf32')
    return device


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before, images_before = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(count or before)
    cv2.setNumThreads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        cv2.setNumThreads(images_before)


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = enabled
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


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


def _statistics(times: Sequence[Sequence[float]]) -> dict[str, float | tuple[float, ...]]:
    values = np.concatenate(times)
    return {
        'median_ms': float(np.median(values)),
        'mean_ms': float(values.mean()),
        'std_ms': float(values.std()),
        'p95_ms': float(np.percentile(values, 95)),
        'repeat_medians_ms': tuple(float(np.median(repetition)) for repetition in times),
    }


def _range(values: Sequence[float], spec: str) -> str:
    return f'{min(values):{spec}} – {max(values):{spec}}'


def _as_json(value: object) -> object:
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value
