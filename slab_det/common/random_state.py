"""Saves, restores and seeds the random generators of Python, numpy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from slab_det.machine import MACHINE


def random_state() -> dict:
    """Returns the state of Python's, numpy's and torch's generators, in types that a checkpoint may hold."""
    state = dict(python=random.getstate(), numpy=np.random.get_state(legacy=False), torch=torch.get_rng_state())
    if MACHINE.has_gpu:
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping) -> None:
    """Sets the generators to a state from :func:`random_state`."""
    version, values, gauss = state['python']
    random.setstate((version, tuple(values), gauss))
    np.random.set_state(state['numpy'])
    torch.set_rng_state(state['torch'].cpu())
    if 'cuda' in state and MACHINE.has_gpu:
        torch.cuda.set_rng_state(state['cuda'].cpu())


@contextmanager
def fixed_random_state(seed: int) -> Iterator[None]:
    """Seeds the generators on the CPU inside the block, and restores their state after it."""
    python, legacy = random.getstate(), np.random.get_state()
    # A worker of a data loader must not touch the CUDA generators.
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
