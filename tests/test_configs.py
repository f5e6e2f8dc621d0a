"""Every config builds the row it is named after, and ends with the norms that it says."""
import pytest
import torch
from conftest import CONFIGS
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn

import slab_det
from slab_det.layers import OfflineNorm

SWIN_T_NORMS = 1 + 2 * 12 + 3 + 4
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))


@pytest.mark.parametrize('name', NAMES)
def test_config_ends_with_the_norms_it_says(name):
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    model = MODELS.build(cfg.model).eval()
    assert type(model).__name__ == ('FasterRCNN' if name.startswith('faster') else 'MaskRCNN')
    assert ('ProgressiveNormHook' in str(cfg.get('custom_hooks'))) == ('prepbn' in name or 'slab' in name)
    slab_det.set_gamma(model, 0)
    fused = slab_det.fuse(model, inplace=True)
    num_norms = 24 if name.startswith('quickstart') else SWIN_T_NORMS
    report = fused.fusion_report
    kept = len(report.select('kept'))
    assert not report.select('affine') and len(report.norms) == num_norms
    if 'prepbn' not in name and 'slab' not in name:
        assert kept == num_norms
    elif name.endswith('official'):
        assert [fate.norm for fate in report.select('kept')] == [f'backbone.norm{i}' for i in range(4)]
    else:
        assert kept == 0
        assert not [m for m in fused.modules() if isinstance(m, (OfflineNorm, nn.LayerNorm))]


@pytest.mark.parametrize('name', [name for name in NAMES if not name.startswith('quickstart')])
def test_coco_configs_follow_the_papers_recipe(name):
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-4, 0.05)
    assert 'momentum' not in optimizer
    assert cfg.train_cfg.max_epochs == 12
    assert cfg.param_scheduler[0].end == 500 and cfg.param_scheduler[1].milestones == [8, 11]
    assert cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.train_dataloader.dataset.data_root == 'data/coco/'
    assert cfg.model.backbone.drop_path_rate == 0.1
    backbone = MODELS.build(cfg.model.backbone)
    # SLAB: one position per slot in four windows of 56 and 28, where softmax attention has 169 per head.
    positions = 2 * 56 ** 2 * 96 + 2 * 28 ** 2 * 192 if 'slab' in name else 0
    assert sum(p.numel() for p in backbone.parameters()) == pytest.approx(27.5e6 + positions, rel=0.01)


def test_weight_decay_spares_norms_and_position_bias():
    from mmengine.optim import build_optim_wrapper
    cfg = Config.fromfile(CONFIGS / 'mask_rcnn_slab_swin_t.py')
    model = MODELS.build(cfg.model)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared = {names[id(p)] for group in wrapper.optimizer.param_groups if group['weight_decay'] == 0
              for p in group['params']}
    norms = {name for name in names.values() if '.repbn.' in name or '.ln.' in name}
    tables = {name for name in names.values() if name.endswith('relative_position_bias_table')}
    assert spared == norms | tables and len(tables) == 8 and torch.is_tensor(model.backbone.norm0.repbn.eta)
