"""What forbids changing one layer alone: code that runs beside its forward, and weights that have other owners."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from slab_det.norms import OfflineNorm


def find_hooks(module: nn.Module) -> str:
    """What runs besides the forward of the module's class; '' if nothing does."""
    if module._forward_pre_hooks or module._forward_hooks:
        return 'forward hooks'
    return 'a forward of its own' if 'forward' in vars(module) else ''


def has_hooks(module: nn.Module) -> bool:
    """Whether :func:`find_hooks` finds something in ``module`` or below."""
    return any(map(find_hooks, module.modules()))


def other_owners(model: nn.Module) -> dict[str, list[str]]:
    """For each name of a parameter that has several, the other ones.

    Parameters that only share their memory (``one.weight.data = other.weight.data``) are one parameter here.
    """
    owners = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Tensors without memory (meta) have no address.
        address = parameter.data_ptr()
        owners[(parameter.device, address) if address else id(parameter)].append(name)
    return {
        name: [other for other in names if other != name]
        for names in owners.values()
        if len(names) > 1
        for name in names
    }


def names_of_norms(model: nn.Module) -> dict[OfflineNorm, list[str]]:
    """Every outermost OfflineNorm of the model with all its names."""
    names = defaultdict(list)
    inside: str | None = None
    for name, module in model.named_modules(remove_duplicate=False):
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, OfflineNorm):
            inside = f'{name}.' if name else ''
            names[module].append(name)
    return dict(names)
