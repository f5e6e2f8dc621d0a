"""Measures CPU latency in every runtime, each detector interleaved with its LayerNorm and mmdet counterparts.

    python -m benchmarks.runtimes --threads 2

Needs `pip install -e ".[openvino]"`. Weights are random, with 32 objects in every Mask R-CNN and none in RetinaNet;
int8 is calibrated on noise, which does not change latency. All detectors of one form are measured in the same rounds,
and added to benchmarks/results/runtimes.json; a later run measures missing detectors beside their LayerNorm detectors.
Freed memory is kept; without that, equal models differ in latency (docs/latency.md, Memory).
"""

import slab_det  # before mmdet: registers everything

# isort: split

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import cv2
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.results import FOLDER, ROOT, Results
from benchmarks.untrained import build_untrained
from slab_det.common.memory import keep_freed_memory
from slab_det.common.pipeline import ImagePipeline
from slab_det.common.record import format_table
from slab_det.export import ExportedDetector, export_onnx, load_runtime, quantize_onnx, random_images
from slab_det.fusion.channels import find_channels, resize_channels
from slab_det.inference import ServedDetector
from slab_det.measure.cost import count_multiply_adds
from slab_det.measure.figure import INK, WIDTH, save_figure, styled
from slab_det.measure.timer import PAUSE_SECONDS, time_in_turns
from slab_det.measure.untrained import prepare_untrained

CALIBRATION_SIZE = (320, 416)
# The test pipeline without resizing.
STEPS = (dict(type='LoadImageFromFile'), dict(type='PackDetInputs'))
NOT_MEASURED = 'not measured'

Call = Callable[[], object]


# Kinds of processors: the files with their rows. The deployed forms of mmdet's detector were measured on another Xeon.
PROCESSORS = {
    'CPU with AMX (Intel Xeon)': ('runtimes', 'runtimes_mmdet_deployed'),
    'CPU with AVX-512 (AMD EPYC, Zen 4)': ('runtimes_epyc',),
    'CPU with AVX2 alone (AMD EPYC, Zen 3)': ('runtimes_avx2',),
}


class Row(NamedTuple):
    """A detector.

    Attributes:
        config: Its name in configs/, or of a config of mmdet.
        stock: The row of mmdet's detector.
        layer_norm: The row of ours with LayerNorm.
        type: Type of the backbone, in place of the config's.
        kept: Number of LayerNorms that absorption keeps: the first ones, which read the most tokens; None for all.
        eighths: Eighths of the channels that stay, by unit, without a fit: :func:`remove_channels`.
    """

    config: str
    stock: str
    layer_norm: str
    type: str = ''
    kept: int | None = None
    eighths: Mapping[str, int] | None = None


SWIN, PVT = ('Swin-T, mmdet', 'Swin-T, LayerNorm'), ('PVT-S, mmdet', 'PVT-S, LayerNorm')
RETINANET = ('RetinaNet PVT-T, mmdet',) * 2
RETINANET_CONFIG = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
# Eighths that leave half, or a third, of the multiply-adds of a Mask R-CNN with Swin-T or PVT-S at 800x1216.
THIRD = {'ffn': 1, 'rpn_conv': 3, 'lateral_convs': 8}
HALF = {**THIRD, 'neck': 8}
ROWS = {
    SWIN[0]: Row('mask_rcnn_swin_t', *SWIN, type='SwinTransformer'),
    SWIN[1]: Row('mask_rcnn_swin_t', *SWIN),
    'Swin-T, absorbed, 8 of 32 kept': Row('mask_rcnn_swin_t', *SWIN, kept=8),
    'Swin-T, absorbed, 4 kept': Row('mask_rcnn_swin_t', *SWIN, kept=4),
    'Swin-T, absorbed, none kept': Row('mask_rcnn_swin_t', *SWIN, kept=0),
    'Swin-T, half of the multiply-adds': Row('mask_rcnn_swin_t', *SWIN, eighths=HALF),
    'Swin-T, a third of the multiply-adds': Row('mask_rcnn_swin_t', *SWIN, eighths=THIRD),
    'Swin-T-PRepBN': Row('mask_rcnn_prepbn_swin_t', *SWIN),
    'Swin-T-BN+FFNBN': Row('mask_rcnn_bn_ffnbn_swin_t_3x', *SWIN),
    'SLAB-Swin-T': Row('mask_rcnn_slab_swin_t', *SWIN),
    PVT[0]: Row('mask_rcnn_pvt_s', *PVT, type='PyramidVisionTransformer'),
    PVT[1]: Row('mask_rcnn_pvt_s', *PVT),
    'PVT-S, half of the multiply-adds': Row('mask_rcnn_pvt_s', *PVT, eighths=HALF),
    'PVT-S, a third of the multiply-adds': Row('mask_rcnn_pvt_s', *PVT, eighths=THIRD),
    'PVT-S-PRepBN': Row('mask_rcnn_prepbn_pvt_s', *PVT),
    RETINANET[0]: Row(RETINANET_CONFIG, *RETINANET),
}


