"""Window geometry against padding, rolling and slicing written out."""

import pytest
import torch
import torch.nn.functional as F

from slab_det.attention.geometry import window_geometry

CPU = torch.device('cpu')
CASES = [(8, 12, 4, 0), (8, 12, 4, 2), (7, 9, 4, 0), (7, 9, 4, 2), (3, 2, 5, 2), (1, 11, 3, 1), (6, 6, 6, 3)]


def cut_windows(image: torch.Tensor, size: int, shift: int) -> torch.Tensor:
    """Pads a (B, H, W, C) map at the bottom right, rolls it and slices windows one by one."""
    _, height, width, _ = image.shape
    image = F.pad(image, (0, 0, 0, -width % size, 0, -height % size)).roll((-shift, -shift), (1, 2))
    windows = [
        sample[top : top + size, left : left + size].flatten(0, 1)
        for sample in image
        for top in range(0, image.shape[1], size)
        for left in range(0, image.shape[2], size)
    ]
    return torch.stack(windows)


@pytest.mark.parametrize(('height', 'width', 'size', 'shift'), CASES)
@pytest.mark.parametrize('grad', [False, True])
def test_partition_equals_slicing_and_merge_undoes_it(height, width, size, shift, grad):
    x = torch.randn(2, height * width, 3)
    geometry = window_geometry(height, width, size, shift, CPU)
    with torch.set_grad_enabled(grad):
        windows = geometry.partition(x, None)
        assert torch.equal(windows, cut_windows(x.unflatten(1, (height, width)), size, shift))
        assert torch.equal(geometry.merge(windows), x)
    assert geometry.num_windows * 2 == len(windows)


@pytest.mark.parametrize(('height', 'width', 'size', 'shift'), CASES)
def test_padding_slots_hold_the_given_row(height, width, size, shift):
    geometry = window_geometry(height, width, size, shift, CPU)
    row = torch.tensor([7.0, 8.0])
    windows = geometry.partition(torch.zeros(2, height * width, 2), row)
    is_padding = cut_windows(torch.ones(2, height, width, 1), size, shift)[..., 0] == 0
    assert torch.equal(windows == row, is_padding[..., None].expand_as(windows))
    assert torch.equal(geometry.padding_mask().repeat(2, 1), is_padding)


@pytest.mark.parametrize(('height', 'width', 'size', 'shift'), CASES)
def test_gradients_of_partition_and_merge(height, width, size, shift):
    geometry = window_geometry(height, width, size, shift, CPU)
    x = torch.randn(2, height * width, 2, dtype=torch.double, requires_grad=True)
    padding = torch.randn(2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, padding: geometry.partition(x, padding), (x, padding))
    windows = torch.randn(2 * geometry.num_windows, size * size, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(geometry.merge, (windows,))


@pytest.mark.parametrize(('height', 'width', 'size', 'shift'), [case for case in CASES if case[3]])
def test_mask_parts_what_the_shift_brought_together(height, width, size, shift):
    """Swin's regions: numbered slices of the padded map, on which windows are then cut without rolling."""
    padded = torch.zeros(1, height + -height % size, width + -width % size, 1)
    bands = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate((rows, columns) for rows in bands for columns in bands):
        padded[:, rows, columns] = number
    regions = cut_windows(padded, size, 0)[..., 0]
    expected = torch.zeros(len(regions), size * size, size * size)
    expected[regions[:, :, None] != regions[:, None, :]] = -100
    assert torch.equal(window_geometry(height, width, size, shift, CPU).attention_mask(torch.float32), expected)


def test_geometry_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        geometry = window_geometry(5, 13, 4, 1, CPU)
    x = torch.randn(1, 65, 2, requires_grad=True)
    geometry.merge(geometry.partition(x, None)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
