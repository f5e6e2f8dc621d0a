"""The outputs in which two forms of a model are compared, and the images that it reads."""

from __future__ import annotations

from torch import Tensor, nn


def extract_features(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """The feature maps of a detector's neck, or of a backbone, for images (B, C, H, W)."""
    return model.extract_feat(images) if hasattr(model, 'extract_feat') else model(images)


def input_channels(model: nn.Module) -> int:
    """Number of channels of the images that a detector or backbone reads: its first convolution's, or 3 without one."""
    # Deployed models have convolutions of other classes.
    parts = getattr(model, 'backbone', model).modules()
    return next(
        (part.in_channels for part in parts if hasattr(part, 'kernel_size') and hasattr(part, 'in_channels')), 3
    )
