"""The images of a folder: each once, whatever links lie in it."""

from __future__ import annotations

from pathlib import Path

from coco_files import dataset_cfg, write_images

from slab_det.data import ImageFolder


def names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in ImageFolder(folder, dataset_cfg(folder, 'val')['pipeline']).files]


def test_links_upwards_are_not_followed_and_others_are(tmp_path: Path) -> None:
    folder = tmp_path / 'pictures'
    for name, count in (('pictures', 1), ('pictures/b', 2), ('pictures/.hidden', 1), ('elsewhere', 1)):
        write_images(tmp_path / name, count)
    expected = ['0.jpg', 'b/0.jpg', 'b/1.jpg']
    assert names(folder) == expected
    (folder / 'up').symlink_to('..')
    # Two of them made the listing endless.
    (folder / 'b' / 'here').symlink_to(folder)
    (folder / 'b' / 'again').symlink_to('.')
    assert names(folder) == expected
    (folder / 'c').symlink_to('../elsewhere')
    (tmp_path / 'elsewhere' / 'back').symlink_to(folder)
    (folder / '1.jpg').symlink_to('b/1.jpg')
    (folder / 'broken.jpg').symlink_to('nowhere.jpg')
    assert names(folder) == ['0.jpg', '1.jpg', 'b/0.jpg', 'b/1.jpg', 'c/0.jpg']
    # The folder may be a link itself.
    (tmp_path / 'link').symlink_to(folder)
    assert names(tmp_path / 'link') == names(folder)
