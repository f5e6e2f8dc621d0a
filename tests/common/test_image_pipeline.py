"""ImagePipeline reads files, bytes, arrays and Pillow images alike, and refuses invalid images in one line."""

import io

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image

from slab_det.common.errors import DataError
from slab_det.common.pipeline import ImagePipeline

STEPS = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(192, 160), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs'),
]
ROWS, COLUMNS = np.mgrid[:64, :96]
RGB = np.stack([COLUMNS * 2, ROWS * 3, 255 - COLUMNS * 2], -1).astype(np.uint8)
BGR = RGB[..., ::-1]
GRAY = np.array(Image.fromarray(RGB).convert('L'))


def encode(image: np.ndarray | Image.Image, format: str, mode: str = '', **options) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    (image.convert(mode) if mode else image).save(buffer, format, **options)
    return buffer.getvalue()


def pack(image, steps=(STEPS[0], STEPS[3])):
    """Returns the input of the detector, (H, W, 3), without resizing."""
    return ImagePipeline(steps)(image)['inputs'].permute(1, 2, 0).numpy()


TURNED = Image.Exif()
TURNED[0x0112] = 6  # EXIF orientation: rotate by 90 degrees clockwise
FILES = {
    'rgb': (encode(RGB, 'PNG'), BGR),
    'gray': (encode(GRAY, 'PNG'), GRAY[..., None]),
    'rgba': (encode(RGB, 'PNG', 'RGBA'), BGR),
    'palette': (encode(GRAY, 'PNG', 'P'), GRAY[..., None]),
    '16 bits': (cv2.imencode('.png', BGR.astype(np.uint16) * 257)[1].tobytes(), BGR),
    'cmyk jpeg': (encode(RGB, 'JPEG', 'CMYK', quality=95), BGR),
    **{f'turned {kind}': (encode(RGB, kind, exif=TURNED), np.rot90(BGR, -1)) for kind in ('JPEG', 'PNG', 'TIFF')},
}


@pytest.mark.parametrize('name', FILES)
def test_every_file_format_is_read_upright_as_uint8_bgr(name, tmp_path):
    content, expected = FILES[name]
    (tmp_path / 'image').write_bytes(content)
    found = pack(content)
    assert found.dtype == np.uint8 and np.array_equal(pack(tmp_path / 'image'), found)
    assert found.shape[:2] == expected.shape[:2]
    # JPEG is lossy.
    assert np.abs(found.astype(int) - expected).mean() <= (2 if 'jpeg' in name.lower() else 0), name


@pytest.mark.parametrize(
    ('image', 'expected'),
    [
        (BGR, BGR),
        (GRAY, GRAY[..., None]),
        (GRAY[..., None], GRAY[..., None]),
        (np.dstack([BGR, GRAY]), BGR),
        (BGR.astype(np.float64), BGR),
        (BGR.astype(np.int64), BGR),
        (BGR[::-1, ::-2], BGR[::-1, ::-2]),
        (np.zeros((64, 96, 3)), np.zeros((64, 96, 3))),
        (BGR + 0.4, BGR),
    ],
    ids=['bgr', 'gray', 'one channel', 'bgra', 'float64', 'int64', 'strides', 'black', 'rounded'],
)
@pytest.mark.parametrize('steps', [STEPS, (STEPS[0], STEPS[3])], ids=['resized', 'as it is'])
def test_an_array_becomes_three_channels(image, expected, steps):
    before = image.copy()
    found = pack(image, steps)
    wanted = pack(np.ascontiguousarray(np.broadcast_to(expected, (*expected.shape[:2], 3))), steps)
    assert np.abs(found - wanted.astype(float)).max() <= 1 and np.array_equal(image, before)


@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'P', 'CMYK', '1'])
def test_pillow_image_is_read_as_rgb(mode):
    image = Image.fromarray(RGB).convert(mode)
    assert np.array_equal(pack(image), np.asarray(image.convert('RGB'))[..., ::-1])


GRAYS = {
    'file': encode(GRAY, 'PNG'),
    'array': GRAY,
    'one channel': GRAY[..., None],
    'float32': GRAY.astype(np.float32),
    'three channels': GRAY[..., None].repeat(3, 2),
    'strides': np.flipud(np.flipud(GRAY)[..., None].repeat(3, 2)),
    'Pillow L': Image.fromarray(GRAY),
    'Pillow F': Image.fromarray(GRAY.astype(np.float32)),
}


@pytest.mark.parametrize('name', GRAYS)
@pytest.mark.parametrize('color_type', ['grayscale', 'unchanged'])
@pytest.mark.parametrize('to_float32', [False, True])
def test_every_form_of_a_gray_image_has_one_channel_where_the_loader_says_so(name, color_type, to_float32):
    loader, form = dict(STEPS[0], color_type=color_type, to_float32=to_float32), GRAYS[name]
    expected = pack(GRAYS['file'], [loader, *STEPS[1::2]])
    found = pack(form, [loader, *STEPS[1::2]])
    if color_type == 'unchanged' and name in ('three channels', 'strides'):
        expected = expected.repeat(3, 2)
    assert found.shape == expected.shape and np.abs(found - expected.astype(float)).max() <= 1
    assert found.dtype == np.float32 if to_float32 or 'float' in name or 'F' in name else np.uint8


