"""What slab_det uses of PyTorch that no release has to keep: each use, in the oldest and the newest version we allow.

GitHub's workflow runs this file with both. A new use needs a test here that names it.
"""

import ast
import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from mmdet.registry import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

import slab_det
from slab_det.common.errors import DeploymentError
from slab_det.compare.difference import RoundedArithmetic
from slab_det.export import check_parity, export_onnx, load_runtime, random_images
from slab_det.families.layers import linear_relu
from slab_det.fusion.folding import OTHER_NORMS
from slab_det.inference.gpu import kernels
from slab_det.machine import Machine
from slab_det.measure.cost import count_multiply_adds
from slab_det.norms import RepBN, TokenBN
from slab_det.norms.base import is_recomputing
from slab_det.runtime.ops import roi_align_backward

SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
FILES = sorted(Path(slab_det.__file__).parent.rglob('*.py'))
PINNED: set[str] = set()


def pins(*names):
    """Says which private names a test runs."""
    PINNED.update(names)
    return lambda test: test


def is_private(dotted):
    """Whether a dotted name of PyTorch has a private part, or is an operator."""
    parts = dotted.split('.')
    is_name = parts[0] == 'torch' and all(map(str.isidentifier, parts))
    private = any(part.startswith('_') and not part.startswith('__') for part in parts)
    return is_name and (private or (parts[1:2] == ['ops'] and len(parts) > 3))


