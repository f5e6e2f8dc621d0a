"""optimize: finds the fastest form of a trained detector on this machine that still finds the same objects."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from torch import nn

from slab_det.checkpoints import build_detector
from slab_det.compare.agreement import as_detections
from slab_det.fusion.fuse import check_statistics
from slab_det.inference.folder import FILE, is_folder
from slab_det.inference.forms import CHANNELS, NORMS, Form, list_forms
from slab_det.measure.environment import describe_environment
from slab_det.measure.latency import find_device
from slab_det.optimization.budget import TimeBudget
from slab_det.optimization.choice import SURE_ROUNDS, Measured, choose, find_dropped, summarize
from slab_det.optimization.evaluation import Evaluation
from slab_det.optimization.records import Records
from slab_det.optimization.report import OptimizationReport, write_folder
from slab_det.optimization.turns import BASE, LEAST_ROUNDS, Turns
from slab_det.optimization.variants import Variants
from slab_det.recalibration import image_folder_dataloader
from slab_det.runtime.errors import ConfigError, DataError, SlabDetError, config_errors
from slab_det.runtime.numbers import check_threads
from slab_det.runtime.run_folder import check_writable

# Rounds after which forms are dropped, and rounds of each form that is left.
FIRST_ROUNDS, ROUNDS = SURE_ROUNDS, 30
# Every third image is held out from absorption and calibration, and serves for comparison.
HELD_OUT = 3
# Fewest and most images to absorb on, and the share of the minutes that one absorption may take.
FEWEST, MOST, ABSORPTION_SHARE = 8, 80, 0.2
# Number of forms of the original detector, the fastest ones, in which absorbed detectors are measured.
ENGINES = 2
WORK = 'work'


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
    """Finds the fastest form of a trained detector on this machine that still finds the same objects.

    Forms are the detector as it is ('eager'), deployed (:func:`slab_det.deploy`) and exported to ONNX Runtime and
    OpenVINO, in each precision that the machine computes; in the fastest of these also with fewer hidden channels, and
    with its LayerNorms absorbed (:func:`slab_det.absorb`).

    Every form predicts the images in turns, one at a time, from the bytes of a file to detections. A third of the
    images is held out from absorption and int8 calibration: on these, times are measured, and detections are compared
    with the original detector's (:func:`slab_det.compare.agreement.agreement`). A form that is slower than a form which
    loses no more is dropped early. The fastest form whose loss of AP is at most ``max_loss`` is recommended, or, of
    forms of about the same speed, the one with the fewest changes (:func:`~slab_det.optimization.choice.choose`).

    Args:
        config: Config of the detector, or its path; any detector that :func:`slab_det.deploy` takes.
        checkpoint: Its weights.
        images: Folder of images like those that the detector will see, without labels.
        out: Folder for the result, new or of an earlier call. ``slab_det.load_detector(out)`` serves the recommended
            form. ``out/work`` holds what was measured; the same call goes on from there.
        minutes: Time for measuring. A step that will not fit, by what such steps took so far, is left out and named;
            the same call then goes on. Only the original detector is measured in any case.
        max_loss: Largest loss of AP, in points from 0 to 100.
        eval: Also measure AP of the original and the recommended form, on ``val_dataloader`` of the config. The
            measured loss then replaces the expected one. It is not part of ``minutes``.
        num_images: Number of images, evenly spaced over the folder.
        device: 'cpu' or 'cuda'; None takes a GPU if PyTorch finds one.
        threads: CPU threads of every runtime; None takes PyTorch's number.
        progress: Print each step, and show progress bars.

    Returns:
        What was measured, and the recommended form.

    Raises:
        ConfigError, CheckpointError: If the detector cannot be built or loaded.
        DataError: If the folder holds no readable image, the detector finds nothing in the held-out images, or its
            measured AP is 0.
        SlabDetError: If ``out`` holds other files, or an argument is out of range.
        OSError: If a file cannot be written. The same call goes on afterwards.
    """
    out = Path(out)
    if not minutes > 0 or not max_loss >= 0:
        raise SlabDetError(f'minutes={minutes:g} must be above 0, max_loss={max_loss:g} at least 0')
    check_threads(threads)
    if out.exists() and not out.is_dir():
        raise SlabDetError(f'{out} is a file; give a new folder')
    if out.is_dir() and any(out.iterdir()) and not (is_folder(out) or (out / WORK).is_dir()):
        raise SlabDetError(f'{out} holds files of something else; give a new folder')
    check_writable(out / FILE)
    device = find_device(device or ('cuda' if torch.cuda.is_available() else 'cpu')).type
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        cfg = config if isinstance(config, Config) else _read_config(config)
        search = _Search(cfg, str(checkpoint), images, out, minutes, max_loss, num_images, device, progress)
        with _muted_log():
            return search.run(eval)
    finally:
        torch.set_num_threads(before)


@contextmanager
def _muted_log() -> Iterator[None]:
    """Mutes all logs below errors: the report says what the log says of each form."""
    logger, muted = MMLogger.get_current_instance(), logging.root.manager.disable
    level = logger.level
    # logging.disable does not reach mmengine's loggers.
    logger.setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(muted)
        logger.setLevel(level)


def _read_config(path: str | Path) -> Config:
    if not Path(path).is_file():
        raise ConfigError(f'{path}: there is no such config; check its name')
    with config_errors(str(path)):
        return Config.fromfile(path)


class _Search:
    """An optimization; arguments as for :func:`optimize`."""

    def __init__(
        self,
        cfg: Config,
        checkpoint: str,
        images: str | Path,
        out: Path,
        minutes: float,
        max_loss: float,
        num_images: int,
        device: str,
        progress: bool,
    ) -> None:
        self.cfg, self.out, self.minutes, self.max_loss = cfg, out, minutes, max_loss
        budget = TimeBudget(60 * minutes, {})
        self.detector = build_detector(cfg, checkpoint)
        check_statistics(self.detector, checkpoint)
        loader = image_folder_dataloader(cfg, images, num_images)
        dataset = loader.dataset
        self.names = [str(dataset.dataset.files[index]) for index in dataset.indices]
        count = len(self.names)
        held_out = [i for i in range(count) if i % HELD_OUT == HELD_OUT - 1] or [*range(count)]
        self.fitted = [i for i in range(count) if i not in held_out] or [*range(count)]
        contents = {i: Path(self.names[i]).read_bytes() for i in held_out}
        shapes = {i: tuple(dataset[i]['data_samples'].img_shape) for i in held_out}
        self.environment, threads = describe_environment(device), torch.get_num_threads()
        self.records = Records(out / WORK, self._key(threads))
        state = self.records.state
        budget.seen = state.setdefault('seconds', {})
        self.variants = Variants(out / WORK, cfg, self.detector, loader, budget, progress)
        self.variants.use_images(self.fitted)
        self.turns = Turns(self.variants, self.records, budget, contents, shapes, device, threads, progress)
        self.evaluation = Evaluation(cfg, self.records, self.turns)
        if self.records.dropped:
            self.turns.say(f'{out / WORK} was made with other {self.records.dropped}: everything is measured anew')
        # The forms that lose to another one; the forms of this call.
        self.dropped: dict[str, str] = state.setdefault('dropped', {})
        self.tried: dict[str, Form] = {}
        self.late: list[str] = []
        self.summaries: dict[str, tuple[tuple, Measured]] = {}

    def _key(self, threads: int) -> dict:
        """What the measurements depend on."""
        weights, pictures = hashlib.sha256(), hashlib.sha256()
        for name, value in self.detector.state_dict().items():
            weights.update(name.encode())
            weights.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name in self.names:
            pictures.update(Path(name).read_bytes())
        return dict(
            config=hashlib.sha256(self.cfg.pretty_text.encode()).hexdigest(),
            checkpoint=weights.hexdigest(),
            images=pictures.hexdigest(),
            versions=self.environment['versions'] | _runtime_versions(),
            device=self.environment['device'],
            threads=threads,
        )

    def run(self, eval: bool) -> OptimizationReport:
        """Measures, chooses and writes the folder."""
        turns = self.turns
        self._check_finds()
        if eval:
            # First: what an agreement means depends on it.
            self.evaluation.measure_base(self.detector)
        turns.run([BASE], LEAST_ROUNDS)
        turns.budget.prediction = float(np.median(self.records.times(BASE.key))) / 1e3
        originals = list(list_forms(turns.device))
        turns.say(f'The original detector in {len(originals)} forms:')
        # In parts, so that a long export takes no time from forms that need none.
        effort = attrgetter('effort')
        for _, forms in groupby(sorted(originals, key=effort), key=effort):
            self.measure([*forms], FIRST_ROUNDS)
        # What a variant is tried in depends on all of them, but for those that no call of these minutes can measure.
        if any(seconds <= turns.budget.seconds for seconds in turns.late.values()):
            self.late.append('removing channels and norms was not tried')
        else:
            self._fix_fitted()
            self._try_variants()
        left = [form for form in self.forms.values() if self._is_left(form)]
        rounds = max(ROUNDS, len(turns.images))
        turns.say(f'{len(left)} {"form is" if len(left) == 1 else "forms are"} left:')
        self.measure(left, rounds)
        unfinished = [form for form in left if form.key in self.forms and self.records.count(form.key) < rounds]
        if unfinished:
            forms = 'form has' if len(unfinished) == 1 else 'forms have'
            self.late.append(f'{len(unfinished)} {forms} fewer than {rounds} rounds')
        chosen, ties = choose(self.measured(), self.max_loss)
        while eval and chosen not in self.evaluation.found:
            self.evaluation.measure(self.forms[chosen])
            chosen, ties = choose(self.measured(), self.max_loss)
        return self._write(chosen, ties)

    @property
    def forms(self) -> dict[str, Form]:
        """The forms of this call that run here, by their keys."""
        return {key: form for key, form in self.tried.items() if key not in self.turns.failed}

    def measure(self, forms: Sequence[Form], rounds: int) -> None:
        """Runs forms in turns with the original detector until each has this many rounds; drops those that lose."""
        self.tried |= {form.key: form for form in (BASE, *forms)}
        self.turns.run([form for form in forms if form.key not in self.dropped], rounds)
        self.dropped.update(find_dropped(self.measured(), BASE.key))
        self.records.save()
        self.turns.unload(self.dropped)

    def measured(self) -> dict[str, Measured]:
        """What was measured of each form that has enough rounds and was not dropped, by its key."""
        return {
            key: self._summarize(form)
            for key, form in self.forms.items()
            if key not in self.dropped and self.records.count(key) >= LEAST_ROUNDS
        }

    def _summarize(self, form: Form) -> Measured:
        """What was measured of a form; computed again only after a further round."""
        given = self.evaluation.ap, self.evaluation.loss(form.key), len(self.records.rounds)
        if self.summaries.get(form.key, (None,))[0] != given:
            summary = summarize(self.records, form.key, BASE.key, form.changes, *given[:2])
            self.summaries[form.key] = (given, summary)
        return self.summaries[form.key][1]

    def _is_left(self, form: Form) -> bool:
        """Whether a form may still be chosen."""
        if form == BASE:
            return True
        measured = self.measured()
        return form.key in measured and measured[form.key].loss_range[0] <= self.max_loss

    def _check_finds(self) -> None:
        """Puts the first held-out image with a detection first.

        Raises:
            DataError: If there is none.
        """
        turns, images = self.turns, self.turns.images
        for image in images:
            if image not in self.records.found.get(BASE.key, {}):
                turns.load([BASE])
                found = as_detections(turns.served[BASE.key](turns.contents[image]))
                self.records.add(image, {}, {BASE.key: found})
            if len(self.records.found[BASE.key][image].scores):
                images.remove(image)
                images.insert(0, image)
                return
        raise DataError(
            f'the detector finds nothing in {len(images)} images, so nothing shows whether a faster form finds the '
            'same: give images of its objects, and check config and checkpoint'
        )

    def _fix_fitted(self) -> None:
        """Chooses the number of images for absorption by the time that it will take."""
        state = self.records.state
        if 'num_fitted' not in state:
            affordable = ABSORPTION_SHARE * 60 * self.minutes / self.turns.budget.estimate('absorb')
            state['num_fitted'] = int(min(max(affordable, FEWEST), MOST))
            self.records.save()
        count = min(state['num_fitted'], len(self.fitted))
        step = len(self.fitted) / count
        self.variants.use_images([self.fitted[int(i * step)] for i in range(count)])

    def _try_variants(self) -> None:
        """Measures absorbed detectors in the fastest forms of the original."""
        engines = self._choose_engines()
        names, best = [*CHANNELS], ()
        middle = len(names) // 2
        # More channels go where the detector can spare those in the middle, fewer where it cannot.
        for name in names[middle:]:
            found = self._try_variant(engines, (name,))
            best = found or best
            if not found:
                break
        for name in () if best else names[:middle][::-1]:
            if best := self._try_variant(engines, (name,)):
                break
        if any(isinstance(module, nn.LayerNorm) for module in self.detector.modules()):
            self._try_variant(engines[:1], (*best, *NORMS))

    def _choose_engines(self) -> list[Form]:
        """The fastest forms of the original detector; a call that goes on takes those of the first call."""
        state = self.records.state
        if 'engines' not in state:
            measured = self.measured()
            forms = [form for form in self.forms.values() if self._is_left(form) and form != BASE]
            forms = [form for form in forms if measured[form.key].loss <= self.max_loss]
            forms = sorted(forms, key=lambda form: measured[form.key].ratio) or [BASE]
            # Absorption for int8 makes other weights: the time is better spent on one of both.
            is_int8 = forms[0].precision == 'int8'
            state['engines'] = [form.key for form in forms if (form.precision == 'int8') == is_int8][:ENGINES]
        return [self.forms[key] for key in state['engines'] if key in self.forms] or [BASE]

    def _try_variant(self, engines: Sequence[Form], variant: tuple[str, ...]) -> tuple[str, ...]:
        """Measures an absorbed detector in some forms; returns ``variant`` if it finds about the same, else ()."""
        forms = [Form(engine.runtime, engine.precision, variant) for engine in engines]
        self.turns.say(f'{forms[0].removed}:')
        self.measure(forms, FIRST_ROUNDS)
        # Also dropped forms: they are slow, but show what the variant finds. A call that goes on decides the same.
        tried = self.records.state.setdefault('tried', {})
        found = [self._summarize(form) for form in forms if self.records.count(form.key) >= LEAST_ROUNDS]
        if found:
            tried.setdefault(forms[0].key, any(form.loss <= self.max_loss for form in found))
        return variant if tried.get(forms[0].key) else ()

    def _find_late(self) -> list[str]:
        """What there was no time for, in words."""
        notes = []
        for form, seconds in self.turns.late.items():
            if form.key not in self.forms or self.records.count(form.key) >= LEAST_ROUNDS:
                continue
            note = f'{form.title} was not measured'
            if seconds:
                note += f', which takes about {math.ceil(seconds / 60)} min'
            if seconds > self.turns.budget.seconds:
                note += f': give at least --minutes {math.ceil(seconds / 60 + 1)}'
            notes.append(note)
        return notes + self.late

    def _write(self, chosen: str, ties: Collection[str]) -> OptimizationReport:
        turns, entries = self.turns, []
        for key, form in self.forms.items():
            if self.records.count(key) < LEAST_ROUNDS:
                continue
            entry = dict(key=key, title=form.title, runtime=form.runtime, precision=form.precision)
            entry |= dict(variant=form.variant, files=[str(path) for path in self.variants.files(form)])
            entry |= self._summarize(form).to_dict() | turns.infos[key]
            entry |= dict(ap=self.evaluation.found.get(key), dropped_for=self.dropped.get(key, ''), tie=key in ties)
            entries.append(entry)
        content = dict(
            recommended=chosen,
            max_loss=self.max_loss,
            ap=self.evaluation.ap,
            device=turns.device,
            threads=turns.threads,
            forms=sorted(entries, key=lambda entry: entry['ratio']),
            failed=turns.failed,
            late=self._find_late(),
            images=dict(held_out=len(turns.images), fitted=len(self.variants.images), sizes=_sizes(turns.shapes)),
            environment=self.environment,
            classes=[*((self.detector.dataset_meta or {}).get('classes') or ())],
        )
        found = {key: self.records.found[key] for key in (BASE.key, chosen)}
        return write_folder(self.out, content, [Path(name) for name in self.names], found)


def _sizes(shapes: Mapping[int, tuple[int, int]]) -> str:
    """The sizes of images after the test pipeline, in words."""
    sizes = sorted({*shapes.values()}, key=lambda size: size[0] * size[1])
    low, high = ('x'.join(map(str, size)) for size in (sizes[0], sizes[-1]))
    return low if low == high else f'{low} to {high}'


def _runtime_versions() -> dict[str, str]:
    found = {}
    for name in ('onnxruntime', 'openvino'):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
