"""timm weights by ``timm://NAME``, and safetensors files."""

import os

import pytest
import timm
import timm.models._hub
import torch
from conftest import PVT_V2, RunsCode, differing
from mmengine.runner import CheckpointLoader
from safetensors.torch import save_file

from slab_det.backbones import SLABPVT
from slab_det.checkpoints import load_pretrained
from slab_det.common.errors import CheckpointError

# pvt_v2_b0.
CONFIG = dict(embed_dims=32, num_layers=(2, 2, 2, 2), **PVT_V2)


def serve(monkeypatch, path) -> None:
    """Makes every timm download return the file ``path``."""

    def download(repo_id: str, filename: str, **kwargs) -> str:
        if not filename.endswith(path.suffix):
            raise timm.models._hub.EntryNotFoundError('no such file')
        return str(path)

    monkeypatch.setattr(timm.models._hub, 'hf_hub_download', download)


@pytest.mark.parametrize('suffix', ['.safetensors', '.bin'])
def test_timm_names_and_files_load(tmp_path, monkeypatch, suffix):
    path = tmp_path / f'weights{suffix}'
    state = timm.create_model('pvt_v2_b0').state_dict()
    (save_file if suffix == '.safetensors' else torch.save)(state, path)
    serve(monkeypatch, path)
    expected, by_file = SLABPVT(**CONFIG), SLABPVT(**CONFIG)
    load_pretrained(expected, state)
    report = load_pretrained(by_file, path)
    assert report.complete and report.format == 'timm_pvt_v2', str(report)
    assert not differing(by_file, expected)
    for name in ('pvt_v2_b0', 'pvt_v2_b0.in1k'):
        ours = SLABPVT(**CONFIG, init_cfg=dict(type='Pretrained', checkpoint=f'timm://{name}'))
        ours.init_weights()
        assert not differing(ours, expected)


@pytest.mark.parametrize('name', ['swin_enormous', 'pvt_v2_b0.no_such_tag', 'hf-hub:someone/swin'])
def test_unknown_timm_name_error_points_to_list_models(name):
    with pytest.raises(CheckpointError, match='list_models'):
        load_pretrained(SLABPVT(**CONFIG), f'timm://{name}')


def test_failed_timm_download_error_says_how_to_continue(monkeypatch):
    def download(**kwargs) -> str:
        raise OSError('no route to host\nTraceback')

    monkeypatch.setattr(timm.models._hub, 'hf_hub_download', download)
    with pytest.raises(CheckpointError, match='no route to host.*name that file') as error:
        load_pretrained(SLABPVT(**CONFIG), 'timm://pvt_v2_b0')
    assert '\n' not in str(error.value)


def test_downloads_of_timm_run_no_code(tmp_path, monkeypatch):
    path, proof = tmp_path / 'evil.bin', tmp_path / 'it ran'
    torch.save({'head.bias': RunsCode(os.mkdir, str(proof))}, path)
    serve(monkeypatch, path)
    # Some versions of timm read the files of some models this way; before 1.0.26 they had no function for it.
    monkeypatch.setattr(
        timm.models._hub, '_torch_load', lambda file, **kwargs: torch.load(file, weights_only=None), raising=False
    )
    with pytest.raises(CheckpointError, match='timm cannot get the weights'):
        CheckpointLoader.load_checkpoint('timm://pvt_v2_b0')
    assert not proof.exists()
    torch.save(timm.create_model('pvt_v2_b0').state_dict(), path)
    assert CheckpointLoader.load_checkpoint('timm://pvt_v2_b0')
