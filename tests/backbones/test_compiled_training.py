"""Training a backbone under torch.compile, as mmengine's ``compile=True`` does, is training it without."""

import copy

import pytest
import torch
from mmdet.registry import MODELS
from torch._dynamo.testing import CompileCounterWithBackend

from slab_det.norms import set_gamma


class Training:
    """Steps of SGD."""

    def __init__(self, backbone, forward):
        self.backbone, self.forward = backbone, forward
        self.optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01)

    def step(self, images, gamma):
        set_gamma(self.backbone, gamma)
        self.optimizer.zero_grad()
        sum(feature.square().mean() for feature in self.forward(images)).backward()
        self.optimizer.step()
        return copy.deepcopy(self.backbone.state_dict())


@pytest.mark.parametrize('norm, with_cp', [('PRepBN', False), ('PRepBN', True), ('UN', False)])
def test_a_compiled_backbone_trains_to_the_same_weights_and_statistics(norm, with_cp):
    torch._dynamo.reset()
    backbone = MODELS.build(
        dict(
            type='SLABSwin',
            embed_dims=8,
            depths=(1,),
            num_heads=(1,),
            strides=(4,),
            out_indices=(0,),
            drop_path_rate=0.0,
            norm_cfg=dict(type=norm),
            with_cp=with_cp,
        )
    ).train()
    start = copy.deepcopy(backbone.state_dict())
    # Traces and guards as every backend, and needs no C++ compiler.
    counter = CompileCounterWithBackend('aot_eager')
    other = copy.deepcopy(backbone)
    eager, compiled = Training(other, other), Training(backbone, torch.compile(backbone, backend=counter))
    graphs = []
    for width, gamma in ((64, 1.0), (96, 0.8), (64, 0.6), (96, 0.4), (64, 0.2), (96, 0.0), (64, 0.0)):
        images = torch.randn(2, 3, 64, width)
        expected, actual = (training.step(images, gamma) for training in (eager, compiled))
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=f'{name} at gamma {gamma}')
        graphs.append(counter.frame_count)
    assert not all(torch.equal(value, start[name]) for name, value in actual.items() if 'running_var' in name)
    # One set per width; none for each gamma, but for 0, which is another computation.
    assert 0 < graphs[0] < graphs[1] == graphs[4] <= graphs[5] == graphs[6]
