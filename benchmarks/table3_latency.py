"""The ten rows of SLAB's Table 3 on one device: mmdet's LayerNorm, ours, and fused PRepBN, eager and deployed.

    python benchmarks/table3_latency.py --device cuda
    python benchmarks/table3_latency.py --rows Swin-T-PRepBN --size 64 96 --rounds 2 --warmup 1    # to try it on a CPU

All models of a row are measured interleaved in one process, and only they are in memory. The results of a row are
written as soon as they are there: called again with the same arguments, the script goes on with the next row.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import gc
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from mmengine.config import Config, DictAction
from torch import nn

from slab_det.cli import run_cli
from slab_det.deployment.precision import lower_precision
from slab_det.checkpoints.build import build_detector
from slab_det.measure.environment import describe_environment
from slab_det.runtime.errors import LatencyError
from slab_det.measure.latency import DTYPES, SCOPES, describe_scope, measure_latency
from slab_det.measure.paper import SLAB_TABLE_3
from slab_det.measure.untrained import prepare_untrained

ROOT = Path(__file__).resolve().parents[1]
MMDET_BACKBONES = {'SLABSwin': 'SwinTransformer', 'SLABPVT': 'PyramidVisionTransformer'}


@dataclass(frozen=True, eq=False)
class Family:
    """Rows with the same attention and size: they differ in the norm alone.

    Attributes:
        layer_norm: Row of the paper with LayerNorm; None where it has none.
        prepbn: Row with PRepBN; None where the paper has none.
        ours: Config of our detector.
        stock: Config whose backbone mmdet has too.
        twin: What makes ``ours`` a LayerNorm model.
    """

    layer_norm: str | None
    prepbn: str | None
    ours: str
    stock: str
    twin: Mapping

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(row for row in (self.layer_norm, self.prepbn) if row)


LN = {'norm_cfg': {'type': 'LN', '_delete_': True}}
PVT_LN = {'norm_cfg': {'type': 'LN', 'eps': 1e-6, '_delete_': True}}
FAMILIES = (
    Family('Swin-T', 'Swin-T-PRepBN', 'mask_rcnn_prepbn_swin_t', 'mask_rcnn_swin_t', LN),
    Family('Swin-S', 'Swin-S-PRepBN', 'mask_rcnn_prepbn_swin_s', 'mask_rcnn_swin_s', LN),
    Family('PVT-T', 'PVT-T-PRepBN', 'mask_rcnn_prepbn_pvt_t', 'mask_rcnn_pvt_t', PVT_LN),
    Family('PVT-S', 'PVT-S-PRepBN', 'mask_rcnn_prepbn_pvt_s', 'mask_rcnn_pvt_s', PVT_LN),
    Family('Flatten-Swin-T', None, 'mask_rcnn_flatten_swin_t', 'mask_rcnn_swin_t', {}),
    Family(None, 'SLAB-Swin-T', 'mask_rcnn_slab_swin_t', 'mask_rcnn_swin_t', LN),
)
TITLES = {
    'stock': 'mmdet LN eager',
    'stock cast': 'mmdet LN eager, weights cast',
    'layer norm': 'our LN eager',
    'layer norm deployed': 'our LN deployed',
    'fused': 'PRepBN fused eager',
    'fused deployed': 'PRepBN fused deployed',
}
# (what, over what, target).
RATIOS = (
    ('fused', 'stock', '≤ 0.85'),
    ('fused deployed', 'stock', '≤ 0.35'),
    ('fused deployed', 'stock cast', ''),
    ('fused deployed', 'layer norm deployed', 'hope 0.90'),
)
FORMS = {
    'eager': {},
    'compile': {'compile': True},
    'reduce-overhead': {'compile': 'reduce-overhead'},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = [row for family in FAMILIES for row in family.rows]
    parser.add_argument('--rows', nargs='+', choices=rows, default=rows, metavar='ROW', help=f'of {", ".join(rows)}')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='(here %(default)s)')
    parser.add_argument(
        '--dtypes',
        nargs='+',
        choices=list(DTYPES),
        metavar='DTYPE',
        help='default: float32 float16 on a GPU, float32 on a CPU',
    )
    parser.add_argument(
        '--scopes',
        nargs='+',
        choices=list(SCOPES),
        default=['backbone+neck', 'detector'],
        metavar='SCOPE',
        help='(default %(default)s)',
    )
    parser.add_argument(
        '--form', choices=list(FORMS), help='of the deployed models (default: reduce-overhead on a GPU)'
    )
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1333), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=50, help='(default %(default)s)')
    parser.add_argument('--warmup', type=int, default=10, help='(default %(default)s)')
    parser.add_argument('--repeat', type=int, default=3, help='whole measurements (default %(default)s)')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--image', metavar='FILE', help='photograph; default seeded noise')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        default={},
        metavar='KEY=VALUE',
        help='for every config, such as smaller models to try this',
    )
    parser.add_argument('--out', metavar='FILE', help='default benchmarks/results/table3_latency_DEVICE.json')
    parser.add_argument('--again', action='store_true', help='measure everything anew')
    args = parser.parse_args()
    kind = torch.device(args.device).type
    args.dtypes = args.dtypes or (['float32', 'float16'] if kind == 'cuda' else ['float32'])
    args.form = args.form or ('reduce-overhead' if kind == 'cuda' else 'eager')
    if args.form != 'eager' and args.warmup < 3:
        # An eager pass fills the caches, the next compiles and captures, and only then is it itself.
        parser.error(f'--form {args.form} needs --warmup 3 at least: deployed models compile in their first rounds')
    args.out = Path(args.out or ROOT / 'benchmarks' / 'results' / f'table3_latency_{kind}.json')
    return args


def build(config: str, backbone: Mapping, options: Mapping) -> nn.Module:
    """The detector of a config with random weights, and the same work for the heads of all."""
    cfg = Config.fromfile(ROOT / 'configs' / f'{config}.py')
    cfg.merge_from_dict({'model.backbone': {'init_cfg': None, **backbone}})
    cfg.merge_from_dict(options)
    torch.manual_seed(0)
    model = build_detector(cfg)
    prepare_untrained(model)
    return model


def build_stock(family: Family, options: Mapping) -> nn.Module:
    """The detector on mmdet's own backbone."""
    backbone = Config.fromfile(ROOT / 'configs' / f'{family.stock}.py').model.backbone
    return build(family.stock, {'type': MMDET_BACKBONES[backbone.type]}, options)


