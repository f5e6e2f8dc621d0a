"""report.json and its table."""

import multiprocessing
import re
from pathlib import Path

import pytest
from mmengine.logging import MMLogger

from slab_det.backbones import SLABSwin
from slab_det.common.errors import SlabDetError
from slab_det.measure.report_file import (
    ReportEntry,
    ap_from_metrics,
    describe_dataset,
    describe_model,
    markdown_table,
    read_report,
    update_report,
    write_report,
)
from slab_det.norms import TokenBN

AP = {'bbox': {'AP': 0.4311, 'AP50': 0.66, 'AP75': 0.47, 'APs': None, 'APm': 0.464, 'APl': 0.56}}
DATASET = {'ann_file': '/data/coco/annotations/instances_val2017.json', 'images': 5000}


def latency(median_ms: float, **changes: object) -> dict:
    conditions = {'scope': 'detector', 'size': [800, 1333], 'dtype': 'float32', 'device': 'Some CPU', 'threads': 2}
    return {'median_ms': median_ms, **conditions, 'rounds': 100, 'warmup': 20, **changes}


def entry(name: str = 'SLAB-Swin-T', variant: str = 'fused', **changes: object) -> ReportEntry:
    values = {'norm': 'PRepBN', 'attention': 'sla', 'detector': 'MaskRCNN', 'config': 'configs/a.py', **changes}
    return ReportEntry(name=name, variant=variant, **values)


def test_written_report_is_read_back(tmp_path: Path) -> None:
    entries = [entry(ap=AP, latency=latency(5.0), dataset=DATASET), entry(variant='unfused')]
    path = tmp_path / 'new' / 'report.json'
    write_report(path, entries)
    assert read_report(path) == entries
    with pytest.raises(ValueError):
        write_report(path, [entry(ap={'bbox': {'AP': float('nan')}})])
    assert read_report(path) == entries and list(path.parent.iterdir()) == [path], 'the old report stays'


def test_two_processes_may_update_one_report(tmp_path: Path) -> None:
    path = tmp_path / 'report.json'

    def update(own: str) -> None:
        for index in range(30):
            update_report(path, entry(checkpoint=f'{own}{index}.pth'))

    other = multiprocessing.get_context('fork').Process(target=update, args=('b',))
    other.start()
    update('a')
    other.join()
    assert (other.exitcode, len(read_report(path))) == (0, 60)


def test_update_merges_entries_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'report.json'
    # RecalibrateFuseHook writes the absolute path of the checkpoint.
    update_report(path, entry(checkpoint=str(tmp_path / 'a.pth'), ap=AP, training={'seed': 0}))
    update_report(
        path,
        entry(checkpoint='a.pth', latency=latency(5.0)),
        entry(checkpoint='a.pth', variant='unfused', latency=latency(6.0)),
    )
    report = read_report(path)
    assert [found.variant for found in report] == ['fused', 'unfused']
    assert (report[0].ap, report[0].training, report[0].latency) == (AP, {'seed': 0}, latency(5.0))
    update_report(path, entry(checkpoint='a.pth', latency=latency(4.0)), entry(config='b.py'))
    newer = read_report(path)
    assert newer[0].latency == latency(4.0) and len(newer) == 3, 'another config is another row'


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{', 'JSONDecodeError'),
        ('{"schema": 2, "entries": []}', 'schema 2, expected 1'),
        ('{"schema": 1, "entries": [{"speed": 3}]}', 'speed'),
    ],
)
def test_invalid_report_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / 'report.json').write_text(content)
    with pytest.raises(SlabDetError, match=rf'report\.json is not a report.json of slab_det: .*{message}'):
        read_report(tmp_path / 'report.json')


