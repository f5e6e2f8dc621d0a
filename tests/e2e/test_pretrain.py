"""Classifiers of mmpretrain go the way of detectors: training, recalibration, fusion, test, report."""

import pickle
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import CONFIGS, NEEDS_MMPRETRAIN, differing
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope

import slab_det
from slab_det.checkpoints import load_pretrained
from slab_det.measure.cost import count_multiply_adds
from slab_det.measure.report import read_report
from slab_det.norms import named_offline_norms

pytestmark = NEEDS_MMPRETRAIN
# Drop-path, and the share of the run in which gamma falls.
RECIPES = {
    'swin_t': (0.2, None),
    'prepbn_swin_t': (0.1, 0.8),
    'slab_swin_t': (0.2, 60000 / 375300),
    'swin_s': (0.3, None),
    'prepbn_swin_s': (0.3, 0.8),
    'slab_swin_s': (0.3, 60000 / 375300),
    'pvt_t': (0.1, None),
    'prepbn_pvt_t': (0.0, 0.8),
    'slab_pvt_t': (0.0, 0.8),
    'pvt_s': (0.1, None),
    'prepbn_pvt_s': (0.1, 0.8),
    'slab_pvt_s': (0.1, 0.8),
    'deit_t': (0.1, None),
    'prepbn_deit_t': (0.0, 0),
    'slab_deit_t': (0.0, 60000 / 375300),
    'deit_s': (0.1, None),
    'prepbn_deit_s': (0.0, 0.8),
    'slab_deit_s': (0.0, 60000 / 375300),
    'cswin_t': (0.2, None),
    'slab_cswin_t': (0.1, 120000 / 375300),
    'cswin_s': (0.4, None),
    'slab_cswin_s': (0.3, 120000 / 375300),
}
# Millions of parameters and G multiply-adds as the papers of Swin and PVT, which has DeiT too, print them.
PUBLISHED = {
    'swin_t': ('28', '4.5'),
    'swin_s': ('50', '8.7'),
    'pvt_t': ('13.2', '1.9'),
    'pvt_s': ('24.5', '3.8'),
    'deit_t': ('5.7', '1.3'),
    'deit_s': ('22.1', '4.6'),
    # With transformers in its first module.
    't2t_vit_14': ('21.5', '6.1'),
}
# Of each stage at 224: blocks, tokens, channels, heads, reduction of the keys.
PVT_STAGES = {
    'pvt_t': ((2, 3136, 64, 1, 8), (2, 784, 128, 2, 4), (2, 196, 320, 5, 2), (2, 49, 512, 8, 1)),
    'pvt_s': ((3, 3136, 64, 1, 8), (4, 784, 128, 2, 4), (6, 196, 320, 5, 2), (3, 49, 512, 8, 1)),
}


# Parameters of Microsoft's own code, in which they were counted; its README prints 23M and 35M, 4.3G and 6.9G.
CSWIN_PARAMETERS = {'cswin_t': 22_320_552, 'cswin_s': 34_643_304}
# UN's Table 2. Norms, and the epochs on ImageNet.
UN_ROWS = {'un_t2t_vit_14': (2 * (2 + 14) + 1, 310), 'un_swin_t': (1 + 2 * 12 + 3 + 1, 300)}
UN_CONFIGS = [f'{row}_{data}' for row in UN_ROWS for data in ('in1k', 'cifar10', 'cifar100')]


def load(row: str) -> Config:
    name = row if row in UN_CONFIGS else f'{row}_in1k'
    return Config.fromfile(CONFIGS / 'pretrain' / f'{name}.py')


def linear_attention(tokens: int, dims: int, heads: int) -> int:
    """Two products with a (C, C) and a (C, C + h) matrix, in which the heads lie, and the 5x5 convolution."""
    return tokens * dims * (2 * dims + heads) + 25 * tokens * dims


