"""Turns: loads forms of a detector, and predicts images with all of them in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Container, Mapping, Sequence

import numpy as np

from slab_det.compare.agreement import as_detections
from slab_det.inference.forms import Form
from slab_det.inference.serving import ServedDetector, load_detector
from slab_det.optimization.budget import TimeBudget
from slab_det.optimization.records import Records
from slab_det.optimization.variants import Variants
from slab_det.runtime.errors import describe_reason
from slab_det.runtime.memory import memory_growth
from slab_det.runtime.progress import Progress

# After a call the threads of a runtime spin for a while; they must not take the cores from the next call.
PAUSE_SECONDS = 0.05
# Fewest rounds that quartiles can be taken of.
LEAST_ROUNDS = 3
BASE = Form('eager')


class Turns:
    """Predicts images with the original detector and other forms, one image at a time.

    Args:
        variants: The files of the forms.
        records: Keeps times and detections.
        budget: No step but those of the original detector begins that does not fit.
        contents: The bytes of each image, by its index.
        shapes: Its height and width after the test pipeline.
        device: 'cpu' or 'cuda'.
        threads: CPU threads of every runtime.
        progress: Print each failure, and show progress bars.

    Attributes:
        images: Indices of the images, in the order in which they are taken.
        infos: First call in seconds, memory and size on disk of each form, by its key.
        failed: Why a form does not run, by its key.
        late: Seconds that the next step of a form would have taken, by the form; 0 where only rounds are missing.
    """

    def __init__(
        self,
        variants: Variants,
        records: Records,
        budget: TimeBudget,
        contents: Mapping[int, bytes],
        shapes: Mapping[int, tuple[int, int]],
        device: str,
        threads: int,
        progress: bool,
    ) -> None:
        self.variants, self.records, self.budget = variants, records, budget
        self.contents, self.shapes, self.images = contents, shapes, [*contents]
        self.device, self.threads, self.progress = device, threads, progress
        self.infos: dict[str, dict] = records.state.setdefault('forms', {})
        self.failed: dict[str, str] = {}
        self.late: dict[Form, float] = {}
        # The loaded forms, and the sizes of images that each has seen.
        self.served: dict[str, ServedDetector] = {}
        self.warm: dict[str, set[tuple[int, int]]] = {}

    def say(self, text: str) -> None:
        """Prints a step."""
        if self.progress:
            print(text, flush=True)

    def run(self, forms: Sequence[Form], rounds: int) -> None:
        """Runs the original detector and those of the forms that have fewer rounds, until each has this many."""
        records = self.records
        forms = [form for form in dict.fromkeys(forms) if form != BASE and form.key not in self.failed]
        # A call that goes on begins with what the last one had no time for.
        forms = [BASE, *sorted(forms, key=lambda form: records.count(form.key))]
        forms = [form for form in forms if records.count(form.key) < rounds]
        if not forms:
            return
        self.load([BASE, *forms])
        loaded = [form for form in dict.fromkeys([BASE, *forms]) if form.key in self.served]
        keys = [form.key for form in loaded]
        needed = max(rounds - records.count(form.key) for form in forms)
        for _ in Progress(range(needed), 'Measuring', disable=not self.progress):
            is_required = keys == [BASE.key] and records.count(BASE.key) < LEAST_ROUNDS
            if not is_required and not self.budget.fits(self._round_seconds(keys)):
                break
            self._run_round(keys)
        for form in loaded:
            if form.key in self.served and records.count(form.key) < LEAST_ROUNDS:
                self.late.setdefault(form, 0.0)

    def load(self, forms: Sequence[Form], required: bool = False) -> None:
        """Loads forms, and measures the first call and the memory of those that are new.

        Args:
            forms: The forms. What makes one fail is noted in ``failed``; what has no time, in ``late``.
            required: Raise what makes a form fail, and take the time. Always so for the original detector.
        """
        for form in forms:
            if form.key in self.served or form.key in self.failed:
                continue
            is_required = required or form == BASE
            if missing := form.find_missing(self.device):
                self._fail(form.key, f'needs {missing}')
                continue
            seconds = self._load_seconds(form)
            if not is_required and not self.budget.fits(seconds):
                self.late[form] = seconds
                continue
            try:
                self._load(form)
                self.late.pop(form, None)
            except Exception as error:
                if is_required:
                    raise
                self._fail(form.key, error)
        self.records.save()

    def unload(self, keys: Container[str]) -> None:
        """Frees the memory of forms."""
        self.served = {key: served for key, served in self.served.items() if key not in keys}
        gc.collect()

    def _load(self, form: Form) -> None:
        image = self.images[0]
        config, weights = self.variants.files(form)
        info = dict(disk_mb=sum(path.stat().st_size for path in (config, weights)) / 1e6)
        with self.budget.step('load'), memory_growth(self.device) as memory:
            start = time.perf_counter()
            device = None if form.is_exported else self.device
            served = load_detector(config, weights, form.runtime, device, **form.options(self.threads))
            served(self.contents[image])
            info['first_s'] = time.perf_counter() - start
        info['memory_mb'] = memory.megabytes
        if form.is_exported:
            info['weight_bits'] = served.model.runtime.metadata.get('int8_weight_bits')
        self.served[form.key], self.warm[form.key] = served, {self.shapes[image]}
        self.infos.setdefault(form.key, info)

    def _load_seconds(self, form: Form) -> float:
        """Estimates the time until a form is loaded and has its first rounds, with the forms that are loaded."""
        rounds = LEAST_ROUNDS * self._round_seconds([*self.served, form.key])
        return self.variants.seconds(form) + self.budget.estimate('load') + rounds

    def _round_seconds(self, keys: Sequence[str]) -> float:
        """Estimates the time of a round; a form without times takes as long as the original detector."""
        times = [self.records.times(key) for key in keys]
        seconds = [float(np.median(each)) / 1e3 if len(each) else self.budget.prediction for each in times]
        return sum(seconds) + PAUSE_SECONDS * len(seconds)

    def _run_round(self, keys: list[str]) -> None:
        """Predicts one image with each form, in alternating order: the first image that one of them has not seen."""
        records, times, found = self.records, {}, {}
        unseen = (i for i in self.images if any(i not in records.found.get(key, {}) for key in keys))
        image = next(unseen, self.images[len(records.rounds) % len(self.images)])
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

    def _fail(self, key: str, reason: Exception | str) -> None:
        if isinstance(reason, OSError):
            raise reason
        if key == BASE.key:
            raise reason
        self.failed[key] = reason if isinstance(reason, str) else describe_reason(reason)
        self.served.pop(key, None)
        self.say(f'  {key}: {self.failed[key]}')