def test_metrics_of_the_runner_become_ap(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MMLogger, '_instance_dict', {})
    suffixes = {'': 0.5, '_50': 0.7, '_75': 0.55, '_s': -1.0, '_m': 0.0, '_l': 0.6}
    metrics = {f'coco/bbox_mAP{suffix}': value for suffix, value in suffixes.items()}
    assert ap_from_metrics({**metrics, 'coco/cat_precision': 0.1}) == {
        'bbox': {'AP': 0.5, 'AP50': 0.7, 'AP75': 0.55, 'APs': None, 'APm': 0.0, 'APl': 0.6}
    }
    # mmpretrain logs per cent.
    assert ap_from_metrics({'accuracy/top1': 81.25}) == {'accuracy': {'top1': 0.8125, 'top5': None}}
    assert 'no COCO AP' not in ''.join(capsys.readouterr())
    assert ap_from_metrics({'pascal_voc/mAP': 0.4, 'pascal_voc/AP50': 0.4}) == {}
    assert 'among the metrics pascal_voc/mAP, pascal_voc/AP50: give a CocoMetric' in ''.join(capsys.readouterr())
    # A dataset without objects.
    assert ap_from_metrics({'coco/bbox_mAP': -1.0, 'accuracy': 0.3}) == {}


# tests/test_model_index.py checks the names of the package's configs.
@pytest.mark.parametrize(
    ('backbone', 'name'),
    [
        ({'type': 'mmdet.SwinTransformer', 'embed_dims': 96, 'depths': [2, 2, 18, 2]}, 'Swin-96x22182'),
        ({'type': 'SLABSwin', 'attention': ('sla', 'sla', 'softmax', 'softmax')}, 'SLA-Swin'),
        ({'type': 'SLABSwin', 'norm_cfg': {'type': 'UN'}, 'embed_dims': 32}, 'Swin-32-UN'),
        ({'type': SLABSwin, 'norm_cfg': {'type': TokenBN}, 'ffn_norm': 'pre_act'}, 'Swin-BN+FFNBN'),
        ({'type': 'PyramidVisionTransformerV2', 'embed_dims': 32, 'num_layers': [2, 2, 2, 2]}, 'PVTV2-32x2222'),
        ({'type': 'mmpretrain.T2T_ViT', 'embed_dims': 384, 'num_layers': 14}, 'T2T_ViT-384x14'),
    ],
)
def test_rows_are_named_by_attention_backbone_size_and_norm(backbone: dict, name: str) -> None:
    model = {'type': 'MaskRCNN', 'backbone': backbone}
    assert describe_model(model)['name'] == name
    assert describe_model({'type': 'FusedDetector', 'model': model}) == describe_model(model)


def test_dataset_is_described_through_wrappers() -> None:
    class Leaf(list):
        ann_file = 'a.json'

    class Wrapper(list):
        dataset = Leaf('ab')

    assert describe_dataset(Wrapper('abcd')) == {'ann_file': 'a.json', 'images': 4}


def test_table_has_the_columns_of_table_3() -> None:
    table = markdown_table([entry(ap=AP, latency=latency(51.04), dataset=DATASET, training={'seed': 1})])
    header, _, row, *_ = table.splitlines()
    assert header == '| model | norm | form | ms | box AP / 50 / 75 / s / m / l | mask AP / 50 / 75 / s / m / l |'
    assert row == '| SLAB-Swin-T | PRepBN | fused | 51.0 [1] | 43.1 / 66.0 / 47.0 / – / 46.4 / 56.0 [2] | – |'
    assert (
        '[1] ms: median latency, detector, batch 1, 800x1333 (HxW), float32, Some CPU, 2 threads, 100 rounds' in table
    )
    assert '[2] AP on coco/instances_val2017.json (5000 images); trained seed 1' in table


def test_table_marks_numbers_by_their_conditions() -> None:
    rows = [
        entry(latency=latency(5.0), ap=AP, dataset=DATASET),
        entry(variant='unfused', latency=latency(6.0), ap=AP, dataset={**DATASET, 'images': 50}),
        entry('Swin-T', latency=latency(7.0, threads=1)),
    ]
    table = markdown_table(rows)
    latencies = re.findall(r'\| (\d\.0) \[(\d)\] \|', table)
    assert latencies == [('5.0', '1'), ('6.0', '1'), ('7.0', '4')]
    assert re.findall(r'56\.0 \[(\d)\]', table) == ['2', '3']
    assert '[4] ms: median latency, detector, batch 1, 800x1333 (HxW), float32, Some CPU, 1 thread,' in table
