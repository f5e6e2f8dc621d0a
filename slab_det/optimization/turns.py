"""Turns: loads forms of a detector, and predicts images with all of them in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial

from torch import nn

from slab_det.common.errors import ComparisonError, DataError, DeploymentError, describe_reason
from slab_det.common.memory import memory_growth
from slab_det.common.progress import Progress
from slab_det.compare.detections import Detections, as_detections, detect
from slab_det.compare.ruler import retained_ap
from slab_det.inference.forms import BASE, Form
from slab_det.inference.serving import ServedDetector, load_detector
from slab_det.measure.timer import PAUSE_SECONDS, take_turns, time_call
from slab_det.optimization.choice import QUARTILE_ROUNDS, SURE_ROUNDS
from slab_det.optimization.images import SplitImages
from slab_det.optimization.records import TRUTH, Records
from slab_det.optimization.variants import FileStep, Variants

# Seconds in which a form, when it is first measured, may predict held-out images without being timed. The expected loss
# is estimated from detections, and the first rounds show five images. In the quick start, its range is 8 to 23 points
# wide after 5 images, and 2 to 5 after 40. A detector of 50 ms predicts the 40 images of the default in 2 s. A detector
# of 3 s predicts one or two images in these seconds; its rounds, which it needs anyway, show further images.
LOOK_SECONDS = 5
# Seconds in which forms get the rounds from which on quartiles are compared, when they are first measured.
ROUND_SECONDS = 5


class Turns:
    """Predicts images with the original detector and other forms, one image at a time.

    Args:
        variants: The files of the forms.
        records: Keeps times and detections.
        images: The images.
        device: 'cpu' or 'cuda'.
        threads: CPU threads of every runtime.
        deadline: Time (``time.monotonic``) from which on no step begins. The original detector, and forms that are
            loaded by then, still get their rounds.
        progress: Print each step, and show progress bars.

    Attributes:
        order: Indices of the held-out images, in the order in which they are taken.
    """

    def __init__(
        self,
        variants: Variants,
        records: Records,
        images: SplitImages,
        device: str,
        threads: int,
        deadline: float,
        progress: bool,
    ) -> None:
        self.variants, self.records, self.images, self.order = variants, records, images, [*images.contents]
        self.device, self.threads, self.deadline, self.progress = device, threads, deadline, progress
        # The loaded forms, and the sizes of images that each has seen.
        self.served: dict[str, ServedDetector] = {}
        self.warm: dict[str, set[tuple[int, int]]] = {}

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.progress:
            print(text, flush=True)

    def is_late(self) -> bool:
        """Whether no step may begin any more."""
        return time.monotonic() >= self.deadline

    def choose_first_image(self) -> None:
        """Puts the first held-out image first in which the original detector finds something, mirrored too.

        Raises:
            DataError: If there is none.
        """
        order, records = self.order, self.records
        for image in order:
            if not {BASE.key, TRUTH} <= {key for key, found in records.found.items() if image in found}:
                self.load([BASE])
                found = as_detections(self.served[BASE.key](self.images.contents[image]))
                records.add(image, {}, {BASE.key: found} | self._find_truth(image))
            found = [records.found[BASE.key][image]]
            with suppress(ComparisonError):  # nothing is found
                retained_ap([records.found[TRUTH][image]], found, found)
                order.remove(image)
                order.insert(0, image)
                return
        raise DataError(
            f'the detector finds nothing in {len(order)} images that it finds again in the mirrored image, so nothing '
            'shows what a faster form loses: give images of its objects, and check config and checkpoint'
        )

    def run(self, forms: Sequence[Form], rounds: int) -> None:
        """Runs the original detector and those of the forms that have fewer rounds, until each has this many.

        Quick forms get ``QUARTILE_ROUNDS`` at once, in ``ROUND_SECONDS``.
        """
        records = self.records
        forms = [form for form in dict.fromkeys(forms) if form != BASE and form.key not in records.failed]
        # A call that goes on begins with what the last one had no time for.
        forms = [BASE, *sorted(forms, key=lambda form: records.count(form.key))]
        forms = [form for form in forms if records.count(form.key) < rounds]
        if not forms or (self.is_late() and records.count(BASE.key) >= SURE_ROUNDS):
            return
        self.load([BASE, *forms])
        # Where all others fail, rounds of the original detector compare nothing.
        forms = [form for form in forms if form.key in self.served]
        if not forms:
            return
        keys = [form.key for form in dict.fromkeys([BASE, *forms])]
        self._look(keys)
        needed, start = max(rounds - records.count(form.key) for form in forms), time.monotonic()
        done = 0
        for _ in Progress(range(needed), 'Measuring', disable=not self.progress):
            # What was loaded in time is measured: making it takes longer.
            if self.is_late() and all(records.count(key) >= SURE_ROUNDS for key in keys):
                break
            self._run_round(keys)
            done += 1
        # In fewer rounds one bad one may hide which form is faster, until the forms that are left get all of theirs.
        while not self.is_late() and time.monotonic() - start < ROUND_SECONDS:
            if min(map(records.count, keys)) >= QUARTILE_ROUNDS:
                break
            self._run_round(keys)
            done += 1
        if done:
            self.say(f'  {done} rounds with {", ".join(keys)}: {time.monotonic() - start:.0f} s')

    def load(self, forms: Sequence[Form]) -> None:
        """Loads forms, and measures the first call and the memory of those that are new; notes what makes one fail."""
        for form in forms:
            if form.key not in self.served and form.key not in self.records.failed:
                with self._note_failure(form.key):
                    self._make(form, is_required=form == BASE)
        self.records.save()

    def load_model(self, form: Form) -> nn.Module:
        """Returns the detector of a form, which is loaded also after the deadline; raises what makes it fail."""
        if form.key not in self.served:
            self._make(form, is_required=True)
        return self.served[form.key].model

    def unload(self, keys: Container[str]) -> None:
        """Frees the memory of forms."""
        left = {key: served for key, served in self.served.items() if key not in keys}
        if len(left) < len(self.served):
            self.served = left
            gc.collect()

    def _make(self, form: Form, is_required: bool) -> None:
        """Makes the files of a form, and loads it; begins no step after the deadline, unless the form is required."""
        if missing := form.find_missing(self.device):
            raise DeploymentError(f'needs {missing}')
        for step in [*self.variants.steps(form), FileStep('ready', partial(self._load, form))]:
            if self.is_late() and not is_required:
                break
            start = time.monotonic()
            step.make()
            self.say(f'  {form.title}: {step.done} after {time.monotonic() - start:.0f} s')

    def _load(self, form: Form) -> None:
        image = self.order[0]
        config, weights = self.variants.paths(form)
        info = asdict(form) | dict(disk_mb=sum(path.stat().st_size for path in (config, weights)) / 1e6)
        with memory_growth(self.device) as memory:
            device = None if form.is_exported else self.device

            def load() -> ServedDetector:
                served = load_detector(config, weights, form.runtime, device, **form.options(self.threads))
                served(self.images.contents[image])
                return served

            milliseconds, served = time_call(load)
            info['first_s'] = milliseconds / 1e3
        info['memory_mb'] = memory.megabytes
        if form.is_exported:
            info['weight_bits'] = served.model.runtime.metadata.get('int8_weight_bits')
        self.served[form.key], self.warm[form.key] = served, {self.images.shapes[image]}
        self.records.infos.setdefault(form.key, info)

    def _find_truth(self, image: int) -> dict[str, Detections]:
        """What the original detector, which is loaded, finds in a mirrored image that it was not shown before."""
        if image in self.records.found.get(TRUTH, {}):
            return {}
        (found,) = detect(self.served[BASE.key].model, self.images.load(image), mirrored=True)
        return {TRUTH: found}

    def _look(self, keys: list[str]) -> None:
        """Predicts held-out images that some of the forms have not seen, in ``LOOK_SECONDS`` a form, without timing."""
        start, seconds = time.monotonic(), LOOK_SECONDS * len(keys)
        for image in self.order:
            new = [key for key in keys if image not in self.records.found.get(key, {})]
            if not new:
                continue
            if self.is_late() or time.monotonic() - start >= seconds:
                break
            found = self._find_truth(image)
            for key in new:
                with self._note_failure(key):
                    found[key] = as_detections(self.served[key](self.images.contents[image]))
                    self.warm[key].add(self.images.shapes[image])
            self._add(keys, image, {}, found)

    def _run_round(self, keys: list[str]) -> None:
        """Predicts one image with each form, in alternating order: the first image that one of them has not seen."""
        records, times = self.records, {}
        unseen = (i for i in self.order if any(i not in records.found.get(key, {}) for key in keys))
        image = next(unseen, self.order[len(records.rounds) % len(self.order)])
        content, found = self.images.contents[image], self._find_truth(image)
        for key in take_turns(keys, len(records.rounds)):
            served, is_new = self.served[key], image not in records.found.get(key, {})
            with self._note_failure(key):
                if self.images.shapes[image] not in self.warm[key]:
                    # The first image of a size compiles kernels or captures a graph.
                    served(content)
                    self.warm[key].add(self.images.shapes[image])
                times[key], sample = time_call(partial(served, content), self.device, PAUSE_SECONDS)
                if is_new:
                    found[key] = as_detections(sample)
        self._add(keys, image, times, found)

    def _add(self, keys: list[str], image: int, times: dict[str, float], found: dict[str, Detections]) -> None:
        """Adds what was measured to the records, and removes the forms from ``keys`` that failed."""
        keys[:] = [key for key in keys if key not in self.records.failed]
        self.records.add(image, times, found)

    @contextmanager
    def _note_failure(self, key: str) -> Iterator[None]:
        """Notes an error of a form, which is then left out; raises that of a file or of the original detector."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) or key == BASE.key:
                raise
            self.records.failed[key] = describe_reason(error)
            self.served.pop(key, None)
            self.say(f'  {key}: {self.records.failed[key]}')
