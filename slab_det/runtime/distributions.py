"""Which distributions of mmengine, mmcv and mmdet are installed, and whether they get along."""

from importlib.metadata import distributions
from importlib.util import find_spec

# Import name: the maintained distribution, and those that install files of the same names.
DISTRIBUTIONS = {
    'mmengine': ('onedl-mmengine', ('mmengine', 'mmengine-lite')),
    'mmcv': ('onedl-mmcv', ('mmcv', 'mmcv-full', 'mmcv-lite')),
    'mmdet': ('onedl-mmdetection', ('mmdet',)),
}


def check_distributions() -> None:
    """Makes sure that each of mmengine, mmcv and mmdet comes from one distribution, and is complete enough to import.

    Raises:
        ImportError: If two distributions overwrite each other's files, or a package is missing; with the commands
            that repair it.
    """
    clashes = []
    for maintained, originals in DISTRIBUTIONS.values():
        originals = [name for name in originals if is_installed(name)]
        if originals and is_installed(maintained):
            clashes.append((maintained, originals))
    if clashes:
        both = '; '.join(f'{" and ".join(originals)} beside {maintained}' for maintained, originals in clashes)
        originals = ' '.join(name for _, names in clashes for name in names)
        maintained = ' '.join(name for name, _ in clashes)
        # Uninstalling the originals removes the files that both own, hence the second command.
        raise ImportError(
            f'Installed together are {both}, and they overwrite each other. Keep the maintained ones:\n'
            f'  pip uninstall -y {originals}\n'
            f'  pip install --force-reinstall --no-deps {maintained}'
        )
    missing = [name for name in DISTRIBUTIONS if not is_importable(name)]
    if missing:
        maintained = ' '.join(DISTRIBUTIONS[name][0] for name in missing)
        # A distribution whose files were removed with another one still counts as installed for pip.
        raise ImportError(
            f'Not installed, or without their files: {", ".join(missing)}. Install them:\n'
            f'  pip install --force-reinstall --no-deps {maintained}\n'
            f'  pip install {maintained}'
        )


def is_installed(name: str) -> bool:
    """Whether pip knows a distribution of this name here."""
    return next(iter(distributions(name=name)), None) is not None


def is_importable(package: str) -> bool:
    """Whether a top-level package has its ``__init__.py``; looks for it without importing."""
    spec = find_spec(package)
    # Folders left behind by an uninstallation are a namespace package: found, but with no file of their own.
    return spec is not None and spec.origin is not None
