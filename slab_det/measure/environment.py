"""Describes the environment of a measurement: versions, device, instructions of the CPU and threads."""

import platform
import re

import mmcv
import mmdet
import mmengine
import torch
import torchvision

import slab_det
from slab_det.machine import MACHINE, read_cpuinfo


def device_name(device: torch.device | str) -> str:
    """Returns the product name of a device, for example 'NVIDIA H200' or 'Intel(R) Xeon(R) Platinum 8481C'."""
    device = torch.device(device)
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    # On most Linux distributions platform.processor() is empty or 'x86_64'.
    fields = dict(re.findall(r'^(.+?)\s*: (.*?)\s*$', read_cpuinfo(), flags=re.MULTILINE))
    if 'model name' not in fields:
        return platform.processor() or platform.machine()
    # Virtual machines name every EPYC generation 'AMD EPYC'; family and model tell them apart.
    return f'{fields["model name"]} (family {fields.get("cpu family")}, model {fields.get("model")})'


def describe_environment(device: torch.device | str = 'cpu') -> dict:
    """Returns versions of libraries, the name of the device, the CPU's instructions and threads, and TF32 settings."""
    libraries = (torch, torchvision, mmengine, mmcv, mmdet, slab_det)
    versions = {library.__name__: library.__version__ for library in libraries}
    return {
        'versions': {'python': platform.python_version(), **versions},
        'device': device_name(device),
        'instructions': ' '.join(MACHINE.instructions) or 'not recorded',
        'threads': torch.get_num_threads(),
        'tf32_matmul': torch.backends.cuda.matmul.allow_tf32,
        'tf32_cudnn': torch.backends.cudnn.allow_tf32,
        'platform': platform.platform(),
    }
