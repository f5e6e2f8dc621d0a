"""What forbids changing one layer alone: code that runs beside its forward, and weights that have other owners."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


def find_hooks(module: nn.Module) -> str:
    """What runs besides the forward of the module's class; '' if nothing does."""
    if module._forward_pre_hooks or module._forward_hooks:
        return 'forward hooks'
    return 'a forward of its own' if 'forward' in vars(module) else ''


def has_hooks(module: nn.Module) -> bool:
    """Whether :func:`find_hooks` finds something in ``module`` or below."""
    return any(map(find_hooks, module.modules()))


def find_tied_parameters(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter that has several names, the other names, separated by commas.

    Parameters that only share their memory (``one.weight.data = other.weight.data``) are one parameter here.
    """
    owners = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Tensors without memory (meta) have no address.
        address = parameter.data_ptr()
        owners[(parameter.device, address) if address else id(parameter)].append(name)
    return {name: ', '.join(n for n in names if n != name) for names in owners.values() if names[1:] for name in names}
