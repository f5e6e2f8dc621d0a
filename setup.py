"""Installs slab_det and everything it needs; nothing is compiled."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    """The version, without importing the package: its dependencies are not there yet."""
    source = (HERE / 'slab_det' / '__init__.py').read_text(encoding='utf-8')
    return re.search(r"^__version__ = '([^']+)'", source, re.MULTILINE).group(1)


setup(
    name='slab_det',
    version=read_version(),
    description='Fast Swin and PVT detectors for MMDetection, with every norm folded away at inference',
    packages=find_packages(include=['slab_det', 'slab_det.*']),
    py_modules=['slab_det_arguments'],
    python_requires='>=3.10,<3.14',
    install_requires=[
        'torch>=2.4',
        'torchvision>=0.19',
        'timm>=1.0',
        'numpy>=1.26,<3',
        'pycocotools>=2.0.8',
        'faster-coco-eval>=1.6',
        'matplotlib>=3.8',
        'tqdm>=4.66',
        # The maintained distributions of mmengine, mmcv and mmdet; the import names are the original ones.
        'onedl-mmengine>=0.10.12,<1',
        'onedl-mmcv>=2.3.6,<3',
        'onedl-mmdetection>=3.5.1,<4',
    ],
    extras_require={
        'test': [
            'pytest>=8',
            'pytest-xdist>=3.6',
            'ruff>=0.9',
            'onnx>=1.17',
            'onnxruntime>=1.20',
            'mkdocs-material>=9.5',
        ],
        'docs': ['mkdocs-material>=9.5'],
        'onnx': ['onnx>=1.17', 'onnxruntime>=1.20'],
        'openvino': ['onnx>=1.17', 'onnxruntime>=1.20', 'openvino>=2024.6'],
    },
)
