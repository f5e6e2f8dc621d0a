"""Serves a detector over HTTP: the bytes of an image file in, its objects as JSON out.

Needs the extra serve. A process holds one detector and looks at one image at a time; by default there is one process
for each processor, with one thread, and on a GPU one process. There is no authentication: put it behind a server that
has, and that limits how many requests wait.
"""

import argparse
import gc
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

from slab_det.cli import command
from slab_det.precisions import EXPORT_RUNTIMES, precisions_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from slab_det.inference import ServedDetector

MEGABYTE = 2**20
# How the parent tells its arguments to the processes that serve.
VARIABLE = 'SLAB_DET_SERVE'
# uvicorn ends a process that is silent for so long. Its own five seconds are too few to import PyTorch where other
# processes run.
SILENT_SECONDS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', metavar='FOLDER', help='folder of slab-det optimize; or a config, before its weights')
    parser.add_argument('weights', nargs='?', help='of a config: a checkpoint, or with --runtime an exported file')
    parser.add_argument('--form', metavar='NAME', help='another form of a folder than the recommended one')
    parser.add_argument('--runtime', choices=('torch', *EXPORT_RUNTIMES), default='torch')
    parser.add_argument('--device', help="'cpu' or 'cuda:N', with 'torch' (default: a GPU if there is one)")
    parser.add_argument('--masks', choices=('full', 'rle'), default='full', help='rle: one mask in memory at a time')
    parser.add_argument('--dtype', choices=precisions_of('torch'), help="of the layers, with 'torch'")
    parser.add_argument(
        '--processes', type=int, metavar='N', help='detectors in memory (default: one a processor; on a GPU one)'
    )
    parser.add_argument('--threads', type=int, default=1, help='CPU threads of each process (default %(default)s)')
    parser.add_argument('--host', default='127.0.0.1', help='address to listen at (default: this machine alone)')
    parser.add_argument('--port', type=int, default=8000)
    parser.add_argument('--max-megabytes', type=float, default=20, help='largest image file (default %(default)s)')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Serves until it is stopped. A detector that does not run is an error before the port opens."""
    from slab_det.common.errors import SlabDetError
    from slab_det.common.numbers import check_threads
    from slab_det.machine import MACHINE

    try:
        import uvicorn
    except ImportError as error:
        raise SlabDetError('slab-det serve needs the extra serve: pip install "slab_det[serve]"') from error

    check_threads(args.threads)
    if args.processes is not None and args.processes < 1:
        raise SlabDetError(f'--processes {args.processes}: give 1 or more')
    detector = load(args)
    processes = args.processes or (1 if runs_on_gpu(detector) else MACHINE.processors // args.threads)
    try:
        if processes == 1:
            uvicorn.run(create_app(detector, args.max_megabytes), host=args.host, port=args.port)
        else:
            del detector
            os.environ[VARIABLE] = json.dumps(vars(args))
            # Each process is a new interpreter: the threads of a runtime do not survive a fork.
            uvicorn.run(
                'slab_det_command:create_worker',
                factory=True,
                workers=processes,
                timeout_worker_healthcheck=SILENT_SECONDS,
                host=args.host,
                port=args.port,
            )
    finally:
        # The interpreter ends seconds sooner if it does not look for cycles in all that PyTorch and mmdet import.
        gc.freeze()


def create_worker() -> 'FastAPI':
    """Makes the application of one of several processes."""
    import slab_det

    slab_det.runtime.install()  # refuses checkpoints that hold code
    args = argparse.Namespace(**json.loads(os.environ[VARIABLE]))
    return create_app(load(args), args.max_megabytes)


def runs_on_gpu(detector: 'ServedDetector') -> bool:
    """Whether PyTorch runs a detector on a GPU; exported files run on the CPU."""
    from torch import nn

    model = detector.model
    return isinstance(model, nn.Module) and any(parameter.is_cuda for parameter in model.parameters())


def load(args: argparse.Namespace) -> 'ServedDetector':
    """Loads the detector, and lets it look at a first image, which is slower than the next ones.

    Raises:
        DeploymentError: If it predicts no instances.
    """
    import numpy as np
    import torch

    import slab_det
    from slab_det.common.errors import DeploymentError

    options = dict(runtime=args.runtime, masks=args.masks, device=args.device)
    if args.dtype:
        options['dtype'] = getattr(torch, args.dtype)
    if args.form:
        options['form'] = args.form
    if args.weights is None or args.runtime != 'torch':
        options['threads'] = args.threads
    else:
        torch.set_num_threads(args.threads)
    detector = slab_det.load_detector(args.config, args.weights, **options)
    if 'pred_instances' not in detector(np.zeros((64, 64, 3), np.uint8)):
        raise DeploymentError(
            f'{args.config} predicts no instances, which this server answers: set test_cfg.instance_on'
        )
    return detector


def create_app(detector: 'ServedDetector', max_megabytes: float) -> 'FastAPI':
    """Makes the application, which answers ``GET /healthz`` and ``POST /detect``.

    Args:
        detector: What :func:`slab_det.load_detector` returns.
        max_megabytes: Largest image file; a larger one is answered with 413, and not read to its end.
    """
    import anyio
    from fastapi import FastAPI, HTTPException, Query, Request

    import slab_det
    from slab_det.common.errors import DataError

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Images wait for each other here: two at once would share the same cores.
        app.state.turn = anyio.CapacityLimiter(1)
        yield

    app = FastAPI(title='slab_det', version=slab_det.__version__, lifespan=lifespan)

    @app.get('/healthz')
    async def healthz() -> dict:
        """Answers 200. The port opens after the detector has looked at a first image."""
        return dict(status='ok', classes=detector.classes)

    @app.post('/detect')
    async def detect(request: Request, min_score: Annotated[float, Query(ge=0, le=1)] = 0.0) -> dict:
        """The objects in an image file, which is the body of the request; see :func:`find_objects`."""
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            # Whatever the request's header says of its length.
            if len(content) > max_megabytes * MEGABYTE:
                raise HTTPException(413, f'the image has more than {max_megabytes:g} MB; send a smaller one')
        if not content:
            raise HTTPException(422, 'the body is empty: send the bytes of an image, as curl --data-binary @photo.jpg')
        call = partial(find_objects, detector, bytes(content), min_score)
        try:
            return await anyio.to_thread.run_sync(call, limiter=app.state.turn)
        except DataError as error:
            raise HTTPException(422, str(error)) from error

    return app


def find_objects(detector: 'ServedDetector', content: bytes, min_score: float = 0.0) -> dict:
    """Finds the objects in an image file, as values that JSON has.

    Returns:
        ``{'height', 'width', 'detections': [{'label', 'name', 'score', 'box': [x1, y1, x2, y2], 'mask'}]}``, the best
        first, in pixels of the image; 'mask' is COCO's run-length code, of detectors with masks alone.
    """
    import numpy as np
    import torch
    from pycocotools.mask import encode

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


if __name__ == '__main__':
    main()
