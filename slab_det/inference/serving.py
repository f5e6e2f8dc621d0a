"""load_detector: loads a detector that predicts from files, bytes or arrays, in PyTorch or an ONNX runtime."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MMLogger
from torch import nn

from slab_det.checkpoints import build_detector
from slab_det.common.config import open_config
from slab_det.common.errors import ConfigError, DataError, DeploymentError, ExportError
from slab_det.common.memory import keep_freed_memory
from slab_det.common.numbers import check_threads
from slab_det.common.pipeline import Image, ImagePipeline, find_test_pipeline
from slab_det.families.masks import check_mask_format, encode_masks
from slab_det.fusion.folding import check_statistics, fuse
from slab_det.inference.deployment import deploy
from slab_det.inference.folder import find_stored
from slab_det.machine import find_device
from slab_det.norms import named_offline_norms
from slab_det.precisions import RUNTIMES
from slab_det.runtime.registries import enter_scope

# The process that imported this module, or the last fork of it that mend_threads has seen.
_process = os.getpid()


def mend_threads() -> None:
    """Makes PyTorch compute with one thread in a forked process, where it would wait for the parent's threads."""
    global _process
    if os.getpid() == _process:
        return
    _process = os.getpid()
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        MMLogger.get_current_instance().warning(
            'this process was forked, and threads do not survive a fork: PyTorch computes with one thread here; import '
            'slab_det in each worker after the fork, or start workers with the method spawn'
        )


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
    changes predictions. A pickled one of an exported file loads the file again.

    Args:
        model: A detector with ``test_step``, in eval mode.
        steps: Configs of the test pipeline, see :class:`~slab_det.common.pipeline.ImagePipeline`.
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
        mend_threads()
        data = self.pipeline(image)
        # Copied before the detector adds to them.
        metainfo, given = data['data_samples'].metainfo, {*data['data_samples'].keys()}
        (found,) = self.model.test_step(dict(inputs=[data['inputs']], data_samples=[data['data_samples']]))
        # A new sample, because each runtime adds metainfo of its own.
        predictions = {name: value for name, value in found.cpu().items() if name not in given}
        return DetDataSample(metainfo=metainfo, **predictions)


def load_detector(
    config: str | Path | Config,
    weights: str | Path | None = None,
    runtime: str = 'torch',
    device: str | torch.device | None = None,
    masks: str = 'full',
    keep_memory: bool = True,
    **options: object,
) -> ServedDetector:
    """Loads a detector for serving: ``detector(image)`` returns a DetDataSample, ``detector([image, ...])`` a list.

    ``load_detector('FOLDER')`` serves the form that :func:`slab_det.optimize` chose.

    An image is a path, the bytes of a file, an array in BGR, or a Pillow image; see
    :class:`~slab_det.common.pipeline.ImagePipeline`. Results are what the detector's ``test_step`` predicts, such as
    ``pred_instances`` and ``pred_panoptic_seg``; boxes and masks refer to the original image. ``detector.classes``
    holds the class names. The first image of each size is slower.

    Args:
        config: A config with the test pipeline, fused or not; or a folder of :func:`slab_det.optimize`, which says
            weights and runtime.
        weights: For 'torch' and 'eager' a checkpoint, fused or not; for other runtimes a file that
            :func:`slab_det.export.export_onnx` wrote.
        runtime: 'torch' (runs the deployed detector, see :func:`slab_det.deploy`), 'eager' (runs the detector as the
            config builds it), 'onnxruntime' or 'openvino'.
        device: Device for 'torch' and 'eager'; None selects a GPU if PyTorch finds one. Other runtimes run on the CPU.
        masks: 'full' for mmdet's tensor (n, H, W): 100 masks of 4000x8000 are 3.2 GB. 'rle' for a list of n dicts, as
            ``pycocotools.mask.encode`` returns them, made one mask at a time. mmdet's evaluators take both.
        keep_memory: Keep the memory that an image needed for the next one, in the whole process
            (:func:`~slab_det.common.memory.keep_freed_memory`); False leaves glibc's settings as they are.
        **options: ``dtype`` of :func:`slab_det.deploy`, or ``threads`` and ``precision`` of
            :func:`slab_det.export.load_runtime`; for a folder ``form``, the name of another of its forms,
            and ``threads``: PyTorch's forms then set the threads of the process, which they else leave as they are.

    Raises:
        ConfigError: If the config cannot be read, or the model cannot be built.
        CheckpointError: If the checkpoint is missing or does not fit.
        FusionError, DeploymentError: If the detector cannot be fused or deployed, or its norms have no statistics; if
            the machine lacks what the form of a folder needs.
        ExportError: If the runtime is unknown or cannot run the file, the file was exported for another resize, for
            other preprocessing or with a ``test_cfg`` that it cannot follow (docs/deploy.md), or the runtime does not
            take ``device`` or an option.
    """
    mend_threads()
    if keep_memory:
        keep_freed_memory()
    if weights is None:
        return _load_folder(config, runtime, device, masks, **options)
    if runtime not in RUNTIMES:
        raise ExportError(f'runtime {runtime!r} is not one of {", ".join(RUNTIMES)}')
    known = RUNTIMES[runtime].options
    for name in options:
        if name not in known:
            takes = ' and '.join(known) or 'none'
            raise ExportError(f'{name}= is not an option of the runtime {runtime}, which takes {takes}')
    cfg = open_config(config)
    load = _load_exported if RUNTIMES[runtime].module else _load_checkpoint
    model, meta = load(cfg, str(weights), runtime, device, masks, options)
    return ServedDetector(model, find_test_pipeline(cfg), (meta or {}).get('classes', ()))


