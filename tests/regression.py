"""Runs of a small regression, for hooks that need no detector."""

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from slab_det.norms import PRepBN


class Points(Dataset):
    """Eight items of five random points each, and what the regression shall make of them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(5, 4, generator=generator) * 3 + 1, torch.randn(5, 2, generator=generator)


class Regression(BaseModel):
    """Two norms between linear layers, recomputed in the backward pass if asked."""

    def __init__(self, norm=PRepBN, with_cp=False):
        super().__init__()
        self.norms = nn.ModuleList(norm(4) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.with_cp = with_cp

    def forward(self, x, target, mode='tensor'):
        for norm, linear in zip(self.norms, self.linears, strict=True):

            def block(x, norm=norm, linear=linear):
                return x + linear(norm(x)).relu()

            x = checkpoint(block, x, use_reentrant=False) if self.with_cp and self.training else block(x)
        loss = (self.head(x) - target).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]


def train(
    work_dir,
    hooks,
    model=Regression,
    max_iters=10,
    by_epoch=False,
    batch_size=4,
    interval=1,
    val=False,
    accumulate=1,
    seed=0,
    **options,
):
    """Trains what ``model()`` builds, up to a KeyboardInterrupt of a hook, and returns the runner."""
    torch.manual_seed(3)
    collate = dict(type='default_collate')
    loader = dict(dataset=Points(), batch_size=batch_size, num_workers=0, collate_fn=collate)
    if by_epoch:
        length = dict(by_epoch=True, max_epochs=max_iters * batch_size // len(Points()))
        sampler = dict(type='DefaultSampler', shuffle=True)
    else:
        length = dict(by_epoch=False, max_iters=max_iters, val_interval=2 if val else max_iters + 1)
        sampler = dict(type='InfiniteSampler', seed=seed)
    dump = dict(type='DumpResults', out_file_path=f'{work_dir}/out.pkl', collect_device='gpu')
    runner = Runner(
        model(),
        str(work_dir),
        train_dataloader=dict(**loader, sampler=sampler),
        train_cfg=length,
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01), accumulative_counts=accumulate),
        val_dataloader=dict(**loader, sampler=dict(type='DefaultSampler', shuffle=False)) if val else None,
        val_cfg={} if val else None,
        val_evaluator=dump if val else None,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=interval, by_epoch=by_epoch)),
        custom_hooks=hooks,
        experiment_name=f'{work_dir}-{sorted(options)}',
        randomness=dict(seed=seed),
        **options,
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        pass
    return runner
