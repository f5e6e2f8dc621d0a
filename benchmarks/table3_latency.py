"""The ten rows of SLAB's Table 3 on one device: mmdet's LayerNorm, ours, and fused PRepBN, eager and deployed.

    python benchmarks/table3_latency.py --device cuda --scope detector --dtype float16
    python benchmarks/table3_latency.py --scope backbone --size 480 640 --rounds 3 --warmup 1 --threads 1

All models of a row are measured interleaved in one process, with random weights; heads find the same number of objects
in every model. Rows are written into benchmarks/results/table3_latency_DEVICE.json as soon as they are there, and
--rows adds to a file.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from slab_det.cli import run_cli
from slab_det.measure.latency import COMPILE_MODES, DTYPES, SCOPES, latency_table, measure_latency
from slab_det.measure.report import read_paper_tables
from slab_det.measure.untrained import build_untrained

ROOT = Path(__file__).resolve().parents[1]
STOCK_SWIN, STOCK_PVT = dict(type='SwinTransformer'), dict(type='PyramidVisionTransformer')
LN, PVT_LN = (dict(norm_cfg=dict(type='LN', _delete_=True, **eps)) for eps in ({}, dict(eps=1e-6)))


class Row(NamedTuple):
    """One row of Table 3, or two that differ in the norm alone.

    Attributes:
        stock: Config of the LayerNorm row that mmdet has too; mmdet has no linear attention.
        ours: Config of our detector.
        backbone: mmdet's backbone.
        layer_norm: Changes that make ``ours`` a LayerNorm model.
        base: The paper's row that ``stock`` is.
    """

    stock: str
    ours: str
    backbone: Mapping
    layer_norm: Mapping
    base: str


ROWS = {
    'Swin-T-PRepBN': Row('mask_rcnn_swin_t', 'mask_rcnn_prepbn_swin_t', STOCK_SWIN, LN, 'Swin-T'),
    'Swin-S-PRepBN': Row('mask_rcnn_swin_s', 'mask_rcnn_prepbn_swin_s', STOCK_SWIN, LN, 'Swin-S'),
    'PVT-T-PRepBN': Row('mask_rcnn_pvt_t', 'mask_rcnn_prepbn_pvt_t', STOCK_PVT, PVT_LN, 'PVT-T'),
    'PVT-S-PRepBN': Row('mask_rcnn_pvt_s', 'mask_rcnn_prepbn_pvt_s', STOCK_PVT, PVT_LN, 'PVT-S'),
    'Flatten-Swin-T': Row('mask_rcnn_swin_t', 'mask_rcnn_flatten_swin_t', STOCK_SWIN, {}, 'Swin-T'),
    'SLAB-Swin-T': Row('mask_rcnn_swin_t', 'mask_rcnn_slab_swin_t', STOCK_SWIN, LN, 'Swin-T'),
}


def build_models(name: str, device: str, dtype: torch.dtype | None) -> dict[str, nn.Module]:
    """The models of a row: every gain is shown over the same attention with LayerNorm in the same form."""
    row = ROWS[name]
    models = {
        f'{row.base}, mmdet': build_untrained(_config(row.stock), row.backbone),
        f'{name} with LayerNorm': build_untrained(_config(row.ours), row.layer_norm),
    }
    if row.layer_norm:
        models[f'{name}, fused'] = build_untrained(_config(row.ours), {})
    for form in list(models)[1:]:
        models[f'{form}, deployed'] = slab_det.deploy(models[form].to(device), dtype)
    return models


def _config(name: str) -> Path:
    return ROOT / 'configs' / f'{name}.py'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', nargs='+', choices=ROWS, default=list(ROWS), metavar='ROW', help=', '.join(ROWS))
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='(here %(default)s)')
    parser.add_argument('--dtype', choices=DTYPES, default='float32', help='autocast, and of deployed models')
    parser.add_argument('--scope', choices=SCOPES, default='detector', help='(default %(default)s)')
    parser.add_argument('--compile', choices=COMPILE_MODES, help='torch.compile of backbone and neck, of every model')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=50)
    parser.add_argument('--warmup', type=int, default=10)
    parser.add_argument('--repeat', type=int, default=1, help='whole measurements')
    parser.add_argument('--threads', type=int)
    parser.add_argument('--out', type=Path, help='default benchmarks/results/table3_latency_DEVICE.json')
    args = parser.parse_args()
    out = args.out or ROOT / 'benchmarks' / 'results' / f'table3_latency_{torch.device(args.device).type}.json'
    paper = read_paper_tables(ROOT / 'benchmarks' / 'paper_tables.json')[0].rows
    options = ('device', 'dtype', 'scope', 'rounds', 'warmup', 'repeat', 'threads')
    found = json.loads(out.read_text()) if out.exists() else {}
    for name in args.rows:
        dtype = None if args.dtype == 'float32' else DTYPES[args.dtype]
        results = measure_latency(
            build_models(name, args.device, dtype),
            size=tuple(args.size),
            compile=args.compile or False,
            progress=True,
            **{option: getattr(args, option) for option in options},
        )
        print(f'\n{name}\n\n{latency_table(list(results.values()))}')
        base = ROWS[name].base
        print(f'paper, V100, whole detector: {paper[name]["ms"]} over {paper[base]["ms"]} ms of {base}')
        found[f'{name}, {args.scope}, {args.dtype}'] = {form: result.to_dict() for form, result in results.items()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + '\n')
    print(f'Written to {out}')


if __name__ == '__main__':
    run_cli(main)