class Form(NamedTuple):
    """How a detector runs.

    Attributes:
        runtime: 'torch', 'onnxruntime' or 'openvino'.
        kind: How the detector is prepared: '', 'deployed', 'compiled' or 'int8'.
        precision: 'float32' or 'bfloat16', for most layers.
    """

    runtime: str
    kind: str = ''
    precision: str = 'float32'


FORMS = {
    'eager': Form('torch'),
    'deployed': Form('torch', 'deployed'),
    'deployed, bfloat16': Form('torch', 'deployed', 'bfloat16'),
    'torch.compile': Form('torch', 'compiled'),
    'ONNX Runtime': Form('onnxruntime'),
    'ONNX Runtime, int8': Form('onnxruntime', 'int8'),
    'OpenVINO': Form('openvino'),
    'OpenVINO, bfloat16': Form('openvino', '', 'bfloat16'),
    'OpenVINO, int8': Form('openvino', 'int8'),
}


def build(row: Row) -> nn.Module:
    """Builds the detector of a row, with its offline norms fused."""
    config = row.config if '::' in row.config else ROOT / 'configs' / f'{row.config}.py'
    model = build_untrained(config, {'type': row.type} if row.type else {})
    if row.config == RETINANET_CONFIG:
        # Otherwise most anchors of most classes are candidates, and their sorting takes a third of the time.
        nn.init.constant_(model.bbox_head.retina_cls.bias, -20.0)
    if row.eighths:
        remove_channels(model, row.eighths)
        # Other weights find other numbers of objects.
        prepare_untrained(model)
    if row.kept is None:
        return model
    images = [torch.randn(1, 3, 64, 64)]
    absorb = partial(slab_det.absorb, model, images, 1, progress=False)
    everything = absorb('remove')
    names = [norm.norm for norm in everything.absorption_report.norms][: row.kept]
    return absorb(names) if names else everything


