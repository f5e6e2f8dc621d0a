"""FFNs with one more norm between their two linear layers (BN+FFNBN, Yao et al., ICCVW 2021)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor

from slab_det.fusion import Fold


class NormedFFN(FFN):
    """mmcv's FFN of two linear layers, with a norm over its hidden channels.

    State-dict keys are those of mmcv's FFN, and those of ``norm``. Subclasses say on which side of the activation
    the norm stands.

    Args:
        norm_cfg: The norm.
        **options: Arguments of mmcv's FFN but for ``num_fcs``.

    Shape:
        (..., C) -> (..., C), channels last.
    """

    def __init__(self, norm_cfg: dict, **options) -> None:
        super().__init__(num_fcs=2, **options)
        self.norm = build_norm_layer(norm_cfg, self.feedforward_channels)[1]

    @abstractmethod
    def activate(self, hidden: Tensor) -> Tensor:
        """Norm and activation of the hidden channels."""

    def forward(self, x: Tensor, identity: Tensor | None = None) -> Tensor:
        (fc1, _, hidden_drop), fc2, drop = self.layers
        out = self.gamma2(drop(fc2(hidden_drop(self.activate(fc1(x))))))
        out = self.dropout_layer(out)
        if not self.add_identity:
            return out
        return (x if identity is None else identity) + out

    def input_layers(self) -> tuple[str]:
        """The layer that reads the input; see :mod:`slab_det.fusion`."""
        return ('layers.0.0',)


class PreActFFN(NormedFFN):
    """``fc2(act(norm(fc1(x))))``: at inference the norm is part of fc1."""

    def activate(self, hidden: Tensor) -> Tensor:
        return self.layers[0][1](self.norm(hidden))

    def folds(self) -> Iterator[Fold]:
        yield Fold('norm', after='layers.0.0')


class PostActFFN(NormedFFN):
    """``fc2(norm(act(fc1(x))))``: at inference the norm is part of fc2."""

    def activate(self, hidden: Tensor) -> Tensor:
        # Before the dropout, whose noise would widen the statistics that inference uses.
        return self.norm(self.layers[0][1](hidden))

    def folds(self) -> Iterator[Fold]:
        yield Fold('norm', before='layers.1')


NORMED_FFNS: dict[str, type[NormedFFN]] = {'pre_act': PreActFFN, 'post_act': PostActFFN}


def build_ffn(ffn_norm: str | None, norm_cfg: dict, **options) -> FFN:
    """The FFN of a block.

    Args:
        ffn_norm: Where the additional norm stands, 'pre_act' or 'post_act'; None builds mmcv's FFN as it is.
        norm_cfg: The additional norm.
        **options: Arguments of mmcv's FFN but for ``num_fcs``, which is 2.

    Raises:
        ValueError: If ``ffn_norm`` is unknown.
    """
    if ffn_norm is None:
        return FFN(num_fcs=2, **options)
    if ffn_norm not in NORMED_FFNS:
        raise ValueError(f'unknown ffn_norm {ffn_norm!r}: choose from {[None, *NORMED_FFNS]}')
    return NORMED_FFNS[ffn_norm](norm_cfg, **options)
