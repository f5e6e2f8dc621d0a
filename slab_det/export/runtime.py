"""Runs an exported file in ONNX Runtime or OpenVINO, by itself or as a model of mmdet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import Tensor

from slab_det.export.int8_sums import cuts_off_sums
from slab_det.export.settings import follow_config
from slab_det.families.masks import check_form, enlarge_masks, paste_masks
from slab_det.machine import MACHINE
from slab_det.runtime.config import type_name
from slab_det.runtime.errors import ExportError
from slab_det.runtime.numbers import check_threads
from slab_det.runtime.record import to_plain
from slab_det.runtimes import EXPORT_RUNTIMES, RUNTIMES, precision_arguments

METADATA_KEY = 'slab_det'
Run = Callable[[np.ndarray], dict[str, np.ndarray]]
# Takes a file, or its content, the number of threads and the precision.
Start = Callable[[str | bytes, int, str], Callable[[np.ndarray], list[np.ndarray]]]


def find_resize(steps: Sequence[dict]) -> dict | None:
    """The config of the resize transform of a test pipeline, as JSON stores it; None if no transform resizes."""
    step = next((step for step in steps if 'Resize' in type_name(step['type'])), None)
    return step and to_plain(dict(step, type=type_name(step['type'])))


def crop_to_multiples(image: np.ndarray | Tensor, divisor: int) -> np.ndarray | Tensor:
    """Crops an image (..., H, W) to the largest multiples of ``divisor``."""
    height, width = (side // divisor * divisor for side in image.shape[-2:])
    return image[..., :height, :width]


def import_extra(name: str) -> ModuleType:
    """Imports a package of the extra 'onnx' or 'openvino'.

    Raises:
        ExportError: If it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        extra = RUNTIMES[name].extra if name in RUNTIMES else 'onnx'
        raise ExportError(f'the package {error.name} is not installed: pip install -e ".[{extra}]"') from error


def limit_threads(threads: int) -> int:
    """Returns the threads that a runtime is asked for: 0, its own choice, counts the host's cores."""
    is_limited = MACHINE.processors < (os.cpu_count() or 1)
    # Otherwise the runtime's choice is better: it leaves out the second thread of each core.
    return threads or (MACHINE.processors if is_limited else 0)


def find_start(runtime: str) -> Start:
    """The function that loads an exported file in a runtime, from the module that :data:`RUNTIMES` names."""
    return import_module(RUNTIMES[runtime].module).start


@lru_cache(None)
def cuts_off_int8_sums(runtime: str) -> bool:
    """Whether a runtime needs weights of 7 bits on this CPU; see :mod:`slab_det.export.int8_sums`."""
    return cuts_off_sums(partial(find_start(runtime), threads=1, precision='f32'))


@dataclass(frozen=True)
class Runtime:
    """A loaded ONNX file. It is pickled as its path and options, and loads the file again where it is unpickled.

    Attributes:
        metadata: What :func:`slab_det.export.export_onnx` wrote into the file.
        run: Returns the outputs by name for an image (1, 3, H, W), float32, 0 to 255, in the channel order of the
            pipeline.
        with_threshold: Loads the file with another score threshold; raises ExportError if the file has none.
        arguments: The arguments of :func:`load_runtime` that load the same.
    """

    metadata: dict
    run: Run
    with_threshold: Callable[[float], Runtime]
    arguments: tuple

    def __reduce__(self) -> tuple:
        # A loaded file has threads and memory of its process.
        return load_runtime, self.arguments

    def __deepcopy__(self, memo: dict) -> Runtime:
        # Threads share a loaded file, and so can copies.
        return self


def load_runtime(
    path: str | Path,
    runtime: str = 'onnxruntime',
    threads: int = 0,
    precision: str = 'f32',
    score_thr: float | None = None,
) -> Runtime:
    """Loads an exported file.

    Args:
        path: The file that :func:`export_onnx` or :func:`quantize_onnx` wrote.
        runtime: 'onnxruntime' or 'openvino'.
        threads: CPU threads; 0 lets the runtime choose, among the processors that this process may use.
        precision: 'f32' or, with OpenVINO, 'bf16'; an int8 file has its own, and 'f32' for the rest.
        score_thr: Detections with this score or a smaller one are dropped; None for the threshold of the file.

    Raises:
        ExportError: If the runtime is unknown or not installed, this process may not use so many threads, or the file
            is missing, damaged, not from slab-det, or without the threshold to change.
    """
    if runtime not in EXPORT_RUNTIMES:
        raise ExportError(f'runtime {runtime!r} is not one of {", ".join(EXPORT_RUNTIMES)}')
    if precision not in precision_arguments(runtime):
        others = [name for name in EXPORT_RUNTIMES if precision in precision_arguments(name)]
        raise ExportError(
            f'precision {precision!r} is not one of {", ".join(precision_arguments(runtime))}, which {runtime} computes'
            + ''.join(f': use runtime {name}' for name in others[:1])
        )
    check_threads(threads, ExportError, least=0, name='threads=')
    if not Path(path).is_file():
        raise ExportError(f'{path} not found')
    onnx = import_extra('onnx')
    # protobuf comes with onnx.
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ExportError(
            f'{path} was not written by slab-det export, or was cut off while it was written or copied: export it again'
        ) from error
    text = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    if text is None:
        raise ExportError(f'{path} was not written by slab-det export')
    metadata = json.loads(text)
    is_int8 = any(node.op_type == 'DequantizeLinear' for node in model.graph.node)
    if is_int8 and metadata.get('int8_weight_bits', 8) == 8 and cuts_off_int8_sums(runtime):
        MMLogger.get_current_instance().warning(
            f'{path}: {runtime} cuts off sums of int8 products on this CPU, as CPUs without VNNI instructions do, and '
            'the file may find other objects here: export it again with --int8 --reduce-range, or use another runtime'
        )
    # OpenVINO may call an output by the name of its operator.
    names = [output.name for output in model.graph.output]

    divisor = metadata['image'].get('size_divisor', 1)

    def load(score_thr: float | None) -> Runtime:
        source = str(path) if score_thr is None else _set_threshold(path, score_thr)
        run = find_start(runtime)(source, threads, precision)

        def run_named(image: np.ndarray) -> dict[str, np.ndarray]:
            height, width = image.shape[2:]
            if height % divisor or width % divisor:
                raise ExportError(
                    f'{path} takes images whose sides are multiples of {divisor}, as its detector does, not {height}x'
                    f'{width}: set pad_size_divisor={divisor} in the data_preprocessor of its config, and export again'
                )
            return dict(zip(names, run(image), strict=True))

        # Absolute: whoever unpickles it may be in another folder.
        return Runtime(metadata, run_named, load, (os.path.abspath(path), runtime, threads, precision, score_thr))

    return load(score_thr)


