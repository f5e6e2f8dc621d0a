"""Distributions of mmengine, mmcv and mmdet that do not get along."""

import pytest

from slab_det.runtime.distributions import check_distributions


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """A function that adds the metadata of a distribution before the real ones."""
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
def test_originals_beside_maintained_ones_are_an_error_with_its_remedy(pretend, originals, maintained):
    for distribution in (originals + ' ' + maintained).split():
        pretend(distribution)
    with pytest.raises(ImportError) as error:
        check_distributions()
    commands = [line.strip() for line in str(error.value).splitlines() if line.startswith('  ')]
    assert commands == [f'pip uninstall -y {originals}', f'pip install --force-reinstall --no-deps {maintained}']
