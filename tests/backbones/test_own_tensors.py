"""A forward reads the current weights, however they were written: loaded, assigned, averaged or through ``.data``."""

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import differing, randomize, relative_difference
from test_backbones import CSWIN, PVT, SWIN, VIT, build
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SLAB = {**SWIN, 'attention': ('sla', 'softmax', 'focused'), 'window_sizes': (8, 7, 4)}
MODELS = {'Swin': SWIN, 'SLAB': SLAB, 'PVT': PVT, 'CSWin': CSWIN, 'ViT': {**VIT, 'norm_cfg': dict(type='LN')}}
ALL = pytest.mark.parametrize('small', MODELS.values(), ids=MODELS)
IMAGE = torch.randn(1, 3, 61, 78, generator=torch.Generator().manual_seed(3))


def used(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and floating-point buffers that a forward reads, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


@ALL
@torch.no_grad()
def test_a_state_dict_holds_the_parameters_themselves(small):
    model = build(small)
    tensors = used(model)
    assert all(
        value.data_ptr() == tensors[key].data_ptr() for key, value in model.state_dict().items() if key in tensors
    )


def _copy_data(model, source):
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data.copy_(theirs)


def _swap_data(model, source):
    # As EMAHook does before validation.
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        ours.data, theirs.data = theirs.data.clone(), ours.data.clone()


WRITES = {
    'data.copy_': _copy_data,
    'swap': _swap_data,
    'vector_to_parameters': lambda model, source: vector_to_parameters(
        parameters_to_vector(source.parameters()), model.parameters()
    ),
    'load_state_dict': lambda model, source: model.load_state_dict(source.state_dict()),
    'assign': lambda model, source: model.load_state_dict(source.state_dict(), assign=True),
}


@pytest.mark.parametrize('write', WRITES.values(), ids=WRITES)
@ALL
@torch.no_grad()
def test_forward_reads_the_weights_that_were_written_last(small, write):
    model, source = build(small).eval(), randomize(build(small)).eval()
    model(IMAGE)
    expected = source(IMAGE)
    write(model, source)
    assert relative_difference(model(IMAGE), expected) < 1e-6


@ALL
def test_fsdp_on_one_process_trains_to_the_same_weights(small, tmp_path):
    model = build(small, drop_path_rate=0.0).train()
    sharded = copy.deepcopy(model)
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        sharded = FullyShardedDataParallel(sharded, device_id=torch.device('cpu'), use_orig_params=True)
        for module in (model, sharded):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            sum(feature.square().mean() for feature in module(IMAGE)).backward()
            optimizer.step()
        assert not differing(model, sharded.state_dict())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    'small',
    [
        dict(SLAB, depths=(2, 1, 1), attention=('softmax', 'sla', 'focused')),
        dict(PVT, num_layers=(1, 1, 1, 1)),
        dict(CSWIN, depths=(1, 1, 1, 1)),
        MODELS['ViT'],
    ],
    ids=lambda small: small['type'],
)
def test_torch_compile_takes_the_whole_backbone(small):
    torch._dynamo.reset()
    model = build(small, drop_path_rate=0.0).train()
    # Every break of the graph is an error.
    compiled = torch.compile(model, backend='eager', fullgraph=True, dynamic=False)
    assert relative_difference(compiled(IMAGE), model(IMAGE)) < 1e-5
