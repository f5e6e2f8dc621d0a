"""absorb with channels: hidden channels go everywhere until a share of the multiply-adds is left."""

import copy
import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import differing, layer_norms, make_affine, pictures, raw_outputs, relative_difference, small_mmdet_cfg
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from teachers import SWIN, as_trained, build_teacher, prune, survey

import slab_det
from slab_det.absorption.absorption import absorb, find_least_share
from slab_det.absorption.channels.estimates import Price
from slab_det.absorption.channels.judge import Judge
from slab_det.absorption.channels.maps import find_components
from slab_det.absorption.channels.observed import Observer
from slab_det.absorption.channels.prices import measure_prices
from slab_det.absorption.channels.survey import Survey
from slab_det.absorption.images import read_images
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.norms.block_cache import BlockCache
from slab_det.backbones.adopt import adopt
from slab_det.checkpoints import build_detector
from slab_det.common.tensors import tensors_in
from slab_det.compare.ruler import RetainedAP
from slab_det.conversion import ConversionError
from slab_det.families import find_absorbed
from slab_det.fusion import save_fused
from slab_det.fusion.channels import find_channels, input_weight, output_parameters, resize_channels, set_input_weight

IMAGES = pictures(5, (34, 70))


def build(cfg):
    model = as_trained(MODELS.build(cfg))
    model.cfg = cfg
    return model


def build_single_stage(name='retinanet/retinanet_r50_fpn_1x_coco', **head):
    cfg = small_mmdet_cfg(name, dict(SWIN, type='SLABSwin'))
    cfg.bbox_head.update(stacked_convs=2, feat_channels=16, **head)
    return build(cfg)


def build_rtmdet():
    """RTMDet's head on an FPN, since its own neck takes few sizes of images."""
    cfg = small_mmdet_cfg('atss/atss_r50_fpn_1x_coco', dict(SWIN, type='SLABSwin'))
    head = Config.fromstring("_base_ = ['mmdet::rtmdet/rtmdet_l_8xb32-300e_coco.py']", '.py').model.bbox_head
    head.update(in_channels=16, feat_channels=16, num_classes=3, with_objectness=True)
    # Coarser levels of small images have too few positions.
    cfg.neck.num_outs = 3
    cfg.type, cfg.bbox_head = 'RTMDet', head
    return build(cfg)


def build_cascade():
    cfg = small_mmdet_cfg('cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco', dict(SWIN, type='SLABSwin'))
    cfg.roi_head.mask_roi_extractor.out_channels = 16
    cfg.roi_head.mask_head.update(in_channels=16, conv_out_channels=16, num_convs=2, num_classes=3)
    cfg.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    cfg.test_cfg.rcnn.max_per_img = 20
    return build(cfg)


def build_with_pafpn():
    """A neck that keeps its channels."""
    cfg = build_single_stage().cfg
    cfg.neck.type = 'PAFPN'
    return build(cfg)


TEACHERS = {
    'SLABSwin': build_teacher,
    'SwinTransformer': lambda: build_teacher('SwinTransformer', 'faster_rcnn', wide=False),
    'PyramidVisionTransformer': lambda: build_teacher('PyramidVisionTransformer', 'faster_rcnn', wide=False),
    'RetinaNet': build_single_stage,
    'ATSS': lambda: build_single_stage('atss/atss_r50_fpn_1x_coco', norm_cfg=dict(type='GN', num_groups=4)),
    'FCOS': lambda: build_single_stage(
        'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco', norm_cfg=dict(type='GN', num_groups=8), centerness_on_reg=True
    ),
    'RTMDet': build_rtmdet,
    'CascadeRCNN': build_cascade,
    'PAFPN': build_with_pafpn,
}


@pytest.fixture(params=TEACHERS)
def teacher(request):
    """A detector with random weights."""
    model = TEACHERS[request.param]()
    adopt(model)
    return model


def head_outputs(model, image):
    """What the heads compute from an image."""
    with torch.no_grad():
        # A cascade returns lists of its stages.
        found = raw_outputs(model, image) if hasattr(model, 'roi_head') else model.bbox_head(model.extract_feat(image))
        return tensors_in(found)


