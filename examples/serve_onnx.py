"""Finds objects with an exported file, without slab_det: its runtime, OpenCV and numpy are enough.

    pip install onnxruntime opencv-python-headless    # or openvino in place of onnxruntime
    python serve_onnx.py model.onnx photo.jpg
    python serve_onnx.py model.onnx photo.jpg --runtime openvino --threads 2

Prints one JSON object for each detection. Copy this file into your own program: it is all that an exported detector
needs. ``python tools/export_onnx.py`` writes the file and the metadata that are read here.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import cv2
import numpy as np

# Runs an image (1, C, H, W) and returns boxes, scores, labels and, of Mask R-CNN, mask logits.
Run = Callable[[np.ndarray], list[np.ndarray]]


def load_onnxruntime(file: str, threads: int = 0) -> tuple[dict, Run]:
    """Returns the metadata of a file, and the function that runs it; 0 threads lets the runtime choose."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # By itself it starts a thread for each core of the machine, also where this process may use fewer (taskset, Slurm).
    usable = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    options.intra_op_num_threads = threads or (usable if usable < os.cpu_count() else 0)
    session = onnxruntime.InferenceSession(file, options, providers=['CPUExecutionProvider'])
    metadata = json.loads(session.get_modelmeta().custom_metadata_map['slab_det'])
    return metadata, lambda image: session.run(None, {'image': image})


def load_openvino(file: str, threads: int = 0) -> tuple[dict, Run]:
    """As :func:`load_onnxruntime`."""
    import openvino

    core = openvino.Core()
    model = core.read_model(file)
    metadata = json.loads(model.get_rt_info(['framework', 'slab_det']).astype(str))
    # By default OpenVINO computes in bfloat16 where the CPU has it; f32 is as the file says.
    options = {'INFERENCE_PRECISION_HINT': 'f32', 'PERFORMANCE_HINT': 'LATENCY'}
    if threads:
        options['INFERENCE_NUM_THREADS'] = threads
    request, lock = core.compile_model(model, 'CPU', options).create_infer_request(), Lock()

    def run(image: np.ndarray) -> list[np.ndarray]:
        # A request serves one thread at a time, and the next image overwrites its memory.
        with lock:
            return [np.array(value) for value in request.infer({'image': image}).to_tuple()]

    return metadata, run


RUNTIMES = {'onnxruntime': load_onnxruntime, 'openvino': load_openvino}


def prepare(image: np.ndarray, resize: dict | None) -> tuple[np.ndarray, np.ndarray]:
    """The file's input for an image (H, W, C), uint8, in BGR or gray, and the scale factors of its boxes (4,)."""
    height, width = image.shape[:2]
    size = width, height
    if resize and resize.get('keep_ratio'):
        scale = resize['scale']
        factor = min(max(scale) / max(size), min(scale) / min(size))
        # Sides are rounded half up, each by itself: the factors of x and y differ.
        size = int(width * factor + 0.5), int(height * factor + 0.5)
    elif resize:
        size = tuple(resize['scale'])
    pixels = np.atleast_3d(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR))
    return pixels.transpose(2, 0, 1)[None].astype(np.float32), np.array([size[0] / width, size[1] / height] * 2)


def paste_mask(logits: np.ndarray, box: np.ndarray, height: int, width: int, threshold: float = 0.5) -> np.ndarray:
    """The mask (height, width) of mask logits (28, 28) and their box (x1, y1, x2, y2) in the image."""

    def weights(start: float, end: float, size: int, cells: int) -> np.ndarray:
        # Bilinear, from the centres of pixels to the centres of cells; zero outside.
        position = (np.arange(size) + 0.5 - start) / (end - start) * cells - 0.5
        return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(cells)))

    rows = weights(box[1], box[3], height, logits.shape[0])
    columns = weights(box[0], box[2], width, logits.shape[1])
    return rows @ (1 / (1 + np.exp(-logits))) @ columns.T >= threshold


class Detector:
    """An exported detector. Threads may share it; load it in each worker, after the fork.

    Args:
        file: What ``python tools/export_onnx.py`` wrote, with the whole detector.
        runtime: 'onnxruntime' or 'openvino'.
        threads: CPU threads; 0 lets the runtime choose.

    Raises:
        ValueError: If the file holds a backbone alone, or its images are resized in another way than by ``Resize``.
    """

    def __init__(self, file: str | Path, runtime: str = 'onnxruntime', threads: int = 0) -> None:
        self.metadata, self.run = RUNTIMES[runtime](str(file), threads)
        self.resize = self.metadata['image']['resize']
        self.is_gray = self.metadata['image']['channel_order'] == 'gray'
        self.classes = (self.metadata['dataset_meta'] or {}).get('classes', ())
        if self.metadata['scope'] != 'detector':
            raise ValueError(f'{file} holds a {self.metadata["scope"]}: export it with --scope detector')
        if self.resize and (self.resize['type'] != 'Resize' or 'scale' not in self.resize):
            raise ValueError(f'{file} was exported for {self.resize}: resize images so before you run it')

    def __call__(self, content: bytes, min_score: float = 0.0) -> list[dict]:
        """Finds the objects in an image file.

        Args:
            content: The bytes of the file; OpenCV decodes it and rotates it by its EXIF orientation.
            min_score: Least score of a detection, beyond the file's own threshold.

        Returns:
            A dict of each detection, the best first: 'label', 'name', 'score', 'box' (x1, y1, x2, y2) in pixels of the
            image, and for Mask R-CNN 'mask', an array (H, W) of bool.

        Raises:
            ValueError: If OpenCV does not decode the image.
        """
        flags = cv2.IMREAD_GRAYSCALE if self.is_gray else cv2.IMREAD_COLOR
        image = cv2.imdecode(np.frombuffer(content, np.uint8), flags) if content else None
        if image is None:
            raise ValueError('damaged, or not an image that OpenCV decodes')
        pixels, factors = prepare(image, self.resize)
        boxes, scores, labels, *logits = self.run(pixels)
        found = []
        for index in np.flatnonzero(scores >= min_score):
            box, label = boxes[index] / factors, int(labels[index])
            name = self.classes[label] if self.classes else str(label)
            found.append(dict(label=label, name=name, score=float(scores[index]), box=box.tolist()))
            if logits:
                mask = paste_mask(logits[0][index], box, *image.shape[:2], self.metadata['mask_threshold'])
                found[-1]['mask'] = mask
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('file', help='exported file')
    parser.add_argument('images', nargs='+', help='image files')
    parser.add_argument('--runtime', choices=RUNTIMES, default='onnxruntime')
    parser.add_argument('--threads', type=int, default=0, help='CPU threads (default: the runtime chooses)')
    parser.add_argument('--min-score', type=float, default=0.3, help='least score of a detection (default %(default)s)')
    args = parser.parse_args()
    detector = Detector(args.file, args.runtime, args.threads)
    for image in args.images:
        for found in detector(Path(image).read_bytes(), args.min_score):
            mask = found.pop('mask', None)
            area = {} if mask is None else dict(mask_pixels=int(mask.sum()))
            print(json.dumps(dict(image=image, **found, **area)))


if __name__ == '__main__':
    main()
