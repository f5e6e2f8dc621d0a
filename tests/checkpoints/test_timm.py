"""timm's Swin and PVTv2: the same features, from a state dict, a safetensors file and timm's own names."""

import os
import sys

import pytest
import timm
import timm.models._hub
import torch
from mmdet.models.backbones import PyramidVisionTransformerV2, SwinTransformer
from mmengine.runner import CheckpointLoader
from safetensors.torch import save_file
from torch import Tensor, nn

from slab_det.backbones import SLABPVT, SLABSwin
from slab_det.checkpoints import load_pretrained
from slab_det.runtime.errors import CheckpointError

V2 = dict(
    patch_sizes=(7, 3, 3, 3), paddings=(3, 1, 1, 1), use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64, with no two weights alike and activations of the size of the image's."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for value in model.state_dict().values():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        value.copy_(noise / value[0].numel() ** 0.5 if value.ndim > 1 else 1 + noise / 2)
    return model


def timm_swin(**options) -> nn.Module:
    """Windows and shifts in every block, for every size of image."""
    options = (
        dict(
            embed_dim=8,
            depths=(2, 2, 2, 2),
            num_heads=(1, 2, 4, 8),
            num_classes=5,
            strict_img_size=False,
            always_partition=True,
        )
        | options
    )
    return randomised(timm.models.swin_transformer.SwinTransformer(**options))


def swin_like(kind: str, theirs: nn.Module, window_size: int = 7) -> nn.Module:
    """Ours or mmdet's, without norms on the outputs."""
    depths = [len(stage.blocks) for stage in theirs.layers]
    config = dict(
        embed_dims=8,
        depths=depths,
        num_heads=[2**i for i in range(len(depths))],
        strides=(4, 2, 2, 2)[: len(depths)],
        out_indices=tuple(range(len(depths))),
        window_size=window_size,
    )
    if kind == 'ours':
        return SLABSwin(out_norm_cfg=None, **config).double().eval()
    model = SwinTransformer(**config).double()
    for i in range(len(depths)):
        setattr(model, f'norm{i}', nn.Identity())
    model.eval()
    return model


def timm_pvt_v2() -> nn.Module:
    return randomised(
        timm.models.pvt_v2.PyramidVisionTransformerV2(
            embed_dims=(8, 16, 40, 64), depths=(1, 2, 1, 1), num_heads=(1, 2, 5, 8), num_classes=5
        )
    )


def pvt_v2_like(kind: str) -> nn.Module:
    config = dict(embed_dims=8, num_layers=(1, 2, 1, 1), num_heads=(1, 2, 5, 8))
    return (SLABPVT(**config, **V2) if kind == 'ours' else PyramidVisionTransformerV2(**config)).double().eval()


@torch.no_grad()
def distances(ours: nn.Module, theirs: nn.Module, size: tuple[int, int]) -> list[float]:
    """Largest difference over largest value, per stage."""
    image = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected: list[Tensor] = theirs.forward_intermediates(image, intermediates_only=True, output_fmt='NCHW')
    return [
        ((got - want).abs().max() / want.abs().max()).item() for got, want in zip(ours(image), expected, strict=True)
    ]


@pytest.mark.parametrize('kind', ['ours', 'mmdet'])
@pytest.mark.parametrize(
    ('options', 'size'),
    [
        (dict(), (224, 224)),
        # Neither maps nor windows are even, and windows fill every map.
        (dict(depths=(2, 2), num_heads=(1, 2), window_size=3), (72, 120)),
        # Windows do not fill the maps, which is the same without shifted windows; merging pads odd maps.
        (dict(depths=(1, 1, 1, 1)), (92, 116)),
    ],
)
def test_swin_features_are_those_of_timm(kind, options, size):
    theirs = timm_swin(**options)
    ours = swin_like(kind, theirs, options.get('window_size', 7))
    report = load_pretrained(ours, theirs.state_dict())
    assert report.complete, str(report)
    assert report.format == 'timm_swin'
    per_stage = distances(ours, theirs, size)
    assert max(per_stage) < 1e-10, per_stage


def test_where_timm_does_not_shift_the_last_stage_differs():
    # Of timm_swin's docstring: nothing is lost in loading, the forwards are not the same function.
    theirs = timm_swin(always_partition=False)
    ours = swin_like('ours', theirs)
    load_pretrained(ours, theirs.state_dict())
    *same, last = distances(ours, theirs, (224, 224))
    assert max(same) < 1e-10 and last > 1e-5, (same, last)


@pytest.mark.parametrize('kind', ['ours', 'mmdet'])
@pytest.mark.parametrize('size', [(224, 224), (97, 131)])
def test_pvt_v2_features_are_those_of_timm(kind, size):
    theirs, ours = timm_pvt_v2(), pvt_v2_like(kind)
    report = load_pretrained(ours, theirs.state_dict())
    assert report.complete, str(report)
    assert report.format == 'timm_pvt_v2'
    assert any('had 1e-05' in note for note in report.notes), str(report)
    assert max(distances(ours, theirs, size)) > 1e-10, 'timm has another eps in two places, which the note says'
    for name, module in ours.named_modules():
        if name.endswith(('.0.norm', '.attn.norm')):
            module.eps = 1e-5
    per_stage = distances(ours, theirs, size)
    assert max(per_stage) < 1e-10, per_stage


def test_pooling_variant_of_timm_is_refused():
    theirs = timm.models.pvt_v2.PyramidVisionTransformerV2(
        embed_dims=(8, 16, 40, 64), depths=(1, 2, 1, 1), num_heads=(1, 2, 5, 8), linear=True
    )
    with pytest.raises(CheckpointError, match=r'shapes do not fit.*attn\.sr\.weight'):
        load_pretrained(pvt_v2_like('ours'), theirs.state_dict())


@pytest.mark.parametrize(
    'name', ['swinv2_cr_tiny_224', 'swinv2_tiny_window8_256', 'resnet18', 'convnext_atto', 'deit_tiny_patch16_224']
)
def test_other_models_of_timm_are_refused(name):
    with torch.device('meta'):
        state = timm.create_model(name).state_dict()
    for model in (SLABSwin(embed_dims=8, num_heads=(1, 2, 2, 4)), pvt_v2_like('ours')):
        with pytest.raises(CheckpointError, match='looks like (Swin V2|ResNet|ConvNeXt|DeiT or ViT):'):
            load_pretrained(model, state)


def test_windows_that_are_no_square_are_refused():
    theirs = timm_swin(window_size=(3, 5))
    with pytest.raises(CheckpointError, match=r'relative_position_bias_table has 45 positions.*no square'):
        load_pretrained(swin_like('ours', theirs), theirs.state_dict())


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_safetensors_files_load(tmp_path):
    path = tmp_path / 'model.safetensors'
    theirs = timm_pvt_v2()
    save_file(theirs.state_dict(), path)
    ours, expected = pvt_v2_like('ours'), pvt_v2_like('ours')
    load_pretrained(expected, theirs.state_dict())
    report = load_pretrained(ours, path)
    assert report.complete and report.format == 'timm_pvt_v2', str(report)
    assert same_weights(ours, expected)


def test_safetensors_without_the_package_say_so(tmp_path, monkeypatch):
    path = tmp_path / 'model.safetensors'
    save_file({'weight': torch.ones(50)}, path)
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    with pytest.raises(CheckpointError, match='pip install safetensors'):
        load_pretrained(pvt_v2_like('ours'), path)


def serve(monkeypatch, path) -> None:
    """Every download of timm is this file."""

    def download(repo_id: str, filename: str, **kwargs) -> str:
        if not filename.endswith(path.suffix):
            raise timm.models._hub.EntryNotFoundError('no such file')
        return str(path)

    monkeypatch.setattr(timm.models._hub, 'hf_hub_download', download)


@pytest.mark.parametrize('suffix', ['.safetensors', '.bin'])
@pytest.mark.parametrize('name', ['pvt_v2_b0', 'pvt_v2_b0.in1k'])
def test_timm_names_load(tmp_path, monkeypatch, name, suffix):
    path = tmp_path / f'weights{suffix}'
    theirs = timm.create_model('pvt_v2_b0')
    (save_file if suffix == '.safetensors' else torch.save)(theirs.state_dict(), path)
    serve(monkeypatch, path)
    config = dict(embed_dims=32, num_layers=(2, 2, 2, 2), **V2)
    ours = SLABPVT(**config, init_cfg=dict(type='Pretrained', checkpoint=f'timm://{name}'))
    ours.init_weights()
    expected = SLABPVT(**config)
    load_pretrained(expected, theirs.state_dict())
    assert same_weights(ours, expected)
    report = load_pretrained(expected, f'timm://{name}')
    assert report.complete and report.source == f'timm://{name}'


@pytest.mark.parametrize(
    'name', ['swin_enormous', 'pvt_v2_b0.no_such_tag', '', 'hf-hub:someone/swin', 'local-dir:somewhere', 'swin_tiny']
)
def test_unknown_timm_names_say_where_the_names_are(name):
    with pytest.raises(CheckpointError, match=r'timm has no pretrained weights of this name.*list_models'):
        load_pretrained(pvt_v2_like('ours'), f'timm://{name}')


def test_weights_that_cannot_be_downloaded_say_how_to_go_on(monkeypatch):
    def download(**kwargs) -> str:
        raise OSError('no route to host\nTraceback')

    monkeypatch.setattr(timm.models._hub, 'hf_hub_download', download)
    with pytest.raises(CheckpointError, match=r'no route to host.*name that file') as error:
        load_pretrained(pvt_v2_like('ours'), 'timm://pvt_v2_b0')
    assert '\n' not in str(error.value)


class RunsCode:
    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    'variables', [{}, {'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}, {'TORCH_FORCE_WEIGHTS_ONLY_LOAD': '0'}], ids=str
)
def test_downloads_of_timm_run_no_code(tmp_path, monkeypatch, variables):
    for name in ('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    path, proof = tmp_path / 'evil.bin', tmp_path / 'it ran'
    torch.save({'head.bias': RunsCode(os.mkdir, str(proof))}, path)
    serve(monkeypatch, path)
    # As an older timm reads the files of some models.
    monkeypatch.setattr(timm.models._hub, '_torch_load', lambda file, **kwargs: torch.load(file, weights_only=None))
    with pytest.raises(CheckpointError, match='timm cannot get the weights'):
        CheckpointLoader.load_checkpoint('timm://pvt_v2_b0')
    assert not proof.exists()
    assert {key: value for key, value in os.environ.items() if key.startswith('TORCH')} == {
        key: value for key, value in before.items() if key.startswith('TORCH')
    }
    torch.save(timm.create_model('pvt_v2_b0').state_dict(), path)
    assert CheckpointLoader.load_checkpoint('timm://pvt_v2_b0')
