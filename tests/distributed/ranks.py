"""Checks that need several processes, run in all of them: ``python ranks.py PROCESSES FOLDER``.

Importing torch and mmdet takes seconds, so it is done once, and the processes are forked from here. Each writes what it
saw to FOLDER/<rank>.json, where the tests read it.
"""

import slab_det  # noqa: F401, I001 (before mmdet)

import errno
import json
import multiprocessing
import os
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.dist import get_rank, init_dist
from mmengine.hooks import EMAHook
from mmengine.runner import Runner
from recorder import StepRecorder, digest
from regression import Regression, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from slab_det.data.synthetic import generate
from slab_det.runtime.errors import DataError
from slab_det.fusion import verify
from slab_det.hooks import ExactResumeHook, ProgressiveNormHook, RecalibrateFuseHook, recalibrate_fuse
from slab_det.norms import MABN, UN, PowerNorm, PRepBN

CONFIGS = Path(__file__).parents[2] / 'configs'
CHANNELS = 6
# Tokens of each process. A single token alone has no variance.
TOKENS = [5, 1, 7, 3]
# Images of each process in a recalibration: unequal in number and size, and one process has none.
IMAGES = ([(64, 80), (33, 90), (48, 40)], [(90, 33)], [(40, 40), (64, 32)], [])
SIZE = (96, 80)
SMALL = dict(embed_dims=8, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4))


def distance(value, reference):
    """Largest difference, relative to the largest value."""
    return float((value - reference).abs().max() / reference.abs().max())


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
        pairs = {key: (value, by_token[key].split(TOKENS, 1)[get_rank()]) for key, value in own_by_token.items()}
        pairs |= {key: (value, gradients[key]) for key, value in own_gradients.items()}
        pairs |= {key: (value.double(), buffers[key].double()) for key, value in own_buffers.items()}
        found[f'{name}, {recompute}'] = {key: distance(*pair) for key, pair in pairs.items() if pair[1].any()}
    return found


# Recalibration ---------------------------------------------------------------------------------------------------


def backbone():
    torch.manual_seed(0)
    model = MODELS.build(dict(type='SLABSwin', norm_cfg=dict(type='PRepBN'), **SMALL)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * scale)
    slab_det.set_gamma(model, 0)
    return model


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
    statistics = [(model.state_dict()[key], value) for key, value in alone.items() if 'running' in key]
    return {
        'distances': [distance(*pair) for pair in statistics],
        'digest': digest(model.state_dict()),
        'batches': report.num_batches,
        'residuals': report.residuals,
    }


def download_fails():
    # Port 9 of this machine: nothing listens there.
    return message(slab_det.runtime.read_checkpoint, 'http://127.0.0.1:9/swin.pth')


def recalibration_fails_on_one():
    model = backbone().eval()
    before = digest(model.state_dict())
    images = images_of(get_rank())
    if get_rank() == 2:
        images[1][:] = float('nan')
    error = message(slab_det.recalibrate, model, images, 2, 0.01, False)
    return {'error': error, 'unchanged': digest(model.state_dict()) == before}


# A run -----------------------------------------------------------------------------------------------------------


def training(folder):
    """A run with PRepBN, whose statistics are each process's own, and UN, whose statistics are shared."""
    folder, watch = folder / f'regression{get_rank()}', StepRecorder()

    def run(**options):
        norms = iter([PRepBN(4), UN(4, warmup_iters=1)])
        hooks = [ProgressiveNormHook(total=4, unit='iter'), EMAHook(), ExactResumeHook(), watch]
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


def detector_config(folder):
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    cfg.model.backbone.update(window_sizes=(10, 6, 7, 7), **SMALL)
    cfg.model.neck.in_channels = [8, 16, 32, 64]
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.generator = {'num_train': 8, 'num_val': 3, 'size': SIZE}
        loader.update(num_workers=0, persistent_workers=False)
    cfg.val_evaluator.collect_device = cfg.test_evaluator.collect_device = 'gpu'
    cfg.train_dataloader.batch_size = 2
    cfg.train_cfg.max_iters, cfg.train_cfg.val_interval = 1, 10
    cfg.default_hooks.checkpoint.interval = 1
    cfg.custom_hooks = [{'type': 'ProgressiveNormHook', 'total': 0}]
    cfg.launcher, cfg.work_dir = 'pytorch', str(folder / 'detector')
    return cfg


def end_of_run(cfg):
    """RecalibrateFuseHook after a training, first with errors of single processes, then without."""
    cfg.work_dir += str(get_rank())
    runner = Runner.from_cfg(cfg)
    runner.train()
    folder = Path(cfg.work_dir)
    hook = RecalibrateFuseHook(num_images=6, max_passes=2)
    quick = RecalibrateFuseHook(num_images=6, recalibrate=False)
    saved = (folder / 'iter_1.pth').read_bytes() if get_rank() == 0 else None
    found = {}

    def raises(name, target, attribute, value, hook=hook, rank=0):
        original = getattr(target, attribute)
        if get_rank() == rank:
            setattr(target, attribute, value)
        found[name] = message(hook.after_train, runner)
        setattr(target, attribute, original)

    def no_images(*args):
        raise DataError('images/7.png is missing')

    def full_disk(*args):
        raise OSError(errno.ENOSPC, 'No space left on device')

    raises('data', recalibrate_fuse, 'recalibration_dataloader', no_images, rank=3)
    raises('disk', os, 'fsync', full_disk)
    raises('verification', verify, 'FLOAT64_BOUND', -1.0, quick)
    found['intact'] = saved is None or (folder / 'iter_1.pth').read_bytes() == saved
    found['early'] = sorted(path.name for path in folder.glob('*fused*'))
    return found


# Processes -------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return str(listener.getsockname()[1])


def launch():
    """Starts the process group with the default backend, nccl."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        init_dist('pytorch', timeout=60)
    return {'backend': dist.get_backend(), 'warnings': [str(w.message) for w in caught]}


def run(rank, world_size, folder, port, norms, statistics, cfg):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR='127.0.0.1', MASTER_PORT=port
    )
    found = {'launch': launch()}
    found['norms'] = trained_together(norms)
    found['recalibration'] = recalibrated_together(statistics)
    found['failed recalibration'] = recalibration_fails_on_one()
    found['failed download'] = download_fails()
    found['training'] = training(folder)
    found['end of run'] = end_of_run(cfg)
    (folder / f'{rank}.json').write_text(json.dumps(found))


def main(world_size, folder):
    torch.set_num_threads(1)
    register_all_modules(init_default_scope=True)
    slab_det.runtime.install()
    os.environ['SLAB_DET_CACHE'] = str(folder / 'cache')
    generate(num_train=8, num_val=3, size=SIZE)
    every = range(world_size)
    norms = {(name, recompute): trained(name, every, recompute) for name in NORMS for recompute in (False, True)}
    arguments = world_size, folder, free_port(), norms, recalibrated_alone(), detector_config(folder)
    fork = multiprocessing.get_context('fork')
    processes = [fork.Process(target=run, args=(rank, *arguments)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode) for process in processes))


if __name__ == '__main__':
    main(int(sys.argv[1]), Path(sys.argv[2]))
