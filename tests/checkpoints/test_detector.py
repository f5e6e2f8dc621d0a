"""Whole detectors: what load_from, --resume and testing may load."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import BaseLoop, Runner, load_checkpoint
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from torch import nn

from slab_det.backbones import SLABSwin
from slab_det.checkpoints import check_detector_checkpoint
from slab_det.hooks.checked_load import CheckedLoadHook
from slab_det.runtime.errors import CheckpointError

SMALL = dict(embed_dims=8, depths=(2, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1), window_size=4)


class Detector(nn.Module):
    def __init__(self, num_classes: int = 3, **config) -> None:
        super().__init__()
        self.backbone = SLABSwin(**{**SMALL, **config})
        self.neck = nn.Conv2d(16, 4, 1)
        self.bbox_head = nn.Linear(4, num_classes)


def checkpoint_of(model: nn.Module, prefix: str = '') -> dict:
    state = {
        prefix + key: torch.rand_like(value) if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    # As mmengine saves it, with what it resumes from.
    return dict(meta=dict(epoch=0, iter=0), message_hub={}, state_dict=state)


def official_checkpoint() -> dict:
    """The official detection layout of a plain-RepBN Mask R-CNN backbone, LayerNorm on the outputs."""
    native = checkpoint_of(Detector(norm_cfg=dict(type='RepBN'), out_norm_cfg=dict(type='LN')))['state_dict']
    state = {}
    for key, value in native.items():
        for ours, theirs in (
            ('stages.', 'layers.'),
            ('projection', 'proj'),
            ('attn.w_msa', 'attn'),
            ('ffn.layers.0.0', 'mlp.fc1'),
            ('ffn.layers.1', 'mlp.fc2'),
            ('.eta', '.alpha'),
        ):
            key = key.replace(ours, theirs)
        if f'{key.rpartition(".")[0]}.'.endswith(('norm.', 'norm1.', 'norm2.')) and 'backbone.norm' not in key:
            key = key if key.endswith('.alpha') else '.bn.'.join(key.rsplit('.', 1))
        state[key] = value
    return dict(state_dict=state)


def runner_of(model: nn.Module, resume: bool = False, training: bool = True) -> SimpleNamespace:
    loop = BaseLoop.__new__(type('Loop', (BaseLoop,), dict(run=None))) if training else dict(type='EpochBasedTrainLoop')
    return SimpleNamespace(model=model, _resume=resume, _load_from='some.pth', _train_loop=loop)


def load(model: nn.Module, checkpoint: dict, **options) -> None:
    CheckedLoadHook(**options.pop('hook', {})).after_load_checkpoint(runner_of(model, **options), checkpoint)
    _load_checkpoint_to_model(model, checkpoint)


@pytest.mark.parametrize('options', [dict(), dict(resume=True), dict(training=False)])
@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_own_checkpoints_load(options, prefix):
    model = Detector(norm_cfg=dict(type='PRepBN'))
    checkpoint = checkpoint_of(model, prefix)
    saved = dict(checkpoint['state_dict'])
    load(model, checkpoint, **options)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[prefix + key].to(value.dtype), msg=key)


def test_renamed_norms_and_wrapped_models_load_without_a_runner(tmp_path):
    source, target = Detector(norm_cfg=dict(type='PRepBN')), Detector(norm_cfg=dict(type='RepBN'))
    checkpoint = checkpoint_of(source, 'module.')
    for key in checkpoint['state_dict']:
        if key.endswith('_gamma'):
            checkpoint['state_dict'][key] = torch.zeros((), dtype=torch.float64)
    check_detector_checkpoint(target, checkpoint, complete=True)
    # As slab_det.checkpoints.build.build_detector loads it: nothing strips a prefix there.
    missing, unexpected = target.load_state_dict(checkpoint['state_dict'], strict=False)
    assert not [key for key in missing if not key.endswith('relative_position_index')]
    assert not unexpected


def test_official_backbone_is_converted_in_place():
    checkpoint = official_checkpoint()
    eta = checkpoint['state_dict']['backbone.layers.0.blocks.0.norm1.alpha']
    head = checkpoint['state_dict']['bbox_head.weight']
    model = Detector(norm_cfg=dict(type='PRepBN'), out_norm_cfg=dict(type='LN'))
    load(model, checkpoint, training=False)
    norm = model.backbone.stages[0].blocks[0].norm1
    assert norm.gamma == 0.0
    assert norm.statistics_loaded
    assert torch.equal(norm.repbn.eta, eta)
    assert torch.equal(model.bbox_head.weight, head)


@pytest.mark.parametrize('options', [dict(), dict(resume=True), dict(training=False)])
def test_nothing_matched_is_an_error(options):
    with pytest.raises(CheckpointError, match='nothing matches'):
        load(Detector(), dict(state_dict={'encoder.weight': torch.zeros(2)}), **options)


def test_a_classifier_is_no_detector():
    with pytest.raises(CheckpointError, match='init_cfg'):
        load(Detector(), dict(model=checkpoint_of(SLABSwin(**SMALL))['state_dict']))


def test_shapes_that_do_not_fit_are_errors_unless_reinitialized():
    checkpoint = checkpoint_of(Detector(num_classes=80))
    model = Detector(num_classes=3)
    with pytest.raises(CheckpointError, match=r'bbox_head\.weight \(80, 4\).*reinitialize'):
        load(model, dict(checkpoint))
    before = model.bbox_head.weight.detach().clone()
    load(model, checkpoint, hook=dict(reinitialize=['bbox_head']))
    assert torch.equal(model.bbox_head.weight, before)
    assert torch.equal(model.neck.weight, checkpoint['state_dict']['neck.weight'])


@pytest.mark.parametrize(
    ('options', 'strict'), [(dict(), False), (dict(resume=True), True), (dict(training=False), True)]
)
@pytest.mark.parametrize('lost', ['neck.weight', 'backbone.norm1.weight', 'backbone.stages.0.blocks.1.norm1.bias'])
def test_missing_weights_are_errors_where_all_are_needed(options, strict, lost):
    model = Detector()
    checkpoint = checkpoint_of(model)
    del checkpoint['state_dict'][lost]
    if strict:
        with pytest.raises(CheckpointError, match=lost.replace('.', r'\.')):
            load(model, checkpoint, **options)
    else:
        report = check_detector_checkpoint(model, checkpoint)
        assert report.missing_unexpected == [lost]


def test_surplus_keys_are_reported():
    checkpoint = checkpoint_of(Detector())
    checkpoint['state_dict']['mask_head.weight'] = torch.zeros(1)
    report = check_detector_checkpoint(Detector(), checkpoint)
    assert report.unused_unexpected == ['mask_head.weight']
    assert 'mask_head.weight' in str(report)


QUADRATIC = dict(UN=dict(type='UN'), PowerNorm=dict(type='PowerNorm'), wide=dict(type='UN', window_size=8))


@pytest.mark.parametrize(('source', 'target'), [('UN', 'wide'), ('UN', 'PowerNorm'), ('PowerNorm', 'UN')])
@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_what_the_check_leaves_out_is_not_loaded_after_it(source, target, prefix):
    source, target = (Detector(norm_cfg=QUADRATIC[name]) for name in (source, target))
    fresh = {key: value.clone() for key, value in target.state_dict().items()}
    checkpoint = checkpoint_of(source, prefix)
    for key, value in checkpoint['state_dict'].items():
        if not value.is_floating_point() and 'norm' in key:
            checkpoint['state_dict'][key] = torch.full_like(value, 7)
    given = dict(checkpoint['state_dict'])
    report = check_detector_checkpoint(target, checkpoint)
    _load_checkpoint_to_model(target, checkpoint)
    norm_keys = [key for key in fresh if key.startswith('backbone.norm0.')]
    assert any(key in report.missing_expected for key in norm_keys)
    for key in norm_keys:
        taken = key.endswith(('.weight', '.bias', '.running_var'))
        assert torch.equal(target.state_dict()[key], given[prefix + key] if taken else fresh[key]), key


@pytest.mark.parametrize('norm', ['LN', 'PRepBN', 'UN'])
def test_a_checkpoint_of_the_same_model_stays_as_it_is(norm):
    # EMAHook swaps its weights with these by name.
    model = Detector(norm_cfg=dict(type=norm))
    checkpoint = checkpoint_of(model)
    state = checkpoint['state_dict']
    check_detector_checkpoint(model, checkpoint)
    assert checkpoint['state_dict'] is state


def saved(tmp_path, model: nn.Module, lost: tuple[str, ...] = ()) -> tuple[str, dict]:
    state = checkpoint_of(model)['state_dict']
    path = tmp_path / 'saved.pth'
    torch.save(dict(state_dict={key: value for key, value in state.items() if not key.startswith(lost)}), path)
    return str(path), state


def load_as_torch(model, path):
    model.load_state_dict(torch.load(path, weights_only=True)['state_dict'])


def load_as_init_detector(model, path):
    load_checkpoint(model, path, map_location='cpu')


@pytest.mark.parametrize('load_plainly', [load_as_torch, load_as_init_detector])
@pytest.mark.parametrize('norm', ['LN', 'PRepBN'])
def test_a_backbone_checks_what_any_loader_gives_it(tmp_path, load_plainly, norm):
    path, state = saved(tmp_path, Detector(norm_cfg=dict(type=norm)))
    model = Detector(norm_cfg=dict(type=norm))
    load_plainly(model, path)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key].to(value.dtype), msg=key)
    path, _ = saved(tmp_path, Detector(norm_cfg=dict(type=norm)), lost=('backbone.norm1.',))
    with pytest.raises(CheckpointError, match='weights of the model are missing: norm1'):
        load_plainly(Detector(norm_cfg=dict(type=norm)), path)
    path, _ = saved(tmp_path, Detector(norm_cfg=dict(type=norm), embed_dims=16))
    with pytest.raises(CheckpointError, match='shapes do not fit'):
        load_plainly(Detector(norm_cfg=dict(type=norm)), path)
    path, _ = saved(tmp_path, Detector(norm_cfg=dict(type='RepBN')))
    if norm == 'LN':
        with pytest.raises(CheckpointError, match='holds a RepBN, the model a LayerNorm'):
            load_plainly(Detector(), path)


def test_a_backbone_converts_what_any_loader_gives_it(tmp_path):
    path, state = saved(tmp_path, Detector())
    model = Detector(norm_cfg=dict(type='PRepBN'))
    load_as_init_detector(model, path)
    assert model.backbone.norm0.gamma == 1.0
    assert torch.equal(model.backbone.norm0.ln.weight, state['backbone.norm0.weight'])
    official = official_checkpoint()
    model = Detector(norm_cfg=dict(type='PRepBN'), out_norm_cfg=dict(type='LN'))
    model.load_state_dict(official['state_dict'], strict=False)
    norm = model.backbone.stages[0].blocks[0].norm1
    assert norm.gamma == 0.0
    assert torch.equal(norm.repbn.eta, official['state_dict']['backbone.layers.0.blocks.0.norm1.alpha'])


def test_surplus_weights_of_a_backbone_are_left_for_the_loader_to_report(tmp_path):
    state = checkpoint_of(Detector(depths=(2, 4)))['state_dict']
    with pytest.raises(RuntimeError, match=r'Unexpected key.*stages\.1\.blocks\.2\.norm1\.weight'):
        Detector().load_state_dict(state)


def test_a_pretrained_detector_may_be_a_part(tmp_path):
    path, state = saved(tmp_path, Detector(), lost=('bbox_head.',))
    model = Trainable(Detector(), init_cfg=dict(type='Pretrained', checkpoint=path))
    head = model.bbox_head.weight.detach().clone()
    model.init_weights()
    assert torch.equal(model.neck.weight, state['neck.weight'])
    assert torch.equal(model.bbox_head.weight, head)


class Trainable(BaseModel):
    def __init__(self, detector: Detector, init_cfg: dict | None = None) -> None:
        super().__init__(init_cfg=init_cfg)
        self.backbone, self.neck, self.bbox_head = detector.backbone, detector.neck, detector.bbox_head

    def forward(self, x: torch.Tensor, mode: str = 'tensor'):
        out = self.bbox_head(self.neck(self.backbone(x)[-1]).mean((2, 3)))
        return dict(loss=out.mean()) if mode == 'loss' else out


def make_runner(work_dir, **kwargs) -> Runner:
    return Runner(
        model=Trainable(Detector(norm_cfg=dict(type='PRepBN'))),
        work_dir=str(work_dir),
        experiment_name=work_dir.name,
        train_dataloader=dict(
            dataset=[dict(x=torch.randn(3, 20, 20))] * 4,
            batch_size=2,
            num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=False, max_iters=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1)),
        custom_hooks=[dict(type='CheckedLoadHook'), dict(type='EMAHook')],
        log_level='WARNING',
        **kwargs,
    )


def test_a_runner_checks_what_it_loads(tmp_path):
    runner = make_runner(tmp_path / 'first')
    runner.train()
    saved = tmp_path / 'first' / 'iter_1.pth'
    lost, foreign = tmp_path / 'lost.pth', tmp_path / 'foreign.pth'
    checkpoint = torch.load(saved, weights_only=False)
    del checkpoint['state_dict']['neck.weight'], checkpoint['ema_state_dict']
    torch.save(checkpoint, lost)
    torch.save(dict(state_dict={'encoder.weight': torch.zeros(1)}), foreign)

    make_runner(tmp_path / 'resumed', load_from=str(saved), resume=True).train()
    make_runner(tmp_path / 'started', load_from=str(lost)).train()
    with pytest.raises(CheckpointError, match='neck.weight'):
        make_runner(tmp_path / 'cut', load_from=str(lost), resume=True).train()
    with pytest.raises(CheckpointError, match='nothing matches'):
        make_runner(tmp_path / 'wrong', load_from=str(foreign)).train()


def test_what_a_training_began_anew_is_loaded_when_it_is_resumed_or_tested():
    hook = dict(reinitialize=['bbox_head'])
    for options in (dict(resume=True), dict(training=False)):
        model = Detector()
        checkpoint = checkpoint_of(model)
        load(model, checkpoint, hook=hook, **options)
        assert torch.equal(model.bbox_head.weight, checkpoint['state_dict']['bbox_head.weight'])
