"""An image is the same to a detector in whatever form it comes, or is refused in one sentence."""

import io
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image

from slab_det.runtime.errors import DataError
from slab_det.runtime.pipeline import ImagePipeline

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
    """(H, W, 3) as the detector sees it, without resize."""
    return ImagePipeline(steps)(image)['inputs'].permute(1, 2, 0).numpy()


def with_pixel(value):
    image = BGR.astype(np.float32)
    image[3, 4, 1] = value
    return image


TURNED = Image.Exif()
TURNED[0x0112] = 6  # to be turned by 90 degrees clockwise
FILES = {
    'rgb': (encode(RGB, 'PNG'), BGR),
    'gray': (encode(GRAY, 'PNG'), GRAY[..., None]),
    'gray jpeg': (encode(GRAY, 'JPEG', quality=95), GRAY[..., None]),
    'rgba': (encode(RGB, 'PNG', 'RGBA'), BGR),
    'gray and alpha': (encode(GRAY, 'PNG', 'LA'), GRAY[..., None]),
    'palette': (encode(GRAY, 'PNG', 'P'), GRAY[..., None]),
    '16 bits': (cv2.imencode('.png', BGR.astype(np.uint16) * 257)[1].tobytes(), BGR),
    '16 bits gray': (encode(GRAY.astype(np.uint16) * 257, 'PNG'), GRAY[..., None]),
    '16 bits tiff': (cv2.imencode('.tiff', BGR.astype(np.uint16) * 257)[1].tobytes(), BGR),
    'cmyk jpeg': (encode(RGB, 'JPEG', 'CMYK', quality=95), BGR),
    'cmyk tiff': (encode(RGB, 'TIFF', 'CMYK'), BGR),
    **{f'turned {kind}': (encode(RGB, kind, exif=TURNED), np.rot90(BGR, -1)) for kind in ('JPEG', 'PNG', 'TIFF')},
}


@pytest.mark.parametrize('name', FILES)
def test_a_file_of_any_kind_is_read_upright_in_eight_bits_of_bgr(name, tmp_path):
    content, expected = FILES[name]
    (tmp_path / 'image').write_bytes(content)
    found = pack(content)
    assert found.dtype == np.uint8 and np.array_equal(pack(tmp_path / 'image'), found)
    assert np.array_equal(pack(str(tmp_path / 'image')), found)
    assert found.shape[:2] == expected.shape[:2]
    # JPEG loses a little.
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
        (BGR.astype(np.float16), BGR),
        (BGR[::-1, ::-2], BGR[::-1, ::-2]),
    ],
    ids=['bgr', 'gray', 'one channel', 'bgra', 'float64', 'int64', 'float16', 'strides'],
)
@pytest.mark.parametrize('steps', [STEPS, (STEPS[0], STEPS[3])], ids=['resized', 'as it is'])
def test_an_array_becomes_three_channels(image, expected, steps):
    before = image.copy()
    found = pack(image, steps)
    wanted = pack(np.ascontiguousarray(np.broadcast_to(expected, (*expected.shape[:2], 3))), steps)
    assert np.abs(found - wanted.astype(float)).max() <= 1 and np.array_equal(image, before)


@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'LA', 'P', 'CMYK', '1', 'HSV'])
def test_an_image_of_pillow_is_read_as_rgb(mode):
    image = Image.fromarray(RGB).convert(mode)
    assert np.array_equal(pack(image), np.asarray(image.convert('RGB'))[..., ::-1])


def test_an_image_of_pillow_with_more_than_eight_bits_is_taken_as_an_array():
    assert np.array_equal(pack(Image.fromarray(GRAY.astype(np.float32))), pack(GRAY))
    with pytest.raises(DataError, match='divide 16 bits by 257'):
        pack(Image.fromarray(GRAY.astype(np.uint16) * 257))


