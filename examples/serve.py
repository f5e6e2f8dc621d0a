"""Serves a detector over HTTP: the bytes of an image file in, its objects as JSON out.

    pip install -e ".[serve]"
    python examples/serve.py FOLDER --port 8000  # that slab-det optimize wrote
    python examples/serve.py fused_config.py fused.pth  # or the parts of a detector
    curl --data-binary @photo.jpg 'http://localhost:8000/detect?min_score=0.3'
    curl http://localhost:8000/healthz

A process holds one detector and looks at one image at a time; start several processes, or containers, for several at
once. It has no authentication: put it behind a server that has, and that limits how many requests wait.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from pycocotools.mask import encode

import slab_det
from slab_det.inference import ServedDetector
from slab_det.inference.folder import find_stored
from slab_det.runtime.errors import DataError, DeploymentError

MEGABYTE = 2**20


def create_app(
    config: str | Path, weights: str | Path | None = None, max_bytes: int = 20 * MEGABYTE, **options: object
) -> FastAPI:
    """Makes the application. It loads the detector when the server starts, in the process that serves.

    Args:
        config, weights, options: See :func:`slab_det.load_detector`.
        max_bytes: Largest image file; a larger one is answered with 413, and not read to its end.
    """

    @asynccontextmanager
    async def load(app: FastAPI) -> AsyncIterator[None]:
        app.state.detector = slab_det.load_detector(config, weights, **options)
        # Images wait for each other here: two at once would share the same cores.
        app.state.turn = anyio.CapacityLimiter(1)
        # The first image is slower, and a detector that does not run is known before the first request.
        if 'pred_instances' not in app.state.detector(np.zeros((64, 64, 3), np.uint8)):
            raise DeploymentError(
                f'{config} predicts no instances, which this server answers: set test_cfg.instance_on'
            )
        yield

    app = FastAPI(title='slab_det', version=slab_det.__version__, lifespan=load)

    @app.get('/healthz')
    async def healthz() -> dict:
        """Answers 200. The port opens after the detector has looked at a first image."""
        return dict(status='ok', classes=app.state.detector.classes)

    @app.post('/detect')
    async def detect(request: Request, min_score: Annotated[float, Query(ge=0, le=1)] = 0.0) -> dict:
        """The objects in an image file, which is the body of the request; see :func:`describe`."""
        content = await read_body(request, max_bytes)
        call = partial(describe, app.state.detector, content, min_score)
        try:
            return await anyio.to_thread.run_sync(call, limiter=app.state.turn)
        except DataError as error:
            raise HTTPException(422, str(error)) from error

    return app


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Reads the body of a request, and stops where it is too large, whatever its header says."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_bytes:
            raise HTTPException(413, f'the image has more than {max_bytes / MEGABYTE:g} MB; send a smaller one')
    if not content:
        raise HTTPException(422, 'the body is empty: send the bytes of an image file, as curl --data-binary @photo.jpg')
    return bytes(content)


def describe(detector: ServedDetector, content: bytes, min_score: float = 0.0) -> dict:
    """Finds the objects in an image file, and describes them by values that JSON has.

    Returns:
        ``{'height', 'width', 'detections': [{'label', 'name', 'score', 'box': [x1, y1, x2, y2], 'mask'}]}``, the best
        first, in pixels of the image; 'mask' is COCO's run-length code, of detectors with masks alone.
    """
    sample = detector(content)
    found = sample.pred_instances
    detections = []
    for index in torch.nonzero(found.scores >= min_score).flatten().tolist():
        label = int(found.labels[index])
        detections.append(
            dict(
                label=label,
                name=detector.classes[label] if detector.classes else str(label),
                score=float(found.scores[index]),
                box=found.bboxes[index].tolist(),
            )
        )
        if 'masks' in found:
            mask = found.masks[index]
            # With masks='rle' it is encoded already.
            code = encode(np.asfortranarray(mask.numpy(), np.uint8)) if isinstance(mask, torch.Tensor) else mask
            detections[-1]['mask'] = dict(size=list(code['size']), counts=code['counts'].decode())
    height, width = sample.ori_shape[:2]
    return dict(height=height, width=width, detections=detections)


def has_own_threads(args: argparse.Namespace) -> bool:
    """Whether the runtime has threads of its own beside PyTorch's."""
    return args.runtime != 'torch' if args.weights else find_stored(args.config).form.is_exported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='folder of slab-det optimize; or a config, such as fused_config.py')
    parser.add_argument('weights', nargs='?', help='of a config: a checkpoint, or with --runtime an exported file')
    parser.add_argument('--runtime', choices=('torch', 'onnxruntime', 'openvino'), default='torch')
    parser.add_argument('--device', help="'cpu' or 'cuda:N', with 'torch' (default: a GPU if there is one)")
    parser.add_argument('--masks', choices=('full', 'rle'), default='full', help='rle: one mask in memory at a time')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16', 'float16'), help="of the layers, with 'torch'")
    parser.add_argument('--threads', type=int, help='CPU threads (default: the runtime chooses)')
    parser.add_argument('--host', default='127.0.0.1', help='address to listen at (default: this machine alone)')
    parser.add_argument('--port', type=int, default=8000)
    parser.add_argument('--max-megabytes', type=float, default=20, help='largest image file (default %(default)s)')
    args = parser.parse_args()
    slab_det.runtime.install()  # refuses checkpoints that hold code
    options = dict(runtime=args.runtime, masks=args.masks, device=args.device)
    if args.dtype:
        options['dtype'] = getattr(torch, args.dtype)
    if args.threads and has_own_threads(args):
        options['threads'] = args.threads
    elif args.threads:
        torch.set_num_threads(args.threads)
    app = create_app(args.config, args.weights, int(args.max_megabytes * MEGABYTE), **options)
    uvicorn.run(app, host=args.host, port=args.port)


if __name__ == '__main__':
    main()
