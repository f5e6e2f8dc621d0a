"""Checkpoint files load through an allow-list; unsafe and broken files are refused."""

import io
import os
import pickle
import threading

import mmengine.logging
import mmengine.runner.checkpoint
import numpy as np
import pytest
import torch
from conftest import SMALL_SWIN, RunsCode, differing, randomize
from mmdet.registry import MODELS
from mmengine.runner import CheckpointLoader
from safetensors.torch import save, save_file

from slab_det.checkpoints import load_pretrained
from slab_det.common.errors import CheckpointError
from slab_det.runtime import read_checkpoint
from slab_det.runtime.checkpoint_files import safe_reading


def load_with_mmengine(path):
    return CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


READERS = [read_checkpoint, load_with_mmengine]


@pytest.mark.parametrize('load', READERS)
@pytest.mark.parametrize('zipped', [True, False])
def test_unsafe_checkpoint_is_refused_and_does_not_run(tmp_path, zipped, load):
    path, proof = tmp_path / 'evil.pth', tmp_path / 'it ran'
    torch.save({'state_dict': RunsCode(os.mkdir, str(proof))}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r'evil\.pth: holds posix\.mkdir.*trust'):
        load(path)
    assert not proof.exists()
    # Without the allow-list the code does run.
    torch.load(path, weights_only=False)
    assert proof.exists()


def test_pickled_getattr_is_limited_to_known_methods(tmp_path):
    path = tmp_path / 'evil.pth'
    for call in ((getattr, torch.Tensor, 'numpy'), (getattr, mmengine.logging.HistoryBuffer, '__init__')):
        torch.save({'state_dict': RunsCode(*call)}, path)
        with pytest.raises(CheckpointError, match='builtins.getattr'):
            read_checkpoint(path)