def outputs(model, image):
    """The maps of the neck and what the heads compute from them."""
    with torch.no_grad():
        return [*model.extract_feat(image), *head_outputs(model, image)]


def test_the_students_multiply_adds_are_those_planned(teacher, tmp_path):
    """The student is rebuilt from its config, and deployed."""
    norms = 'keep' if 'roi_head' not in teacher.cfg or teacher.with_mask else 'remove'
    adopted = copy.deepcopy(teacher)
    adopt(adopted)
    surveyed = survey(adopted, IMAGES, tmp_path)
    surveyed.prices = measure_prices(surveyed, Judge(adopted, surveyed.observer.images), tmp_path)
    share = 0.6 * surveyed.least_share() + 0.4
    counts = surveyed.choose(share)
    student = absorb(teacher, IMAGES, share, norms, progress=False)
    report = student.absorption_report
    assert counts == report.counts == student.fusion_report.channels
    before, after = report.multiply_adds
    assert after == surveyed.multiply_adds(counts) and share - 0.1 < after / before <= share
    assert layer_norms(student) == (layer_norms(teacher) if norms == 'keep' else [])
    assert f'{after / before:.0%}' in str(report)
    if teacher.cfg.type == 'RetinaNet':
        # Twice pruned.
        student = absorb(student, IMAGES, 0.95, progress=False)
        assert student.fusion_report.channels.keys() >= counts.keys() and student.fusion_report.channels != counts
    checkpoint, config = save_fused(student, Config(dict(model=teacher.cfg)), tmp_path / 'fused.pth')
    rebuilt = build_detector(Config.fromfile(config), str(checkpoint))
    image = pictures(1, (75, 101), seed=5)[0]
    assert not differing(student, rebuilt)
    assert relative_difference(outputs(rebuilt, image), outputs(student, image)) < 1e-4
    assert relative_difference(outputs(slab_det.deploy(rebuilt), image), outputs(student, image)) < 1e-4


def add_twins(model, units):
    """Makes the second half of the channels of each head like the first half, and twice as large where no norm follows;
    q and k lose half of their rank."""
    for unit in units:
        writers, between = ([*map(model.get_submodule, names)] for names in (unit.writers, unit.between))
        norms = [x for layer in between for x in layer.state_dict().values() if x.ndim]
        parts = 3 if unit.tokens else 1
        for x in (*filter(torch.is_tensor, (x for layer in writers for x in output_parameters(layer))), *norms):
            first, second = x.data.unflatten(0, (parts, unit.heads, -1)).chunk(2, 2)
            second.copy_(first if norms else 2 * first)


