"""absorb: norms are absorbed or kept, students are saved and rebuilt, and interrupted runs resume."""

import copy
import weakref
from operator import itemgetter
from types import MethodType

import pytest
import torch
from conftest import differing, find_objects, layer_norms, make_affine, pictures, raw_outputs
from mmengine.config import Config
from mmengine.logging import MMLogger
from teachers import BACKBONES, NORMS_GONE, build_teacher
from torch import nn

import slab_det
from slab_det.absorption.absorption import absorb
from slab_det.absorption.images import is_held_out, read_images
from slab_det.absorption.norms import walk
from slab_det.absorption.probes import Probe
from slab_det.absorption.store import TensorStore
from slab_det.checkpoints import build_detector
from slab_det.compare.detections import detect
from slab_det.conversion import ConversionError
from slab_det.fusion import save_fused


@pytest.fixture
def teacher():
    """See :func:`build_teacher`."""
    return build_teacher


def test_inference_mode_changes_nothing(teacher):
    model = teacher('SLABSwin')
    expected = absorb(model, pictures(5), **NORMS_GONE)
    with torch.inference_mode():
        assert not differing(absorb(model, pictures(5), **NORMS_GONE), expected)


@pytest.mark.parametrize('backbone', [name for name in BACKBONES if 'BN' not in name])
def test_affine_layer_norms_are_absorbed_exactly(teacher, backbone):
    """With a large eps, 1 / sigma is the same for all tokens, so the student equals the teacher at every size, also
    with padded windows."""
    model = make_affine(teacher(backbone).double())
    images = [image.double() for image in pictures()]
    student = absorb(model, images, **NORMS_GONE)
    report = student.absorption_report
    assert [norm.norm for norm in report.kept] == layer_norms(student)
    if 'V2' in backbone or 'v2' in backbone:
        # The patch embeddings that read these norms pad.
        assert len(report.kept) == 3
        assert all('padding=0' in norm.reason for norm in report.kept)
    else:
        assert not report.kept
    assert all(norm.error < 1e-9 for norm in report.norms if norm.outcome == 'absorbed')
    for size in ((66, 70), (75, 101)):
        image = pictures(1, size, seed=5)[0].double()
        with torch.no_grad():
            for one, other in zip(raw_outputs(model, image), raw_outputs(student, image), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(('ours', 'stock'), [('SLABSwin', 'SwinTransformer'), ('SLABPVT', 'PyramidVisionTransformer')])
def test_mmdet_and_slab_det_backbones_give_the_same_student(teacher, ours, stock):
    """Same weights and images give the same student, although mmdet does not call all its layers as modules."""
    one, other = teacher(ours).double(), teacher(stock).double()
    other.load_state_dict(one.state_dict())
    images = [image.double() for image in pictures()]
    one, other = (absorb(model, images, **NORMS_GONE) for model in (one, other))
    with torch.no_grad():
        for a, b in zip(one.extract_feat(images[0]), other.extract_feat(images[0]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert len(one.absorption_report.refits) == len(other.absorption_report.refits) > 0


def test_fitted_writers_reduce_the_error_of_the_stream(teacher):
    report = absorb(teacher(), pictures(25), **NORMS_GONE).absorption_report
    assert [*report.refits][10:] == [f'neck.fpn_convs.{i}.conv' for i in range(4)]
    nearer = [left < 0.99 for left in report.refits.values()]
    assert sum(nearer[:10]) >= 5 and any(nearer[10:])
    assert report.norms[0].norm == 'backbone.patch_embed.norm'


def test_probed_tensors_are_freed_before_the_next_batch(teacher, monkeypatch):
    """At 800x1333 these tensors take a third of the memory of a PVT-S forward."""
    run, shown = walk.Walk.run, []

    def watched(self, batch, *args, **kwargs):
        assert [other for other, tensor in shown if tensor() is not None and other != batch] == []
        tensors = run(self, batch, *args, **kwargs)
        shown.extend((batch, weakref.ref(tensor)) for tensor in tensors)
        return tensors

    monkeypatch.setattr(walk.Walk, 'run', watched)
    absorb(teacher(), pictures(5), **NORMS_GONE)
    assert {batch for batch, _ in shown} == {*range(5)}


def test_a_student_for_int8_is_less_sensitive_to_rounded_inputs(teacher):
    model, image = teacher(), pictures(1, (34, 38), seed=5)[0]

    def rounded(module, args):
        step = (args[0].max().clamp(min=0) - args[0].min().clamp(max=0)) / 255
        return ((args[0] / step).round() * step,)

    errors = []
    for int8 in (False, True):
        student = absorb(model, pictures(5, (34, 38)), int8=int8, **NORMS_GONE)
        with torch.no_grad():
            exact = student.extract_feat(image)
            for module in student.backbone.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(rounded)
            maps = student.extract_feat(image)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(maps, exact, strict=True)])
    assert all(2 * b < a for a, b in zip(*errors, strict=True)), errors


@pytest.mark.parametrize('form', [list, set, itemgetter(0)])
def test_named_norms_stay(teacher, form):
    model = teacher()
    names = layer_norms(model)[4:6]
    student = absorb(model, pictures(), 1, form(names), progress=False)
    stay = [names[0]] if isinstance(form, itemgetter) else names
    assert layer_norms(student) == stay == [fusion.norm for fusion in student.fusion_report.select('kept')]
    assert {norm.norm: norm.reason for norm in student.absorption_report.kept} == dict.fromkeys(stay, 'kept by choice')


def test_the_retained_ap_on_held_out_images_is_reported_and_little_is_a_warning(teacher, monkeypatch):
    model, images, warnings = teacher(), pictures(5), []
    monkeypatch.setattr(MMLogger, 'warning', lambda logger, text: warnings.append(text))
    with torch.no_grad():
        # Detections with empty masks would be dropped.
        model.roi_head.mask_head.conv_logits.bias += 10
    (found,) = detect(model, images[4:])
    student = absorb(model, images, **NORMS_GONE)
    compared = f'AP retained, by {len(found.scores)} detections in 1 held-out images: '
    assert len(found.scores) > 0 and compared in str(student.absorption_report)
    assert 0 <= student.absorption_report.retained_ap
    monkeypatch.setattr('slab_det.absorption.absorption.LEAST_RETAINED_AP', 9)
    absorb(model, images, **NORMS_GONE)
    assert '% of the AP are retained, less than 900%, with 0 LayerNorms kept' in warnings[-1]
    assert 'keep more norms (norms=) or train towards the teacher' in warnings[-1]


def test_if_the_teacher_finds_nothing_the_loss_is_unknown(teacher, monkeypatch):
    model, warnings = teacher(), []
    monkeypatch.setattr(MMLogger, 'warning', lambda logger, text: warnings.append(text))
    with torch.no_grad():
        # Every box is classified as background.
        model.roi_head.bbox_head.fc_cls.bias[-1] += 100
    report = absorb(model, pictures(5), **NORMS_GONE).absorption_report
    assert report.retained_ap is None
    assert 'retained is unknown: the teacher finds nothing in 1 held-out images' in str(report)
    assert 'finds nothing in 1 held-out images: 0 LayerNorms are kept' in warnings[-1]
    with pytest.raises(ConversionError, match='give images of its objects, or channels=0.5'):
        absorb(model, pictures(5), progress=False)


@pytest.mark.parametrize('options', [dict(channels=1, norms='remove'), dict(channels=0.6)])
def test_images_of_two_pixels_are_fitted_and_no_loss_is_announced(teacher, options):
    """No region reaches the mask head, and nothing is held out."""
    report = absorb(find_objects(teacher()), pictures(2, (1, 2)), progress=False, **options).absorption_report
    assert 'fitted images' in str(report) and 'AP about' not in str(report)
    assert 'the loss of AP is unknown, because nothing was held out' in str(report)


@pytest.mark.parametrize('count', [1, 4, 5, 12])
def test_every_fifth_batch_is_held_out_if_there_are_five(count, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(MMLogger, '_instance_dict', {})
    images = read_images(nn.Linear(1, 1), pictures(count), tmp_path)
    assert [index for index in range(images.count) if is_held_out(index)] == [*range(4, count, 5)]
    assert (f'{count} batches: none is held out' in ''.join(capsys.readouterr())) == (count < 5)


def test_the_teacher_stays_as_it_was(teacher):
    model = teacher()
    model.train()
    model.backbone.stages[0].eval()
    flags = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    student = absorb(model, pictures(), **NORMS_GONE)
    assert flags == [module.training for module in model.modules()]
    assert not any(module.training for module in student.modules())
    assert not differing(model, before)
    assert not any(
        module._forward_hooks or 'forward' in vars(module) for m in (model, student) for module in m.modules()
    )


@pytest.mark.parametrize(
    ('backbone', 'again'),
    [
        *((backbone, '') for backbone in ('SwinTransformer', 'PyramidVisionTransformer')),
        ('SLABSwin', 'absorb'),
        ('SwinTransformer', 'fuse'),
    ],
)
def test_an_absorbed_detector_is_rebuilt_from_its_saved_config(teacher, tmp_path, backbone, again):
    model = teacher(backbone)
    names = layer_norms(model)
    student = absorb(model, pictures(), 1, names[3:5], progress=False)
    if again:
        stay = names[3:5] if again == 'fuse' else names[4:5]
        student = slab_det.fuse(student) if again == 'fuse' else absorb(student, pictures(), 1, stay, progress=False)
        assert layer_norms(student) == stay
    checkpoint, config = save_fused(student, Config(dict(model=model.cfg)), tmp_path / 'fused.pth')
    rebuilt = build_detector(Config.fromfile(config), str(checkpoint))
    assert layer_norms(rebuilt) == layer_norms(student)
    image = pictures(1, (75, 101))[0]
    with torch.no_grad():
        for one, other in zip(student.extract_feat(image), rebuilt.extract_feat(image), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_resumed_absorption_equals_an_uninterrupted_one(teacher, tmp_path, monkeypatch):
    model, images = teacher(), pictures()
    whole = absorb(model, images, **NORMS_GONE)

    class Killed(BaseException):
        pass

    calls, limit = [], 300
    run = walk.Walk.run

    def killed(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == limit:
            raise Killed
        return run(self, *args, **kwargs)

    monkeypatch.setattr(walk.Walk, 'run', killed)
    with pytest.raises(Killed):
        absorb(model, images, work_dir=tmp_path, **NORMS_GONE)
    assert not any('forward' in vars(module) for module in model.modules())
    limit = 0
    calls.clear()
    resumed = absorb(model, images, work_dir=tmp_path, **NORMS_GONE)
    spent = len(calls)
    finished = absorb(model, images, work_dir=tmp_path, **NORMS_GONE)
    assert len(calls) == spent, 'a finished absorption runs no model'
    for student in (resumed, finished):
        assert not differing(whole, student) and student.absorption_report == whole.absorption_report
    # Another teacher, or as many other images, does not resume from these files.
    other = teacher()
    other.backbone.patch_embed.projection.bias.data += 1
    limit = spent + 1
    for arguments in ((other, images), (model, pictures(seed=1))):
        calls.clear()
        with pytest.raises(Killed):
            absorb(*arguments, work_dir=tmp_path, **NORMS_GONE)


def test_a_work_dir_keeps_the_fits_of_other_settings_and_of_other_code_apart(teacher, tmp_path, monkeypatch):
    """The weights are the same, and the fits are not."""

    def count_files(model):
        absorb(model, pictures(2), work_dir=tmp_path / 'fits', **NORMS_GONE)
        return len(list((tmp_path / 'fits').iterdir()))

    blocks = count_files(teacher())
    assert count_files(teacher()) == blocks
    other = teacher()
    other.backbone.stages[0].blocks[0].norm1.eps = 0.1
    assert count_files(other) == 2 * blocks
    # Another commit of the same version.
    package = tmp_path / 'slab_det'
    package.mkdir()
    (package / '__init__.py').write_text('')
    monkeypatch.setattr(slab_det, '__file__', str(package / '__init__.py'))
    assert count_files(teacher()) == 3 * blocks
    (package / 'absorption.py').write_text('# fits otherwise')
    assert count_files(teacher()) == 4 * blocks


def test_layers_that_two_blocks_share_are_not_fitted(teacher):
    def writers(model):
        return {*absorb(model, pictures(2), **NORMS_GONE).absorption_report.refits}

    whole, model = teacher(), teacher()
    first, second = model.backbone.stages[0].blocks
    second.attn = first.attn
    second.ffn.layers[1].weight = first.ffn.layers[1].weight
    # An alias of the convolutions does not count as sharing.
    model.levels = model.neck.fpn_convs
    shared = {
        f'backbone.stages.0.blocks.{i}.{layer}' for i in range(2) for layer in ('attn.w_msa.proj', 'ffn.layers.1')
    }
    assert shared < writers(whole) and writers(model) == writers(whole) - shared


@pytest.mark.parametrize('left', [0, 1000])
def test_a_walk_drops_outputs_that_no_later_block_reads(tmp_path, left):
    class Skipping(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            return self[2](self[1](y) + y)

    model, image, cpu = Skipping(*(nn.Linear(3, 3) for _ in range(3))), torch.ones(1, 3), torch.device('cpu')

    reads = walk.find_reads(model, '012', image)
    assert reads == {'0': {walk.IMAGE}, '1': {'0'}, '2': {'0', '1'}}
    store = TensorStore(tmp_path, cpu)
    store.left = {cpu: left}
    store.put('0', image)
    stored, one = [], walk.Walk(model, reads, store)
    for name in '012':
        (output,) = one.run(0, name, [Probe(name, 'output')], finish=True)
        stored.append([*store.values])
        assert sorted(path.stem for path in tmp_path.iterdir()) == (stored[-1] if not left else [])
    torch.testing.assert_close(output, model(image))
    assert stored == [['0', '0_0'], ['0', '0_0', '1_0'], ['0']] and store.left == {cpu: max(0, left - image.nbytes)}


@torch.no_grad()
def test_a_tensor_store_fills_devices_in_order_then_files(tmp_path):
    meta, cpu, value = torch.device('meta'), torch.device('cpu'), (torch.arange(4.0), dict(size=(2, 2)))
    store = TensorStore(tmp_path, cpu)
    store.left = {meta: 16, cpu: 32}
    for name in 'abcd':
        store.put(name, value)
    assert {name: device for name, (device, _) in store.values.items()} == dict(a=meta, b=cpu, c=cpu, d=None)
    for name in 'bcd':
        tensor, others = store.get(name)
        assert torch.equal(tensor, value[0]) and others == value[1]
        tensor += 1
        assert torch.equal(store.get(name)[0], value[0])
    store.drop('a')
    assert store.left == {meta: 16, cpu: 0}
    store.put('e', value)
    assert store.values['e'][0] == meta


def test_a_forward_set_on_a_module_object_is_restored(teacher):
    model = teacher().backbone
    block = model.stages[0].blocks[0]
    given = block.forward = MethodType(type(block).forward, block)
    student = absorb(model, pictures(), **NORMS_GONE)
    assert block.forward is given and student.stages[0].blocks[0].forward.__self__ is student.stages[0].blocks[0]


def test_hooks_that_would_be_lost_are_an_error(teacher):
    model = teacher('SwinTransformer')
    model.backbone.stages[0].blocks[0].attn.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ConversionError, match='stages.0.blocks.0.attn: ShiftWindowMSA has forward hooks'):
        absorb(model, pictures(), **NORMS_GONE)


def test_models_that_cannot_be_absorbed_are_errors(teacher, small_detector):
    with pytest.raises(ConversionError, match='no LayerNorm'):
        absorb(small_detector(), pictures(), **NORMS_GONE)
    with pytest.raises(ConversionError, match='DataParallel; give model.module'):
        absorb(nn.DataParallel(teacher()), pictures(), **NORMS_GONE)
    with pytest.raises(ConversionError, match='deployed.*; absorb the detector before deploying it'):
        absorb(slab_det.deploy(teacher()), pictures(), **NORMS_GONE)
    with pytest.raises(ConversionError, match='no batch'):
        absorb(teacher(), [], **NORMS_GONE)
    with pytest.raises(ConversionError, match='backbone.nrom1.*these can: backbone.patch_embed.norm'):
        absorb(teacher(), pictures(), 1, ['backbone.nrom1'], progress=False)
    broken = teacher()
    broken.backbone.stages[1].blocks[0].norm1.weight.data[0] = torch.inf
    with pytest.raises(ConversionError, match='stages.1.blocks.0.norm1: .* NaN or infinite'):
        absorb(broken, pictures(), **NORMS_GONE)
