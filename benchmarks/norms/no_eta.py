"""NoEtaHook: PRepBN without its eta, the middle row of SLAB's Table 7 (BN, + progressive, + RepBN)."""

from __future__ import annotations

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.norms import RepBN


@HOOKS.register_module()
class NoEtaHook(Hook):
    """Holds eta of every RepBN at 0: what remains is BatchNorm, and with progression gamma LN + (1 - gamma) BN."""

    @torch.no_grad()
    def before_train(self, runner: Runner) -> None:
        for module in runner.model.modules():
            if isinstance(module, RepBN):
                # Without a gradient the optimizer leaves it alone.
                module.eta.requires_grad_(False).zero_()
