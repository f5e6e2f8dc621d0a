"""The state of the random generators: taken, set, and fixed for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch


def random_state() -> dict:
    """The state of Python's, numpy's and torch's generators, as what may stand in a checkpoint."""
    state = dict(python=random.getstate(), numpy=np.random.get_state(legacy=False), torch=torch.get_rng_state())
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping) -> None:
    """Sets what :func:`random_state` returned."""
    version, values, gauss = state['python']
    random.setstate((version, tuple(values), gauss))
    np.random.set_state(state['numpy'])
    torch.set_rng_state(state['torch'].cpu())
    if 'cuda' in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())


@contextmanager
def fixed_random_state(seed: int) -> Iterator[None]:
    """Within, what these generators draw on the CPU depends on ``seed`` alone; after it they go on undisturbed."""
    python, legacy = random.getstate(), np.random.get_state()
    # Not the CUDA generators: a worker of a data loader must not touch them.
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
