"""Adds configs and tools to an installation; the rest of the package is described in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithMim(build_py):
    """Adds slab_det/.mim to an installation: there mmengine and mim look for a package's configs, tools and models.

    mmengine names a config ``package::folder/file.py`` and refuses a name without a folder, so that a plain copy of
    configs/ would not be found. Each config goes into a folder named after its metafile:
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


def describe() -> str:
    """README.md as a page of the package: without pictures and links to files, which lie in the repository."""
    text = re.sub(r'^!\[.*\n\n', '', (HERE / 'README.md').read_text(encoding='utf-8'), flags=re.MULTILINE)
    return re.sub(r'\[([^\]]*)\]\((?!https?:)[^)]*\)', r'\1', text)


setup(cmdclass={'build_py': BuildWithMim}, long_description=describe(), long_description_content_type='text/markdown')