def test_samples_name_their_file_and_boxes_find_back(tmp_path):
    (tmp_path / 'image.png').write_bytes(encode(RGB, 'PNG'))
    pipeline = ImagePipeline(STEPS)
    path, content, array = (
        pipeline(image, img_id=3)['data_samples'] for image in (tmp_path / 'image.png', encode(RGB, 'PNG'), BGR)
    )
    assert (path.img_path, content.img_path, array.img_path) == (str(tmp_path / 'image.png'), '', '')
    for sample in (path, content, array):
        assert (sample.ori_shape, sample.img_shape, sample.img_id) == ((64, 96), (128, 192), 3)
        assert sample.scale_factor == (2, 2)


@pytest.mark.parametrize(
    ('image', 'message'),
    [
        (b'', 'the image is no image of 8 or 16 bits .* or a damaged one'),
        (b'text', 'the image is no image of 8 or 16 bits .* or a damaged one'),
        (encode(RGB, 'JPEG')[:900], 'the image is no image of 8 or 16 bits .* or a damaged one'),
        (encode(GRAY.astype(np.float32), 'TIFF'), '32 bits per value: give an array of 0 to 255'),
        (encode(GRAY.astype(np.int32), 'TIFF'), '32 bits per value: give an array of 0 to 255'),
        (cv2.imencode('.tiff', BGR.astype(np.float32))[1].tobytes(), 'no image of 8 or 16 bits'),
        (np.zeros((20000, 10), np.uint8), r'the image, 20000x10 \(HxW\), .* a side is too short.*\(Resize\)'),
        (np.zeros((3, 480, 640), np.uint8), r'and not \(3, 480, 640\): give image.transpose\(1, 2, 0\)'),
        (np.zeros((2, 48, 64, 3), np.uint8), 'several images as a list'),
        (np.zeros((0, 64, 3), np.uint8), r'and not \(0, 64, 3\)'),
        (torch.zeros(64, 96, 3), 'a path, bytes, an array or an image of Pillow, not a Tensor'),
        ([BGR], 'a path, bytes, an array or an image of Pillow, not a list'),
        (cv2.imencode('.hdr', BGR.astype(np.float32))[1].tobytes(), 'no image of 8 or 16 bits'),
        (cv2.imencode('.pfm', GRAY.astype(np.float32))[1].tobytes(), '32 bits per value|no image of 8 or 16 bits'),
        (BGR.astype(np.int16) - 128, 'int16, has values from -128 to 127: give 0 to 255'),
        (BGR.astype(np.int8), 'int8, has values from -128 to'),
        (BGR.astype(np.float32) * 2, 'float32, has values from 0 to 510'),
        (BGR / 255, 'float64, has values from 0 to 1: .*multiply 0 to 1 by 255'),
        (BGR / 127.5, 'float64, has values from 0 to 2'),
        (BGR / 127.5 - 1, 'float64, has values from -1 to 1'),
        (BGR.astype(np.uint16) * 257, 'uint16, has values from 0 to 65535: .*divide 16 bits by 257'),
        (with_pixel(-1e9), 'float32, has values from -1e[+]09 to 255'),
        (with_pixel(np.nan), 'float32, has values from nan to nan'),
        (with_pixel(np.inf), 'float32, has values from 0 to inf'),
        (BGR > 9, 'bool, has values from 0 to 1'),
        (BGR.astype(complex), 'an array of complex128'),
        (BGR.astype(object), 'an array of object'),
    ],
)
def test_what_is_no_image_is_refused_in_one_sentence(image, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        ImagePipeline(STEPS)(image)
    assert len(str(caught.value)) < 250 and 'OpenCV' not in str(caught.value) and '\n' not in str(caught.value)
    if isinstance(image, bytes):
        (tmp_path / 'bad.jpg').write_bytes(image)
        with pytest.raises(DataError, match='bad.jpg .*(no image|32 bits)'):
            ImagePipeline(STEPS)(tmp_path / 'bad.jpg')


@pytest.mark.parametrize('image', [np.zeros((64, 96, 3)), with_pixel(255.4), with_pixel(-0.4)])
def test_black_and_what_rounds_to_0_to_255_are_images(image):
    assert ImagePipeline(STEPS)(image)


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('', 'No such file'),
        ('nowhere.jpg', 'No such file'),
        ('.', 'Is a directory'),
        ('a\0b.jpg', 'null byte'),
        ('file:///photo.jpg', 'file'),
        ('s3://bucket/photo.jpg', 'Petrel'),
        ('x' * 9000, 'File name too long'),
    ],
)
def test_what_cannot_be_read_is_a_data_error(name, reason):
    with pytest.raises(DataError, match=f'cannot be read .*{reason}') as caught:
        ImagePipeline(STEPS)(name)
    assert len(str(caught.value)) < 400 and '\0' not in str(caught.value)