def contents_of(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


WHOLE = contents_of({'state_dict': {'weight': torch.ones(50, 50)}})
LEGACY = contents_of({'state_dict': {'weight': torch.ones(50, 50)}}, _use_new_zipfile_serialization=False)
BROKEN = {
    'empty': b'',
    'half': WHOLE[: len(WHOLE) // 2],
    'without its last byte': WHOLE[:-1],
    'half legacy': LEGACY[: len(LEGACY) // 2],
    'config': b'custom_imports = dict(imports=[])\n_base_ = 1\n',
    'text like a name': b'cos\nsystem\n',
    'plain pickle': pickle.dumps({'state_dict': {}}, protocol=2)[:-4],
}


@pytest.mark.parametrize('kind', BROKEN)
def test_broken_file_error_names_file_and_remedy(tmp_path, kind):
    path = tmp_path / 'broken.pth'
    path.write_bytes(BROKEN[kind])
    expected = r'broken\.pth: cannot be read as a checkpoint.*earlier one'
    with pytest.raises(CheckpointError, match=expected) as error:
        read_checkpoint(path)
    assert 'weights_only' not in str(error.value)


KINDS = {
    'git lfs pointer': (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n', 'Git LFS.*git lfs pull'),
    'html': (b'<!DOCTYPE html><title>404</title>', 'page of HTML.*download it again'),
    'safetensors': (save({'weight': torch.ones(2)}), r'safetensors file: rename it, .* ends in \.safetensors'),
}


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize(('content', 'expected'), KINDS.values(), ids=KINDS)
def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path, content, expected, suffix):
    path = tmp_path / f'weights.{suffix}'
    path.write_bytes(content)
    if suffix == 'safetensors' and 'rename' in expected:
        assert read_checkpoint(path)['weight'].tolist() == [1, 1]
    else:
        with pytest.raises(CheckpointError, match=rf'weights\.{suffix}.*{expected}'):
            read_checkpoint(path)


def test_pickles_of_numpy_1_and_2_load(tmp_path):
    path = tmp_path / 'numpy.pth'
    values = {'array': np.arange(3, dtype=np.int16), 'scalar': np.float32(0.5), 'flag': np.bool_(True)}
    torch.save(values, path)
    renamed = tmp_path / 'other.pth'
    # Pickles of numpy 1 and 2 name different modules; in a legacy file the name can be replaced.
    torch.save(values, renamed, _use_new_zipfile_serialization=False)
    content = renamed.read_bytes()
    ours, other = b'numpy._core.multiarray', b'numpy.core.multiarray'
    ours, other = (ours, other) if ours in content else (other, ours)
    renamed.write_bytes(content.replace(ours, other))
    assert other in renamed.read_bytes()
    for file in (path, renamed):
        loaded = read_checkpoint(file)
        assert loaded['array'].tolist() == [0, 1, 2] and loaded['scalar'] == 0.5 and loaded['flag'], file
    # The allow-list does not stay in force after loading.
    with pytest.raises(pickle.UnpicklingError, match='multiarray'):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ('load', 'address'),
    [
        (read_checkpoint, 'https://example.com/weights.pth'),
        (load_with_mmengine, 'torchvision://resnet18'),
        (read_checkpoint, 'torchvision://resnet18'),
    ],
)
def test_downloads_are_read_with_the_allow_list(tmp_path, monkeypatch, load, address):
    torch.save({'state_dict': RunsCode(os.mkdir, str(tmp_path / 'it ran'))}, tmp_path / 'evil.pth')
    monkeypatch.setattr(
        torch.hub, 'download_url_to_file', lambda url, target, *args, **kwargs: os.link(tmp_path / 'evil.pth', target)
    )
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    with pytest.raises(CheckpointError, match=r'posix\.mkdir'):
        load(address)
    assert os.listdir(tmp_path / 'hub' / 'checkpoints') and not (tmp_path / 'it ran').exists()


def test_reading_an_address_changes_nothing_of_mmengine(monkeypatch):
    module, schemes = mmengine.runner.checkpoint, dict(CheckpointLoader._schemes)
    # As before slab_det.runtime.install().
    for name in ('load_from_http', '_safe_torch_load'):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: pytest.fail('mmengine reads without an allow-list'))
    monkeypatch.setitem(CheckpointLoader._schemes, '', module.load_from_local)
    before = dict(vars(module))
    monkeypatch.setattr(torch.hub, 'load_state_dict_from_url', lambda *args, weights_only, **kwargs: weights_only)
    assert read_checkpoint('torchvision://resnet18') is True
    for address, message in (('s3://bucket/a.pth', 'petrel'), ('nobody://a', 'no checkpoint nobody://a')):
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(address)
    assert vars(module) == before and CheckpointLoader._schemes == schemes | {'': module.load_from_local}


def test_broken_safetensors_error_names_the_file(tmp_path):
    path = tmp_path / 'cut.safetensors'
    save_file({'weight': torch.ones(50)}, path)
    for content in (b'', b'\xff' * 40, path.read_bytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r'cut\.safetensors: cannot be read'):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ('address', 'expected'),
    [
        ('tim://swin_tiny', r'no checkpoint tim://.*timm://'),
        (os.path.dirname(__file__), 'no checkpoint .*runtime; check its name'),
        ('torchvision://resnet5', r'torchvision://resnet5: mmengine cannot load.*resnet5.*name the file'),
        ('open-mmlab://nothing', r'open-mmlab://nothing: mmengine cannot load.*name the file'),
        ('mmcls://nothing', r'mmcls://nothing: mmengine cannot load'),
        ('s3://bucket/swin.pth', r's3://bucket/swin\.pth: mmengine cannot load.*petrel'),
        ('pavi://swin', 'pavi://swin: mmengine cannot load.*pavi'),
        ('mmdet://swin', 'no checkpoint mmdet://swin.*address of mmengine'),
        ('nowhere.pth', r'no checkpoint nowhere\.pth; check its name'),
        # Nothing listens on port 9.
        ('http://127.0.0.1:9/swin.pth', r'cannot be downloaded .*init_cfg\.checkpoint=FILE'),
    ],
)
def test_unreadable_address_error_says_what_to_do(address, expected):
    with pytest.raises(CheckpointError, match=expected) as error:
        read_checkpoint(address)
    assert '\n' not in str(error.value)


def test_a_backbone_loads_from_an_address_of_mmengine(tmp_path, monkeypatch):
    """With mmengine's table of names; the file is not downloaded but taken from the disk."""
    source, model = (MODELS.build(SMALL_SWIN) for _ in range(2))
    torch.save({'state_dict': randomize(source).state_dict()}, tmp_path / 'swin.pth')
    addresses = []

    def download(url, target, *args, **kwargs):
        addresses.append(url)
        os.link(tmp_path / 'swin.pth', target)

    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    assert load_pretrained(model, 'torchvision://swin_t.imagenet1k_v1').complete
    assert not differing(model, source) and 'swin_t' in addresses[0]


def test_threads_read_one_after_the_other(tmp_path):
    """The first to end would otherwise take the allow-list away from the second."""
    torch.save({'scalar': np.float32(0.5)}, tmp_path / 'numpy.pth')
    entered, found = threading.Event(), []

    def read():
        with safe_reading('other'):
            entered.set()
        found.append(read_checkpoint(tmp_path / 'numpy.pth')['scalar'])

    thread = threading.Thread(target=read)
    with safe_reading('first'):
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set() and found == [0.5]
