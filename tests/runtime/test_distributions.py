"""Distributions of mmengine, mmcv and mmdet that overwrite each other."""

import pytest

from slab_det.runtime.distributions import check_distributions


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Returns a function that makes a distribution look installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(distribution):
        folder = tmp_path / f'{distribution.replace("-", "_")}-1.0.dist-info'
        folder.mkdir()
        (folder / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n')

    return add


@pytest.mark.parametrize(
    ('originals', 'maintained'),
    [
        ('mmcv-full', 'onedl-mmcv'),
        ('mmengine', 'onedl-mmengine'),
        ('mmcv mmdet', 'onedl-mmcv onedl-mmdetection'),
    ],
)
def test_clashing_distributions_raise_with_repair_commands(pretend, originals, maintained):
    for distribution in (originals + ' ' + maintained).split():
        pretend(distribution)
    with pytest.raises(ImportError) as error:
        check_distributions()
    commands = [line.strip() for line in str(error.value).splitlines() if line.startswith('  ')]
    assert commands == [f'pip uninstall -y {originals}', f'pip install --force-reinstall --no-deps {maintained}']