@pytest.mark.parametrize('build', [build_teacher, TEACHERS['ATSS'], build_rtmdet])
def test_channels_that_repeat_others_are_removed_everywhere_at_little_loss(build, tmp_path):
    # Narrow heads have too few channels for a close fit.
    model = build(wide=False, act_cfg=dict(type='ReLU')) if build is build_teacher else build()
    model = model.double()
    # In other units neither layers nor ReLU keep the pairs.
    units = [unit for unit in find_channels(model).values() if unit.tokens or 'head' in unit.name]
    add_twins(model, units)
    assert len(units) == (11 if build is build_teacher else 9), units
    counts = {unit.name: unit.count // 2 for unit in units}
    images = [image.double() for image in pictures(10)]
    student = prune(survey(model, images, tmp_path), counts)
    control = copy.deepcopy(model)
    assert student.absorption_report.counts == counts
    resize_channels(control, counts)
    image, regions = (
        pictures(1, (75, 101), seed=5)[0].double(),
        torch.tensor([[0, 3, 5, 40, 50], [0, 20, 10, 90, 60.0]]),
    )
    with torch.no_grad():
        maps = model.extract_feat(image)

        def outputs_of_heads(net):
            if not hasattr(net, 'roi_head'):
                return net.bbox_head(maps)
            box, mask = net.roi_head._bbox_forward(maps, regions.double()), net.roi_head._mask_forward
            return net.rpn_head(maps), box['cls_score'], box['bbox_pred'], mask(maps, regions.double())['mask_preds']

        for net in (student, control):
            losses = [
                relative_difference(tensors_in(one), tensors_in(other))
                for one, other in zip(
                    (net.extract_feat(image), *outputs_of_heads(net)), (maps, *outputs_of_heads(model)), strict=True
                )
            ]
            assert max(losses) < 2e-2 if net is student else min(losses) > 0.1, losses


def test_no_other_combinations_of_maps_lose_less_than_components():
    generator = torch.Generator().manual_seed(0)
    x, root, *others = (torch.randn(size, 6, generator=generator, dtype=torch.double) for size in (200, 3, 2, 2, 2))
    x, q, moments = x @ torch.randn(6, 6, generator=generator, dtype=torch.double) + 1, root.T @ root, CrossMoments()
    moments.add(x)
    second = x.T @ x / len(x)
    found = find_components(moments, q)

    def lost(encoder, decoder):
        rest = torch.eye(6) - decoder @ encoder
        return float((q @ rest @ second @ rest.T).trace())

    for kept in range(7):
        components = found.encoder[:kept], found.decoder[:, :kept]
        assert lost(*components) == pytest.approx(float(found.losses[kept]), abs=1e-9 * float(found.losses[0]))
    assert float(found.losses[3]) < 1e-9 * float(found.losses[0]), 'the readers have three outputs'
    for encoder in (*others, torch.eye(6, dtype=torch.double)[:2], torch.eye(6, dtype=torch.double)[4:]):
        decoder = second @ encoder.T @ torch.linalg.inv(encoder @ second @ encoder.T)
        assert lost(encoder, decoder) > float(found.losses[2])


@pytest.mark.parametrize('name', ['neck', 'neck.lateral_convs'])
@pytest.mark.parametrize('build', [build_teacher, build_single_stage, build_cascade])
@torch.no_grad()
def test_channels_of_a_neck_that_are_combinations_of_others_go_at_little_loss(build, name, tmp_path):
    model = build().double()
    unit = find_channels(model)[name]
    half = unit.count // 2
    matrix = torch.randn(half, half, dtype=torch.double) / half**0.5
    for conv in map(model.get_submodule, unit.writers):
        conv.weight[half:] = torch.einsum('ij,jckl->ickl', matrix, conv.weight[:half])
        conv.bias[half:] = matrix @ conv.bias[:half]
    surveyed = survey(model, [x.double() for x in pictures(10)], tmp_path)
    student, control = prune(surveyed, {name: half}), copy.deepcopy(model)
    resize_channels(control, {name: half})
    (found,) = student.absorption_report.pruned
    assert found.unit == name and found.kept == half and found.error < 1e-4
    owners = {unit.owner for unit in find_channels(model).values() if 'head' in unit.name}

    def outputs_of_heads(net):
        """The outputs of the heads on an image, at the regions of the teacher."""
        found = []
        hooks = [net.get_submodule(name).register_forward_hook(lambda *args: found.append(args[2])) for name in owners]
        surveyed.observer.run(net, surveyed.observer.images.store.get('4'), 4)
        for hook in hooks:
            hook.remove()
        return tensors_in(found)

    for net in (student, control):
        losses = [
            relative_difference([one], [other])
            for one, other in zip(outputs_of_heads(net), outputs_of_heads(model), strict=True)
        ]
        assert max(losses) < 2e-2 if net is student else max(losses) > 0.3, losses


@torch.no_grad()
def test_norms_that_go_leave_the_components_of_maps(tmp_path):
    """Norms that are affine already go without any change, also where the neck's maps became components."""
    model = build_teacher(detector='faster_rcnn').double()
    make_affine(model.backbone)
    images = [image.double() for image in pictures(5, (34, 70))]
    options = dict(channels=0.6, progress=False, compare=False)
    kept, removed = (absorb(model, images, norms=norms, **options) for norms in ('keep', 'remove'))
    counts = kept.absorption_report.counts
    assert counts == removed.absorption_report.counts and {'neck', 'neck.lateral_convs'} <= counts.keys()
    assert layer_norms(kept) and not layer_norms(removed)
    for one, other in zip(kept.extract_feat(images[4]), removed.extract_feat(images[4]), strict=True):
        error, other_error = (relative_difference([x], [y]) for x, y in ((one, other), (one, 0 * other)))
        assert error < 0.02 < other_error, error


def test_layers_that_read_the_maps_of_a_neck_are_fitted_after_the_maps_lost_channels(tmp_path, monkeypatch):
    model, images = build_single_stage().double(), [image.double() for image in pictures(10)]
    student = prune(survey(model, images, tmp_path), {'neck': 8})
    monkeypatch.setattr('slab_det.absorption.channels.observed.MAX_COLUMNS', 0)
    control = prune(survey(model, images, tmp_path), {'neck': 8})
    image = images[4]
    expected, fitted, combined = (
        torch.cat([x.flatten() for x in head_outputs(net, image)]) for net in (model, student, control)
    )
    assert (fitted - expected).norm() < 0.8 * (combined - expected).norm(), (fitted - expected).norm()


def test_channels_that_no_layer_reads_can_go_without_any_change(teacher):
    model = teacher.double()
    units = {name: unit for name, unit in find_channels(model).items() if not name.startswith('backbone')}
    counts = {name: unit.count // 2 for name, unit in units.items()}
    assert len(units) >= 3 and all(counts.values()), units
    for name, unit in units.items():
        for layer in map(model.get_submodule, unit.readers):
            weight = input_weight(layer).clone()
            weight.unflatten(1, (unit.count, -1))[:, counts[name] :] = 0
            set_input_weight(layer, weight)
    pruned = copy.deepcopy(model)
    resize_channels(pruned, counts)
    image = pictures(1, (75, 101), seed=5)[0].double()
    assert relative_difference(head_outputs(pruned, image), head_outputs(model, image)) < 1e-9
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize('build', [build_single_stage, build_teacher])
def test_half_of_the_weight_of_positions_goes_by_the_scores_of_the_teacher(build):
    model, images = build(), torch.cat(pictures(2, (34, 70)))
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), (34, 70))
    samples = [DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0))) for _ in images]
    regions = find_absorbed(model).find_regions(model, images, samples, 1.0)
    head = 'rpn_head' if hasattr(model, 'rpn_head') else 'bbox_head'
    with torch.no_grad():
        logits = model.get_submodule(head)(model.extract_feat(images))[0]
    scores = torch.cat([x.sigmoid().amax(1).flatten() for x in logits])
    weights = [regions.position_weights(head, level) for level in range(len(logits))]
    assert [x.shape[2:] for x in weights] == [x.shape[2:] for x in logits]
    torch.testing.assert_close(torch.cat([x.flatten() for x in weights]), 0.5 + 0.5 * scores / scores.mean())
    assert regions.position_weights('roi_head.bbox_head', 0) is None


