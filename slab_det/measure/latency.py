"""Batch-1 latency of detectors, measured side by side and stored with all that the number depends on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain

import cv2
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from slab_det.checkpoints.build import is_deployed
from slab_det.checkpoints.fused import is_fused
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency_table import check_comparable, describe_scope, latency_table, repeat_ratios
from slab_det.measure.measured_scopes import SCOPES, EncodedImage, MeasuredInput, read_image
from slab_det.measure.memory_pages import count_page_faults, keep_freed_memory, keeps_freed_memory
from slab_det.measure.model_cost import ModelCost, measure_cost
from slab_det.runtime.errors import LatencyError

__all__ = [
    'COMPILE_MODES', 'DTYPES', 'SCOPES', 'LatencyResult', 'check_comparable', 'describe_scope', 'latency_table',
    'measure_latency', 'repeat_ratios',
]  # fmt: skip
DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
# torch.compile's own names; its list would have to be loaded with all of inductor.
COMPILE_MODES = ('default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs')


@dataclass(frozen=True)
class LatencyResult:
    """Latency of one model and the scope of the number; milliseconds per image at batch 1.

    Attributes:
        name: Which model.
        scope: One of ``SCOPES``.
        timed: What is inside the timed region, in words.
        size: (height, width) of the image after resizing, before padding.
        input_shape: (1, 3, H, W) as the backbone sees it.
        image: File name of the input, or 'seeded noise'.
        image_bytes: Size of the encoded image, which is decoded within the scope 'end-to-end'.
        detections: Objects found in the last round; None where no heads run. Heads are cheap
            where nothing is found, so compare detectors at like counts.
        device: Name of the device.
        device_type: 'cpu' or 'cuda'.
        clock: What measured the time.
        dtype: What is computed in; 'float32' is without autocast. Of a deployed model it is the one that it was
            deployed in.
        autocast: Whether ``dtype`` is that of an autocast region; casting the weights is timed then. False where
            the weights have the dtype themselves.
        tf32: Whether matrix products and convolutions may use TF32.
        channels_last: Whether weights and input have the memory format channels_last.
        threads: Of torch, and of image decoding and resizing, on the CPU.
        kept_memory: Whether the process keeps memory that was freed: asked for here, in an earlier call, or by glibc's
            variables.
        page_faults: Fresh pages of memory that the system handed out in a round, the median; each takes one or two
            microseconds (benchmarks/fresh_pages.py). 0 where they cannot be counted.
        warmup: Rounds before the first that counts, in every repeat.
        rounds: Rounds that count, in every repeat.
        repeats: How many times the whole measurement was made; the times below are over all of them.
        interleaved: Names of all models measured in the same rounds.
        fused: Whether the norms are folded away.
        deployed: Whether the model is the form that slab_det.deploy makes.
        compiled: Whether torch.compile was applied to backbone and neck.
        compile_mode: Its mode; None without.
        repeat_medians_ms: The median of each repeat.
        cost: Multiply-adds, parameters, memory and norms left of the same call; None where it was not asked for.
        environment: See :func:`slab_det.measure.environment.describe_environment`.
    """

    name: str
    scope: str
    timed: str
    size: tuple[int, int]
    input_shape: tuple[int, int, int, int]
    image: str
    image_bytes: int
    detections: int | None
    device: str
    device_type: str
    clock: str
    dtype: str
    autocast: bool
    tf32: bool
    channels_last: bool
    threads: int
    kept_memory: bool
    page_faults: int
    warmup: int
    rounds: int
    repeats: int
    interleaved: tuple[str, ...]
    fused: bool
    deployed: bool
    compiled: bool
    compile_mode: str | None
    median_ms: float
    mean_ms: float
    std_ms: float
    p95_ms: float
    min_ms: float
    repeat_medians_ms: tuple[float, ...]
    cost: ModelCost | None
    environment: dict

    def to_dict(self) -> dict:
        """The same as JSON types."""
        return _as_json(asdict(self))

    @property
    def spread(self) -> float:
        """Largest minus smallest median of the repeats, over the median."""
        return (max(self.repeat_medians_ms) - min(self.repeat_medians_ms)) / self.median_ms


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

    Every round runs all models once and every second round runs them in reverse order, so that clock speed,
    heat and neighbours touch all of them alike. CUDA is timed by events, the CPU by ``time.perf_counter``.

    The models are moved to ``device`` and left there, in eval mode and, with ``compile``, compiled.

    Args:
        models: Detectors by name; for scope 'backbone' bare backbones will do.
        size: (height, width) to which the image is resized; each model's data_preprocessor then normalises
            and pads it as in testing (to a multiple of 32 where a model has none).
        rounds: Timed rounds.
        warmup: Rounds run before, not counted.
        scope: 'backbone', 'backbone+neck', 'detector' or 'end-to-end', see ``SCOPES``.
        device: 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'float16' or 'bfloat16'; autocast, unless the weights have that dtype already. What
            slab_det.deploy made has its own.
        threads: CPU threads of torch during the measurement; None leaves them.
        image: Path of an image; None takes noise from a fixed seed.
        compile: Apply torch.compile to backbone and neck before; a string is its mode.
        progress: Draw a progress bar on stderr.
        repeat: Make the whole measurement, warm-up and rounds, this many times: their medians show the spread from
            run to run.
        channels_last: Put weights and input into torch.channels_last before.
        tf32: Let matrix products and convolutions on a GPU use TF32. Without it neither does, whatever torch's
            switches say outside.
        cost: Also count multiply-adds, parameters, memory and norms, by three more calls of every model.
        keep_memory: Keep freed memory for the next allocation, from now on and in the whole process, so that no model
            waits for fresh pages; see :func:`slab_det.measure.memory_pages.keep_freed_memory`.

    Returns:
        One result per name, in the order of ``models``.

    Raises:
        LatencyError: For an unknown scope, dtype or mode, a device that is not there, weights of another dtype, an
            unreadable image or counts that make no sense.
    """
    device = _check_request(models, size, rounds, warmup, scope, device, dtype, compile, repeat, tf32)
    photo = read_image(image, size)
    mode = 'default' if compile is True else compile or None
    with _threads(threads), _tf32(tf32):
        runs = {
            name: _Run(name, model, scope, photo, size, device, dtype, channels_last) for name, model in models.items()
        }
        if keep_memory:
            # Once nothing can be refused any more: it cannot be taken back.
            keep_freed_memory()
        costs = {name: run.cost() if cost else None for name, run in runs.items()}
        if mode:
            for run in runs.values():
                run.compile(mode)
        with torch.inference_mode():
            times, page_faults = _take_turns(runs, rounds, warmup, repeat, progress)
        environment = describe_environment(device)

    return {
        name: LatencyResult(
            name=name,
            scope=scope,
            timed=SCOPES[scope].timed,
            size=tuple(size),
            input_shape=tuple(run.input.tensor.shape),
            image=photo.name,
            image_bytes=len(photo.content),
            detections=run.detections(),
            device=environment['device'],
            device_type=device.type,
            clock='CUDA events' if device.type == 'cuda' else 'time.perf_counter',
            dtype=next(word for word, kind in DTYPES.items() if kind == run.dtype),
            autocast=run.autocast,
            tf32=tf32,
            channels_last=channels_last,
            threads=environment['threads'],
            kept_memory=keeps_freed_memory(),
            page_faults=int(np.median(page_faults[name])),
            warmup=warmup,
            rounds=rounds,
            repeats=repeat,
            interleaved=tuple(models),
            fused=is_fused(run.model),
            deployed=is_deployed(run.model),
            compiled=mode is not None,
            compile_mode=mode,
            **_statistics(times[name]),
            cost=costs[name],
            environment=environment,
        )
        for name, run in runs.items()
    }


