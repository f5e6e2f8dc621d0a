"""OwnFiles: the files of a folder that a command wrote, the only ones that it replaces or removes there."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slab_det.common.errors import SlabDetError
from slab_det.common.files import whole_file


def marker_path(folder: Path, command: str) -> Path:
    """The file of a folder that lists what a command of slab-det wrote there, one name a line."""
    return folder / f'.slab_det_{command}'


def check_own(folder: Path, command: str) -> None:
    """Raises SlabDetError unless a folder is new, empty, or one that a command of slab-det wrote."""
    if folder.exists() and not folder.is_dir():
        raise SlabDetError(f'{folder} is a file; give a new folder')
    if folder.is_dir() and any(folder.iterdir()) and not marker_path(folder, command).is_file():
        raise SlabDetError(f'{folder} holds files that slab-det {command} did not write; give a new folder')


class OwnFiles:
    """Writes and removes files of a folder, but none that somebody else put there.

    Args:
        folder: The folder; it need not exist.
        command: The command of slab-det that writes, such as 'optimize'.
    """

    def __init__(self, folder: Path, command: str) -> None:
        self.folder, self.command, self.marker = folder, command, marker_path(folder, command)
        is_known = self.marker.is_file()
        self.names = {*self.marker.read_text(errors='replace').splitlines()} if is_known else set()
        if not is_known:
            self._save()

    @contextmanager
    def write(self, name: str) -> Iterator[Path]:
        """Yields a temporary path, which becomes the file ``name`` of the folder after the block.

        Raises:
            SlabDetError: If there is a file of this name that somebody else wrote.
        """
        path = self.folder / name
        if name not in self.names:
            if path.exists() or path.is_symlink():
                raise SlabDetError(f'{path} is not a file that slab-det {self.command} wrote: move it away')
            # Listed before it is there: a killed program must not leave a file that is listed nowhere.
            self.names.add(name)
            self._save()
        with whole_file(path) as unfinished:
            yield unfinished

    def copy(self, source: Path) -> None:
        """Puts a file into the folder, as a second name of the same bytes where the file system has that."""
        target = self.folder / source.name
        # By size and time.
        if source.name in self.names and target.is_file() and filecmp.cmp(source, target):
            return
        with self.write(source.name) as name:
            try:
                os.link(source, name)
            except OSError:
                shutil.copy2(source, name)

    def remove_others(self, names: set[str]) -> None:
        """Removes what an earlier call wrote, but for files of these names."""
        others = self.names - names
        for name in others:
            (self.folder / name).unlink(missing_ok=True)
        if others:
            self.names -= others
            self._save()

    def _save(self) -> None:
        with whole_file(self.marker) as marker:
            marker.write_text(''.join(f'{name}\n' for name in sorted(self.names)))
