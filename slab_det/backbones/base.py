"""Backbone: the base of all backbones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from mmcv.cnn import build_norm_layer
from mmengine.logging import MMLogger
from mmengine.model import BaseModule
from mmengine.model.weight_init import trunc_normal_, trunc_normal_init
from mmengine.utils import to_2tuple
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from slab_det.attention import Attention
from slab_det.checkpoints import check_state_dict, load_pretrained
from slab_det.norms import OfflineNorm, named_offline_norms


class Backbone(BaseModule):
    """Loads pretrained weights, puts norms behind its stages and keeps loaded statistics frozen; see SLABSwin."""

    def __init__(
        self,
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
        self.register_load_state_dict_pre_hook(check_state_dict)
        check_norm_cfg('norm_cfg', norm_cfg)
        self.pretrain_img_size = to_2tuple(pretrain_img_size)
        self.out_indices = tuple(out_indices)
        self.norm_eval = norm_eval
        # Whether the returned feature maps are channels last.
        self.channels_last = False

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of the returned feature maps; a property, because ``torch.save`` cannot write it."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def count_positions(self, patch: int) -> tuple[int, int]:
        """(H, W) of the learned positions, one for each patch of ``patch`` x ``patch`` pixels."""
        height, width = self.pretrain_img_size
        return height // patch, width // patch

    def add_output_norms(self, out_norm_cfg: str | dict | None, norm_cfg: dict, num_features: Sequence[int]) -> None:
        """Gives each output a norm: ``norm_cfg`` for 'same', another one, or None for none."""
        cfg = norm_cfg if out_norm_cfg == 'same' else out_norm_cfg
        if cfg:
            check_norm_cfg('out_norm_cfg', cfg)
        for i in self.out_indices:
            self.add_module(f'norm{i}', build_norm_layer(cfg, num_features[i])[1] if cfg else nn.Identity())

    def make_output(self, stage: int, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Makes the output (B, C, H, W) of a stage from its tokens (B, H * W, C)."""
        image = getattr(self, f'norm{stage}')(x).transpose(1, 2).unflatten(2, hw_shape)
        return image.contiguous(memory_format=self.memory_format)

    def init_from_scratch(self) -> None:
        """Draws weights as ViT does; convolutions keep PyTorch's."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02, bias=0.0)
            elif isinstance(module, nn.MultiheadAttention):
                trunc_normal_(module.in_proj_weight, std=0.02)

    def init_weights(self) -> None:
        """Initialises the weights from scratch, then loads the checkpoint that ``init_cfg`` names.

        Raises:
            ValueError: If ``init_cfg`` names no checkpoint.
            CheckpointError: If the checkpoint does not fit.
        """
        cfg = self.init_cfg
        if cfg is not None and 'checkpoint' not in cfg:
            raise ValueError(
                f"{type(self).__name__} takes init_cfg=None or dict(type='Pretrained', checkpoint=...), got {cfg}"
            )
        self.init_from_scratch()
        if cfg is not None:
            load_pretrained(self, cfg['checkpoint'], prefix=cfg.get('prefix') or '')
        live = [name for name, norm in named_offline_norms(self) if not norm.statistics_loaded]
        if self.norm_eval and live:
            MMLogger.get_current_instance().warning(
                f'norm_eval: no statistics were loaded for {", ".join(live)}; they stay live'
            )
        self._is_init = True

    def train(self, mode: bool = True) -> Backbone:
        """Sets training mode, except for frozen modules and, with ``norm_eval``, norms with loaded statistics."""
        super().train(mode)
        self.freeze()
        if mode and self.norm_eval:
            for _, norm in named_offline_norms(self):
                if norm.statistics_loaded:
                    norm.eval()
        return self

    def freeze(self) -> None:
        """Puts modules that do not train into eval mode."""


def per_stage(name: str, value: object, num_stages: int, may_be_longer: bool = False) -> tuple:
    """One value for each stage: a sequence as it is, anything else repeated; ValueError for another length."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (value,) * num_stages
    if len(value) < num_stages or (len(value) > num_stages and not may_be_longer):
        raise ValueError(f'{name}={tuple(value)} needs one entry for each of the {num_stages} stages')
    return tuple(value[:num_stages])


def attention_per_stage(
    words: str | Sequence[str], num_stages: int, kinds: Mapping[str, type[Attention]]
) -> tuple[str, ...]:
    """The word of each stage's attention; ValueError unless all of them are in ``kinds``."""
    words = per_stage('attention', words, num_stages)
    if unknown := {*words} - kinds.keys():
        raise ValueError(f'unknown attention {sorted(unknown)}: choose from {sorted(kinds)}')
    return words


def check_norm_cfg(name: str, norm_cfg: dict) -> None:
    """Raises ValueError unless ``norm_cfg`` builds a norm that takes tokens, channels last."""
    try:
        norm = build_norm_layer(norm_cfg, 1)[1]
    except KeyError as error:
        raise ValueError(
            f"{name}={norm_cfg}: there is no such norm; give a dict(type=...) of 'LN', 'TokenBN', 'RepBN', 'PRepBN', "
            "'UN', 'MABN', 'PowerNorm' or what custom_imports registers in mmengine's MODELS"
        ) from error
    if isinstance(norm, (_NormBase, nn.GroupNorm)) and not isinstance(norm, OfflineNorm):
        raise ValueError(
            f'{name}: {type(norm).__name__} takes channels first, and would normalise tokens instead of '
            "channels here; dict(type='TokenBN') is the BatchNorm of tokens"
        )
