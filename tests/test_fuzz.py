"""Random models save, load and fuse exactly: forty, or as many as SLAB_DET_FUZZ says."""

from __future__ import annotations

import copy
import io
import math
import os

import pytest
import torch
from conftest import build_detector_cfg, relative_difference
from fuzz_cases import Case, draw_case
from mmdet.registry import MODELS
from torch import Tensor, nn

import slab_det
from slab_det.fusion import FusionError
from slab_det.norms import OfflineNorm

# Law 1: in float32, fusion moves outputs by at most ten times the model's own rounding error. On one image this error
# may be small by chance: where the bound is exceeded, the largest distances over several images are compared. The error
# of focused attention varies most: the largest of 8 images moves tenfold from draw to draw (case 219).
FLOAT64_BOUND = 1e-9
FLOAT32_FACTOR = 10
IMAGES_IN_DOUBT = 32


@pytest.mark.parametrize('seed', range(int(os.environ.get('SLAB_DET_FUZZ', 40))))
def test_a_random_case_saves_loads_and_fuses_exactly_or_is_refused_where_gamma_is_left(seed):
    case = draw_case(seed)
    # pytest shows it when the test fails.
    print(case)
    model = build_model(case)
    inputs = draw_inputs(case)
    before = run(model, *inputs)
    assert before and all(output.isfinite().all() for output in before), 'an output is not finite'
    check_reload(model, build_model(case, seed=case.seed + 1), before, inputs)
    if any(norm.gamma > 0 for norm in model.modules() if hasattr(norm, 'gamma')):
        # A norm that still contains LayerNorm is no affine map.
        with pytest.raises(FusionError, match='gamma'):
            slab_det.fuse(model)
        return
    fused = slab_det.fuse(model)
    left = [name for name, module in fused.named_modules() if isinstance(module, OfflineNorm)]
    assert not left, f'fused, and still there: {left}'
    check_equal(before, run(model, *inputs), 'the model after a fused copy was made')
    folds = [fusion.to_dict() for fusion in fused.fusion_report.norms]
    rebuilt = MODELS.build(dict(type='FusedDetector', model=model_config(case), folds=folds)).to(case.dtype)
    check_reload(fused, rebuilt, run(fused, *inputs), inputs)

    model64 = copy.deepcopy(model).double()
    inputs64 = [x.double() for x in inputs]
    float64 = distance(run(slab_det.fuse(model64), *inputs64), run(model64, *inputs64))
    assert float64 <= FLOAT64_BOUND, f'fused and unfused differ by {float64:g} in float64'
    if case.dtype == torch.float64:
        return
    ratio = measure_float32_ratio(case, model, fused, model64, num_images=1)
    if ratio > FLOAT32_FACTOR:
        ratio = measure_float32_ratio(case, model, fused, model64, IMAGES_IN_DOUBT)
    assert ratio <= FLOAT32_FACTOR, f'fused and unfused differ in float32 by {ratio:g} times rounding'


def check_reload(model: nn.Module, other: nn.Module, expected: list[Tensor], inputs: tuple[Tensor, Tensor]) -> None:
    """``other``, of the same config, computes the same to the last bit once it has the saved weights of ``model``."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.eval()
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    check_equal(expected, run(other, *inputs), 'the model after saving and loading')


def check_equal(expected: list[Tensor], got: list[Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(a, b), f'{what} differs in output {i} by {(a - b).abs().max():g}'


def measure_float32_ratio(case: Case, model: nn.Module, fused: nn.Module, model64: nn.Module, num_images: int) -> float:
    """Over several draws of images, the largest distance of ``fused`` over the model's own to its float64 self."""
    distances = []
    for i in range(num_images):
        inputs = draw_inputs(case, seed=case.seed + i)
        plain = run(model, *inputs)
        own = distance(plain, run(model64, *(x.double() for x in inputs)))
        distances.append((distance(run(fused, *inputs), plain), own))
    apart, own = torch.tensor(distances, dtype=torch.float64).max(0).values.tolist()
    if own == 0:
        return math.inf if apart else 0.0
    return apart / own


def distance(outputs: list[Tensor], references: list[Tensor]) -> float:
    """The relative difference of the outputs that are not equal: an output of zeros has none."""
    pairs = [pair for pair in zip(outputs, references, strict=True) if not torch.equal(*(x.double() for x in pair))]
    return relative_difference(*zip(*pairs, strict=True)) if pairs else 0.0


def build_model(case: Case, seed: int | None = None) -> nn.Module:
    """The model of a case, every weight and statistic random, in eval mode."""
    model = MODELS.build(model_config(case)).to(case.dtype)
    fill_at_random(model, case.seed if seed is None else seed)
    slab_det.set_gamma(model, case.gamma)
    # mmdet's Swin returns None from eval().
    model.eval()
    return model


def fill_at_random(model: nn.Module, seed: int) -> None:
    """No two numbers alike; variances over two decades, etas of either sign, some channels without weight."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for name, tensor in state.items():
        if not tensor.is_floating_point() or name.endswith('_gamma'):
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith('running_var'):
            noise = torch.pow(10.0, 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1)
        elif tensor.ndim > 1:
            noise /= tensor[0].numel() ** 0.5
        else:
            noise[torch.rand(tensor.shape, generator=generator) < 0.05] = 0.0
        state[name] = noise.to(tensor)
    model.load_state_dict(state)


def model_config(case: Case) -> dict:
    """The config of a case's backbone or detector."""
    backbone = copy.deepcopy(case.backbone)
    if case.part == 'backbone':
        return backbone
    model = build_detector_cfg(case.part)
    model.backbone = backbone
    model.neck.update(in_channels=output_channels(backbone), **case.neck)
    strides = [4 * 2**level for level in range(case.neck['num_outs'])]
    model.rpn_head.anchor_generator.strides = strides
    for extractor in (model.roi_head.bbox_roi_extractor, model.roi_head.mask_roi_extractor):
        if extractor:
            extractor.featmap_strides = strides[:4]
    return model


def output_channels(backbone: dict) -> list[int]:
    """Channels of every output of a backbone, which are in the order of the stages."""
    stages = sorted(backbone['out_indices'])
    if 'depths' in backbone:
        return [backbone['embed_dims'] * 2**stage for stage in stages]
    return [backbone['embed_dims'] * backbone['num_heads'][stage] for stage in stages]


def draw_inputs(case: Case, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Images, and regions of them: (batch, x1, y1, x2, y2) each."""
    generator = torch.Generator().manual_seed(case.seed if seed is None else seed)
    images = torch.randn(case.batch, 3, *case.size, generator=generator, dtype=torch.float64)
    height, width = case.size
    corners = torch.rand(6, 2, 2, generator=generator, dtype=torch.float64).sort(1).values
    boxes = (corners * torch.tensor([width, height])).flatten(1)
    index = torch.arange(6) % case.batch
    return images.to(case.dtype), torch.cat([index[:, None], boxes], 1).to(case.dtype)


@torch.no_grad()
def run(model: nn.Module, images: Tensor, regions: Tensor) -> list[Tensor]:
    """All that a model computes but for the choice of regions, which jumps where scores tie."""
    if not hasattr(model, 'rpn_head'):
        return list(model(images))
    features = model.extract_feat(images)
    scores, deltas = model.rpn_head(features)
    regional = model.roi_head._bbox_forward(features, regions)
    outputs = [*features, *scores, *deltas, regional['cls_score'], regional['bbox_pred']]
    if model.roi_head.with_mask:
        outputs.append(model.roi_head._mask_forward(features, regions)['mask_preds'])
    return outputs
