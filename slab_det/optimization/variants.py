"""Makes the files of forms: checkpoints of the original and the absorbed detectors, and exported files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config
from torch import nn
from torch.utils.data import DataLoader

import slab_det
from slab_det.checkpoints import build_detector
from slab_det.common.config import to_values
from slab_det.fusion import save_fused
from slab_det.inference.forms import CHANNELS, NORMS, Form
from slab_det.runtime.run_folder import save_with_config

# Images that int8 is calibrated on.
CALIBRATION_IMAGES = 20


class FileStep(NamedTuple):
    """A part of making the files of a form.

    Attributes:
        done: What it has done at its end, in a word.
        make: Does it.
    """

    done: str
    make: Callable[[], None]


class Variants:
    """The files of forms, made when a form first needs them and kept in a folder.

    Args:
        folder: The folder.
        cfg: The config of the detector.
        detector: The detector on the CPU, in eval mode, as ``build_detector`` returns it.
        images: Images to absorb and calibrate on, one a batch.
        device: Device to absorb on.
        progress: Show progress bars.
    """

    def __init__(
        self, folder: Path, cfg: Config, detector: nn.Module, images: DataLoader, device: str, progress: bool
    ) -> None:
        self.folder, self.cfg, self.detector = folder, Config(to_values(cfg)), detector
        self.images, self.device, self.progress = images, device, progress

    def paths(self, form: Form) -> tuple[Path, Path]:
        """The config and the weights of a form, whether they were made or not."""
        suffix = '.pth' if not form.is_exported else '.int8.onnx' if form.precision == 'int8' else '.onnx'
        return self.folder / f'{form.model}_config.py', self.folder / f'{form.model}{suffix}'

    def steps(self, form: Form) -> list[FileStep]:
        """What is left to do until the files of a form are there, in order: absorb, export, calibrate.

        Each step writes one file, whole, from the files of those before it.

        Raises:
            ConversionError, FusionError: A step, if the detector cannot be absorbed as the form needs it.
            ExportError: A step, if the detector cannot be exported.
        """
        config, weights = self.paths(form)
        checkpoint, plain = (self.folder / f'{form.model}{suffix}' for suffix in ('.pth', '.onnx'))
        steps = []
        if not (checkpoint.is_file() and config.is_file()):
            made = self._absorb if form.variant else self._save_original
            steps.append(FileStep('absorbed' if form.variant else 'saved', partial(made, form, checkpoint)))
        if form.is_exported and not plain.is_file():
            steps.append(FileStep('exported', partial(self._export, config, checkpoint, plain)))
        if form.is_exported and not (weights == plain or weights.is_file()):
            steps.append(FileStep('calibrated', partial(self._calibrate, plain, weights)))
        return steps

    def _save_original(self, form: Form, path: Path) -> None:
        # Without the states of the optimizer and of averaged weights.
        content = dict(meta=dict(dataset_meta=self.detector.dataset_meta), state_dict=self.detector.state_dict())
        save_with_config(content, self.cfg, path)

    def _absorb(self, form: Form, path: Path) -> None:
        try:
            student = slab_det.absorb(
                self.detector.to(self.device),
                self.images,
                **absorb_options(form),
                # Its files are named by what they depend on: all forms share the prices of channels.
                work_dir=self.folder / 'blocks',
                # The forms are compared on images of their own.
                compare=False,
                progress=self.progress,
            )
        finally:
            self.detector.cpu()
        save_fused(student.cpu(), self.cfg, path, self.detector.dataset_meta)

    # The imports are those of onnx, which other forms do not need.
    def _export(self, config: Path, checkpoint: Path, path: Path) -> None:
        from slab_det.export import export_onnx

        export_onnx(build_detector(Config.fromfile(config), str(checkpoint)), path)

    def _calibrate(self, plain: Path, path: Path) -> None:
        from slab_det.export import quantize_onnx

        batches = islice(self.images, CALIBRATION_IMAGES)
        quantize_onnx(plain, path, (batch['inputs'][0][None].float().numpy() for batch in batches))


def absorb_options(form: Form) -> dict:
    """The options of :func:`slab_det.absorb` that make a form's weights."""
    options: dict = dict(channels=1)
    for part in form.variant:
        options |= CHANNELS[part] if part in CHANNELS else NORMS[part]
    return options | dict(int8=form.precision == 'int8')
