"""LayerDecayConstructor: learning rates that fall from the heads to the first layers of the backbone."""

from __future__ import annotations

from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """mmengine's constructor, with the learning rate of each parameter times ``layer_decay_rate ** (n - 1 - depth)``.

    The model's ``backbone.get_layer_depth`` gives the depth and the number n of depths. Heads and necks have the last
    depth, so they keep their learning rate. mmdet's constructor knows ConvNeXt alone, mmpretrain's classifiers alone.

    Args:
        optim_wrapper_cfg: As mmengine's, with ``lr`` of the optimizer.
        paramwise_cfg: mmengine's options, such as ``custom_keys``, and ``layer_decay_rate``, above 0 and at most 1.

    Raises:
        ValueError: If ``lr`` or ``layer_decay_rate`` is missing or wrong; when called, if the model's backbone has no
            ``get_layer_depth``.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        self.rate = self.paramwise_cfg.get('layer_decay_rate', 0)
        if self.base_lr is None or not 0 < self.rate <= 1:
            raise ValueError(
                'LayerDecayConstructor needs optimizer.lr and a paramwise_cfg.layer_decay_rate above 0 and at most 1, '
                f'such as 0.9; it got lr={self.base_lr} and paramwise_cfg={self.paramwise_cfg}'
            )

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = '', **kwargs: object) -> None:
        """Adds the parameters of a module to the groups of the optimizer, one group each."""
        super().add_params(params, module, prefix, **kwargs)
        # mmengine calls this method again for each child, with a prefix.
        if prefix:
            return
        backbone = getattr(module, 'backbone', None)
        if not hasattr(backbone, 'get_layer_depth'):
            raise ValueError(
                f'LayerDecayConstructor: the backbone {type(backbone).__name__} has no get_layer_depth; SLABSwin, '
                'SLABPVT, SLABViT and SLABCSwin have it'
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        for group in params:
            depth, num_depths = backbone.get_layer_depth(names[group['params'][0]], 'backbone.')
            group['lr'] = group.get('lr', self.base_lr) * self.rate ** (num_depths - 1 - depth)
