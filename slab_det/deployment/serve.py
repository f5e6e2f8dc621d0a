"""load_detector: a detector that takes images in any form, in any runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from torch import nn

from slab_det.checkpoints.build import build_detector
from slab_det.deployment.deploy import deploy
from slab_det.fusion import check_statistics, fuse
from slab_det.norms import named_offline_norms
from slab_det.runtime.errors import ConfigError, DataError, ExportError
from slab_det.runtime.pipeline import Image, ImagePipeline, inference_steps
from slab_det.runtime.scope import enter_scope


class ImageListError(DataError):
    """Some images of a list were refused; ``results`` holds the objects of the others.

    Attributes:
        results: A DetDataSample for each image of the list, and None for those that were refused.
        errors: The DataError of each refused image, by its index.
    """

    def __init__(self, results: list[DetDataSample | None], errors: dict[int, DataError]) -> None:
        reasons = ''.join(f'\n[{index}] {error}' for index, error in errors.items())
        super().__init__(f'{len(errors)} of {len(results)} images were refused, `results` has the others:{reasons}')
        self.results, self.errors = results, errors


class ServedDetector:
    """Finds objects in images: files, bytes, arrays or images of Pillow.

    Several threads may call it at the same time. Images of a list run one by one: padding to a common size would change
    their objects.

    Args:
        model: A detector with ``test_step``, in eval mode.
        steps: Configs of the test pipeline, see :class:`~slab_det.runtime.pipeline.ImagePipeline`.
        classes: The name of each label; empty if the file of the weights has no names.
    """

    def __init__(self, model: nn.Module, steps: Sequence[dict], classes: Sequence[str] = ()) -> None:
        self.model, self.pipeline, self.classes = model, ImagePipeline(steps), tuple(classes)

    def __call__(self, images: Image | Sequence[Image]) -> DetDataSample | list[DetDataSample]:
        """Predicts the objects of one image, or of each image of a list; results are on the CPU.

        Raises:
            DataError: If the image cannot be read, or has other values or another shape than training images.
            ImageListError: If this holds for images of a list; raised after its last image.
        """
        if not isinstance(images, (list, tuple)):
            return self._detect(images)
        results, errors = [None] * len(images), {}
        for index, image in enumerate(images):
            try:
                results[index] = self._detect(image)
            except DataError as error:
                errors[index] = error
        if errors:
            raise ImageListError(results, errors)
        return results

    @torch.no_grad()
    def _detect(self, image: Image) -> DetDataSample:
        data = self.pipeline(image)
        metainfo = data['data_samples'].metainfo
        (found,) = self.model.test_step(dict(inputs=[data['inputs']], data_samples=[data['data_samples']]))
        # A new sample, because each runtime adds fields of its own.
        return DetDataSample(metainfo=metainfo, pred_instances=found.pred_instances.cpu())


def load_detector(
    config: str | Path | Config,
    weights: str | Path,
    runtime: str = 'torch',
    device: str | torch.device | None = None,
    masks: str = 'full',
    **options: object,
) -> ServedDetector:
    """Loads a detector for serving: ``detector(image)`` is a DetDataSample, ``detector([image, ...])`` a list of them.

    An image is a path, the bytes of a file, an array in BGR, or an image of Pillow; see
    :class:`~slab_det.runtime.pipeline.ImagePipeline`. Boxes are in its pixels, and masks have its size, as in
    ``pred_instances`` of mmdet. ``detector.classes`` names the labels. The first image of a size costs more than the
    next.

    Args:
        config: A config with the test pipeline, fused or not.
        weights: A checkpoint, which is fused if it is not; for other runtimes than 'torch' the file that
            :func:`slab_det.deployment.export.export_onnx` wrote.
        runtime: 'torch', in the form of :func:`slab_det.deploy`; 'onnxruntime' or 'openvino'.
        device: Device of the runtime 'torch'; None takes a GPU where PyTorch finds one. Others run on the CPU.
        masks: 'full', as mmdet gives them, (n, H, W): 100 masks of 4000x8000 are 3.2 GB. Or 'rle': a list of n dicts,
            as ``pycocotools.mask.encode`` gives them; one mask at a time is in memory. mmdet's evaluators take both.
        **options: ``dtype`` of :func:`slab_det.deploy`, or ``threads`` and ``precision`` of
            :func:`slab_det.deployment.export.load_runtime`.

    Raises:
        ConfigError: If the model cannot be built.
        CheckpointError: If the checkpoint is missing or does not fit.
        FusionError, DeploymentError: If the detector cannot be fused or deployed, or its norms have no statistics.
        ExportError: If there is no such runtime, it cannot run the file, the file is for images of another resize, or
            an option or a ``device`` is not for this runtime.
    """
    known = ('dtype',) if runtime == 'torch' else ('threads', 'precision')
    for name in options:
        if name not in known:
            raise ExportError(f'{name}= is no option of the runtime {runtime}, which takes {" and ".join(known)}')
    if not isinstance(config, Config) and not Path(config).is_file():
        raise ConfigError(f'{config}: there is no such config; check its name')
    cfg = config if isinstance(config, Config) else Config.fromfile(config)
    if runtime == 'torch':
        model = build_detector(cfg, str(weights)).to(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
        check_statistics(model, str(weights))
        model = fuse(model, inplace=True) if any(named_offline_norms(model)) else model
        model = deploy(model, inplace=True, masks=masks, **options)
        meta = model.dataset_meta
    else:
        if device is not None:
            raise ExportError(f'device={str(device)!r} is for the runtime torch; {runtime} runs on the CPU')
        # The import takes half a second, which the runtime torch does not need.
        from slab_det.deployment.export import ExportedDetector

        enter_scope(cfg)
        model = ExportedDetector(str(weights), inference_steps(cfg), masks, runtime=runtime, **options).eval()
        meta = model.runtime.metadata.get('dataset_meta')
    return ServedDetector(model, inference_steps(cfg), (meta or {}).get('classes', ()))
