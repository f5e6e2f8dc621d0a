"""Checks that the installed distributions of mmengine, mmcv and mmdet do not overwrite each other's files."""

from importlib.metadata import distributions

# The maintained distribution, and those that install files of the same names.
DISTRIBUTIONS = {
    'onedl-mmengine': ('mmengine', 'mmengine-lite'),
    'onedl-mmcv': ('mmcv', 'mmcv-full', 'mmcv-lite'),
    'onedl-mmdetection': ('mmdet',),
}


def check_distributions() -> None:
    """Checks that each of mmengine, mmcv and mmdet comes from one distribution.

    Raises:
        ImportError: If two distributions overwrite each other's files; with the commands that repair it.
    """
    clashes = {
        maintained: found
        for maintained, originals in DISTRIBUTIONS.items()
        if is_installed(maintained) and (found := [name for name in originals if is_installed(name)])
    }
    if clashes:
        both = '; '.join(f'{" and ".join(originals)} beside {maintained}' for maintained, originals in clashes.items())
        originals = ' '.join(name for names in clashes.values() for name in names)
        # Uninstalling the originals removes the files that both own, hence the second command.
        raise ImportError(
            f'Installed together are {both}, and they overwrite each other. Keep the maintained ones:\n'
            f'  pip uninstall -y {originals}\n'
            f'  pip install --force-reinstall --no-deps {" ".join(clashes)}'
        )


def is_installed(name: str) -> bool:
    """Whether a distribution of this name is installed."""
    return next(iter(distributions(name=name)), None) is not None