def test_later_stages_of_a_cascade_are_fitted_at_the_regions_that_earlier_stages_refined():
    model, image = build_cascade(), IMAGES[0]
    metas = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), (34, 70))
    samples = [DetDataSample(metainfo=dict(metas, scale_factor=(1.0, 1.0)))]
    regions = find_absorbed(model).find_regions(model, image, samples, 1.0)
    assert len(regions.proposals) == 3
    maps = model.extract_feat(image)
    for stage, head in enumerate(model.roi_head.bbox_head[:2]):
        rois = regions.proposals[stage]
        with torch.no_grad():
            found = model.roi_head._bbox_forward(stage, maps, rois)
        labels = found['cls_score'][:, :-1].argmax(1)
        boxes = head.regress_by_class(rois[:, 1:], labels, found['bbox_pred'], metas)
        torch.testing.assert_close(regions.proposals[stage + 1][:, 1:], boxes)


def test_auto_takes_the_least_share_with_a_draft_that_retains_the_ap(monkeypatch, capsys, warnings):
    model, tried = build_teacher('SLABSwin', 'faster_rcnn'), []

    def judge_draft(judge, share):
        tried.append(share)
        return RetainedAP(0.995 if share > 0.7 else 0.9, 0.01)

    pretended = SimpleNamespace(least_share=lambda: 0.4, choose=lambda share: share, judge_draft=judge_draft)
    assert find_least_share(pretended, None, progress=False) == 23 / 32
    assert len(tried) == 4 and min(tried) > 0.4
    # The real thing, where no student agrees.
    monkeypatch.setattr('slab_det.absorption.absorption.LEAST_RETAINED_AP', 10)
    monkeypatch.setattr(Survey, 'least_share', lambda self: 0.95)
    with torch.no_grad():
        # The teacher finds objects.
        model.roi_head.bbox_head.fc_cls.bias[-1] -= 10
    # A unit that could lose none in any case is not the reason.
    wanted, reasons = find_channels(model), {'rpn_head.rpn_conv': 'pretended'}
    assert reasons.keys() < wanted.keys()
    monkeypatch.setattr(
        'slab_det.absorption.channels.observed.find_channels',
        lambda model: {key: dataclasses.replace(unit, reason=reasons.get(key, '')) for key, unit in wanted.items()},
    )
    student = absorb(model, IMAGES)
    assert not student.absorption_report.pruned and student.absorption_report.retained_ap == pytest.approx(1)
    assert 'no student with fewer retains 1000% of the AP' in warnings[0]
    assert re.findall(r'(0.\d+) of the multiply-adds left: ', capsys.readouterr().out) == ['0.97']


