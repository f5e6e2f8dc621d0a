"""Writes the folder of an optimization: the files of the recommended form, its numbers, a README and two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slab_det.common.errors import DeploymentError
from slab_det.common.own_files import OwnFiles
from slab_det.common.record import SCHEMA, Record, format_digits, format_ratio, format_table, to_json
from slab_det.compare.detections import Detections
from slab_det.compare.ruler import FEW_DETECTIONS
from slab_det.inference.folder import OPTIMIZE_JSON, is_folder, read_folder
from slab_det.inference.forms import BASE
from slab_det.measure.report_file import AP_KINDS, format_ap
from slab_det.optimization.choice import QUARTILE_ROUNDS, SURE_ROUNDS
from slab_det.optimization.evidence import describe_evidence

FEW_ROUNDS_NOTE = (
    f'With fewer than {QUARTILE_ROUNDS} rounds a form is called faster only if its slowest round is faster than the '
    f"other form's fastest; with fewer than {SURE_ROUNDS}, never."
)
# Detections below this score are not drawn, as in mmdet's demo.
SCORE = 0.3
README, FIGURE, GRID = 'README.md', 'ap_ms.svg', 'objects.png'


@dataclass(frozen=True)
class OptimizationReport(Record):
    """The result of :func:`slab_det.optimize`.

    Attributes:
        folder: The folder, which ``slab_det.load_detector`` takes.
        content: What its optimize.json holds.
    """

    folder: Path
    content: dict

    @property
    def recommended(self) -> dict:
        """The entry of the recommended form."""
        return self.entry(self.content['recommended'])

    def entry(self, key: str) -> dict:
        """The entry of a form."""
        return next(entry for entry in self.content['forms'] if entry['key'] == key)

    def verdict(self) -> str:
        """Says which form is recommended, and what it gains and loses, in a few sentences."""
        best, base = self.recommended, self.entry(BASE.key)
        others = [entry for entry in self.content['forms'] if entry['tie'] and entry is not best]
        unsure = [entry for entry in others if min(entry['rounds'], best['rounds']) < SURE_ROUNDS]
        others = [entry for entry in others if entry not in unsure]
        if best is base:
            lines = ['Nothing is gained here: no form is faster than the detector as it is, in eager PyTorch.']
            if self.content['not_measured'] or unsure:
                lines = ['No faster form was found in the time; the same command goes on.']
        else:
            before, after = (format_digits(ratio * base['median_ms']) for ratio in (1, best['ratio']))
            lines = [
                f'**{best["title"]}** takes {_ratio(best)} of the time of the detector in eager PyTorch: {after} ms '
                f'for an image instead of {before} ms.',
                _describe_loss(best),
            ]
        for ties, what in (
            (others, 'About as fast, and with more changes or more loss'),
            (unsure, 'After too few rounds to be called faster or slower'),
        ):
            if ties:
                names = ties[0]['title'] if len(ties) == 1 else f'{len(ties)} forms, marked * in the table'
                lines.append(f'{what}: {names}.')
        lines += self._describe_absorption()
        if best is not base and best['detections'] < FEW_DETECTIONS:
            lines.append(
                f'**The comparison rests on {best["detections"]} detections alone**: give more images of the objects.'
            )
        return ' '.join(lines)

    def _describe_absorption(self) -> list[str]:
        """Says what was gained by removing channels and norms, where that is not in the recommended form."""
        best, lines = self.recommended, []
        # The norms come last: what is absorbed with channels shows what absorbing gains.
        for part, what in (('channels', 'removing channels'), ('norms', 'absorbing LayerNorms')):
            tried = [entry for entry in self.content['forms'] if entry['variant'] and part in entry['variant'][-1]]
            if not tried or any(part in name for name in best['variant']):
                continue
            faster = [entry['loss'] for entry in tried if entry['faster']]
            if faster:
                lines.append(f'{what[0].upper()}{what[1:]} would make it faster, and lose {min(faster):.1f} AP.')
                continue
            is_short = min(best['rounds'], *(entry['rounds'] for entry in tried)) < SURE_ROUNDS
            seems_faster = any(entry['quartiles'][1] < best['quartiles'][0] for entry in tried)
            # More rounds, or forms that were not measured, may show a gain.
            if not (is_short or seems_faster or self.content['not_measured']):
                lines.append(f'Nothing is gained here by {what}.')
        return lines

    def table(self) -> str:
        """The forms as a Markdown table, the fastest first."""
        entries, base_ms = self.content['forms'], self.entry(BASE.key)['median_ms']
        kinds = [kind for kind in AP_KINDS if any(kind in (entry['ap'] or ()) for entry in entries)]
        titles = ['form', 'ms', 'of the time of eager', 'AP retained', 'expected loss of AP']
        titles += [*(AP_KINDS[kind] for kind in kinds), 'memory', 'first image', 'on disk']
        rows = []
        for entry in entries:
            is_base = entry['key'] == BASE.key
            title = f'**{entry["title"]}**' if entry['key'] == self.content['recommended'] else entry['title']
            title += ' *' if entry['tie'] and entry['key'] != self.content['recommended'] else ''
            few = f'{entry["rounds"]} rounds' if entry['rounds'] < SURE_ROUNDS else ''
            few = f'dropped after {entry["rounds"]} rounds' if entry['dropped_for'] else few
            title += f' ({few})' if few else ''
            low, high = entry['loss_range']
            loss = '–' if is_base else f'{entry["expected_loss"]:.2f} ({low:.2f} to {high:.2f})'
            row = [title, format_digits(entry['ratio'] * base_ms), '1' if is_base else _ratio(entry)]
            row += ['–' if is_base else f'{entry["retained_ap"]:.1%}', loss]
            row += [format_ap(entry['ap'], kind) for kind in kinds]
            memory = '–' if entry['memory_mb'] is None else f'{entry["memory_mb"]:.0f} MB'
            rows.append([*row, memory, f'{entry["first_s"]:.1f} s', f'{entry["disk_mb"]:.0f} MB'])
        return format_table(titles, rows)

    def notes(self) -> list[str]:
        """The conditions of the measurement, and what was not measured."""
        content, environment, base = self.content, self.content['environment'], self.entry(BASE.key)
        images, versions = content['images'], environment['versions']
        ties = any(entry['tie'] and entry['key'] != content['recommended'] for entry in content['forms'])
        is_short = any(entry['rounds'] < QUARTILE_ROUNDS and not entry['dropped_for'] for entry in content['forms'])
        threads = f'{content["threads"]} thread{"s" if content["threads"] != 1 else ""}'
        lines = [
            f'Measured on {environment["device"]}, {threads}, PyTorch {versions["torch"]}, batch 1, from the bytes of '
            f'a file to detections, images of {images["sizes"]} (HxW) after the test pipeline, all forms in turns: '
            'median of the ratio to eager in the same round, in brackets its quartiles, over up to '
            f'{base["rounds"]} rounds; '
            "ms: the ratio times eager's median" + ('; * is as fast as the recommended form.' if ties else '.'),
            f'AP retained: AP over that of the original detector ({base["detections"]} detections), with what that '
            f'finds in {base["images"]} mirrored held-out images as the truth. Expected loss: in points, '
            f'{_describe_ap(content["ap"], base)}; in brackets at two standard errors. '
            f'{describe_evidence(content["max_loss"])}',
            *[FEW_ROUNDS_NOTE] * is_short,
            'Memory: largest growth while the form was loaded and ran its first image. First image: with loading.',
        ]
        # Several forms may lack the same.
        for reason in dict.fromkeys(content['failed'].values()):
            keys = ', '.join(key for key, other in content['failed'].items() if other == reason)
            lines.append(f'Not measured: {keys}: {reason}.')
        if content['not_measured']:
            lines.append(f'Not measured in the time: {"; ".join(content["not_measured"])}. The same command goes on.')
        return lines

    def to_dict(self) -> dict:
        """What optimize.json holds."""
        return self.content

    def lines(self) -> list[str]:
        return [self.verdict(), '', self.table(), '', *(f'- {note}' for note in self.notes())]


def _ratio(entry: Mapping) -> str:
    return format_ratio(entry['ratio'], entry['quartiles'])


def _describe_ap(ap: float, base: Mapping) -> str:
    return f'for the measured AP of {100 * ap:.0f}' if base['ap'] else f'if the original has an AP of {100 * ap:.0f}'


def _describe_loss(entry: Mapping) -> str:
    if entry['ap_loss'] is not None:
        # A loss of 0 is no change of -0.0.
        change, high, low = (0 - loss for loss in (entry['ap_loss'], *entry['ap_loss_range']))
        return (
            f'Its AP on the labelled images changes by {change:+.1f} points ({low:+.1f} to {high:+.1f} at two standard '
            'errors of the choice of images).'
        )
    low, high = entry['loss_range']
    return f'Its expected loss of AP is {entry["expected_loss"]:.2f} points ({low:.2f} to {high:.2f}).'


def write_folder(files: OwnFiles, content: dict, forms: Mapping[str, tuple[Path, Path]]) -> OptimizationReport:
    """Writes the folder; optimize.json last, so that an interrupted call leaves the earlier result.

    Args:
        files: The files of the folder.
        content: What optimize.json will hold, but for ``files`` of each form.
        forms: Config and weights of the forms to publish, anywhere.
    """
    if is_folder(files.folder) and _read_key(files.folder) != content['key']:
        # Files of another detector may have the same names.
        (files.folder / OPTIMIZE_JSON).unlink()
    for path in {path for paths in forms.values() for path in paths}:
        files.copy(path)
    for entry in content['forms']:
        entry['files'] = [path.name for path in forms.get(entry['key'], ())]
    report = OptimizationReport(files.folder, content | dict(schema=SCHEMA))
    _write_text(files, README, _readme(report, has_pictures=False))
    _write_text(files, OPTIMIZE_JSON, to_json(report.content))
    files.remove_others({README, OPTIMIZE_JSON, *(name for entry in content['forms'] for name in entry['files'])})
    return report


def draw_pictures(
    files: OwnFiles, report: OptimizationReport, images: Sequence[Path], found: Mapping[str, Mapping[int, Detections]]
) -> None:
    """Adds the two pictures to a folder.

    Args:
        files: The files of the folder.
        report: What was written there.
        images: Files of the images.
        found: Detections of the original and of the recommended form in the images, by index.
    """
    # Matplotlib takes a second, which loading a folder does not need.
    from slab_det.measure.figure import save_figure
    from slab_det.optimization.pictures import loss_figure, objects_figure

    titles = dict(zip(('before', 'after'), (report.entry(BASE.key), report.recommended), strict=True))
    shown = {f'{which}: {entry["title"]}': found[entry['key']] for which, entry in titles.items()}
    objects = objects_figure(shown, images, report.content['classes'], SCORE)
    figures = {FIGURE: loss_figure(report.content), GRID: objects}
    for name, figure in figures.items():
        with files.write(name) as path:
            save_figure(figure, path, Path(name).suffix[1:])
    _write_text(files, README, _readme(report, has_pictures=True))


def _read_key(folder: Path) -> dict | None:
    """What the result of an earlier call is about; None if its file is damaged."""
    with suppress(DeploymentError):
        return read_folder(folder).get('key')
    return None


def _readme(report: OptimizationReport, has_pictures: bool) -> str:
    notes = '\n'.join(f'- {note}' for note in report.notes())
    pictures = f"""
![AP retained over the time of each form]({FIGURE})

![Objects of score {SCORE:g} and more that both detectors find]({GRID})
"""
    return f"""# The fastest form of this detector

{report.verdict()}

```python
import slab_det

detector = slab_det.load_detector('.')  # this folder: give its path from where your program runs
sample = detector('photo.jpg')  # or its bytes, a BGR array, or a Pillow image; a list gives a list
print(sample.pred_instances.bboxes, [detector.classes[i] for i in sample.pred_instances.labels])
```

`slab-det test .` measures its AP on the labelled images of its config.

{report.table()}

{notes}
{pictures if has_pictures else ''}
`{OPTIMIZE_JSON}` holds these numbers. `work/` is what the command goes on from; nothing else needs it.
"""


def _write_text(files: OwnFiles, name: str, text: str) -> None:
    with files.write(name) as path:
        path.write_text(text)
