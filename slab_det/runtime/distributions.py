"""Checks that the installed distributions of mmengine, mmcv and mmdet do not overwrite each other's files."""

from importlib.metadata import distributions

# Maintained distribution: the originals, whose files have the same paths.
DISTRIBUTIONS = {
    'onedl-mmengine': ('mmengine', 'mmengine-lite'),
    'onedl-mmcv': ('mmcv', 'mmcv-full', 'mmcv-lite'),
    'onedl-mmdetection': ('mmdet',),
}


def check_distributions() -> None:
    """Raises ImportError, with the commands that repair it, if two distributions overwrite each other's files."""

    def is_installed(name: str) -> bool:
        return next(iter(distributions(name=name)), None) is not None

    clashes = {
        maintained: found
        for maintained, originals in DISTRIBUTIONS.items()
        if is_installed(maintained) and (found := [*filter(is_installed, originals)])
    }
    if clashes:
        originals = ' '.join(name for names in clashes.values() for name in names)
        # Uninstalling the originals also removes files of the maintained ones, so these are reinstalled.
        raise ImportError(
            f'{originals} and {" ".join(clashes)} overwrite each other. Keep the maintained ones:\n'
            f'  pip uninstall -y {originals}\n'
            f'  pip install --force-reinstall --no-deps {" ".join(clashes)}'
        )
