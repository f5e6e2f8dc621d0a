"""Writes the models of configs/metafile_*.yml, from the configs and the papers' tables.

    python -m benchmarks.model_index

What a metafile says of its collection, before the models, is written by hand.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import yaml
from mmengine.config import Config

from benchmarks.results import ROOT
from slab_det.measure.report_file import describe_model

CONFIGS = ROOT / 'configs'
NAMES = sorted(path.stem for path in CONFIGS.glob('*.py'))
PAPER_TABLES = json.loads((ROOT / 'benchmarks' / 'paper_tables.json').read_text())
# What the papers call the sizes.
SIZES = {
    'Swin-96x2262': 'Swin-T',
    'Swin-96x22182': 'Swin-S',
    'PVT-2222': 'PVT-T',
    'PVT-3463': 'PVT-S',
    'CSwin-12211': 'CSWin-T',
    'CSwin-24181': 'CSWin-T',
}
BACKBONES = {'SLABSwin': 'Swin Transformer', 'SLABPVT': 'PyramidVisionTransformer', 'SLABCSwin': 'CSWin Transformer'}
DETECTORS = {'MaskRCNN': 'Mask R-CNN', 'FasterRCNN': 'Faster R-CNN'}
KINDS = ('mask', 'faster', 'quickstart')


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / f'{name}.py')


def describe(name: str) -> dict[str, str]:
    """What a report says of a config's model, with the row label of the papers."""
    description = describe_model(load(name).model)
    for label, size in SIZES.items():
        description['name'] = description['name'].replace(label, size)
    return description


def published(name: str) -> dict[str, dict[str, float]]:
    """The numbers of the papers' rows that were trained as the config says, by the source and the metric."""
    description, epochs, numbers = describe(name), load(name).train_cfg.get('max_epochs'), {}
    for table in PAPER_TABLES:
        row = table['rows'].get(description['name'])
        if row is not None and (table['detector'], table['epochs']) == (description['detector'], epochs):
            values = {'box AP': row['box'][0], 'V100 ms/image': row['ms'], 'mask AP': row['mask'] and row['mask'][0]}
            numbers[table['source']] = {metric: value for metric, value in values.items() if value is not None}
    return numbers


def find_techniques(cfg: Config) -> list[str]:
    """How a config trains, in mmdet's words where it has some."""
    hooks = {hook.type: hook for hook in cfg.get('custom_hooks', [])}
    recalibrates = hooks.get('RecalibrateFuseHook', {'recalibrate': None}).get('recalibrate', True)
    uses = {
        'Progressive Normalization': hooks.get('ProgressiveNormHook', {}).get('total', 'ProgressiveNormHook' in hooks),
        'Recalibration': recalibrates,
        'Frozen Statistics': cfg.model.backbone.get('norm_eval'),
        **dict.fromkeys(('Multi-scale', 'Random Crop'), 'RandomCrop' in str(cfg.train_dataloader.dataset.pipeline)),
        'From Scratch': cfg.model.backbone.get('init_cfg') is None,
    }
    return ['AdamW', 'Weight Decay', *(name for name, is_used in uses.items() if is_used)]


def describe_entry(name: str, collection: str) -> dict:
    """The entry of a config in its metafile."""
    cfg, description = load(name), describe(name)
    data = cfg.train_dataloader.dataset.type
    lengths = {'Epochs': cfg.train_cfg.get('max_epochs'), 'Iterations': cfg.train_cfg.get('max_iters')}
    lengths['Seed'] = cfg.get('randomness', {}).get('seed')
    metadata = {
        'Row': description['name'],
        **{key: value for key, value in lengths.items() if value is not None},
        'Training Data': data if data == 'SyntheticShapes' else 'COCO',
        'Training Techniques': find_techniques(cfg),
        'Architecture': [DETECTORS[description['detector']], 'FPN', BACKBONES[cfg.model.backbone.type]],
    }
    results = []
    for source, numbers in published(name).items():
        for task, has_masks in (('Object Detection', False), ('Instance Segmentation', True)):
            metrics = {metric: value for metric, value in numbers.items() if (metric == 'mask AP') == has_masks}
            if metrics:
                results.append({'Reported By': source, 'Task': task, 'Dataset': 'COCO val2017', 'Metrics': metrics})
    entry = {'Name': name, 'In Collection': collection, 'Config': f'configs/{name}.py', 'Metadata': metadata}
    return entry | ({'Paper Results': results} if results else {})


class Indented(yaml.SafeDumper):
    """Indents lists, as mmdet's metafiles do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def find_metafile(name: str) -> str:
    """The metafile of a config, by the first part of its name that says which method it is."""
    found = re.search('_(bn_ffnbn|bn|mabn|powernorm|un|flatten|prepbn|slab|cswin|pvt|swin)(?=_|$)', name)[1]
    return f'metafile_{"slab" if found == "prepbn" else found}.yml'


def generate() -> dict[Path, str]:
    """The text of every metafile."""
    texts = {}
    for path in CONFIGS.glob('metafile*.yml'):
        head = path.read_text().partition('Models:\n')[0]
        ((collection, *_),) = [list(entry.values()) for entry in yaml.safe_load(head)['Collections']]
        names = [name for name in NAMES if find_metafile(name) == path.name]
        names.sort(key=lambda name: KINDS.index(name.partition('_')[0]))
        entries = [
            yaml.dump([describe_entry(name, collection)], Dumper=Indented, sort_keys=False, width=120) for name in names
        ]
        models = '\n'.join(re.sub('^', '  ', entry, flags=re.MULTILINE).rstrip(' ') for entry in entries)
        texts[path] = f'{head}Models:\n{models}'
    return texts


def main() -> None:
    for path, text in generate().items():
        path.write_text(text)


if __name__ == '__main__':
    main()