def private_names(tree, module_attributes):
    """The private names of PyTorch in a file, dotted, and the private attributes of nn.Module."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f'{node.module}.{alias.name}' for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node), *(f'torch.nn.Module.{part}' for part in {node.attr} & module_attributes)]
        elif isinstance(node, ast.FunctionDef):
            names = [f'torch.nn.Module.{part}' for part in {node.name} & module_attributes]
        elif isinstance(node, ast.keyword) and node.arg == 'dynamo':
            names = ['torch._dynamo']
        elif isinstance(node, ast.Constant) and str(node.value).startswith('_') and isinstance(node.value, str):
            # getattr(torch, '_name')
            names = [name for name in PINNED if name.endswith(f'.{node.value}')]
        yield from filter(is_private, names)


def test_every_private_name_has_a_test():
    attributes = {name for name in dir(nn.Module()) if name.startswith('_') and not name.startswith('__')}
    found = {}
    for file in FILES:
        for name in private_names(ast.parse(file.read_text()), attributes):
            found.setdefault(name, file.name)
    assert {name: file for name, file in found.items() if name not in PINNED} == {}
    assert PINNED - found.keys() == set(), 'no longer used: remove the test'


def test_every_name_of_pytorch_exists_in_this_version():
    namespaces, missing = dict(torch=torch, nn=nn, F=F, torchvision=torchvision), []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            first, *others = ast.unparse(node).split('.') if isinstance(node, ast.Attribute) else ['']
            # Annotations are not evaluated, and operators that another PyTorch lacks are read by getattr.
            if first in namespaces and all(map(str.isidentifier, others)):
                try:
                    functools.reduce(getattr, others, namespaces[first])
                except AttributeError:
                    missing.append((file.name, ast.unparse(node)))
    assert not missing


@pins('torch.ops.mkldnn._is_mkldnn_bf16_supported', 'torch.ops.mkldnn._is_mkldnn_fp16_supported')
def test_onednn_says_whether_it_has_half_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX512')
    if torch.backends.mkldnn.is_available():
        assert Machine().multiplies_bfloat16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert Machine().multiplies_float16 == torch.ops.mkldnn._is_mkldnn_fp16_supported()
    monkeypatch.setattr(torch.ops, 'mkldnn', object())
    assert not Machine().multiplies_bfloat16 and not Machine().multiplies_float16, 'a PyTorch without the operators'


@pins('torch._addmm_activation')
def test_linear_layer_with_relu(monkeypatch):
    x, weight, bias = torch.randn(5, 7), torch.randn(6, 7), torch.randn(6)
    expected = F.linear(x, weight, bias).relu()
    torch.testing.assert_close(linear_relu(x, weight, bias), expected)
    monkeypatch.delattr(torch, '_addmm_activation')
    torch.testing.assert_close(linear_relu(x, weight, bias), expected)


@pins('torch.ops.aten._scaled_dot_product_flash_attention_for_cpu')
def test_multiply_adds_of_internal_operators():
    x, weight, q = torch.randn(5, 7), torch.randn(6, 7), torch.randn(1, 2, 9, 4)
    assert count_multiply_adds(lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, 'none', [], 'none')) == 210
    assert count_multiply_adds(lambda: linear_relu(x, weight, weight[:, 0])) == 210
    assert count_multiply_adds(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * (2 * 9 * 9 * 4)


@pins('torch.utils._python_dispatch._get_current_dispatch_mode')
def test_a_dispatch_mode_is_seen():
    seen = []
    count_multiply_adds(lambda: seen.append(kernels._get_current_dispatch_mode()))
    assert kernels._get_current_dispatch_mode() is None and seen[0] is not None


@pins('torch.utils._python_dispatch.TorchDispatchMode')
def test_a_dispatch_mode_changes_results():
    x = torch.tensor([1.001, 2.003])
    with RoundedArithmetic(torch.bfloat16):
        # Several operators return a tuple of a class of their own.
        values, indices = (x * 1).topk(2)
    assert values.tolist() == [2.0, 1.0] and indices.tolist() == [1, 0]


def test_activation_checkpointing_is_seen():
    seen, x = [], torch.randn(3, requires_grad=True)

    def forward(x):
        seen.append(is_recomputing())
        return x.sin()

    for reentrant in (True, False):
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True] * 2 and not is_recomputing()


@pins('torch.ops.aten.native_batch_norm_backward')
def test_gradients_of_batch_norms():
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    for norm in (TokenBN(3).double(), RepBN(3).double()):
        eta = 0.0 if norm.eta is None else norm.eta
        tokens = x.flatten(0, 1)
        expected = F.batch_norm(tokens, None, None, norm.weight, norm.bias, True, 0.0, norm.eps) + eta * tokens
        inputs, weights = (x, *norm.parameters()), torch.randn(10, 3, dtype=torch.float64)
        wanted = torch.autograd.grad((expected * weights).sum(), inputs)
        found = torch.autograd.grad((norm(x).flatten(0, 1) * weights).sum(), inputs)
        torch.testing.assert_close(found, wanted)


@pins('torch.ops.torchvision._roi_align_backward')
def test_gradient_of_roi_align():
    x = torch.randn(1, 2, 9, 11, requires_grad=True)
    rois, grad = torch.tensor([[0, 1.0, 2.0, 7.5, 6.0]]), torch.randn(1, 2, 3, 3)
    (expected,) = torch.autograd.grad(torchvision.ops.roi_align(x, rois, 3, 1.0, 2, True), x, grad)
    options = dict(aligned_height=3, aligned_width=3, spatial_scale=1.0, sampling_ratio=2, pool_mode=1, aligned=True)
    found = torch.zeros_like(x)
    roi_align_backward(grad, rois, None, None, found, **options)
    torch.testing.assert_close(found, expected)


@pins('torch.nn.modules.batchnorm._NormBase')
def test_batch_and_instance_norms_are_known():
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d, nn.LazyBatchNorm2d
    assert all(issubclass(norm, OTHER_NORMS) for norm in norms)


@pins('torch._dynamo', 'torch._shape_as_tensor')
def test_detector_is_traced_to_onnx(small_detector, tmp_path):
    pytest.importorskip('onnxruntime')
    model = small_detector(depths=(1, 1, 1, 1))
    export_onnx(model, tmp_path / 'model.onnx', 'backbone')
    # Another size than the traced one.
    (check,) = check_parity(model, load_runtime(tmp_path / 'model.onnx', threads=1), random_images([(70, 97)]))
    assert check.same


@pins('torch.nn.Module._apply', 'torch.nn.Module._load_from_state_dict', 'torch.nn.Module._load_state_dict_pre_hooks')
@pins(
    'torch.nn.Module._modules',
    'torch.nn.Module._parameters',
    'torch.nn.Module._forward_hooks',
    'torch.nn.Module._forward_pre_hooks',
)
def test_internals_of_modules():
    model = MODELS.build(dict(SWIN, norm_cfg=dict(type='RepBN')))
    assert model.half().patch_embed.norm.running_var.dtype == torch.float32
    model.float().eval()
    model.stages[0].blocks[0].ffn.register_forward_hook(lambda module, args, output: 2 * output)
    model.stages[1].blocks[0].ffn.register_forward_pre_hook(lambda module, args: args)
    x = torch.randn(1, 3, 64, 64)
    expected = model(x)
    deployed = slab_det.deploy(slab_det.fuse(model))
    with torch.no_grad():
        torch.testing.assert_close(deployed(x), expected, rtol=1e-3, atol=1e-3)
    for other in (deployed, copy.deepcopy(deployed)):
        with pytest.raises(DeploymentError, match='is deployed'):
            other.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match='belong to another norm than RepBN'):
        model.patch_embed.norm.load_state_dict(dict(scale=torch.ones(8)), strict=False)
