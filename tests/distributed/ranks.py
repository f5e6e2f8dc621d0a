"""What the four gloo processes of test_ranks.py do. Each writes what it saw to <rank>.json, where the tests read it."""

import errno
import hashlib
import json
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from conftest import SMALL_SWIN, as_trained, relative_difference
from mmdet.registry import MODELS
from mmengine.dist import get_rank, get_world_size, init_dist
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import Runner
from regression import Points, Regression, train
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import start_processes
from torch.utils.checkpoint import checkpoint

import slab_det
from slab_det.common.errors import DataError
from slab_det.data.synthetic import generate
from slab_det.hooks import ExactResumeHook, ProgressiveNormHook, RecalibrateFuseHook, recalibrate_fuse
from slab_det.norms import MABN, UN, PowerNorm, PRepBN, named_progressive_norms

NUM_RANKS = 4
CHANNELS = 6
# Tokens of each process. A single token alone has no variance.
TOKENS = [5, 1, 7, 3]
# Images of each process in a recalibration: unequal in number and size, and one process has none.
IMAGES = ([(64, 80), (33, 90), (48, 40)], [(90, 33)], [(40, 40), (64, 32)], [])


def digest(tensors):
    """One word for the bytes of named tensors."""
    sha = hashlib.sha256()
    for name, value in sorted(dict(tensors).items()):
        sha.update(name.encode() + value.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


def message(function, *args):
    """How a call fails: the name of the exception and its words."""
    try:
        function(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


# Norms -----------------------------------------------------------------------------------------------------------

NORMS = {
    'UN': lambda: UN(CHANNELS, warmup_iters=2, window_size=2),
    'MABN': lambda: MABN(CHANNELS, warmup_iters=2, window_size=2),
    'PowerNorm': lambda: PowerNorm(CHANNELS, warmup_iters=2),
}


def tokens_of(rank, step):
    """Tokens, each an image, and the gradients of their outputs; every sixth step has outliers."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens, gradient = torch.randn(2, TOKENS[rank], 1, CHANNELS, generator=generator, dtype=torch.float64)
    return (tokens * (rank + 1) + 3 * rank) * (30 if step % 6 == 5 else 1), gradient


def trained(name, ranks, recompute=False):
    """A norm after steps on the tokens of these ranks: outputs, input gradients, gradients and buffers."""
    torch.manual_seed(0)
    norm = NORMS[name]().double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    by_token = {'output': [], 'input gradient': []}
    for step in range(12):
        x, gradient = map(torch.cat, zip(*(tokens_of(rank, step) for rank in ranks), strict=True))
        x.requires_grad_()
        y = checkpoint(norm, x, use_reentrant=False) if recompute else norm(x)
        y.backward(gradient)
        by_token['output'].append(y.detach().flatten(0, 1))
        by_token['input gradient'].append(x.grad.flatten(0, 1))
    gradients = {key: parameter.grad for key, parameter in norm.named_parameters() if parameter.grad is not None}
    return {key: torch.stack(values) for key, values in by_token.items()}, gradients, dict(norm.named_buffers())


def trained_together(alone):
    """The largest distances to one process with all tokens."""
    found = {}
    for (name, recompute), (by_token, gradients, buffers) in alone.items():
        own_by_token, own_gradients, own_buffers = trained(name, [get_rank()], recompute)
        for gradient in own_gradients.values():
            dist.all_reduce(gradient)
        expected = {key: value.split(TOKENS, 1)[get_rank()] for key, value in by_token.items()} | gradients | buffers
        own = own_by_token | own_gradients | own_buffers
        found[f'{name}, {recompute}'] = {
            key: relative_difference([own[key]], [value]) for key, value in expected.items() if value.any()
        }
    return found


# Recalibration ---------------------------------------------------------------------------------------------------


def backbone():
    return as_trained(MODELS.build(SMALL_SWIN)).double()


def images_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 3, *size, generator=generator, dtype=torch.float64) * (rank + 1) for size in IMAGES[rank]]


def recalibrated_alone():
    model = backbone().eval()
    images = [image for rank in range(len(IMAGES)) for image in images_of(rank)]
    slab_det.recalibrate(model, images, max_passes=4, tol=0, progress=False)
    return model.state_dict()


def recalibrated_together(alone):
    model = backbone().train()
    report = slab_det.recalibrate(model, images_of(get_rank()), max_passes=4, tol=0, progress=False)
    statistics = [([model.state_dict()[key]], [value]) for key, value in alone.items() if 'running' in key]
    return {
        'distances': [relative_difference(*pair) for pair in statistics],
        'digest': digest(model.state_dict()),
        'batches': report.num_batches,
        'residuals': report.residuals,
    }


def recalibration_fails_on_one():
    model = backbone().eval()
    before = digest(model.state_dict())
    images = images_of(get_rank())
    if get_rank() == 2:
        images[1][:] = float('nan')
    error = message(slab_det.recalibrate, model, images, 2, 0.01, False)
    return {'error': error, 'unchanged': digest(model.state_dict()) == before}


# A run -----------------------------------------------------------------------------------------------------------


class StepRecorder(Hook):
    """Notes the model of every iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.notes = {'gammas': [], 'parameters': [], 'states': []}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        gammas = {norm.gamma for norm in named_progressive_norms(runner.model.module).values()}
        self.notes['gammas'].append(sorted(gammas))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = runner.model.module
        self.notes['parameters'].append(digest(model.named_parameters()))
        self.notes['states'].append(digest(model.state_dict()))
        self.notes['find_unused'] = runner.model.find_unused_parameters


def training(folder):
    """A run with PRepBN, whose statistics are each process's own, and UN, whose statistics are shared."""
    folder, watch = folder / f'regression{get_rank()}', StepRecorder()

    def run(**options):
        norms = iter([PRepBN(4), UN(4, warmup_iters=1)])
        hooks = [
            ProgressiveNormHook(total=4 * get_world_size() / len(Points()), unit='epoch'),
            EMAHook(),
            ExactResumeHook(),
            watch,
        ]
        options.update(launcher='pytorch', default_scope='mmengine', max_iters=6, batch_size=1, interval=3)
        return train(folder, hooks, lambda: Regression(lambda c: next(norms)), val=True, accumulate=2, **options)

    loader = run().train_dataloader
    found = {**watch.notes, 'worker seed': iter(loader)._base_seed, 'files': len([*folder.glob('*.pth')])}
    if get_rank() == 0:
        saved = torch.load(folder / 'iter_3.pth', weights_only=False)
        # With EMAHook the model that is trained lies there.
        saved = {key.removeprefix('module.'): value for key, value in saved['ema_state_dict'].items() if key != 'steps'}
        found['saved'] = digest(saved)
    # Only the first process finds a checkpoint in its folder.
    return {**found, 'resume': message(lambda: run(resume=True))}


# The end of a run ------------------------------------------------------------------------------------------------


def end_of_run(cfg):
    """RecalibrateFuseHook after a training, with errors of single processes."""
    cfg.work_dir += str(get_rank())
    cfg.launcher, cfg.val_evaluator.collect_device = 'pytorch', 'gpu'
    cfg.custom_hooks = [{'type': 'ProgressiveNormHook', 'total': 0}]
    cfg.default_hooks.checkpoint.interval = 1
    runner = Runner.from_cfg(cfg)
    runner.train()
    folder = Path(cfg.work_dir)
    hook = RecalibrateFuseHook(num_images=6, max_passes=2)
    saved = (folder / 'iter_1.pth').read_bytes() if get_rank() == 0 else None

    def failed(rank, target, attribute, error):
        fails = mock.patch.object(target, attribute, side_effect=error)
        with fails if get_rank() == rank else nullcontext():
            return message(hook.after_train, runner)

    return {
        'data': failed(3, recalibrate_fuse, 'recalibration_dataloader', DataError('images/7.png is missing')),
        'disk': failed(0, os, 'fsync', OSError(errno.ENOSPC, 'No space left on device')),
        'intact': saved is None or (folder / 'iter_1.pth').read_bytes() == saved,
        'early': sorted(path.name for path in folder.glob('*fused*')),
    }


# Processes -------------------------------------------------------------------------------------------------------


def launch():
    """Starts the process group with the default backend, nccl."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        init_dist('pytorch', timeout=60)
    return {'backend': dist.get_backend(), 'warnings': [str(w.message) for w in caught]}


def start(rank, world_size, port, function, *args):
    addresses = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=port, CUDA_VISIBLE_DEVICES='')
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), **addresses)
    function(*args)


def in_processes(world_size, function, *args):
    """Calls a function in so many processes. They are forked: importing torch and mmdet takes seconds."""
    args = (world_size, str(get_free_port()), function, *args)
    start_processes(start, args, world_size, start_method='fork')


def run(folder, norms, statistics, cfg):
    found = {'launch': launch()}
    found['norms'] = trained_together(norms)
    found['recalibration'] = recalibrated_together(statistics)
    found['failed recalibration'] = recalibration_fails_on_one()
    # Nothing listens at port 9 of this machine.
    found['failed download'] = message(slab_det.runtime.read_checkpoint, 'http://127.0.0.1:9/swin.pth')
    found['training'] = training(folder)
    found['end of run'] = end_of_run(cfg)
    (folder / f'{get_rank()}.json').write_text(json.dumps(found))


def run_all(folder, cfg):
    """Returns what each process wrote."""
    # Not by four processes at a time.
    generate(**cfg.train_dataloader.dataset.generator)
    norms = {(name, recompute): trained(name, range(NUM_RANKS), recompute) for name in NORMS for recompute in (0, 1)}
    in_processes(NUM_RANKS, run, folder, norms, recalibrated_alone(), cfg)
    return [json.loads((folder / f'{rank}.json').read_text()) for rank in range(NUM_RANKS)]
