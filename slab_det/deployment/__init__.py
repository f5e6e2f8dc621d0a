"""The form of a detector that ships: fused weights, everything that depends on size kept, no copies."""

from slab_det.deployment.deploy import deploy

__all__ = ['deploy']