def test_the_search_for_a_share_keeps_norms_that_go_in_the_end(monkeypatch):
    model, tried = build_teacher('SLABSwin', 'faster_rcnn'), []

    def search(survey, judge, progress):
        tried.append(survey.make_draft(survey.choose(0.9), survey.halves[0]))
        return 0.9

    monkeypatch.setattr('slab_det.absorption.absorption.find_least_share', search)
    student = absorb(model, IMAGES, norms='remove', progress=False)
    assert not layer_norms(student) and layer_norms(tried[0]) == layer_norms(model)
    counts = student.fusion_report.channels
    assert counts and counts.items() <= {name: unit.count for name, unit in find_channels(tried[0]).items()}.items()


@pytest.mark.parametrize('build', [build_single_stage, build_cascade, build_teacher])
def test_a_draft_loses_channels_that_no_layer_needs_without_any_change(build, tmp_path):
    model = build().double()
    adopt(model)
    units = find_channels(model)
    for unit in units.values():
        for layer in map(model.get_submodule, unit.readers):
            weight = input_weight(layer).clone()
            weight.unflatten(1, (unit.count, -1))[:, 1::2] = 0
            set_input_weight(layer, weight)
        if unit.tokens:
            weight, bias = output_parameters(model.get_submodule(unit.writers[0]))
            with torch.no_grad():
                # q of half of the channels: the logits have no more rank.
                weight[1 : unit.count : 2], bias[1 : unit.count : 2] = 0, 0
        elif 'mask_head' in unit.name:
            with torch.no_grad():
                # A channel that is silent in all regions that are fitted could go too.
                model.get_submodule(*unit.writers).bias.add_(1)
    images = [image.double() for image in pictures(6, (64, 96))]
    surveyed = survey(model, images, tmp_path)
    counts = {
        name: next(count for count in found.counts if count <= found.unit.count // 2)
        for name, found in surveyed.estimates.items()
        if any(2 * count == found.unit.count for count in found.counts)
    }
    assert {unit.maps for unit in (units[name] for name in counts)} == {True, False}
    assert any(units[name].tokens for name in counts)
    draft = surveyed.make_draft(counts, surveyed.halves[0])
    assert {name: find_channels(draft)[name].count for name in counts} == counts
    ends = {reader for unit in units.values() for reader in unit.readers}
    ends -= {writer for unit in units.values() for writer in unit.writers}

    def run(detector):
        found = []
        handles = [
            detector.get_submodule(name).register_forward_hook(lambda layer, args, output: found.append(output))
            for name in sorted(ends)
        ]
        with torch.no_grad():
            # The heads run at the regions that the teacher found.
            surveyed.observer.run(detector, images[0], 0)
        for handle in handles:
            handle.remove()
        return found

    # Ranks are cut where roots of moments are 1e-6 of the largest.
    assert relative_difference(run(draft), run(model)) < 5e-3


def test_a_price_is_convex_and_below_what_was_measured():
    assert [Price()(x) for x in (0.0, 0.3, 2.0)] == pytest.approx([0.0, 0.3, 2.0])
    price = Price([(0.4, 0.1), (0.2, 0.04), (0.1, 0.05)])
    assert price.corners == [(0, 0), (0.2, 0.04), (0.4, 0.1)]
    assert [price(x) for x in (0, 0.1, 0.2, 0.3, 0.4, 0.6)] == pytest.approx([0, 0.02, 0.04, 0.07, 0.1, 0.16])
    assert Price([(0.0, 0.01)])(0.5) == 0, 'nothing is known to be lost'


def test_prices_are_measured_on_drafts_of_one_kind_and_decide_which_channels_go(tmp_path):
    model, drafts = build_teacher().eval(), []
    images = read_images(model, IMAGES, tmp_path, heads=True)
    observer = Observer(model, images, int8=False)
    priced, unpriced = Survey(observer), Survey(observer)
    kinds = {name: kind for kind, found in priced.kinds.items() for name in found}
    whole = find_channels(model)
    heads = {'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'}
    assert {*kinds.values()} == {'FFN', 'attention', 'neck', 'neck.lateral_convs', *heads}

    def measure(students, same_maps):
        first, second = (half.batches for half in priced.halves)
        # A draft is shown no batch that it is fitted on.
        assert sorted(students) == [*range(len(IMAGES))] and len({*map(id, students.values())}) == 2
        assert {*map(id, map(students.get, first))}.isdisjoint(map(id, map(students.get, second)))
        pruned = [
            {kind for name, kind in kinds.items() if left[name].count < whole[name].count}
            for left in map(find_channels, students.values())
        ]
        assert all(each == pruned[0] for each in pruned)
        drafts.append(pruned[0])
        assert same_maps == (pruned[0] <= heads)
        # The mask head alone is dear.
        return RetainedAP(0.5 if drafts[-1] == {'roi_head.mask_head'} else 0.999, 0.001)

    judge = dict(measure=measure, drop_maps=list, images=images, batches=range(5))
    few = SimpleNamespace(**judge, count_detections=lambda batches: 49)
    priced.prices = measure_prices(priced, few, tmp_path)
    assert not drafts and priced.choose(0.6) == unpriced.choose(0.6), 'too few detections for prices'
    enough = SimpleNamespace(**judge, count_detections=lambda batches: 50)
    priced.prices = measure_prices(priced, enough, tmp_path)
    assert [len(each) for each in drafts] == [1] * 8, 'two drafts for the mask head, one for each other kind'
    again = Survey(observer)
    again.prices = measure_prices(again, few, tmp_path)
    assert len(drafts) == 8 and again.choose(0.6) == priced.choose(0.6) != unpriced.choose(0.6)

    def left(chosen):
        return sum(chosen.get(name, whole[name].count) for name in priced.kinds['roi_head.mask_head'])

    assert left(priced.choose(0.6)) > left(unpriced.choose(0.6))


def test_a_finished_absorption_is_read_from_its_work_dir(tmp_path, monkeypatch):
    model, save, saved = build_single_stage(), BlockCache.save, []
    monkeypatch.setattr(BlockCache, 'save', lambda self, block, *args: saved.append(block) or save(self, block, *args))
    options = dict(channels=0.8, norms='remove', progress=False)
    student, *again = (absorb(model, IMAGES, **options, work_dir=tmp_path) for _ in range(2))
    assert saved == [*dict.fromkeys(saved)] and 'neck.fpn_convs.0.conv' in saved
    assert not differing(student, again[0]) and again[0].absorption_report.pruned == student.absorption_report.pruned


def test_wrong_shares_are_named():
    model = build_single_stage()
    for options, message in (
        *(
            (dict(channels=share), f'channels={share!r}: give the share')
            for share in (0, 1.5, float('nan'), True, 'all', None)
        ),
        (dict(channels=0.01), r'channels=0.01: with the fewest channels everywhere 0\.\d\d of the multiply-adds'),
        (dict(channels=1), "channels=1 and norms='keep' leave nothing to absorb"),
    ):
        with pytest.raises(ConversionError, match=message):
            absorb(model, IMAGES, progress=False, **options)
    with pytest.raises(ConversionError, match="channels='auto' compares detections"):
        absorb(model.backbone, IMAGES, norms='remove', progress=False)
    with pytest.raises(ConversionError, match='no LayerNorm .* and no hidden channels that can be removed'):
        absorb(MODELS.build(dict(type='mmdet.ResNet', depth=18)), IMAGES, 0.5, progress=False)