def _load_checkpoint(
    cfg: Config, weights: str, runtime: str, device: str | torch.device | None, masks: str, options: dict
) -> tuple[nn.Module, dict | None]:
    """The detector of a checkpoint, and its ``dataset_meta``; arguments as for :func:`load_detector`."""
    model = build_detector(cfg, weights).to(find_device(device))
    check_statistics(model, weights)
    meta = model.dataset_meta
    if runtime == 'torch':
        model = fuse(model, inplace=True) if any(named_offline_norms(model)) else model
        return deploy(model, inplace=True, masks=masks, **options), meta
    check_mask_format(masks, DeploymentError)
    if masks == 'rle':
        encode_masks(model)
    return model, meta


def _load_exported(
    cfg: Config, weights: str, runtime: str, device: str | torch.device | None, masks: str, options: dict
) -> tuple[nn.Module, dict | None]:
    """The detector of an exported file, and its ``dataset_meta``; arguments as for :func:`load_detector`."""
    if device is not None:
        raise ExportError(f'device={str(device)!r} is for the runtime torch; {runtime} runs on the CPU')
    # The import takes half a second, which the runtime torch does not need.
    from slab_det.export import ExportedDetector
    from slab_det.export.settings import detector_settings

    enter_scope(cfg)
    detector = detector_settings(cfg)
    model = ExportedDetector(weights, find_test_pipeline(cfg), masks, detector, runtime=runtime, **options).eval()
    return model, model.runtime.metadata.get('dataset_meta')


def _load_folder(
    folder: str | Path | Config,
    runtime: str,
    device: str | torch.device | None,
    masks: str,
    form: str | None = None,
    **options: object,
) -> ServedDetector:
    """Loads a form of a folder that :func:`slab_det.optimize` wrote; arguments as for :func:`load_detector`."""
    if isinstance(folder, Config) or Path(folder).suffix == '.py':
        raise ConfigError('load_detector(config) lacks weights: give a checkpoint or an exported file too')
    stored = find_stored(folder, form)
    known = dict(stored.form.options(stored.threads))
    wrong = [f'{name}=' for name in options if name != 'threads']
    wrong += ['runtime='] * (runtime != 'torch') + ['device='] * (device is not None and stored.form.is_exported)
    if wrong:
        raise DeploymentError(
            f'{folder} says how its detector runs, as {stored.form.key}: leave {" and ".join(wrong)} out, or give form='
        )
    if 'threads' in options and not stored.form.is_exported:
        check_threads(threads := options.pop('threads'), DeploymentError, name='threads=')
        if threads is not None:
            torch.set_num_threads(threads)
    device = None if stored.form.is_exported else device or stored.device
    # load_detector has dealt with memory already.
    return load_detector(stored.config, stored.weights, stored.form.runtime, device, masks, False, **known | options)