def build_columns(family: Family, dtype: str, args: argparse.Namespace) -> dict[str, nn.Module]:
    """All models of a family."""
    low_precision = None if dtype == 'float32' else DTYPES[dtype]

    def deploy(model: nn.Module) -> nn.Module:
        return slab_det.deploy(model.to(args.device), dtype=low_precision, **FORMS[args.form])

    columns = {'stock': build_stock(family, args.cfg_options)}
    if low_precision:
        # Autocast casts all weights in every forward: what mmdet's model takes without that is a column of its own.
        columns['stock cast'] = build_stock(family, args.cfg_options)
        lower_precision(columns['stock cast'], low_precision)
    twin = build(family.ours, family.twin, args.cfg_options)
    columns |= {'layer norm': twin, 'layer norm deployed': deploy(twin)}
    if family.prepbn:
        fused = slab_det.fuse(build(family.ours, {}, args.cfg_options), inplace=True)
        columns |= {'fused': fused, 'fused deployed': deploy(fused)}
    return columns


class Results:
    """The file of results: what it has is not measured again.

    Raises:
        LatencyError: If it was written with other settings.
    """

    def __init__(self, path: Path, settings: dict, again: bool) -> None:
        self.path = path
        self.content = {'settings': settings, 'environment': None, 'measured': {}}
        if again or not path.exists():
            return
        self.content = json.loads(path.read_text())
        stored = self.content['settings']
        if differences := [key for key in settings if stored.get(key) != settings[key]]:
            said = '; '.join(f'{key} {stored.get(key)} there, {settings[key]} here' for key in differences)
            raise LatencyError(f'{path} was measured with other settings: {said}. Give another --out, or --again')

    def find(self, family: Family, dtype: str, scope: str) -> dict[str, dict] | None:
        return self.content['measured'].get(self._key(family, dtype, scope))

    def add(self, family: Family, dtype: str, scope: str, columns: dict[str, dict]) -> None:
        # One environment for the file.
        self.content['environment'] = [column.pop('environment') for column in columns.values()][0]
        self.content['measured'][self._key(family, dtype, scope)] = columns
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # In one step: a run that is cut off leaves what it had.
        temporary = self.path.with_suffix('.part')
        temporary.write_text(json.dumps(self.content, indent=1) + '\n')
        os.replace(temporary, self.path)

    @staticmethod
    def _key(family: Family, dtype: str, scope: str) -> str:
        return f'{" + ".join(family.rows)}, {dtype}, {scope}'


def measure(models: Mapping[str, nn.Module], dtype: str, scope: str, args: argparse.Namespace) -> dict[str, dict]:
    """Latency of every column."""
    results = measure_latency(
        models,
        size=tuple(args.size),
        rounds=args.rounds,
        warmup=args.warmup,
        repeat=args.repeat,
        scope=scope,
        device=args.device,
        dtype=dtype,
        threads=args.threads,
        image=args.image,
        progress=True,
    )
    return {name: result.to_dict() for name, result in results.items()}


