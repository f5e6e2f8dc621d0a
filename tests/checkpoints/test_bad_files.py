"""What is no checkpoint for the backbone at hand is refused in one line, and nothing is loaded."""

import os
import zipfile

import numpy as np
import pytest
import torch
from mmcv import imwrite

from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.runtime.errors import CheckpointError

SWIN = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
PVT = dict(embed_dims=8, num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
BACKBONES = {'swin': lambda **options: SLABSwin(**SWIN, **options), 'pvt': lambda **options: SLABPVT(**PVT, **options)}


class RunsCode:
    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def write_truncated(path, state) -> None:
    torch.save(state, path)
    path.write_bytes(path.read_bytes()[:-2000])


def write_image(path, state) -> None:
    imwrite(np.zeros((8, 8, 3), np.uint8), str(path.with_suffix('.png')))
    path.with_suffix('.png').rename(path)


def write_archive(path, state) -> None:
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('weights.txt', 'none')


def wrong_size(state) -> dict:
    key = next(key for key in state if key.endswith('norm1.weight'))
    return {**state, key: torch.ones(11)}


def dyt(state) -> dict:
    """A Swin or PVT with DyT for its norms, in the authors' names: tanh(alpha x), weight and bias."""
    names = (
        ('layers.0.blocks.0.attn.qkv.weight', 'layers.0.downsample.reduction.weight')
        if any('w_msa' in key for key in state)
        else ('patch_embed1.proj.weight', 'block1.0.attn.q.weight', 'block1.0.attn.kv.weight')
    )
    blocks = 'layers.0.blocks.0' if len(names) == 2 else 'block1.0'
    return (
        {name: torch.ones(8, 3, 4, 4) if 'proj' in name else torch.ones(8, 8) for name in names}
        | {'cls_token': torch.ones(1, 1, 8), 'pos_embed1': torch.ones(1, 3137, 8)}
        | {
            f'{blocks}.{norm}.{name}': torch.ones(1 if name == 'alpha' else 8)
            for norm in ('norm1', 'norm2')
            for name in ('alpha', 'weight', 'bias')
        }
    )


UNREADABLE = 'cannot be read as a checkpoint'
BAD = {
    'truncated': (write_truncated, UNREADABLE),
    'empty': (lambda path, state: path.touch(), UNREADABLE),
    'text': (lambda path, state: path.write_text('epoch,loss\n1,0.5\n'), UNREADABLE),
    'image': (write_image, UNREADABLE),
    'other archive': (write_archive, UNREADABLE),
    'folder': (lambda path, state: path.mkdir(), 'is a folder'),
    'missing': (lambda path, state: None, 'There is no checkpoint'),
    'runs code': (lambda path, state: torch.save(RunsCode(os.mkdir, f'{path} ran'), path), r'posix\.mkdir.*Not loaded'),
    'numbers': (lambda path, state: torch.save({'epoch': 3, 'lr': 0.1}, path), 'no weights.*epoch, lr'),
    'no dict': (lambda path, state: torch.save([1, 2], path), 'no weights.*list'),
    'a tensor': (lambda path, state: torch.save(torch.ones(2), path), 'no weights.*Tensor'),
    'zero matches': (lambda path, state: torch.save({'encoder.weight': torch.ones(2)}, path), 'nothing matches'),
    'wrong size': (
        lambda path, state: torch.save(wrong_size(state), path),
        r'1 shapes do not fit.*norm1\.weight \(11,\).*\(8,\)',
    ),
    'one name in common': (
        lambda path, state: torch.save(
            {next(key for key in state if key.endswith('norm1.weight')): torch.ones(8), 'foo.bar': torch.ones(1)}, path
        ),
        'nothing matches',
    ),
    'DyT': (lambda path, state: torch.save(dyt(state), path), r'norm\d: .*norm\d\.alpha.* make none of LayerNorm'),
}


@pytest.mark.parametrize('backbone', BACKBONES)
@pytest.mark.parametrize('kind', BAD)
@pytest.mark.parametrize('way', ['load_pretrained', 'init_cfg'])
def test_bad_files_are_refused_in_one_line(tmp_path, backbone, kind, way):
    write, expected = BAD[kind]
    path = tmp_path / 'weights.pth'
    write(path, BACKBONES[backbone]().state_dict())
    model = BACKBONES[backbone](init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=expected) as error:
        load_pretrained(model, path) if way == 'load_pretrained' else model.init_weights()
    message = str(error.value)
    assert '\n' not in message and 'weights.pth' in message
    assert not os.path.exists(f'{path} ran')
    if way == 'load_pretrained':
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
