"""Runs an exported file: ONNX Runtime or OpenVINO, whichever is asked for and installed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from slab_det.deployment.export.packages import need
from slab_det.runtime.errors import ExportError

METADATA_KEY = 'slab_det'


class Runtime(ABC):
    """A loaded ONNX file.

    Attributes:
        metadata: What :func:`slab_det.deployment.export.export_onnx` wrote into the file.
    """

    metadata: dict

    @abstractmethod
    def run(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by name for an image (1, 3, H, W), float32, 0 to 255, in the channel order of the pipeline."""


class OnnxRuntime(Runtime):
    """Microsoft's ONNX Runtime on the CPU; float32, or int8 where the file is quantized.

    Args:
        path: The file.
        threads: CPU threads; 0 lets the runtime choose.
        precision: 'f32'; it has no other for a file as it is.
    """

    def __init__(self, path: str | Path, threads: int = 0, precision: str = 'f32') -> None:
        onnxruntime = need('onnxruntime')
        if precision != 'f32':
            raise ExportError(f'ONNX Runtime computes as the file says, not in {precision}: use runtime openvino')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        self._names = [output.name for output in self._session.get_outputs()]
        self.metadata = _metadata(self._session.get_modelmeta().custom_metadata_map.get(METADATA_KEY), path)

    def run(self, image: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self._names, self._session.run(None, {'image': image}), strict=True))


class OpenVino(Runtime):
    """Intel's OpenVINO on the CPU, also AMD's and Arm's.

    Args:
        path: The file.
        threads: CPU threads; 0 lets the runtime choose.
        precision: 'f32' or 'bf16'; bf16 needs a CPU that multiplies it (AVX-512 BF16, AMX), or is slower than f32. In
            both a quantized file runs in int8 where it says so.
    """

    def __init__(self, path: str | Path, threads: int = 0, precision: str = 'f32') -> None:
        onnx, openvino = need('onnx'), need('openvino')
        options = {'INFERENCE_PRECISION_HINT': precision, 'PERFORMANCE_HINT': 'LATENCY'}
        if threads:
            options['INFERENCE_NUM_THREADS'] = threads
        core = openvino.Core()
        self._request = core.compile_model(core.read_model(path), 'CPU', options).create_infer_request()
        properties = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
        self.metadata = _metadata(properties.get(METADATA_KEY), path)

    def run(self, image: np.ndarray) -> dict[str, np.ndarray]:
        outputs = self._request.infer([image])
        # Views of the request's memory, which the next image overwrites.
        return {port.any_name: np.array(value) for port, value in outputs.items()}


RUNTIMES: dict[str, type[Runtime]] = {'onnxruntime': OnnxRuntime, 'openvino': OpenVino}
PRECISIONS = ('f32', 'bf16')


def load_runtime(path: str | Path, runtime: str = 'onnxruntime', threads: int = 0, precision: str = 'f32') -> Runtime:
    """Loads an exported file.

    Args:
        path: The file that :func:`export_onnx` or :func:`quantize_onnx` wrote.
        runtime: 'onnxruntime' or 'openvino'.
        threads: CPU threads; 0 lets the runtime choose.
        precision: 'f32' or, with OpenVINO, 'bf16'.

    Raises:
        ExportError: If the runtime is unknown or not installed, or the file is none of ours.
    """
    if runtime not in RUNTIMES:
        raise ExportError(f'runtime {runtime!r} is not one of {", ".join(RUNTIMES)}')
    if not Path(path).is_file():
        raise ExportError(f'{path} not found')
    return RUNTIMES[runtime](path, threads, precision)


def _metadata(text: str | None, path: str | Path) -> dict:
    if text is None:
        raise ExportError(f'{path} was not written by tools/export_onnx.py')
    return json.loads(text)