def remove_channels(model: nn.Module, eighths: Mapping[str, int]) -> None:
    """Leaves eighths of the channels of each unit, by the last part of its name; half in units not named."""
    units = [unit for unit in find_channels(model).values() if not unit.reason]
    resize_channels(
        model, {unit.name: unit.count * eighths.get(unit.name.rpartition('.')[2], 4) // 8 for unit in units}
    )


def multiply_adds(model: nn.Module, content: bytes) -> int:
    """The multiply-adds of a detector from the bytes of an image to masks."""
    served = ServedDetector(model, STEPS)
    with torch.no_grad():
        return count_multiply_adds(lambda: served(content))


def make_call(model: nn.Module, scope: str, form: Form, content: bytes, file: Path, threads: int) -> Call:
    """Returns the call to measure: from the bytes of an image file to boxes and masks, or the backbone alone.

    Exports ``file`` first, if a runtime other than PyTorch needs it and it does not exist.
    """
    pixels = ImagePipeline(STEPS)(content)['inputs']
    if form.runtime == 'torch':
        if form.kind == 'deployed':
            model = slab_det.deploy(model, torch.bfloat16 if form.precision == 'bfloat16' else None)
        elif form.kind == 'compiled':
            model = copy.deepcopy(model)
            for part in (model.backbone, model.neck, model.rpn_head):
                part.forward = torch.compile(part.forward, dynamic=False, options={'freezing': True})
        if scope == 'backbone':
            return partial(model.backbone, model.data_preprocessor(dict(inputs=[pixels]), False)['inputs'])
        return partial(ServedDetector(model, STEPS), content)
    if not file.exists():
        export_onnx(model, file, scope)
    if form.kind == 'int8':
        file, plain = file.with_suffix('.int8.onnx'), file
        if not file.exists():
            quantize_onnx(plain, file, random_images([CALIBRATION_SIZE]))
    options = dict(runtime=form.runtime, threads=threads, precision=form.precision)
    if scope == 'backbone':
        return partial(load_runtime(file, **options).run, pixels[None].float().numpy())
    return partial(ServedDetector(ExportedDetector(str(file), **options), STEPS), content)


@torch.inference_mode()
def measure(calls: Mapping[str, Call], rounds: int, title: str) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, after one round of warm-up."""
    times = time_in_turns(calls, rounds, pause=PAUSE_SECONDS, title=title)
    return {name: values.round(1).tolist() for name, values in times.items()}


def measure_column(
    models: Mapping[str, nn.Module],
    names: Sequence[str],
    scope: str,
    form: str,
    size: str,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, dict]:
    """Measures rows in one form; returns times, and median ratios to the LayerNorm row and to mmdet's eager row."""
    height, width = map(int, size.split('x'))
    pixels = random_images([(height, width)])[0][0].transpose(1, 2, 0).astype('uint8')
    content = cv2.imencode('.jpg', pixels)[1].tobytes()

    def call(name: str, form: str) -> Call:
        return make_call(models[name], scope, FORMS[form], content, folder / f'{name}.onnx', args.threads)

    beside = [ROWS[name].layer_norm for name in names]
    calls = {name: call(name, form) for name in dict.fromkeys([*beside, *names])}
    stock = {f'{name}, eager': call(name, 'eager') for name in {ROWS[name].stock for name in calls}}
    times = measure(calls | stock, args.rounds, f'{form}, {scope}')

    def ratio(name: str, base: str) -> float:
        return round(statistics.median(one / other for one, other in zip(times[name], times[base], strict=True)), 3)

    def left(name: str) -> dict:
        if scope == 'backbone' or not ROWS[name].eighths:
            return {}
        counts = [multiply_adds(models[key], content) for key in (name, ROWS[name].layer_norm)]
        return dict(left=round(counts[0] / counts[1], 3))

    return {
        name: dict(
            **left(name),
            median_ms=statistics.median(times[name]),
            to_layer_norm=ratio(name, ROWS[name].layer_norm),
            to_mmdet=ratio(name, f'{ROWS[name].stock}, eager'),
            times_ms=times[name],
        )
        for name in names
    }


def by_name_and_form(rows: Sequence[dict]) -> tuple[dict[tuple[str, str], dict], list[str]]:
    """The rows by name and form, and the forms in the order of ``FORMS``."""
    forms = {row['form'] for row in rows}
    return {(row['name'], row['form']): row for row in rows}, [form for form in FORMS if form in forms]


def table(rows: Sequence[dict]) -> str:
    """The rows of one size and scope, with a column for each form.

    Every ratio is to mmdet's eager mode; the rows of mmdet and of LayerNorm also show milliseconds.
    """
    measured, forms = by_name_and_form(rows)
    lines = []
    for name, row in ROWS.items():
        cells = [measured.get((name, form)) for form in forms]
        ratios = [cell and f'{cell["to_mmdet"]:.2f}' for cell in cells]
        if name in (row.stock, row.layer_norm):
            ratios = [
                # Of the processor with AVX2 alone only ratios were written down.
                f'{cell["median_ms"]:.0f} ({ratio})' if cell and 'median_ms' in cell else ratio
                for cell, ratio in zip(cells, ratios, strict=True)
            ]
        if any(cells):
            lines.append([name, *(cell or '–' for cell in ratios)])
    return format_table(('', *forms), lines)


def ratios_table(name: str = 'Swin-T, mmdet') -> str:
    """mmdet's own detector in each form on each kind of processor, over its eager mode there; the fastest is bold."""
    forms = [form for form in FORMS if form not in ('eager', 'torch.compile')]
    lines = []
    for processor in PROCESSORS:
        measured = {form: row['to_mmdet'] for (stored, form), row in rows_of(processor).items() if stored == name}
        least = min(measured[form] for form in forms if form in measured)
        cells = (measured.get(form) for form in forms)
        lines.append([processor, *('–' if x is None else f'**{x:.2f}**' if x == least else f'{x:.2f}' for x in cells)])
    return format_table(('', *forms), lines)


def rows_of(processor: str) -> dict[tuple[str, str], dict]:
    """The stored rows of whole detectors at 800x1216 on a kind of processor, by name and form."""
    stored = (Results(FOLDER / f'{file}.json') for file in PROCESSORS[processor])
    rows = [row for results in stored for row in results.select(size='800x1216', scope='detector')]
    return by_name_and_form(rows)[0]


def processors_table() -> str:
    """Milliseconds of a Mask R-CNN with Swin-T on each kind of machine: the first table of README.md.

    The columns are mmdet's own detector in eager mode, its fastest form, and the same form with half of the
    multiply-adds; beside a form stands the change of the hard detectors' mask AP in it.
    """
    lines = []
    for processor in PROCESSORS:
        measured = rows_of(processor)
        forms = {form: row for (name, form), row in measured.items() if name == SWIN[0] and form != 'eager'}
        fastest = min(forms, key=lambda form: forms[form]['to_mmdet'])
        eager, half = measured.get((SWIN[0], 'eager')), measured.get(('Swin-T, half of the multiply-adds', fastest))
        cells = [milliseconds(eager), f'{milliseconds(forms[fastest])} ({name_form(fastest)})']
        halved = f'{milliseconds(half)} ({name_form(fastest)})' if half else NOT_MEASURED
        cells += [ap_change('hard, LayerNorm', fastest), halved]
        lines.append([processor, *cells, ap_change('hard, half of the multiply-adds', fastest) if half else '–'])
    gpu = Results(FOLDER / 'gpu.json')

    def on_gpu(name: str, form: str) -> str:
        return milliseconds(next(iter(gpu.select(part='detectors', name=name, form=form)), None))

    fastest = f'{on_gpu(SWIN[1], "graph, float16")} (`deploy`, float16; SLABSwin)'
    half = on_gpu('Swin-T, half of the multiply-adds', 'graph, float16')
    lines.append(['NVIDIA H100', on_gpu(SWIN[0], 'eager, float32'), fastest, NOT_MEASURED, half, '–'])
    title = (
        '',
        'mmdet eager, float32',
        'fastest form',
        'AP change',
        'with half of the multiply-adds',
        'AP change',
    )
    return format_table(title, lines)


def milliseconds(row: Mapping | None) -> str:
    """The time of a row; its ratio to mmdet's eager mode, where only that was written down."""
    if row is None:
        return NOT_MEASURED
    if 'median_ms' not in row:
        return f'{row["to_mmdet"]:.2f} of eager'
    return f'{row["median_ms"]:,.0f}' if row['median_ms'] >= 100 else f'{row["median_ms"]:.1f}'


def name_form(form: str) -> str:
    """The name of a form, with its precision."""
    name, _, precision = form.replace('deployed', '`deploy`').partition(', ')
    return f'{name}, {precision or "float32"}'


def ap_change(name: str, form: str) -> str:
    """Mask AP of a hard detector in an int8 form minus the teacher's in float32; other forms have no row."""
    stored = {(row['name'], row['form']): row for row in Results(FOLDER / 'int8.json').rows}
    kinds = {'ONNX Runtime, int8': 'int8', 'OpenVINO, int8': 'int8 in OpenVINO'}
    row, teacher = stored.get((name, kinds.get(form))), stored['hard, LayerNorm', 'float32']
    return f'{100 * (row["segm"] - teacher["segm"]):+.1f}' if row else NOT_MEASURED


def channels_table(rows: Sequence[dict]) -> str:
    """The time of detectors with fewer channels, over that of the same detectors with all."""
    measured, forms = by_name_and_form([row for row in rows if 'left' in row])
    lines = []
    for name in (name for name, row in ROWS.items() if row.eighths):
        cells = [measured.get((name, form)) for form in forms]
        if not any(cells):
            continue
        ratios = (f'{cell["to_layer_norm"]:.2f}' if cell else '–' for cell in cells)
        lines.append([name.partition(',')[0], next(f'{cell["left"]:.2f}' for cell in cells if cell), *ratios])
    return format_table(('', 'multiply-adds left', *forms), lines)


@styled
def draw(rows: Sequence[dict], path: Path) -> None:
    """Draws the time of mmdet's, LayerNorm, absorbed and SLAB detectors in each form, over mmdet's eager mode."""
    measured, forms = by_name_and_form(rows)
    models = {
        SWIN[0]: ('white', "mmdet's own, where measured"),
        SWIN[1]: ('0.5', 'with LayerNorm'),
        'Swin-T, absorbed, none kept': (INK, 'without norms'),
        'SLAB-Swin-T': ('0.8', 'without norms, linear attention (SLAB)'),
    }
    figure = Figure(figsize=(WIDTH, 0.6 * len(forms) + 0.9))
    axes = figure.subplots()
    for index, (name, (colour, label)) in enumerate(models.items()):
        # mmdet's own detector was not measured in every form.
        ratios = {row: measured[name, form]['to_mmdet'] for row, form in enumerate(forms) if (name, form) in measured}
        heights = [row + 0.21 * (index - 1.5) for row in ratios]
        bars = axes.barh(heights, ratios.values(), 0.19, color=colour, edgecolor=INK, linewidth=0.5, label=label)
        axes.bar_label(bars, fmt='%.2f', padding=2)
    axes.axvline(1, color=INK)
    axes.set_yticks(range(len(forms)), forms)
    axes.set_ylim(len(forms) - 0.4, -0.6)
    axes.grid(visible=False, axis='y')
    axes.set_xlabel("time of a Mask R-CNN with Swin-T, mmdet's own eager detector = 1")
    axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=2)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', nargs='+', default=['800x1216'], metavar='HxW')
    parser.add_argument('--scopes', nargs='+', choices=('backbone', 'detector'), default=['backbone', 'detector'])
    parser.add_argument('--forms', nargs='+', choices=list(FORMS), default=list(FORMS))
    parser.add_argument('--rows', nargs='+', choices=list(ROWS), default=list(ROWS), metavar='ROW')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--out', type=Path, default=FOLDER / 'runtimes.json')
    args = parser.parse_args()
    runtimes = {name: version(name) for name in ('onnx', 'onnxruntime', 'openvino')}
    setting = dict(rounds=args.rounds, threads=args.threads, instructions=torch.backends.cpu.get_cpu_capability())
    results = Results(args.out, **setting, batch=1, runtimes=runtimes)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    names = {name for row in args.rows for name in (row, ROWS[row].stock, ROWS[row].layer_norm)}
    models = {name: build(ROWS[name]) for name in names}
    for scope in args.scopes:
        with tempfile.TemporaryDirectory() as folder:
            for size in args.sizes:
                for form in args.forms:
                    column = dict(size=size, scope=scope, form=form)
                    known = {row['name'] for row in results.select(**column)}
                    if form == 'torch.compile':
                        known.add(PVT[0])  # mmdet's PVT does not compile
                    missing = [name for name in args.rows if name not in known]
                    if missing:
                        measured = measure_column(models, missing, scope, form, size, Path(folder), args)
                        for name, values in measured.items():
                            results.add(dict(name=name, **column), values)
                rows = results.select(size=size, scope=scope)
                print(f'\n{scope}, batch 1, {size} (HxW), {args.threads} threads\n\n{table(rows)}', flush=True)
                if any('left' in row for row in rows):
                    print(f'\nover the same detector with all channels, in the same form\n\n{channels_table(rows)}')


if __name__ == '__main__':
    main()