class _Run:
    """One model with its input, ready to be called."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        scope: str,
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
        self.model, self.scope, self.device = model, SCOPES[scope], device
        # slab_det.deploy has chosen, and casts within.
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
            # Or the objects found would count as memory that the model keeps.
            self.input.predictions = None

        return measure_cost(self.scope.parts_of(self.model), call, self.device)

    def compile(self, mode: str) -> None:
        for part in self.scope.compiled_parts_of(self.model):
            part.compile(mode=mode)
        self.compiled = True

    def detections(self) -> int | None:
        return None if self.input.predictions is None else len(self.input.predictions[0].pred_instances)


def _weights_dtype(model: nn.Module) -> torch.dtype:
    weights = chain(getattr(model, 'backbone', model).parameters(), model.parameters())
    return next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)


def _take_turns(
    runs: Mapping[str, _Run], rounds: int, warmup: int, repeat: int, progress: bool
) -> tuple[dict[str, list[list[float]]], dict[str, list[int]]]:
    """The times of every model, one list per repeat, and the page faults of its rounds."""
    stopwatch = _time_cuda if next(iter(runs.values())).device.type == 'cuda' else _time_cpu
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(repeat)] for name in runs}
    page_faults: dict[str, list[int]] = {name: [] for name in runs}
    for step in _steps(repeat * (warmup + rounds), progress):
        repetition, index = divmod(step, warmup + rounds)
        for name in list(runs)[:: -1 if index % 2 else 1]:
            faults_before = count_page_faults()
            elapsed = stopwatch(runs[name])
            if index >= warmup:
                times[name][repetition].append(elapsed)
                page_faults[name].append(count_page_faults() - faults_before)
    return times, page_faults


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


def _steps(count: int, progress: bool) -> Iterator[int]:
    return track(range(count), 'Measuring', console=Console(stderr=True), disable=not progress, transient=True)


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
        'min_ms': float(values.min()),
        'repeat_medians_ms': tuple(float(np.median(repetition)) for repetition in times),
    }


def _as_json(value: object) -> object:
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value
