"""Backbone: the base class of all backbones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from mmengine.model.weight_init import trunc_normal_, trunc_normal_init
from mmengine.utils import to_2tuple
from torch import Tensor, nn

from slab_det.attention import SoftmaxWindowAttention
from slab_det.backbones.blocks import Block
from slab_det.checkpoints import check_state_dict, load_pretrained
from slab_det.common.modules import set_mode
from slab_det.norms import named_offline_norms


class Backbone(BaseModule):
    """Base class: loading, output norms, frozen statistics. :class:`SLABSwin` describes the arguments."""

    def __init__(
        self,
        num_stages: int,
        out_indices: Sequence[int],
        norm_cfg: dict,
        norm_eval: bool,
        init_cfg: dict | None,
        pretrain_img_size: int | tuple[int, int],
        pretrained: str | None = None,
    ) -> None:
        if pretrained is not None:
            if init_cfg is not None:
                raise ValueError('init_cfg and pretrained name two sources of weights: give one')
            init_cfg = dict(type='Pretrained', checkpoint=pretrained)
        super().__init__(init_cfg=init_cfg)
        # As in mmdet, the outputs come in the order of the stages, whatever order is asked for.
        if not isinstance(out_indices, Sequence) or sorted(out_indices) != sorted(
            {*range(num_stages)} & {*out_indices}
        ):
            raise ValueError(f'out_indices={out_indices}: give different stages from 0 to {num_stages - 1}')
        try:
            build_norm_layer(norm_cfg, 1)
        except KeyError as error:
            # mmcv's message does not name the type.
            known = 'LN, TokenBN, RepBN, PRepBN, UN, MABN, PowerNorm or what custom_imports registers'
            raise ValueError(f'norm_cfg={norm_cfg}: there is no such norm; its type is one of {known}') from error
        self.register_load_state_dict_pre_hook(check_state_dict)
        self.pretrain_img_size = to_2tuple(pretrain_img_size)
        self.out_indices = tuple(out_indices)
        self.norm_eval = norm_eval
        # Whether the returned feature maps are channels last. A bool, because torch.save writes no memory format.
        self.channels_last = False

    def count_positions(self, patch: int) -> tuple[int, int]:
        """(H, W) of the learned positions, one for each patch of ``patch`` x ``patch`` pixels."""
        height, width = self.pretrain_img_size
        if min(height, width) < patch:
            raise ValueError(f'pretrain_img_size={self.pretrain_img_size} is smaller than a patch of {patch} pixels')
        return height // patch, width // patch

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """The depth of a parameter, which LayerDecayConstructor and mmpretrain's constructor ask for.

        Args:
            param_name: The name of the parameter.
            prefix: The beginning of the names of the backbone's parameters.

        Returns:
            The depth and the number of depths. Depth 0 is the patch embedding. Depth n is the n-th block, with the
            modules between it and the next block. The last depth is the output norms, and every parameter outside of
            the backbone.
        """
        modules = dict(self.named_modules())
        last = sum(isinstance(module, Block) for module in modules.values()) + 1
        owner, depth = param_name.removeprefix(prefix).rpartition('.')[0], 0
        if param_name.startswith(prefix) and not owner.startswith('norm'):
            for name, module in modules.items():
                depth += isinstance(module, Block)
                if name == owner:
                    return depth, last + 1
        return last, last + 1

    def add_output_norms(self, out_norm_cfg: str | dict | None, norm_cfg: dict, num_features: Sequence[int]) -> None:
        """Adds ``norm<i>`` for each output i: ``norm_cfg`` for 'same', another norm for a dict, no norm for None."""
        cfg = norm_cfg if out_norm_cfg == 'same' else out_norm_cfg
        for i in self.out_indices:
            self.add_module(f'norm{i}', build_norm_layer(cfg, num_features[i])[1] if cfg else nn.Identity())

    def make_output(self, stage: int, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Makes the output (B, C, H, W) of a stage from its tokens (B, H * W, C)."""
        return self.to_map(getattr(self, f'norm{stage}')(x), hw_shape)

    def to_map(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """(B, H * W, C) -> (B, C, H, W), in the memory format of the outputs."""
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return x.transpose(1, 2).unflatten(2, hw_shape).contiguous(memory_format=memory_format)

    def init_from_scratch(self) -> None:
        """Initialises weights as ViT and Swin do; convolutions keep PyTorch's initialisation."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02, bias=0.0)
            elif isinstance(module, nn.MultiheadAttention):
                trunc_normal_(module.in_proj_weight, std=0.02)
            elif isinstance(module, SoftmaxWindowAttention):
                trunc_normal_(module.relative_position_bias_table, std=0.02)

    def init_weights(self) -> None:
        """Initialises the weights from scratch, then loads the checkpoint that ``init_cfg`` names.

        Raises:
            CheckpointError: If the checkpoint does not fit.
        """
        self.init_from_scratch()
        if self.init_cfg is not None:
            load_pretrained(self, self.init_cfg['checkpoint'], prefix=self.init_cfg.get('prefix') or '')
        self._is_init = True

    def train(self, mode: bool = True) -> Backbone:
        """Sets training mode, except for frozen modules and, with ``norm_eval``, norms with loaded statistics."""
        if mode and self.training:
            # mmengine calls this in each iteration: a frozen norm must not read its numbers from the device each time.
            for _, norm in named_offline_norms(self):
                set_mode(norm, True)
        super().train(mode)
        self.freeze()
        if mode and self.norm_eval:
            for _, norm in named_offline_norms(self):
                if norm.statistics_loaded:
                    set_mode(norm, False)
        return self

    def freeze(self) -> None:
        """Puts modules that do not train into eval mode."""
