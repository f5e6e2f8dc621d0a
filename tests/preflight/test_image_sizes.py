"""Sizes in a COCO file are those of its images: turned by EXIF and resized ones are told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import mmcv
import numpy as np
import pytest
from coco_files import SIZE, make_content, run_cfg, write_images, write_split
from PIL import Image

from slab_det.common.errors import DataError
from slab_det.preflight import check_data, image_sizes

TURNED = SIZE[::-1]


def state_size(root: Path, size: tuple[int, int]) -> None:
    content = make_content()
    for image in content['images']:
        image.update(width=size[0], height=size[1])
    write_split(root, 'val', content)


@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_orientations_that_turn_images_are_an_error(root: Path, orientation: int) -> None:
    shutil.rmtree(root / 'val')
    write_images(root / 'val', orientation=orientation)
    read = mmcv.imread(str(root / 'val/0.jpg')).shape[1::-1]
    assert read == (TURNED if orientation > 4 else SIZE)
    cfg = run_cfg(root)
    if orientation > 4:
        message = (
            r"10 of 10 images .* 0\.jpg is read as 48x64 .* not as 64x48.*set color_type='color_ignore_orientation'"
        )
        with pytest.raises(DataError, match=message):
            check_data(cfg)
    # The remedy.
    for name in ('val_dataloader', 'test_dataloader'):
        cfg[name].dataset.pipeline[0].color_type = 'color_ignore_orientation'
    check_data(cfg)
    # Boxes on turned pictures, as they are read by default.
    state_size(root, read)
    check_data(run_cfg(root))
    if orientation > 4:
        with pytest.raises(DataError, match='does not turn it: set color_type'):
            check_data(cfg)


def test_resized_images_and_exchanged_sides_are_an_error(root: Path) -> None:
    state_size(root, (128, 96))
    with pytest.raises(DataError, match=r'64x48 .* not as 128x96.* multiply boxes.* by 0\.5'):
        check_data(run_cfg(root))
    state_size(root, TURNED)
    with pytest.raises(DataError, match='not as 48x64: width and height are exchanged$'):
        check_data(run_cfg(root))
    # Tools round.
    state_size(root, (65, 47))
    check_data(run_cfg(root))


def test_a_wrong_size_among_many_is_a_warning(root: Path, warnings: list[str]) -> None:
    content = make_content(40)
    for image in content['images']:
        image['file_name'] = f'{image["id"] % 10}.jpg'
    for image in content['images'][7:9]:
        image['width'] = 60
    write_split(root, 'train', content)
    check_data(run_cfg(root))
    assert 'width and height of 2 of 40 images' in warnings[0] and '7.jpg is read as 64x48' in warnings[0]
    with pytest.raises(DataError, match='width and height of 2 of 40 images'):
        check_data(run_cfg(root, with_mask=True))
    content['images'][9]['width'] = 60
    write_split(root, 'train', content)
    with pytest.raises(DataError, match=r'width and height of 3 of 40 images .* 7\.jpg is read as 64x48'):
        check_data(run_cfg(root))
    assert len(warnings) == 1


@pytest.mark.parametrize('suffix', ['png', 'webp', 'tiff', 'bmp'])
@pytest.mark.parametrize('orientation', [1, 6])
def test_every_format_is_judged_as_opencv_reads_it(root: Path, suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 255, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    content = make_content()
    for index, image in enumerate(content['images']):
        image['file_name'] = f'{index}.{suffix}'
        path = root / 'val' / image['file_name']
        Image.fromarray(pixels).save(path, **({} if suffix == 'bmp' else dict(exif=exif)))
    size = mmcv.imread(str(path)).shape[1::-1]
    for width, height in (SIZE, TURNED):
        for image in content['images']:
            image.update(width=width, height=height)
        write_split(root, 'val', content)
        if size == (width, height):
            check_data(run_cfg(root))
        else:
            with pytest.raises(DataError, match=rf'0\.{suffix} is read as {size[0]}x{size[1]}'):
                check_data(run_cfg(root))


def test_large_sets_are_sampled_evenly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, looked = image_sizes.read_header, []
    monkeypatch.setattr(image_sizes, 'MAX_READ', 4)
    monkeypatch.setattr(image_sizes, 'read_header', lambda path: looked.append(path.name) or read(path))
    check_data(run_cfg(root), ('val',))
    assert looked == ['0.jpg', '2.jpg', '5.jpg', '7.jpg']


def test_images_that_pillow_cannot_open_are_left_to_the_loader(root: Path) -> None:
    (root / 'val/3.jpg').write_bytes(b'no picture')
    check_data(run_cfg(root))