def _set_threshold(path: str | Path, score_thr: float) -> bytes:
    """The content of an exported file with another score threshold."""
    onnx = import_extra('onnx')
    model = onnx.load(path)
    found = [tensor for tensor in model.graph.initializer if tensor.name.endswith('score_thr')]
    if len(found) != 1:
        raise ExportError(f'{path} has no score threshold that could be changed to {score_thr}; export it again')
    found[0].CopyFrom(onnx.numpy_helper.from_array(np.array(score_thr, np.float32), found[0].name))
    return model.SerializeToString()


@MODELS.register_module()
class ExportedDetector(BaseModel):
    """An mmdet model that predicts by running an exported file.

    Args:
        file: The ONNX file, of scope 'detector'.
        pipeline: Configs of the test pipeline, whose resize must equal the file's; None skips this check.
        detector: Config of the detector. The file follows its ``score_thr``, a smaller ``max_per_img`` and its
            ``mask_thr_binary``; its other settings must equal the file's. None: the settings of the file.
        masks: 'full' or 'rle', see :func:`slab_det.load_detector`.
        **options: Options of :func:`load_runtime`.

    Raises:
        ExportError: If the file has another scope or no masks to encode, was exported for another resize or with
            settings that it cannot change, or the runtime is not installed.
    """

    def __init__(
        self,
        file: str,
        pipeline: Sequence[dict] | None = None,
        masks: str = 'full',
        detector: dict | None = None,
        **options,
    ) -> None:
        check_form(masks, ExportError)
        super().__init__()
        self.runtime, self.masks = load_runtime(file, **options), masks
        if self.runtime.metadata['scope'] != 'detector':
            raise ExportError(f'{file} has scope {self.runtime.metadata["scope"]}: export it with --scope detector')
        expected, resize = self.runtime.metadata['image']['resize'], find_resize(pipeline or ())
        if pipeline is not None and expected is not None and resize != expected:
            raise ExportError(
                f'{file} was exported for the resize {expected}, and this config has {resize or "no resize"}: the file '
                'would find other objects; use the config of the export, or export again with this config'
            )
        self.mask_stride = self.runtime.metadata.get('mask_stride')
        found = 'no masks' if 'mask_threshold' not in self.runtime.metadata else None
        found = 'masks of the whole image' if self.mask_stride is not None else found
        if masks == 'rle' and found is not None:
            raise ExportError(f"masks='rle' encodes masks of boxes, and {file} outputs {found}; leave masks= out")
        self.settings = follow_config(file, self.runtime.metadata, detector)
        if self.settings.score_thr is not None:
            self.runtime = self.runtime.with_threshold(self.settings.score_thr)
        # The runner reads the device of a model from its tensors.
        self.register_buffer('_device', torch.zeros(()), persistent=False)

    def forward(
        self, inputs: list[Tensor], data_samples: list[DetDataSample], mode: str = 'predict'
    ) -> list[DetDataSample]:
        if mode != 'predict':
            raise ExportError(f'an exported detector only predicts, mode={mode!r} is not possible')
        for image, sample in zip(inputs, data_samples, strict=True):
            # Where there is a GPU, the runner moves the images to it.
            found = self.runtime.run(image[None].float().cpu().numpy())
            # Sorted by score.
            found = {name: torch.from_numpy(x[: self.settings.max_per_img]) for name, x in found.items()}
            boxes = found['boxes'] / found['boxes'].new_tensor(sample.scale_factor).repeat(2)
            instances = InstanceData(bboxes=boxes, scores=found['scores'], labels=found['labels'])
            if 'mask_logits' in found:
                logits, threshold, shape = found['mask_logits'], self.settings.mask_threshold, sample.ori_shape[:2]
                if self.mask_stride is None:
                    instances.masks = paste_masks(logits.sigmoid(), boxes, shape, threshold, self.masks)
                else:
                    instances.masks = enlarge_masks(logits, self.mask_stride, sample.scale_factor, shape, threshold)
            sample.pred_instances = instances
        return data_samples
