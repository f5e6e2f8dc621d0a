"""A norm defined outside the package goes the whole way: training, recalibration, conversion, fusion, deployment."""

from pathlib import Path

import pytest
import torch
from conftest import SLA, relative_difference
from mmdet.registry import MODELS
from mmengine.runner import Runner
from torch import Tensor, nn

import slab_det
from slab_det.fusion.verify import extract_features, verify_fusion
from slab_det.norms import OfflineNorm, named_offline_norms

IMAGES = [torch.rand(1, 3, 70, 90), torch.rand(2, 3, 64, 50)]


# docs/extend.md shows this class.
class BatchRMSNorm(OfflineNorm):
    """``weight * x / sqrt(q + eps) + bias``: RMSNorm whose q, the mean of x^2, is taken over tokens, per channel."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))

    def train_forward(self, x: Tensor) -> Tensor:
        square = x.float().square().flatten(0, -2).mean(0)
        self.running_var.lerp_(square.detach(), self.momentum)
        return x * (self.weight * (square + self.eps).rsqrt()) + self.bias

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        return self.weight * (self.running_var + self.eps).rsqrt(), self.bias

    def statistics(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.running_var), self.running_var

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        self.running_var.copy_(var + mean.square())


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    # A config would name the module in custom_imports, and the class would have @MODELS.register_module().
    monkeypatch.setitem(MODELS.module_dict, 'BatchRMSNorm', BatchRMSNorm)


def custom_norms(model: nn.Module) -> list[OfflineNorm]:
    return [norm for _, norm in named_offline_norms(model) if isinstance(norm, BatchRMSNorm)]


def assert_deployed_detector_is_exact(model: nn.Module) -> None:
    """Fused and deployed, the detector computes what ``model`` does, and none of its norms is left."""
    model, images = model.double(), [image.double() for image in IMAGES]
    fused = slab_det.fuse(model)
    assert not custom_norms(fused)
    check = verify_fusion(model, fused, images)
    assert 0 < check.float64 < 1e-9, check
    deployed = slab_det.deploy(fused)
    for image in images:
        assert relative_difference(extract_features(deployed, image), extract_features(model, image)) < 1e-9


def test_a_run_trains_recalibrates_and_fuses_it(small_run_cfg):
    runner = Runner.from_cfg(small_run_cfg(norm_cfg=dict(type='BatchRMSNorm'), **SLA))
    start = [norm.weight.detach().clone() for norm in custom_norms(runner.model)]
    runner.train()
    norms = custom_norms(runner.model)
    assert len(norms) == len(start) > 10
    assert not any(map(torch.equal, start, (norm.weight for norm in norms))), 'parameters that did not train'
    assert not any((norm.running_var == 1).any() for norm in norms), 'statistics that saw no data'
    fused = torch.load(Path(runner.work_dir) / 'fused.pth', weights_only=False)
    assert not any('running_var' in key for key in fused['state_dict'])
    assert_deployed_detector_is_exact(runner.model.eval())


def test_a_layer_norm_detector_is_converted_to_it(small_detector):
    model = slab_det.convert_norms(small_detector(norm_cfg=dict(type='LN')), dict(type='BatchRMSNorm'))
    assert len(custom_norms(model)) > 10
    report = slab_det.recalibrate(model, IMAGES, progress=False)
    assert report.converged
    assert_deployed_detector_is_exact(model)


class ScaleAndShift(BatchRMSNorm):
    """A norm with no buffer in floating point, one that it does not use, and one in a module of its own."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        del self.running_var
        self.register_buffer('unused', None)
        self.counter = nn.Module()
        self.counter.register_buffer('batches', torch.zeros((), dtype=torch.int64))

    def train_forward(self, x: Tensor) -> Tensor:
        self.counter.batches += 1
        return x * self.weight + self.bias

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias

    def statistics(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.weight), torch.ones_like(self.weight)


def test_a_norm_may_have_any_buffers():
    norm, x = ScaleAndShift(4), torch.rand(2, 5, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).sum().backward()
    norm(x)
    assert norm.counter.batches == 2
    norm.calibrating = True
    norm(x)
    assert norm.counter.batches == 2
    norm.half()
    norm.load_state_dict(norm.state_dict())
    assert norm.unused is None


def test_recomputation_leaves_its_statistics():
    norm, x = BatchRMSNorm(4), torch.rand(2, 5, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(norm.running_var, (0.9 + 0.1 * x.square().mean((0, 1))).detach())
