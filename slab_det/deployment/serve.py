"""load_detector: loads a detector that predicts from files, bytes or arrays, in PyTorch or an ONNX runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from torch import nn

from slab_det.checkpoints import build_detector
from slab_det.deployment.deploy import deploy
from slab_det.fusion.fuse import check_statistics, fuse
from slab_det.norms import named_offline_norms
from slab_det.runtime.errors import ConfigError, DataError, ExportError
from slab_det.runtime.pipeline import Image, ImagePipeline, inference_steps
from slab_det.runtime.registries import enter_scope


class ImageListError(DataError):
    """Some images of a list were refused; ``results`` holds the predictions for the others.

    Attributes:
        results: A DetDataSample for each image of the list, or None for a refused image.
        errors: The DataError of each refused image, by its index.
    """

    def __init__(self, results: list[DetDataSample | None], errors: dict[int, DataError]) -> None:
        reasons = ''.join(f'\n[{index}] {error}' for index, error in errors.items())
        super().__init__(f'{len(errors)} of {len(results)} images were refused, `results` has the others:{reasons}')
        self.results, self.errors = results, errors


class ServedDetector:
    """Finds objects in images: files, bytes, arrays or Pillow images.

    Several threads may call it at the same time. Images of a list run one by one, because padding to a common size
    changes predictions.

    Args:
        model: A detector with ``test_step``, in eval mode.
        steps: Configs of the test pipeline, see :class:`~slab_det.runtime.pipeline.ImagePipeline`.
        classes: The class name of each label; empty if the checkpoint or exported file has no names.
    """

    def __init__(self, model: nn.Module, steps: Sequence[dict], classes: Sequence[str] = ()) -> None:
        self.model, self.pipeline, self.classes = model, ImagePipeline(steps), tuple(classes)

    def __call__(self, images: Image | Sequence[Image]) -> DetDataSample | list[DetDataSample]:
        """Predicts the objects of one image, or of each image of a list; results are on the CPU.

        Raises:
            DataError: If the image cannot be read, or its shape or range of values is wrong.
            ImageListError: If images of a list are refused with a DataError; raised after the last image.
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
    """Loads a detector for serving: ``detector(image)`` returns a DetDataSample, ``detector([image, ...])`` a list.

    An image is a path, the bytes of a file, an array in BGR, or a Pillow image; see
    :class:`~slab_det.runtime.pipeline.ImagePipeline`. Boxes and masks refer to the original image, as in mmdet's
    ``pred_instances``. ``detector.classes`` holds the class names. The first image of each size is slower.

    Args:
        config: A config with the test pipeline, fused or not.
        weights: For 'torch' a checkpoint, fused or not; for other runtimes a file that
            :func:`slab_det.deployment.export.export_onnx` wrote.
        runtime: 'torch' (runs the deployed detector, see :func:`slab_det.deploy`), 'onnxruntime' or 'openvino'.
        device: Device for 'torch'; None selects a GPU if PyTorch finds one. Other runtimes run on the CPU.
        masks: 'full' for mmdet's tensor (n, H, W): 100 masks of 4000x8000 are 3.2 GB. 'rle' for a list of n dicts, as
            ``pycocotools.mask.encode`` returns them, made one mask at a time. mmdet's evaluators take both.
        **options: ``dtype`` of :func:`slab_det.deploy`, or ``threads`` and ``precision`` of
            :func:`slab_det.deployment.export.load_runtime`.

    Raises:
        ConfigError: If the model cannot be built.
        CheckpointError: If the checkpoint is missing or does not fit.
        FusionError, DeploymentError: If the detector cannot be fused or deployed, or its norms have no statistics.
        ExportError: If the runtime is unknown or cannot run the file, the file was exported for another resize, for
            other preprocessing or with a ``test_cfg`` that it cannot follow (docs/deploy.md), or the runtime does not
            take ``device`` or an option.
    """
    known = ('dtype',) if runtime == 'torch' else ('threads', 'precision')
    for name in options:
        if name not in known:
            raise ExportError(f'{name}= is not an option of the runtime {runtime}, which takes {" and ".join(known)}')
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
        from slab_det.deployment.export.settings import detector_settings

        enter_scope(cfg)
        detector = detector_settings(cfg)
        model = ExportedDetector(str(weights), inference_steps(cfg), masks, detector, runtime=runtime, **options).eval()
        meta = model.runtime.metadata.get('dataset_meta')
    return ServedDetector(model, inference_steps(cfg), (meta or {}).get('classes', ()))