def more_in_slab(size: str) -> int:
    """Multiply-adds that linear attention has more than softmax attention, by hand."""
    if 'swin' in size:
        # In windows of 7x7, two blocks in each of the first two stages.
        return sum(2 * (linear_attention(n, c, h) - 2 * n * 49 * c) for n, c, h in ((3136, 96, 3), (784, 192, 6)))
    if 'deit' in size:
        # Twelve blocks on 196 tokens; with softmax there is a class token too.
        c, h = (192, 3) if size == 'deit_t' else (384, 6)
        return 12 * (linear_attention(196, c, h) - 12 * c * c - 2 * 197 * 197 * c)
    return sum(
        blocks
        * (
            linear_attention(n, c, h)
            + 2 * n * c * c
            # The convolution that reduces, keys and values, and the two products.
            - ((n * c * c if ratio > 1 else 0) + 2 * n // ratio**2 * c * c + 2 * n * n // ratio**2 * c)
        )
        for blocks, n, c, h, ratio in PVT_STAGES[size]
    )


def more_parameters_in_slab(size: str) -> int:
    """Positions and the 5x5 convolution of the values of one head, less what softmax attention has in their place."""
    if 'swin' in size:
        # A table of 13 x 13 positions for each head.
        return sum(2 * (n * c + 26 * 32 - 169 * h) for n, c, h in ((3136, 96, 3), (784, 192, 6)))
    if 'deit' in size:
        # The class token.
        c = 192 if size == 'deit_t' else 384
        return 12 * (196 * c + 26 * 64) - c
    # The convolution that reduces, and its PRepBN.
    return sum(
        blocks * (n * c + 26 * 64 - (c * c * ratio**2 + c + 4 * c + 1 if ratio > 1 else 0))
        for blocks, n, c, _, ratio in PVT_STAGES[size]
    )


def cswin_multiply_adds(depths: tuple[int, ...], linear_stages: int) -> int:
    """By hand: patches, and of each block the linear layers, both convolutions of the values and the products."""
    count, previous = 512 * 1000, 3
    for stage, (depth, heads, width) in enumerate(zip(depths, (2, 4, 8, 16), (1, 2, 7, 7), strict=True)):
        side, dims = 56 >> stage, 64 << stage
        tokens = side * side
        count += tokens * dims * previous * (9 if stage else 49)
        is_linear = stage < linear_stages
        mixing = linear_attention(tokens, dims, heads) if is_linear else 2 * tokens * side * width * dims
        count += depth * (12 * tokens * dims * dims + 9 * tokens * dims + mixing)
        previous = dims
    return count


def test_every_row_has_its_config():
    names = {path.stem for path in (CONFIGS / 'pretrain').glob('*.py')}
    assert names == {*(f'{row}_in1k' for row in RECIPES), *UN_CONFIGS, 't2t_vit_14_in1k'}


def assert_printed(size: str, parameters: float, multiply_adds: int) -> None:
    for count, printed in zip((parameters / 1e6, multiply_adds / 1e9), PUBLISHED[size], strict=True):
        assert f'{count:.{len(printed.partition(".")[2])}f}' == printed


@pytest.fixture
def no_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at no weight: models of full size take longer to fill than to build."""
    monkeypatch.setattr(torch.nn.init, 'kaiming_uniform_', lambda tensor, **options: torch.nn.init.zeros_(tensor))


@pytest.mark.usefixtures('no_random_weights')
@pytest.mark.parametrize('row', RECIPES)
def test_classifier_has_the_recipe_and_the_size_of_its_row(row):
    cfg, size = load(row), re.search('(c?swin|pvt|deit)_.', row)[0]
    drop_path, total = RECIPES[row]
    assert cfg.model.backbone.drop_path_rate == drop_path
    hooks = {hook.type: hook for hook in cfg.get('custom_hooks', [])}
    average = hooks.pop('EMAHook').momentum if 'cswin' in row else None
    assert average == (1e-4 if 'slab_cswin' in row else 8e-5 if 'cswin' in row else None)
    assert hooks.keys() == ({'ProgressiveNormHook', 'RecalibrateFuseHook'} if total is not None else set())
    assert total is None or hooks['ProgressiveNormHook'].total == total
    assert (cfg.train_cfg.max_epochs, cfg.auto_scale_lr.base_batch_size) == (300, 1024)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-3, 0.05)
    clips, warm_up = (False, 5) if 'pvt' in row else ('cswin' not in row, 20)
    assert (cfg.optim_wrapper.clip_grad is not None, cfg.param_scheduler[0].end) == (clips, warm_up)

    init_default_scope('mmpretrain')
    model = MODELS.build(cfg.model).eval()
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    decays = {id(parameter): group['weight_decay'] > 0 for group in groups for parameter in group['params']}
    for name, parameter in model.named_parameters():
        is_spared = parameter.ndim < 2 or re.search('bias_table|cls_token|positions.pos_embed', name)
        assert decays[id(parameter)] == (not is_spared), name

    slab_det.set_gamma(model, 0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    multiply_adds = count_multiply_adds(lambda: model(torch.zeros(1, 3, 224, 224)))
    if 'cswin' in row:
        assert multiply_adds == cswin_multiply_adds(cfg.model.backbone.depths, 2 if 'slab' in row else 0)
        assert 'slab' in row or parameters == CSWIN_PARAMETERS[row]
        return
    if 'slab' in row:
        multiply_adds -= more_in_slab(size)
        parameters -= more_parameters_in_slab(size)
    assert_printed(size, parameters, multiply_adds)


@pytest.mark.usefixtures('no_random_weights')
@pytest.mark.parametrize('name', UN_CONFIGS)
def test_un_has_the_recipe_of_its_row(name):
    cfg, (row, data) = load(name), name.rsplit('_', 1)
    norms, epochs = UN_ROWS[row]
    init_default_scope('mmpretrain')
    # As --cfg-options does.
    for norm in ('TokenBN', 'MABN', 'PowerNorm', 'UN') if data == 'in1k' else ('UN',):
        cfg.merge_from_dict({'model.backbone.norm_cfg.type': norm})
        model = MODELS.build(cfg.model)
        assert [type(module).__name__ for _, module in named_offline_norms(model)] == [norm] * norms
        assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
    hooks = [hook.type for hook in cfg.custom_hooks]
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    if data == 'in1k':
        assert hooks == ['EMAHook'] * ('t2t' in row) + ['RecalibrateFuseHook']
        # In proportion to the batch.
        assert cfg.optim_wrapper.optimizer.lr / cfg.auto_scale_lr.base_batch_size == 5e-4 / 512
        assert (cfg.train_cfg.max_epochs, cfg.optim_wrapper.clip_grad is None) == (epochs, 't2t' in row)
        size = row.removeprefix('un_')
        multiply_adds = count_multiply_adds(lambda: model.eval()(torch.zeros(1, 3, 224, 224)))
        assert_printed(size, sum(parameter.numel() for parameter in model.parameters()), multiply_adds)
        return
    assert (
        cfg.train_cfg.max_epochs,
        hooks,
        model.head.fc.out_features if 'swin' in row else model.head.layers.head.out_features,
    ) == (60, ['RecalibrateFuseHook'], int(data.removeprefix('cifar')))
    rates = {id(parameter): group['lr'] for group in groups for parameter in group['params']}
    for key, parameter in model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(0.05 if key.startswith('head') else 0.0005), key
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        assert loader.dataset.type.lower() == data and loader.dataset.data_root.rstrip('/') == f'data/{data}'
        # A picture of CIFAR goes through to the size of the model.
        pipeline = Compose(loader.dataset.pipeline)
        picture = dict(img=np.zeros((32, 32, 3), np.uint8), gt_label=0, img_shape=(32, 32), ori_shape=(32, 32))
        assert pipeline(picture)['inputs'].shape == (3, 224, 224)
    assert cfg.load_from == f'work_dirs/{row}_in1k/epoch_{epochs}.pth'


def draw_shapes(root: Path) -> None:
    """Disks and squares of any colour on noise, 64x64, 16 to train on and 8 to test on."""
    rng = np.random.default_rng(0)
    for split, count in (('train', 8), ('val', 4)):
        for name in ('disk', 'square'):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                image = rng.integers(0, 100, (64, 64, 3), dtype=np.uint8)
                colour, (x, y) = rng.integers(150, 256, 3).tolist(), rng.integers(20, 44, 2).tolist()
                if name == 'disk':
                    cv2.circle(image, (x, y), 14, colour, -1)
                else:
                    cv2.rectangle(image, (x - 12, y - 12), (x + 12, y + 12), colour, -1)
                cv2.imwrite(str(root / split / name / f'{index}.png'), image)


def shrink(cfg: Config) -> Config:
    """The twin of a config for the shapes: fewer channels, blocks, pixels and epochs; all else is the config's own."""
    backbone = cfg.model.backbone
    backbone.update(embed_dims=8, pretrain_img_size=64)
    if 'T2T' in backbone.get('model', backbone).type:
        del backbone.embed_dims, backbone.pretrain_img_size
        backbone.model.update(img_size=64, embed_dims=64, num_layers=2, t2t_cfg=dict(token_dims=8))
        backbone.model.layer_cfgs = dict(num_heads=4, feedforward_channels=64)
    elif 'Swin' in backbone.type:
        backbone.update(depths=(1, 1, 2, 1), num_heads=(2, 2, 4, 8))
        if 'window_sizes' in backbone:
            backbone.window_sizes = (16, 8, 7, 7)
    elif 'PVT' in backbone.type:
        backbone.update(num_layers=(1, 1, 1, 1))
    else:
        backbone.update(embed_dims=64, num_heads=4, num_layers=2)
    cfg.model.head.update(num_classes=2, in_channels=64)
    cfg.data_preprocessor.num_classes = 2
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        for transform in loader.dataset.pipeline:
            transform.update({key: value * 2 // 7 for key, value in transform.items() if key in ('scale', 'crop_size')})
        loader.update(batch_size=8, num_workers=0)
        if 'CIFAR' in loader.dataset.type:
            continue
        folder = 'train' if split == 'train' else 'val'
        loader.dataset = dict(
            type='CustomDataset', data_root='nowhere', data_prefix=folder, pipeline=loader.dataset.pipeline
        )
    cfg.val_evaluator.topk = cfg.test_evaluator.topk = (1,)
    cfg.train_cfg.max_epochs = 3
    cfg.param_scheduler = None
    cfg.default_hooks.logger.interval = 1
    return cfg


@pytest.mark.parametrize(
    ('row', 'affine'),
    [('prepbn_pvt_t', 0), ('slab_deit_t', 1), ('slab_cswin_t', 1), ('un_t2t_vit_14', 1)],
)
def test_classifier_goes_the_whole_way(row, affine, tmp_path, call):
    draw_shapes(tmp_path / 'shapes')
    shrink(load(row)).dump(tmp_path / 'small.py')

    call('train.py', 'small.py', '--work-dir', 'run', '--data-root', 'shapes')
    for model in (('small.py', 'run/epoch_3.pth'), ('run/fused_config.py', 'run/fused.pth')):
        options = '--work-dir tested --report run/report.json --latency --rounds 2 --warmup 1'.split()
        out = call('test.py', *model, '--data-root', 'shapes', *options).out
        # It would swap in the statistics of before the recalibration.
        assert '| top-1 accuracy / top5 |' in out and 'EMAHook' not in out
    unfused, fused = read_report('run/report.json')
    assert unfused.ap == fused.ap and unfused.ap['accuracy']['top1'] in [count / 8 for count in range(9)]
    assert fused.latency['median_ms'] > 0 and fused.latency['size'] == [64, 64]
    assert fused.fusion['kept'] == 0 and fused.fusion['affine'] == affine
    assert 0 < fused.fusion['difference']['float64'] < 1e-9
    table = call('report.py', 'run/report.json', '--out', 'table').out
    assert 'accuracy on shapes/val (8 images); trained seed' in table
    assert 'top-1 accuracy' in Path('table/ap_latency.svg').read_text()

    # With the mean and deviation of the images that stand beside the model, a second recalibration finds the same.
    call('recalibrate.py', 'small.py', 'run/epoch_3.pth', '--out', 'again.pth', '--data-root', 'shapes')
    trained, again = (torch.load(path, weights_only=False)['state_dict'] for path in ('run/epoch_3.pth', 'again.pth'))
    assert not differing(trained, again)
    call('fuse.py', 'small.py', 'run/epoch_3.pth', '--out', 'fused_again.pth')

    if 't2t' in row:
        return
    # A detector on the same backbone, which has the output norms of four stages where there are stages.
    detector = Config.fromfile('small.py').model.backbone
    detector.init_cfg = dict(type='Pretrained', checkpoint='run/epoch_3.pth')
    if 'out_indices' in detector:
        detector.out_indices = (0, 1, 2, 3)
    backbone = MODELS.build(detector)
    report = load_pretrained(backbone, 'run/epoch_3.pth')
    assert report.complete
    backbone.init_weights()
    loaded, given = backbone.state_dict(), {k.removeprefix('backbone.'): v for k, v in trained.items()}
    for key in given.keys() - {'head.fc.weight', 'head.fc.bias'}:
        assert torch.equal(loaded[key], given[key]), key


def test_cifar_goes_the_whole_way(tmp_path, call, monkeypatch):
    from mmpretrain.datasets import CIFAR10

    rng, folder = np.random.default_rng(0), tmp_path / 'cifar' / CIFAR10.base_folder
    folder.mkdir(parents=True)
    for name, count in (('train', 16), ('test', 8)):
        labels = [index % 2 for index in range(count)]
        pixels = rng.integers(0, 100, (count, 3 * 32 * 32)) + 100 * np.array(labels)[:, None]
        (folder / name).write_bytes(pickle.dumps(dict(data=pixels.astype(np.uint8), labels=labels)))
        # The digests of the real files.
        monkeypatch.setattr(CIFAR10, f'{name}_list', [(name, None)])
    (folder / 'batches.meta').write_bytes(pickle.dumps(dict(label_names=['dark', 'light'])))
    monkeypatch.setattr(CIFAR10, 'meta', dict(filename='batches.meta', key='label_names', md5=None))
    cfg = shrink(load('un_swin_t_cifar10'))
    cfg.model.head.num_classes = cfg.data_preprocessor.num_classes = 10
    cfg.load_from = None
    cfg.dump(tmp_path / 'small.py')
    for command in (
        'train.py small.py --work-dir run --data-root cifar',
        'test.py run/fused_config.py run/fused.pth --data-root cifar --report run/report.json --latency --rounds 2',
    ):
        call(*command.split())
    (fused,) = (entry for entry in read_report('run/report.json') if entry.variant == 'fused')
    assert 0 < fused.fusion['difference']['float64'] < 1e-9 and fused.fusion['kept'] == 0
    assert fused.ap['accuracy']['top1'] in [count / 8 for count in range(9)] and fused.latency['median_ms'] > 0


def test_flags_for_detectors_are_refused(tmp_path, call):
    load('swin_t').dump(tmp_path / 'config.py')
    result = call('test.py', 'config.py', 'none.pth', '--show-dir', 'drawn', code=1)
    assert '--show-dir are for detectors' in result.err