@pytest.mark.filterwarnings('ignore::PIL.Image.DecompressionBombWarning')
@pytest.mark.parametrize('format', ['PNG', 'JPEG', 'TIFF', 'WEBP', 'BMP', 'GIF'])
@pytest.mark.parametrize('form', [bytes, Image.open], ids=['bytes', 'pillow'])
def test_too_many_pixels_are_refused_before_they_are_decoded(format, form, monkeypatch):
    content = encode(RGB, format)
    image = content if form is bytes else Image.open(io.BytesIO(content))
    monkeypatch.setattr(PIL.Image, 'MAX_IMAGE_PIXELS', 64 * 96)
    assert pack(content).shape == (64, 96, 3)
    for limit in (64 * 96 - 1, 64 * 48 - 1):
        # Pillow warns above its limit, and raises above twice of it.
        monkeypatch.setattr(PIL.Image, 'MAX_IMAGE_PIXELS', limit)
        monkeypatch.setattr(cv2, 'imdecode', None)
        with pytest.raises(DataError, match=f'the image has more than {limit:,} pixels: .*PIL.Image.MAX_IMAGE_PIXELS'):
            ImagePipeline(STEPS)(image)


def test_a_png_of_a_gigapixel_is_refused_from_its_header():
    rows = zlib.compress(bytes(1))
    header = (30000).to_bytes(4, 'big') * 2 + bytes([8, 2, 0, 0, 0])
    chunks = [(b'IHDR', header), (b'IDAT', rows), (b'IEND', b'')]
    png = b'\x89PNG\r\n\x1a\n' + b''.join(
        len(data).to_bytes(4, 'big') + kind + data + zlib.crc32(kind + data).to_bytes(4, 'big') for kind, data in chunks
    )
    with pytest.raises(DataError, match='more than 89,478,485 pixels'):
        ImagePipeline(STEPS)(png)


class Server(BaseHTTPRequestHandler):
    """Answers with a picture, the first half of it, or nothing."""

    def do_GET(self):
        content = encode(RGB, 'PNG')
        if self.path == '/gone.png':
            self.send_error(404)
            return
        if self.path == '/silent.png':
            self.server.over.wait(20)
            return
        self.send_response(200)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content if self.path == '/whole.png' else content[:-9])

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    server = ThreadingHTTPServer(('127.0.0.1', 0), Server)
    server.over = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_are_fetched_in_time_or_not_at_all(address):
    pipeline = ImagePipeline((STEPS[0], STEPS[3]), fetch_timeout=0.5)
    assert np.array_equal(pipeline(f'{address}/whole.png')['inputs'].permute(1, 2, 0).numpy(), BGR)
    for name, reason in (
        ('silent', 'timed out'),
        ('gone', '404'),
        ('cut', 'IncompleteRead'),
    ):
        with pytest.raises(DataError, match=f'{name}.png cannot be read .*{reason}'):
            pipeline(f'{address}/{name}.png')
    with pytest.raises(DataError, match='whole.png is an address, and fetch_timeout=0 refuses addresses'):
        ImagePipeline(STEPS, fetch_timeout=0)(f'{address}/whole.png')


def test_other_loaders_are_refused():
    with pytest.raises(DataError, match='begins with Resize, not with LoadImageFromFile'):
        ImagePipeline(STEPS[1:])
