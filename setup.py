"""Installs slab_det and everything it needs; nothing is compiled."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


def read_version() -> str:
    """The version, without importing the package: its dependencies are not there yet."""
    source = (HERE / 'slab_det' / '__init__.py').read_text(encoding='utf-8')
    return re.search(r"^__version__ = '([^']+)'", source, re.MULTILINE).group(1)


def read_description() -> str:
    """The README without pictures and links of the repository, which lead nowhere from other places."""
    text = re.sub(r'!\[[^]]*\]\((?!https://)[^)]*\)\n*', '', (HERE / 'README.md').read_text(encoding='utf-8'))
    return re.sub(r'\[([^]]*)\]\((?!https://)[^)]*\)', r'\1', text)


class BuildWithMim(build_py):
    """Adds slab_det/.mim to an installation: there mmengine and mim look for a package's configs, tools and models.

    mmengine names a config ``package::folder/file.py``, so that each goes into a folder named after its metafile:
    configs/mask_rcnn_slab_swin_t.py, of metafile_slab.yml, becomes ``slab_det::slab/mask_rcnn_slab_swin_t.py``.
    In the checkout of an editable installation, each folder is a link to configs/ itself, whose edits count.
    """

    def run(self) -> None:
        super().run()
        mim = (HERE if self.editable_mode else Path(self.build_lib)) / 'slab_det' / '.mim'
        shutil.rmtree(mim, ignore_errors=True)
        folders = {}
        for metafile in (HERE / 'configs').glob('metafile_*.yml'):
            names = re.findall(r'Config: configs/(\w+\.py)', metafile.read_text(encoding='utf-8'))
            folders |= dict.fromkeys([metafile.name, *names], metafile.stem.removeprefix('metafile_'))
        places = {f'configs/{name}': f'configs/{folder}/{name}' for name, folder in folders.items()}
        if self.editable_mode:
            places = {}
            (mim / 'configs').mkdir(parents=True)
            shared = {name: name for name in ('_base_', 'pretrain')}
            for folder, target in {**shared, **dict.fromkeys(folders.values(), '')}.items():
                (mim / 'configs' / folder).symlink_to(HERE / 'configs' / target)
        else:
            for folder in ('tools', 'configs/_base_', 'configs/pretrain'):
                shutil.copytree(HERE / folder, mim / folder, ignore=shutil.ignore_patterns('__pycache__'))
        for source in ('model-index.yml', *places):
            text = (HERE / source).read_text(encoding='utf-8').replace("'./", "'../")
            text = re.sub(r"(configs/|'\.\./)(\w+\.\w+)", lambda path: f'{path[1]}{folders[path[2]]}/{path[2]}', text)
            target = mim / places.get(source, source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding='utf-8')


setup(
    name='slab_det',
    version=read_version(),
    description='Fast Swin and PVT detectors for MMDetection, with every norm folded away at inference',
    long_description=read_description(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    keywords='object detection, instance segmentation, transformer, normalization, MMDetection',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX',
        *(f'Programming Language :: Python :: 3.{minor}' for minor in range(10, 14)),
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['slab_det', 'slab_det.*']),
    py_modules=['slab_det_arguments', 'slab_det_command'],
    cmdclass={'build_py': BuildWithMim},
    entry_points={'console_scripts': ['slab-det = slab_det_command:main']},
    python_requires='>=3.10,<3.14',
    install_requires=[
        # Before 2.6, torch.load(weights_only=True) can run code (CVE-2025-32434).
        'torch>=2.6',
        'torchvision>=0.21',
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
            'setuptools>=77',
            'onnx>=1.17',
            'onnxruntime>=1.20',
            'openvino>=2024.6',
            'mkdocs-material>=9.5',
            'onedl-mmpretrain>=1.3.6,<2',
            'onedl-mmsegmentation>=1.4,<2',
        ],
        'docs': ['mkdocs-material>=9.5'],
        'onnx': ['onnx>=1.17', 'onnxruntime>=1.20'],
        # Classifiers: configs/pretrain.
        'pretrain': ['onedl-mmpretrain>=1.3.6,<2'],
        'openvino': ['onnx>=1.17', 'onnxruntime>=1.20', 'openvino>=2024.6'],
    },
)