@pytest.mark.parametrize('mode', ['RGB', 'RGBA', 'L', '1', 'P'])
def test_unchanged_arrays_and_pillow_images_have_the_channels_of_their_file(mode):
    steps = [dict(STEPS[0], color_type='unchanged'), STEPS[3]]
    image = Image.fromarray(RGB).convert(mode)
    expected = pack(encode(image, 'PNG'), steps)
    assert expected.shape[2] == {'RGBA': 4, 'L': 1, '1': 1}.get(mode, 3)
    assert np.array_equal(pack(image, steps), expected) and np.array_equal(pack(expected, steps), expected)


def test_color_arrays_become_gray_as_opencv_does():
    steps = [dict(STEPS[0], color_type='grayscale'), STEPS[3]]
    expected = cv2.cvtColor(np.ascontiguousarray(BGR), cv2.COLOR_BGR2GRAY)[..., None]
    for image in (BGR, np.dstack([BGR, GRAY]), BGR.astype(np.int64), Image.fromarray(RGB)):
        assert np.abs(pack(image, steps) - expected.astype(float)).max() <= 1


def test_pillow_image_with_more_than_eight_bits_is_read_as_an_array():
    assert np.array_equal(pack(Image.fromarray(GRAY.astype(np.float32))), pack(GRAY))
    with pytest.raises(DataError, match='16 bits'):
        pack(Image.fromarray(GRAY.astype(np.uint16) * 257))


def test_samples_have_path_and_scale_to_the_original_image(tmp_path):
    (tmp_path / 'image.png').write_bytes(encode(RGB, 'PNG'))
    pipeline = ImagePipeline(STEPS)
    path, content, array = (
        pipeline(image, img_id=3)['data_samples'] for image in (tmp_path / 'image.png', encode(RGB, 'PNG'), BGR)
    )
    assert (path.img_path, content.img_path, array.img_path) == (str(tmp_path / 'image.png'), '', '')
    for sample in (path, content, array):
        assert (sample.ori_shape, sample.img_shape, sample.img_id) == ((64, 96), (128, 192), 3)
        assert sample.scale_factor == (2, 2)


def test_image_with_too_many_pixels_is_not_decoded(monkeypatch):
    content = encode(RGB, 'PNG')
    monkeypatch.setattr(PIL.Image, 'MAX_IMAGE_PIXELS', 64 * 96)
    ImagePipeline(STEPS)(content)
    for limit in (64 * 96 - 1, 100):
        monkeypatch.setattr(PIL.Image, 'MAX_IMAGE_PIXELS', limit)
        with pytest.raises(DataError, match=f'more than {limit:,} pixels'):
            ImagePipeline(STEPS)(content)


@pytest.mark.parametrize(
    ('image', 'message'),
    [
        (b'', 'cannot be read'),
        (b'text', 'cannot be read'),
        (cv2.imencode('.tiff', BGR.astype(np.float32))[1].tobytes(), 'cannot be read'),
        (cv2.imencode('.tiff', BGR[..., 0].astype(np.float32))[1].tobytes(), '32 bits per value'),
        (cv2.imencode('.pfm', BGR.astype(np.float32))[1].tobytes(), 'cannot be read'),
        ('nowhere.jpg', 'nowhere.jpg cannot be read .*No such file'),
        ('.', 'Is a directory'),
        ('', "^'' cannot be read .*No such file"),
        (np.zeros((20000, 10), np.uint8), r'20000x10 \(HxW\), fails in Resize'),
        (np.zeros((3, 480, 640), np.uint8), r'image.transpose\(1, 2, 0\)'),
        (np.zeros((2, 48, 64, 3), np.uint8), 'several images as a list'),
        (np.zeros((0, 64, 3), np.uint8), r'\(0, 64, 3\)'),
        (torch.zeros(64, 96, 3), 'not a Tensor'),
        (BGR.astype(np.int16) - 128, 'from -128 to 127'),
        (BGR.astype(np.float32) * 2, 'from 0 to 510'),
        (BGR / 255, 'from 0 to 1 .*multiply 0 to 1 by 255'),
        (BGR / 127.5 - 1, 'from -1 to 1'),
        (BGR.astype(np.uint16) * 257, 'from 0 to 65535 .*divide 16 bits by 257'),
        (np.where(BGR > 9, np.nan, 0), 'from nan to nan'),
        (BGR > 9, 'from 0 to 1 .bool'),
        (BGR.astype(object), 'array of object is no image'),
        (BGR.astype(complex), 'array of complex128 is no image'),
        (BGR.astype('U3'), 'is no image'),
    ],
)
def test_invalid_image_is_refused_in_one_line(image, message):
    with pytest.raises(DataError, match=message) as caught:
        ImagePipeline(STEPS)(image)
    assert '\n' not in str(caught.value)


def test_pipeline_without_image_loader_is_refused():
    with pytest.raises(DataError, match='Resize, not with LoadImageFromFile'):
        ImagePipeline(STEPS[1:])
