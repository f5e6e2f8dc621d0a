"""ExcludePaddingHook: the statistics of training are those of the images, not of what they are padded with."""
from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from slab_det.errors import SlabDetError
from slab_det.layers.token_bn import TokenBN
from slab_det.layers.valid_tokens import ValidTokens

from .progressive_norm import unwrap


@HOOKS.register_module()
class ExcludePaddingHook(Hook):
    """Leaves padding tokens out of the training statistics of TokenBN, RepBN and PRepBN.

    Images of a batch are padded to the largest. With it, tokens that begin outside their image are normalised like all
    others, but batch and running statistics do not see them. Evaluation and recalibration stay as they are. UN, MABN
    and PowerNorm still see every token. The papers' models were trained without it.
    """

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner.model)
        if not exclude_padding(model, model.data_preprocessor):
            runner.logger.warning('ExcludePaddingHook: the model has no TokenBN, RepBN or PRepBN; remove the hook')


def exclude_padding(model: nn.Module, data_preprocessor: BaseDataPreprocessor) -> int:
    """Has the norms of ``model`` ask which tokens of the batch that ``data_preprocessor`` made last are valid.

    Returns:
        The number of norms.
    """
    norms = [module for module in model.modules() if isinstance(module, TokenBN)]
    if not norms:
        return 0
    valid_tokens = ValidTokens()
    for norm in norms:
        norm.valid_tokens = valid_tokens

    def set_batch(module: nn.Module, args: tuple, batch: dict) -> None:
        samples = batch.get('data_samples') if isinstance(batch, dict) else None
        if not samples:
            raise SlabDetError(f'ExcludePaddingHook: {type(module).__name__} returns no data_samples, whose img_shape '
                               'says how large images are; use DetDataPreprocessor or remove the hook')
        valid_tokens.set_batch([sample.img_shape for sample in samples], batch['inputs'].shape[-2:])

    data_preprocessor.register_forward_hook(set_batch)
    return len(norms)
