"""optimize: finds the fastest form of a trained detector on this machine that still finds the same objects."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.logging import MMLogger
from torch import nn

from slab_det.checkpoints import build_detector
from slab_det.compare.agreement import ASSUMED_AP, as_detections
from slab_det.data import check_class_order, check_data, classes_of_meta
from slab_det.deployment.forms.choice import Measured, choose, find_dropped, summarize
from slab_det.deployment.forms.folder import FILE, is_folder
from slab_det.deployment.forms.form import CHANNELS, NORMS, Form, list_forms
from slab_det.deployment.forms.records import Records
from slab_det.deployment.forms.report import OptimizationReport, write_folder
from slab_det.deployment.forms.variants import Variants
from slab_det.deployment.serve import ServedDetector, load_detector
from slab_det.fusion.fuse import check_statistics
from slab_det.measure.environment import describe_environment
from slab_det.measure.evaluate import evaluate
from slab_det.measure.latency import find_device
from slab_det.measure.report_file import describe_dataset, main_column
from slab_det.recalibration import image_folder_dataloader
from slab_det.runtime.errors import (
    ConfigError,
    DataError,
    SlabDetError,
    config_errors,
    describe_reason,
)
from slab_det.runtime.memory import memory_growth
from slab_det.runtime.numbers import check_threads
from slab_det.runtime.progress import Progress
from slab_det.runtime.registries import enter_scope
from slab_det.runtime.run_folder import check_writable

# Rounds after which forms are dropped, and rounds of each form that is left.
FIRST_ROUNDS, ROUNDS = 5, 30
# Every third image is held out from absorption and calibration, and serves for comparison.
HELD_OUT = 3
# After a call the threads of a runtime spin for a while; they must not take the cores from the next call.
PAUSE_SECONDS = 0.05
# Absorbing takes about this many times the time in which the original detector predicts, for each image.
ABSORPTION_COST = 12
# Fewest and most images to absorb on, and the share of the minutes that one absorption may take.
FEWEST, MOST, ABSORPTION_SHARE = 8, 80, 0.2
# Number of forms of the original detector, the fastest ones, in which absorbed detectors are measured.
ENGINES = 2
# Fewest rounds that quartiles can be taken of.
LEAST_ROUNDS = 3
BASE = Form('eager')
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
    forms of about the same speed, the one with the fewest changes (:func:`~slab_det.deployment.forms.choice.choose`).

    Args:
        config: Config of the detector, or its path; any detector that :func:`slab_det.deploy` takes.
        checkpoint: Its weights.
        images: Folder of images like those that the detector will see, without labels.
        out: Folder for the result, new or of an earlier call. ``slab_det.load_detector(out)`` serves the recommended
            form. ``out/work`` holds what was measured; the same call goes on from there.
        minutes: Time for measuring. A call that is late stops after the step at hand; the same call then goes on.
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
        self.cfg, self.out, self.max_loss, self.device, self.progress = cfg, out, max_loss, device, progress
        self.minutes, self.deadline = minutes, time.monotonic() + 60 * minutes
        self.threads = torch.get_num_threads()
        detector = build_detector(cfg, checkpoint)
        check_statistics(detector, checkpoint)
        self.loader = image_folder_dataloader(cfg, images, num_images)
        dataset = self.loader.dataset
        self.names = [str(dataset.dataset.files[index]) for index in dataset.indices]
        count = len(self.names)
        self.held_out = [i for i in range(count) if i % HELD_OUT == HELD_OUT - 1] or [*range(count)]
        self.fitted = [i for i in range(count) if i not in self.held_out] or [*range(count)]
        self.contents = {i: Path(self.names[i]).read_bytes() for i in self.held_out}
        self.shapes = {i: tuple(dataset[i]['data_samples'].img_shape) for i in self.held_out}
        self.environment = describe_environment(device)
        self.records = Records(out / WORK, self._key(detector))
        if self.records.dropped:
            self.say(f'{out / WORK} was made with other {self.records.dropped}: everything is measured anew')
        state = self.records.state
        # Measured by form; forms that lose to another one; measured AP.
        self.infos: dict[str, dict] = state.setdefault('forms', {})
        self.dropped: dict[str, str] = state.setdefault('dropped', {})
        self.ap: dict[str, dict] = state.setdefault('ap', {})
        self.forms: dict[str, Form] = {}
        self.failed: dict[str, str] = {}
        self.late: list[str] = []
        self.summaries: dict[str, tuple[tuple, Measured]] = {}
        # The loaded forms, and the sizes of images that each has seen.
        self.served: dict[str, ServedDetector] = {}
        self.warm: dict[str, set[tuple[int, int]]] = {}
        self.variants = Variants(out / WORK, cfg, detector, self.loader, progress)
        self.variants.use_images(self.fitted)

    def say(self, text: str) -> None:
        """Prints a step."""
        if self.progress:
            print(text, flush=True)

    def _key(self, detector: nn.Module) -> dict:
        """What the measurements depend on."""
        weights, pictures = hashlib.sha256(), hashlib.sha256()
        for name, value in detector.state_dict().items():
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
            threads=self.threads,
        )

    def run(self, eval: bool) -> OptimizationReport:
        """Measures, chooses and writes the folder."""
        self._check_finds()
        if eval:
            # First: what an agreement means depends on it.
            self._check_labels()
            self._evaluate(BASE)
            if not self._ap():
                raise DataError(
                    'the original detector has an AP of 0 on the validation images of the config, so there is nothing '
                    'to lose: check that they hold its classes, or leave eval out'
                )
        originals = list(list_forms(self.device))
        self.say(f'The original detector in {len(originals)} forms:')
        self.measure(originals, FIRST_ROUNDS)
        self._fix_fitted()
        self._try_variants()
        left = [form for form in self.forms.values() if self._is_left(form)]
        rounds = max(ROUNDS, len(self.held_out))
        self.say(f'{len(left)} forms are left:')
        self.measure(left, rounds)
        unfinished = [
            form.key for form in left if form in self.forms.values() and self.records.count(form.key) < rounds
        ]
        if unfinished:
            self.late.append(f'{len(unfinished)} forms have fewer than {rounds} rounds')
        chosen, ties = choose(self.measured(), self.max_loss)
        while eval and chosen not in self.ap:
            self._evaluate(self.forms[chosen])
            chosen, ties = choose(self.measured(), self.max_loss)
        return self._write(chosen, ties)

    def measured(self) -> dict[str, Measured]:
        """What was measured of each form that has enough rounds and was not dropped, by its key."""
        return {
            key: self._summarize(form)
            for key, form in self.forms.items()
            if key not in self.dropped and self.records.count(key) >= LEAST_ROUNDS
        }

    def _summarize(self, form: Form) -> Measured:
        """What was measured of a form; computed again only after a further round."""
        given = self._ap(), self._ap_loss(form.key), len(self.records.rounds)
        if self.summaries.get(form.key, (None,))[0] != given:
            summary = summarize(self.records, form.key, BASE.key, form.changes, *given[:2])
            self.summaries[form.key] = (given, summary)
        return self.summaries[form.key][1]

    def _ap(self) -> float:
        """The AP of the original detector, in [0, 1]; an assumption where it was not measured."""
        kinds = self.ap.get(BASE.key, {})
        return max((values[main_column(kind)] for kind, values in kinds.items()), default=ASSUMED_AP)

    def _ap_loss(self, key: str) -> float | None:
        if key not in self.ap:
            return None
        before, after = self.ap[BASE.key], self.ap[key]
        return 100 * max(before[kind][main_column(kind)] - after[kind][main_column(kind)] for kind in before)

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
        for image in self.held_out:
            if image not in self.records.found.get(BASE.key, {}):
                self._load([BASE], required=True)
                found = as_detections(self.served[BASE.key](self.contents[image]))
                self.records.add(image, {}, {BASE.key: found})
            if len(self.records.found[BASE.key][image].scores):
                self.held_out.remove(image)
                self.held_out.insert(0, image)
                return
        raise DataError(
            f'the detector finds nothing in {len(self.held_out)} images, so nothing shows whether a faster form finds '
            'the same: give images of its objects, and check config and checkpoint'
        )

    def _fix_fitted(self) -> None:
        """Chooses the number of images for absorption by the time that it will take."""
        state = self.records.state
        if 'num_fitted' not in state:
            affordable = ABSORPTION_SHARE * 60 * self.minutes / self._absorption_seconds(1)
            state['num_fitted'] = int(min(max(affordable, FEWEST), MOST))
            self.records.save()
        count = min(state['num_fitted'], len(self.fitted))
        step = len(self.fitted) / count
        self.variants.use_images([self.fitted[int(i * step)] for i in range(count)])

    def _absorption_seconds(self, count: int) -> float:
        """Estimates the time of an absorption on this many images."""
        return ABSORPTION_COST * count * float(np.median(self.records.times(BASE.key))) / 1e3

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
        if any(isinstance(module, nn.LayerNorm) for module in self.variants.detector.modules()):
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
        seconds = self._absorption_seconds(len(self.variants.images))
        if not self.variants.has(forms[0]) and time.monotonic() + seconds > self.deadline:
            self.late.append(f'{forms[0].removed} was not tried, which takes about {math.ceil(seconds / 60)} min')
            return ()
        self.say(f'{forms[0].removed}:')
        self.measure([*engines, *forms], FIRST_ROUNDS)
        # Also dropped forms: they are slow, but show what the variant finds. A call that goes on decides the same.
        tried = self.records.state.setdefault('tried', {})
        found = [self._summarize(form) for form in forms if self.records.count(form.key) >= LEAST_ROUNDS]
        if found:
            tried.setdefault(forms[0].key, any(form.loss <= self.max_loss for form in found))
        return variant if tried.get(forms[0].key) else ()

    def measure(self, forms: Sequence[Form], rounds: int) -> None:
        """Runs forms in turns with the original detector until each has this many rounds; drops those that lose."""
        forms = [form for form in dict.fromkeys([BASE, *forms]) if form.key not in self.failed]
        self.forms |= {form.key: form for form in forms}
        needed = max(rounds - self.records.count(form.key) for form in forms if form.key not in self.dropped)
        if needed > 0:
            self._load([form for form in forms if form.key not in self.dropped])
            keys = [form.key for form in forms if form.key in self.served]
            for index in Progress(range(needed), 'Measuring', disable=not self.progress):
                if index >= LEAST_ROUNDS and time.monotonic() > self.deadline:
                    break
                self._run_round(keys)
        self.dropped.update(find_dropped(self.measured(), BASE.key))
        self.records.save()
        for key in [*self.served]:
            if key in self.dropped:
                del self.served[key]
        gc.collect()

    def _run_round(self, keys: list[str]) -> None:
        """Predicts one image with each form, in alternating order: the first image that one of them has not seen."""
        records, times, found = self.records, {}, {}
        unseen = (i for i in self.held_out if any(i not in records.found.get(key, {}) for key in keys))
        image = next(unseen, self.held_out[len(records.rounds) % len(self.held_out)])
        content = self.contents[image]
        for key in keys[:: -1 if len(records.rounds) % 2 else 1]:
            served, is_new = self.served[key], image not in records.found.get(key, {})
            try:
                if self.shapes[image] not in self.warm[key]:
                    # The first image of a size compiles kernels or captures a graph.
                    served(content)
                    self.warm[key].add(self.shapes[image])
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                sample = served(content)
                times[key] = (time.perf_counter() - start) * 1e3
                if is_new:
                    found[key] = as_detections(sample)
            except Exception as error:
                self._fail(key, error)
        for key in [key for key in keys if key in self.failed]:
            keys.remove(key)
        records.add(image, times, found)

    def _load(self, forms: Sequence[Form], required: bool = False) -> None:
        """Loads forms, and measures the first call and the memory of those that are new."""
        image, late = self.held_out[0], []
        for form in forms:
            if form.key in self.served or form.key in self.failed:
                continue
            if form != BASE and not required and time.monotonic() > self.deadline:
                late.append(form.title)
                continue
            missing = form.find_missing(self.device)
            if missing:
                self._fail(form.key, f'needs {missing}')
                continue
            try:
                config, weights = self.variants.files(form)
                info = dict(disk_mb=sum(path.stat().st_size for path in (config, weights)) / 1e6)
                with memory_growth(self.device) as memory:
                    start = time.perf_counter()
                    device = None if form.is_exported else self.device
                    options = form.options(self.threads)
                    served = load_detector(config, weights, form.runtime, device, **options)
                    served(self.contents[image])
                    info['first_s'] = time.perf_counter() - start
                info['memory_mb'] = memory.megabytes
                if form.is_exported:
                    info['weight_bits'] = served.model.runtime.metadata.get('int8_weight_bits')
            except Exception as error:
                if required or form == BASE:
                    raise
                self._fail(form.key, error)
                continue
            self.served[form.key], self.warm[form.key] = served, {self.shapes[image]}
            self.infos.setdefault(form.key, info)
        if late:
            self.late.append(f'{"; ".join(late)} {"was" if len(late) == 1 else "were"} not measured to the end')
        self.records.save()

    def _fail(self, key: str, reason: Exception | str) -> None:
        if isinstance(reason, OSError):
            raise reason
        if key == BASE.key:
            raise reason
        self.failed[key] = reason if isinstance(reason, str) else describe_reason(reason)
        self.forms.pop(key, None)
        self.served.pop(key, None)
        self.say(f'  {key}: {self.failed[key]}')

    def _check_labels(self) -> None:
        """Checks the validation set of the config, and drops what was measured on another one."""
        if not (self.cfg.get('val_dataloader') and self.cfg.get('val_evaluator')):
            raise ConfigError('eval needs a config with val_dataloader and val_evaluator; add them, or leave eval out')
        check_data(self.cfg, ('val',))
        classes = classes_of_meta(vars(self.variants.detector)) or ()
        check_class_order(self.cfg, 'val', classes, 'the checkpoint')
        enter_scope(self.cfg)
        dataset = DATASETS.build(self.cfg.val_dataloader.dataset)
        labels = Path(describe_dataset(dataset)['ann_file'])
        digest = hashlib.sha256(labels.read_bytes() if labels.is_file() else str(labels).encode()).hexdigest()
        if self.records.state.get('labels') != digest:
            self.records.state['labels'] = digest
            self.ap.clear()

    def _evaluate(self, form: Form) -> None:
        """Measures AP of a form on the labelled images of the config."""
        key = form.key
        if key in self.ap:
            return
        self.say(f'AP of {form.title}, on the validation images of the config')
        self._load([form], required=True)
        # The tables of the evaluators, one for boxes and one for masks.
        with redirect_stdout(StringIO()):
            self.ap[key] = evaluate(self.served[key].model, self.cfg)
        if not self.ap[key]:
            raise ConfigError('--eval: val_evaluator of the config measures no COCO AP; give a CocoMetric')
        self.records.save()

    def _write(self, chosen: str, ties: Collection[str]) -> OptimizationReport:
        entries = []
        for key, form in self.forms.items():
            if self.records.count(key) < LEAST_ROUNDS:
                continue
            entry = dict(key=key, title=form.title, runtime=form.runtime, precision=form.precision)
            entry |= dict(variant=form.variant, files=[str(path) for path in self.variants.files(form)])
            entry |= self._summarize(form).to_dict() | self.infos[key]
            entry |= dict(ap=self.ap.get(key), dropped_for=self.dropped.get(key, ''), tie=key in ties)
            entries.append(entry)
        content = dict(
            recommended=chosen,
            max_loss=self.max_loss,
            ap=self._ap(),
            device=self.device,
            threads=self.threads,
            forms=sorted(entries, key=lambda entry: entry['ratio']),
            failed=self.failed,
            late=self.late,
            images=dict(held_out=len(self.held_out), fitted=len(self.variants.images), sizes=self._sizes()),
            environment=self.environment,
            classes=[*((self.variants.detector.dataset_meta or {}).get('classes') or ())],
        )
        found = {key: self.records.found[key] for key in (BASE.key, chosen)}
        return write_folder(self.out, content, [Path(name) for name in self.names], found)

    def _sizes(self) -> str:
        """The sizes of the held-out images after the test pipeline, in words."""
        sizes = sorted({*self.shapes.values()}, key=lambda size: size[0] * size[1])
        low, high = ('x'.join(map(str, size)) for size in (sizes[0], sizes[-1]))
        return low if low == high else f'{low} to {high}'


def _runtime_versions() -> dict[str, str]:
    found = {}
    for name in ('onnxruntime', 'openvino'):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
