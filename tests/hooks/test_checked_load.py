"""CheckedLoadHook in runs; tests/checkpoints/test_detector.py has what it refuses and converts."""

from pathlib import Path

import pytest
import torch
from conftest import SMALL_SWIN
from mmengine.runner import Runner

from slab_det.checkpoints import build_detector
from slab_det.norms import named_progressive_norms


def test_load_from_of_a_layernorm_detector_into_mmdets_swin_needs_the_hook_that_the_error_names(small_run_cfg):
    cfg = small_run_cfg(max_iters=1)
    cfg.model.backbone = dict(SMALL_SWIN, type='SwinTransformer', norm_cfg=dict(type='LN'))
    layer_norm = build_detector(cfg)
    cfg.load_from = str(Path(cfg.work_dir).parent / 'layer_norm.pth')
    torch.save(dict(state_dict=layer_norm.state_dict()), cfg.load_from)
    cfg.model.backbone.norm_cfg = dict(type='PRepBN')
    cfg.custom_hooks = []
    del cfg.default_hooks['checked_load']
    with pytest.raises(RuntimeError, match='for load_from of a detector add ') as error:
        Runner.from_cfg(cfg).train()
    remedy = str(error.value).partition('for load_from of a detector add ')[2].partition(' to the config')[0]
    cfg.merge_from_dict(eval(f'dict({remedy})'))
    cfg.experiment_name += '-2'
    runner = Runner.from_cfg(cfg)
    runner.load_or_resume()
    norms = named_progressive_norms(runner.model)
    assert norms and {norm.gamma for norm in norms.values()} == {1.0}
    weights = layer_norm.state_dict()
    assert all(torch.equal(norm.ln.weight, weights[f'{name}.weight']) for name, norm in norms.items())
