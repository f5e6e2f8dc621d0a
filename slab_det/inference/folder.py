"""Reads the folder that slab_det.optimize wrote, and finds the form in it that this machine can run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slab_det.common.errors import DeploymentError
from slab_det.common.record import read_record
from slab_det.inference.forms import Form
from slab_det.machine import MACHINE

OPTIMIZE_JSON = 'optimize.json'


class Stored(NamedTuple):
    """A form of a folder.

    Attributes:
        form: The form.
        config: Its config.
        weights: Its checkpoint or exported file.
        device: 'cpu' or 'cuda'.
        threads: CPU threads of its measurement, or as many as this process may use if these are fewer.
    """

    form: Form
    config: Path
    weights: Path
    device: str
    threads: int


def is_folder(path: object) -> bool:
    """Whether ``path`` is a folder that :func:`slab_det.optimize` wrote."""
    return isinstance(path, str | Path) and (Path(path) / OPTIMIZE_JSON).is_file()


def read_folder(folder: str | Path) -> dict:
    """Reads the optimize.json of a folder.

    Raises:
        DeploymentError: If it is missing or of another version.
    """
    path = Path(folder) / OPTIMIZE_JSON
    if not path.is_file():
        raise DeploymentError(
            f'{folder} is no folder of slab-det optimize: it holds no {OPTIMIZE_JSON}; give a config and a checkpoint'
        )
    try:
        return read_record(path)
    except (ValueError, KeyError, TypeError) as error:
        raise DeploymentError(f'{path} is not what slab-det optimize writes ({error!r}); run it again') from error


def find_stored(folder: str | Path, key: str | None = None) -> Stored:
    """Finds a form of a folder.

    Args:
        folder: The folder.
        key: Name of the form; None for the recommended one.

    Raises:
        DeploymentError: If the folder has no such form, lacks its files, or this machine cannot run it; the message
            names the forms that run here.
    """
    folder, content = Path(folder), read_folder(folder)
    entries = {entry['key']: entry for entry in content['forms'] if entry['files']}
    key = key or content['recommended']
    if key not in entries:
        raise DeploymentError(f'{folder} has no files of a form {key!r}; its forms are {", ".join(entries)}')
    unmet = _find_unmet(folder, entries[key], content['device'])
    if not unmet:
        entry = entries[key]
        config, weights = (folder / name for name in entry['files'])
        threads = min(content['threads'], MACHINE.processors)
        return Stored(Form.from_dict(entry), config, weights, content['device'], threads)
    runs = [
        f'form={other!r} ({entry["ratio"]:.2f} of the time of the original detector where it was measured)'
        for other, entry in sorted(entries.items(), key=lambda item: item[1]['ratio'])
        if other != key and entry['loss'] <= content['max_loss'] and not _find_unmet(folder, entry, content['device'])
    ]
    advice = f'load_detector({str(folder)!r}, form=...) runs here with ' + ' or '.join(runs[:3])
    raise DeploymentError(
        f'{folder}: the form {key} needs {unmet}; '
        + (advice if runs else 'no form of the folder runs here: run slab-det optimize on this machine')
    )


def _find_unmet(folder: Path, entry: dict, device: str) -> str:
    """Returns what a form needs that the folder or this machine lacks, or ''."""
    absent = [name for name in entry['files'] if not (folder / name).is_file()]
    form = Form.from_dict(entry)
    if absent:
        return f'the file {", ".join(absent)}, which is not there'
    unmet = form.find_missing(device)
    if not unmet and entry.get('weight_bits') == 8:
        # The import takes half a second, which PyTorch's forms do not need.
        from slab_det.export.int8_sums import cuts_off_int8_sums

        if cuts_off_int8_sums(form.runtime):
            return f'a CPU with VNNI instructions: {form.runtime} cuts off its sums of int8 products on this one'
    return unmet