def table(results: Results, dtype: str, scope: str, rows: Iterable[str]) -> str:
    """The table of one dtype and scope."""
    families = [family for family in FAMILIES if set(family.rows) & set(rows)]
    found = {family: columns for family in families if (columns := results.find(family, dtype, scope))}
    names = [name for name in TITLES if any(name in columns for columns in found.values())]
    ratios = [ratio for ratio in RATIOS if set(ratio[:2]) <= set(names)]
    titles = [f'{TITLES[one]} / {TITLES[other]}' for one, other, _ in ratios]
    lines = [
        ['row', *(f'{TITLES[name]}, ms' for name in names), *titles, 'paper (V100, whole detector)'],
        ['---', *['---:'] * (len(names) + len(ratios) + 1)],
        ['target', *[''] * len(names), *(target for _, _, target in ratios), ''],
    ]
    for family, columns in found.items():
        for row in family.rows:
            shown = columns if row == family.prepbn else {k: v for k, v in columns.items() if not k.startswith('fused')}
            lines.append(
                [
                    row,
                    *(f'{shown[name]["median_ms"]:.2f}' if name in shown else '–' for name in names),
                    *(_ratio(shown, one, other) for one, other, _ in ratios),
                    _paper_ratio(row),
                ]
            )
    scope_line = describe_scope({**next(iter(found.values()))['stock'], 'autocast': False}) if found else ''
    return '\n'.join([f'| {" | ".join(cells)} |' for cells in lines] + ['', scope_line])


def _ratio(columns: Mapping[str, dict], one: str, other: str) -> str:
    if one not in columns or other not in columns:
        return '–'
    within = [a / b for a, b in zip(*(columns[name]['repeat_medians_ms'] for name in (one, other)), strict=True)]
    return f'{median(within):.3f}' + (f' ({min(within):.3f} – {max(within):.3f})' if len(within) > 1 else '')


def _paper_ratio(row: str) -> str:
    """The paper's latency over that of the LayerNorm model that stands as stock here."""
    base = row.removeprefix('Flatten-').removeprefix('SLAB-').removesuffix('-PRepBN')
    return f'{SLAB_TABLE_3.rows[row].ms / SLAB_TABLE_3.rows[base].ms:.3f}'


def notes(args: argparse.Namespace, results: Results) -> Sequence[str]:
    measured = [column for columns in results.content['measured'].values() for column in columns.values()]
    found = sorted({column['detections'] for column in measured if column['detections'] is not None})
    return [
        f'Batch 1, image {args.image or "of seeded noise"}, random weights, TF32 off, warm-up {args.warmup}, '
        f'{args.rounds} rounds interleaved, {args.repeat} repeats; ratios: median of the repeats (and their range).',
        f'Deployed: slab_det.deploy, {args.form}. Our LN deployed has the same attention, caches and graphs, so that '
        'fused deployed over it is the norm alone.',
        'Half precision: eager is autocast, as mmdet runs it; deployed has its weights in the dtype, and so has '
        '"weights cast", which is the stock model spared the casts of autocast.',
        'mmdet has no Flatten or SLAB: its Swin-T stands there. "Our LN" of SLAB-Swin-T is SLAB with LayerNorm.',
        'Rows with LayerNorm have nothing to fuse.',
        *(
            [f'Heads are made to find the same number of objects in every model: {", ".join(map(str, found))}.']
            if found
            else []
        ),
    ]


def measure_missing(family: Family, dtype: str, results: Results, args: argparse.Namespace) -> None:
    """Adds what ``results`` does not have yet of one family and dtype."""
    said = f'{", ".join(family.rows)}: {dtype}'
    missing = [scope for scope in args.scopes if not results.find(family, dtype, scope)]
    print(f'{said}, {", ".join(missing)}' if missing else f'{said}: in {args.out} already', flush=True)
    if not missing:
        return
    models = build_columns(family, dtype, args)
    for scope in missing:
        results.add(family, dtype, scope, measure(models, dtype, scope, args))
    del models
    # Graphs and compiled code hold memory in cycles.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    args = parse_arguments()
    settings = {key: getattr(args, key) for key in ('form', 'rounds', 'warmup', 'repeat', 'threads', 'image')}
    settings |= {
        'size': list(args.size),
        'cfg_options': dict(args.cfg_options),
        'device': describe_environment(args.device)['device'],
    }
    results = Results(args.out, settings, args.again)
    for family in FAMILIES:
        if not set(family.rows) & set(args.rows):
            continue
        for dtype in args.dtypes:
            measure_missing(family, dtype, results, args)
    for dtype in args.dtypes:
        for scope in args.scopes:
            print(f'\n{table(results, dtype, scope, args.rows)}')
    print('\n' + '\n'.join(notes(args, results)) + f'\nWritten to {args.out}')


if __name__ == '__main__':
    run_cli(main)
