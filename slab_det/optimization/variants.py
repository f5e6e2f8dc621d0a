"""Makes the files of forms: checkpoints of the original and the absorbed detectors, and exported files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from mmengine.config import Config
from torch import nn
from torch.utils.data import DataLoader, Subset

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.fusion import save_fused
from slab_det.inference.forms import CHANNELS, NORMS, Form
from slab_det.optimization.budget import TimeBudget
from slab_det.runtime.run_folder import save_with_config

# Images that int8 is calibrated on.
CALIBRATION_IMAGES = 20


class Variants:
    """The files of forms, made when a form first needs them and kept in a folder.

    Args:
        folder: The folder.
        cfg: The config of the detector.
        detector: The detector, in eval mode, as ``build_detector`` returns it.
        loader: Images, one a batch.
        budget: Is told what each step takes.
        progress: Show progress bars.
    """

    def __init__(
        self, folder: Path, cfg: Config, detector: nn.Module, loader: DataLoader, budget: TimeBudget, progress: bool
    ) -> None:
        self.folder, self.cfg, self.detector = folder, cfg, detector
        self.budget, self.progress = budget, progress
        self.images = self.loader = loader

    def use_images(self, indices: Sequence[int]) -> None:
        """Absorbs and calibrates on some of the images."""
        images = Subset(self.loader.dataset, indices)
        # Batches are then prepared as for inference.
        images.test_mode = True
        self.images = DataLoader(images, batch_size=1, collate_fn=self.loader.collate_fn)

    def seconds(self, form: Form) -> float:
        """Estimates the time to make the files of a form that are not there."""
        checkpoint = self._path(form)
        steps = {}
        if form.variant and not checkpoint.is_file():
            steps['absorb'] = len(self.images)
        if form.is_exported and not checkpoint.with_suffix('.onnx').is_file():
            steps['export'] = 1
        if form.precision == 'int8' and not checkpoint.with_suffix('.int8.onnx').is_file():
            steps['quantize'] = 1
        return sum(parts * self.budget.estimate(kind) for kind, parts in steps.items())

    def files(self, form: Form) -> tuple[Path, Path]:
        """Returns the config and the weights of a form; makes them where they are missing.

        Raises:
            ConversionError, FusionError: If the detector cannot be absorbed as the form needs it.
            ExportError: If the detector cannot be exported.
        """
        config, checkpoint = self.checkpoint(form)
        if not form.is_exported:
            return config, checkpoint
        # Imports onnx, which other forms do not need.
        from slab_det.export import export_onnx, quantize_onnx

        plain = checkpoint.with_suffix('.onnx')
        if not plain.is_file():
            with self.budget.step('export'):
                export_onnx(build_detector(Config.fromfile(config), str(checkpoint)), plain)
        if form.precision != 'int8':
            return config, plain
        quantized = checkpoint.with_suffix('.int8.onnx')
        if not quantized.is_file():
            batches = islice(self.images, CALIBRATION_IMAGES)
            with self.budget.step('quantize'):
                quantize_onnx(plain, quantized, (batch['inputs'][0][None].float().numpy() for batch in batches))
        return config, quantized

    def checkpoint(self, form: Form) -> tuple[Path, Path]:
        """Returns the config and the checkpoint that a form runs, or that its exported file is made of."""
        checkpoint = self._path(form)
        config = checkpoint.with_name(f'{form.model}_config.py')
        if checkpoint.is_file() and config.is_file():
            return config, checkpoint
        if form.variant:
            with self.budget.step('absorb', len(self.images)):
                student = slab_det.absorb(
                    self.detector,
                    self.images,
                    **absorb_options(form),
                    work_dir=self.folder / f'{form.model}_blocks',
                    progress=self.progress,
                )
            save_fused(student, self.cfg, checkpoint, self.detector.dataset_meta)
            return config, checkpoint
        # Without the states of the optimizer and of averaged weights.
        content = dict(meta=dict(dataset_meta=self.detector.dataset_meta), state_dict=self.detector.state_dict())
        save_with_config(content, self.cfg, checkpoint)
        return config, checkpoint

    def _path(self, form: Form) -> Path:
        return self.folder / f'{form.model}.pth'


def absorb_options(form: Form) -> dict:
    """The options of :func:`slab_det.absorb` that make a form's weights."""
    options: dict = {}
    for part in form.variant:
        # The norms come last, and are then absorbed too.
        options |= CHANNELS[part] if part in CHANNELS else NORMS[part]
    return options | dict(int8=form.precision == 'int8')
