"""ExcludePaddingHook: the statistics of training are those of the images, not of what they are padded with."""

from __future__ import annotations

from dataclasses import dataclass

from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.utils.hooks import RemovableHandle

from slab_det.norms.token_bn import TokenBN
from slab_det.norms.valid_tokens import ValidTokens
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import SlabDetError


@HOOKS.register_module()
class ExcludePaddingHook(Hook):
    """Leaves padding tokens out of the training statistics of TokenBN, RepBN and PRepBN.

    Images of a batch are padded to the largest. With it, tokens that begin outside their image are normalised like all
    others, but batch and running statistics do not see them. Evaluation stays as it is; recalibration takes
    images one by one, padded to multiples of 32 only. UN, MABN and PowerNorm still see every token in training, and so
    does every norm where a transform ``Pad`` has made padding part of the image. The papers' models were trained
    without this hook.
    """

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner.model)
        self._handle = exclude_padding(model, model.data_preprocessor)
        if self._handle is None:
            runner.logger.warning('ExcludePaddingHook: the model has no TokenBN, RepBN or PRepBN; remove the hook')

    def after_train(self, runner: Runner) -> None:
        if self._handle is not None:
            self._handle.remove()
            for norm in _norms(unwrap(runner.model)):
                norm.valid_tokens = None


def exclude_padding(model: nn.Module, data_preprocessor: BaseDataPreprocessor) -> RemovableHandle | None:
    """Has the norms of ``model`` ask which tokens of the batch that ``data_preprocessor`` made last are valid.

    Returns:
        What removes the forward hook of ``data_preprocessor``; None without a norm that could ask.
    """
    norms = _norms(model)
    if not norms:
        return None
    valid_tokens = ValidTokens()
    for norm in norms:
        norm.valid_tokens = valid_tokens
    return data_preprocessor.register_forward_hook(_TellsSizes(valid_tokens))


def _norms(model: nn.Module) -> list[TokenBN]:
    return [module for module in model.modules() if isinstance(module, TokenBN)]


@dataclass
class _TellsSizes:
    """Forward hook of a data preprocessor. No closure: the copy of a model gets one that tells its own norms."""

    valid_tokens: ValidTokens

    def __call__(self, module: nn.Module, args: tuple, batch: dict) -> None:
        samples = batch.get('data_samples') if isinstance(batch, dict) else None
        if not samples or not all(hasattr(sample, 'img_shape') for sample in samples):
            raise SlabDetError(
                f'ExcludePaddingHook: {type(module).__name__} returns no data_samples with img_shape, '
                'which says how large images are; use DetDataPreprocessor and keep img_shape in the '
                'meta_keys of PackDetInputs, or remove the hook'
            )
        self.valid_tokens.set_batch([sample.img_shape for sample in samples], batch['inputs'].shape[-2:])
