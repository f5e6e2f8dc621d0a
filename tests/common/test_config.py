"""Python-style configs, whose types are classes, are written with names that every config can use."""

from __future__ import annotations

import re
from pathlib import Path

import mmcv.ops
import pytest
from mmdet.registry import MODELS
from mmengine.config import Config

from slab_det.checkpoints import build_detector
from slab_det.common.config import to_values
from slab_det.common.errors import ConfigError
from slab_det.conversion.tune_config import write_tune_config
from slab_det.runtime.registries import REGISTRIES
from slab_det.runtime.run_folder import save_with_config, write_config

NO_VAL = ('val_dataloader=None', 'val_evaluator=None')


def find_class(name: str) -> type:
    for registry in REGISTRIES:
        registry.import_from_location()
        for part in (registry, registry.parent):
            if part is not None and name in part._module_dict:
                return part._module_dict[name]
    return getattr(mmcv.ops, name)


def python_style(values: dict) -> str:
    """A config with an import of each class in place of its name, as mmdet's new configs have them."""
    text, imports = '\n'.join(f'{key} = {value!r}' for key, value in values.items()), set()
    for name in set(re.findall(r"'type': '(\w+)'", text)):
        kind = find_class(name)
        module = 'mmcv.ops' if hasattr(mmcv.ops, name) else kind.__module__
        imports.add(f'from {module} import {kind.__name__}\n')
        text = text.replace(f"'type': '{name}'", f"'type': {kind.__name__}")
    return ''.join(sorted(imports)) + text.replace("'default_scope': 'mmdet'", "'default_scope': None")


def type_names(value: object) -> set[str]:
    """All types in a config."""
    if isinstance(value, dict):
        return {value['type']} | type_names([*value.values()]) if 'type' in value else type_names([*value.values()])
    return set().union(*map(type_names, value)) if isinstance(value, (list, tuple)) else set()


@pytest.fixture
def styles(small_run_cfg, tmp_path: Path) -> tuple[dict, Path]:
    """The values of a config of a whole run, and a file with the same in Python style."""
    values = small_run_cfg().to_dict()
    path = tmp_path / 'classes.py'
    path.write_text(python_style(values))
    return values, path


def test_a_python_style_config_has_the_names_of_any_other(styles, tmp_path):
    values, path = styles
    cfg = Config.fromfile(path)
    assert not isinstance(cfg.model.type, str) and cfg.model.rpn_head.loss_bbox.type.__name__ == 'L1Loss'
    named = to_values(cfg)
    assert named.pop('custom_imports')['imports'][0].startswith('slab_det.')
    assert named == {key: value for key, value in values.items() if key != 'custom_imports'}
    # A type that mmengine has written already, which it cannot read itself.
    cfg.dump(tmp_path / 'dumped.py')
    dumped = Config.fromfile(tmp_path / 'dumped.py')
    assert dumped.model.rpn_head.loss_bbox.type == 'mmdet.models.losses.smooth_l1_loss.L1Loss'
    assert type_names(to_values(dumped)) == type_names(values)


OWN = """
from mmengine.registry import MODELS
from torch import nn

@MODELS.register_module()
class OwnNeck(nn.Identity):
    pass

class Plain(nn.Identity):
    pass

def make():
    class Local(nn.Identity):
        pass
    return Local

Local = make()
"""


def test_classes_of_other_packages_are_imported_and_those_without_a_name_refused(tmp_path, monkeypatch):
    (tmp_path / 'own_parts.py').write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def values_of(model: str) -> dict:
        (tmp_path / 'lazy.py').write_text(f'from own_parts import Local, OwnNeck, Plain\n\nmodel = {model}\n')
        return to_values(Config.fromfile(tmp_path / 'lazy.py'))

    values = values_of('dict(type=OwnNeck, part=dict(type=Plain), kinds=[OwnNeck])')
    assert values['model'] == dict(type='OwnNeck', part=dict(type='own_parts.Plain'), kinds=['OwnNeck'])
    assert values['custom_imports']['imports'] == ['own_parts'] and values['default_scope'] == 'mmdet'
    for model, key in (('dict(type=Local)', 'type'), ('dict(type=OwnNeck, kind=Plain)', 'kind')):
        with pytest.raises(ConfigError, match=rf"own_parts\..*'{key}'.*decorate it"):
            values_of(model)


def test_every_config_that_a_run_writes_from_classes_builds(styles, tmp_path, call):
    _, path = styles
    options = 'train_cfg.max_iters=1 train_cfg.val_interval=9 custom_hooks.1.num_images=1 custom_hooks.1.max_passes=1'
    call('train.py', path, '--work-dir', tmp_path / 'run', '--cfg-options', *options.split(), 'val_cfg=None', *NO_VAL)
    run = tmp_path / 'run'
    build_detector(Config.fromfile(run / 'classes.py'), str(run / 'iter_1.pth'))
    build_detector(Config.fromfile(run / 'fused_config.py'), str(run / 'fused.pth'))
    tune = write_tune_config(
        Config.fromfile(path), run / 'fused_config.py', run / 'fused.pth', run / 'iter_1.pth', Config.fromfile(path)
    )
    MODELS.build(Config.fromfile(tune).model)
    # As optimize writes the detector that it is given.
    _, plain = save_with_config({}, Config.fromfile(path), run / 'plain.pth')
    build_detector(Config.fromfile(plain))


def test_what_is_written_reads_as_it_was(tmp_path):
    write_config(Config(dict(model=dict(type='MaskRCNN', lr=1e-3))), tmp_path / 'good.py')
    with pytest.raises(ConfigError, match=r"bad\.py.*NameError: name 'inf'"):
        write_config(Config(dict(limit=float('inf'))), tmp_path / 'bad.py')
