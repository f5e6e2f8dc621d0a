"""optimize: finds the fastest form of a trained detector on this machine that loses little AP."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from mmengine.config import Config
from torch import nn

from slab_det.absorption.digest import add_weights
from slab_det.checkpoints import build_detector
from slab_det.common.config import open_config
from slab_det.common.errors import SlabDetError
from slab_det.common.files import check_writable, locked
from slab_det.common.mute import mute_log
from slab_det.common.numbers import check_threads
from slab_det.common.own_files import OwnFiles, check_own
from slab_det.common.record import describe_environment
from slab_det.fusion.folding import check_statistics
from slab_det.inference.folder import OPTIMIZE_JSON
from slab_det.inference.forms import BASE, CHANNELS, NORMS, Form, list_forms
from slab_det.machine import find_device
from slab_det.optimization.choice import SURE_ROUNDS
from slab_det.optimization.evaluation import Evaluation
from slab_det.optimization.images import SplitImages
from slab_det.optimization.records import Records
from slab_det.optimization.report import OptimizationReport, draw_pictures, write_folder
from slab_det.optimization.standing import Standing
from slab_det.optimization.turns import Turns
from slab_det.optimization.variants import Variants

# Rounds of each form that is not dropped.
ROUNDS = 30
# Number of forms of the original detector, the fastest ones, in which absorbed detectors are measured.
ENGINES = 2
COMMAND, WORK = 'optimize', 'work'


def optimize(
    config: str | Path | Config,
    checkpoint: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    minutes: float = 20.0,
    max_loss: float = 0.5,
    eval: bool = False,
    num_images: int = 120,
    device: str | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> OptimizationReport:
    """Finds the fastest form of a trained detector on this machine that loses little AP.

    Forms are the detector as it is ('eager'), deployed (:func:`slab_det.deploy`) and exported to ONNX Runtime and
    OpenVINO, in each precision that the machine computes; in the fastest of these also with fewer hidden channels, and
    with its LayerNorms absorbed (:func:`slab_det.absorb`).

    Every form predicts the images in turns, one at a time, from the bytes of a file to detections. A third of the
    images is held out from absorption and int8 calibration: on these, times are measured, and the share of the AP that
    a form retains is estimated from detections (:func:`slab_det.compare.ruler.retained_ap`). A quick form predicts all
    of them without timing first. A form that is slower than one which loses no more is dropped early. The fastest form
    whose loss of AP is at most ``max_loss`` is recommended, or, of forms of about the same speed, the one with the
    fewest changes (:func:`~slab_det.optimization.choice.choose`).

    Args:
        config: Config of the detector, or its path; any detector that :func:`slab_det.deploy` takes.
        checkpoint: Its weights.
        images: Folder of images like those that the detector will see, without labels.
        out: Folder for the result: new, empty, or of an earlier call. ``slab_det.load_detector(out)`` serves the
            recommended form, from the first minute on: the folder is written after each step. ``out/work`` holds what
            was measured; the same call goes on from there.
        minutes: A deadline: no step begins after it. To absorb a detector, to export it, to calibrate its int8 file,
            and to load and first measure a form are steps, and so is each further round. Only the original detector
            is measured in any case.
        max_loss: Largest loss of AP, in points from 0 to 100.
        eval: Also measure AP of the original and the recommended form, on ``val_dataloader`` of the config. The
            measured loss then replaces the expected one. It is not part of ``minutes``.
        num_images: Number of images, evenly spaced over the folder; at least six.
        device: 'cpu' or 'cuda', which is PyTorch's current GPU; None takes a GPU if PyTorch finds one.
        threads: CPU threads of every runtime; None takes PyTorch's number.
        progress: Print each step, and show progress bars.

    Returns:
        What was measured, and the recommended form.

    Raises:
        ConfigError, CheckpointError: If the detector cannot be built or loaded.
        DataError: If the folder holds fewer than six readable images, the detector finds nothing in the held-out
            images that it finds again when they are mirrored, or its measured AP is 0.
        SlabDetError: If ``out`` holds files that no call wrote, or lacks some that a call wrote; another program works
            there, an argument is out of range, or no form runs on ``device``.
        OSError: If a file cannot be written. The same call goes on afterwards.
    """
    start, out = time.monotonic(), Path(out)
    if not minutes > 0 or not max_loss >= 0:
        raise SlabDetError(f'minutes={minutes:g} must be above 0, max_loss={max_loss:g} at least 0')
    check_threads(threads, name='threads=')
    check_own(out, COMMAND)
    try:
        check_writable(out / OPTIMIZE_JSON)
    except OSError as error:
        # The user gave the folder.
        error.filename = str(out)
        raise
    found = find_device(device)
    if found.type == 'cuda' and found.index not in (None, torch.cuda.current_device()):
        # Models, memory and the environment would be those of the current GPU.
        raise SlabDetError(
            f"device='{found}' is not PyTorch's current GPU, which optimize measures: give 'cuda', and choose the GPU "
            f'by CUDA_VISIBLE_DEVICES={found.index}'
        )
    device = found.type
    if not any(list_forms(device)):
        raise SlabDetError(f"device={device!r}: no form runs on it; give 'cpu' or 'cuda'")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        cfg = open_config(config)
        with mute_log():
            detector = build_detector(cfg, str(checkpoint))
            check_statistics(detector, str(checkpoint))
            split = SplitImages(cfg, images, num_images)
            # Before the lock, which is a file of the folder.
            OwnFiles(out, COMMAND)
            with locked(out / WORK, wait=False):
                search = _Search(cfg, detector, split, out, max_loss, device, start + 60 * minutes, progress)
                return search.run(eval)
    except BlockingIOError as error:
        raise SlabDetError(f'another program optimizes into {out}: wait for its end, or give another folder') from error
    finally:
        torch.set_num_threads(before)


class _Search:
    """An optimization; the detector is on the CPU. :func:`optimize` and :class:`Turns` describe the arguments."""

    def __init__(
        self,
        cfg: Config,
        detector: nn.Module,
        images: SplitImages,
        out: Path,
        max_loss: float,
        device: str,
        deadline: float,
        progress: bool,
    ) -> None:
        self.detector, self.images, self.max_loss = detector, images, max_loss
        self.files, threads = OwnFiles(out, COMMAND), torch.get_num_threads()
        self.environment = describe_environment(device)
        weights = hashlib.sha256()
        add_weights(weights, detector)
        self.key = dict(
            config=hashlib.sha256(cfg.pretty_text.encode()).hexdigest(),
            checkpoint=weights.hexdigest(),
            images=images.digest(),
            versions=self.environment['versions'],
            device=self.environment['device'],
            threads=threads,
        )
        self.records = Records(out / WORK, self.key)
        self.variants = Variants(self.records.folder, cfg, detector, images.fitted, device, progress)
        self.turns = Turns(self.variants, self.records, images, device, threads, deadline, progress)
        self.evaluation = Evaluation(cfg, self.records, self.turns.load_model, self.turns.say)
        self.standing = Standing(self.records, self.evaluation, max_loss)
        for damaged in self.records.damaged:
            self.turns.say(f'{damaged}: everything is measured anew in {self.records.folder}')
        # The forms that this call tries, in their order.
        self.tried: dict[str, Form] = {}

    def run(self, eval: bool) -> OptimizationReport:
        """Measures, chooses and writes the folder."""
        turns = self.turns
        turns.choose_first_image()
        if eval:
            # First: what a share of the AP means depends on it.
            start = time.monotonic()
            self.evaluation.measure_base(self.detector)
            turns.deadline += time.monotonic() - start
        self.measure([BASE], SURE_ROUNDS, 'The original detector as it is')
        originals = [*list_forms(turns.device)]
        int8 = [form for form in originals if form.precision == 'int8']
        # In parts, so that a long export takes no time from forms that need none.
        for is_exported in (False, True):
            forms = [form for form in originals if form.is_exported == is_exported and form not in int8]
            self.measure(forms, SURE_ROUNDS, 'The original detector')
        names, middle = [*CHANNELS], len(CHANNELS) // 2
        more, fewer = names[:middle], names[middle:]
        # Fewer channels gain most: they come before int8, whose calibration is long.
        self._try_variant(self._choose_engines()[:1], (fewer[0],))
        self.measure(int8, SURE_ROUNDS, 'The original detector in int8')
        self._try_variants(more, fewer)
        rounds = max(ROUNDS, len(turns.order))
        # A form that was dropped for another one comes back where further rounds do not bear that out.
        while left := [
            form
            for key, form in self.standing.forms.items()
            if self.records.count(key) < rounds and self.standing.is_left(form)
        ]:
            self.measure(left, rounds, 'The forms that are left')
            if turns.is_late():
                break
        if eval:
            while (chosen := self.standing.choose()[0]) not in self.evaluation.found:
                self.evaluation.measure(self.standing.forms[chosen])
        return self._write(is_last=True)

    def measure(self, forms: Sequence[Form], rounds: int, title: str) -> None:
        """Runs forms in turns with the original detector until each has this many rounds, and writes the folder."""
        self.tried |= {form.key: form for form in forms}
        dropped = self.standing.dropped()
        left = [form for form in forms if form.key not in dropped]
        if not self.turns.is_late() and any(self.records.count(form.key) < rounds for form in left):
            self.turns.say(f'{title}:')
        self.turns.run(left, rounds)
        self.turns.unload(self.standing.dropped())
        self._write()

    def _try_variants(self, more: Sequence[str], fewer: Sequence[str]) -> None:
        """Measures absorbed detectors in the fastest forms of the original.

        Args:
            more: Budgets of channels above the middle, from many to few.
            fewer: The middle one, and those below.
        """
        engines, best = self._choose_engines(), ()
        # More channels go where the detector can spare those in the middle, fewer where it cannot.
        for name in fewer:
            is_good = self._try_variant(engines, (name,))
            best = (name,) if is_good else best
            if not is_good:
                break
        if not best and is_good is not None:
            for name in reversed(more):
                if self._try_variant(engines, (name,)):
                    best = (name,)
                    break
        if any(isinstance(module, nn.LayerNorm) for module in self.detector.modules()):
            self._try_variant(engines[:1], (*best, *NORMS))

    def _choose_engines(self) -> list[Form]:
        """The fastest forms of the original detector so far."""
        standing, measured = self.standing, self.standing.measured()
        forms = [form for form in standing.forms.values() if not form.variant and form != BASE]
        forms = [form for form in forms if standing.is_left(form) and measured[form.key].loss <= self.max_loss]
        forms = sorted(forms, key=lambda form: measured[form.key].ratio) or [BASE]
        # Absorption for int8 makes other weights: the time is better spent on one of both.
        is_int8 = forms[0].precision == 'int8'
        return [form for form in forms if (form.precision == 'int8') == is_int8][:ENGINES]

    def _try_variant(self, engines: Sequence[Form], variant: tuple[str, ...]) -> bool | None:
        """Measures an absorbed detector in some forms; returns whether it may lose so much, None if not measured."""
        forms = [Form(engine.runtime, engine.precision, variant) for engine in engines]
        self.measure(forms, SURE_ROUNDS, forms[0].removed)
        # Also dropped forms: they are slow, but show what the variant finds.
        found = [self.standing.summarize(form) for form in forms if form.key in self.standing.forms]
        return any(form.loss <= self.max_loss for form in found) if found else None

    def _write(self, is_last: bool = False) -> OptimizationReport:
        """Writes the folder with what was measured so far; the pictures, which take seconds, at the end."""
        turns, failed = self.turns, self.records.failed
        forms, (chosen, _) = self.standing.forms, self.standing.choose()
        missing = [form.title for key, form in self.tried.items() if key not in forms | failed]
        content = dict(
            recommended=chosen,
            max_loss=self.max_loss,
            ap=self.evaluation.ap,
            device=turns.device,
            threads=turns.threads,
            forms=self.standing.entries(),
            failed=failed,
            not_measured=missing,
            images=dict(
                held_out=len(turns.order), fitted=len(self.variants.images), sizes=self.images.describe_sizes()
            ),
            environment=self.environment,
            classes=[*((self.detector.dataset_meta or {}).get('classes') or ())],
            key=self.key,
        )
        # What the recommended form needs, and the original detector for machines that cannot run it.
        kept = {path for key in (BASE.key, chosen) for path in self.variants.paths(forms[key])}
        if absent := next((path for path in sorted(kept) if not path.is_file()), None):
            # To make it again may take minutes, and the deadline may be over.
            raise SlabDetError(f'{absent} is missing: put it back, or remove {absent.parent} to measure all forms anew')
        paths = {key: paths for key, form in forms.items() if kept.issuperset(paths := self.variants.paths(form))}
        report = write_folder(self.files, content, paths)
        if is_last:
            found = {key: self.records.found[key] for key in (BASE.key, chosen)}
            draw_pictures(self.files, report, self.images.names, found)
        return report
