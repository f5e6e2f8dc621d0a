"""Measures what each CPU form of slab_det.deploy gains: whole detectors without one form, over detectors with all.

    python -m benchmarks.cpu_forms --threads 2
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.cpu_forms --threads 2 --dtypes float32

Weights are random, with 32 objects in every detector. All detectors of one model and dtype take turns in one process.
Freed memory is kept (docs/latency.md, Memory). Rows go to benchmarks/results/cpu_forms.json, with the instructions that
PyTorch uses. Rows of tiles and of oneDNN's products are of e0cefb8 and before, which had them.
"""

import slab_det  # before mmdet: registers everything

# isort: split

import argparse
import statistics
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from operator import itemgetter
from unittest import mock

import cv2
import torch
from torch import nn

from benchmarks.results import FOLDER, Results
from benchmarks.runtimes import ROWS, STEPS, Call, build, measure
from slab_det.common.memory import keep_freed_memory, keeps_freed_memory
from slab_det.common.record import format_table
from slab_det.export import random_images
from slab_det.inference import ServedDetector

# A module, and its name that is replaced so that a form is not used. A function that changes one layer returns None to
# leave it.
FORMS = {
    'RoIAlign': ('deploy', 'deployed_roi_align', lambda *_: None),
    'Winograd convolutions (float32)': ('deploy', 'winograd_conv', lambda *_: None),
    'convolutions as products (bfloat16)': ('deploy', 'patch_conv', lambda *_: None),
}
DTYPES = {'float32': None, 'bfloat16': torch.bfloat16}


def without(form: str) -> AbstractContextManager:
    """Keeps ``slab_det.deploy`` and its models from using a form; '' changes nothing."""
    if not form:
        return nullcontext()
    module, name, value = FORMS[form]
    return mock.patch.object(import_module(f'slab_det.inference.{module}'), name, value)


def make_call(model: nn.Module, form: str, dtype: torch.dtype | None, content: bytes) -> Call:
    """Deploys a copy of a model without one form, and returns the call to measure."""
    # The trial of each detector would take minutes.
    with (
        without(form),
        mock.patch.object(import_module('slab_det.inference.deployment'), 'try_deployed', lambda *_: None),
    ):
        served = ServedDetector(slab_det.deploy(model, dtype), STEPS)

    def call() -> None:
        with without(form):
            served(content)

    return call


def table(rows: list[dict]) -> str:
    """Time without each form over the time with all of them."""
    key = itemgetter('name', 'dtype', 'instructions', 'kept_memory')
    found = {(*key(row), row['without']): row['ratio'] for row in rows}
    forms = dict.fromkeys(row['without'] for row in rows)
    lines = []
    for setting in dict.fromkeys(map(key, rows)):
        title = f'{", ".join(setting[:3])}{", memory kept" if setting[3] else ""}'
        ratios = (found.get((*setting, form)) for form in forms)
        lines.append([title, *('–' if ratio is None else f'{ratio:.2f}' for ratio in ratios)])
    return format_table(('time without', *forms), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', nargs='+', choices=list(ROWS), default=['Swin-T, LayerNorm', 'PVT-S, LayerNorm'])
    parser.add_argument('--dtypes', nargs='+', choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument('--without', nargs='+', choices=list(FORMS), default=list(FORMS), metavar='FORM')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    results = Results(FOLDER / 'cpu_forms.json', size=list(args.size), threads=args.threads)
    setting = dict(instructions=torch.backends.cpu.get_cpu_capability(), kept_memory=keeps_freed_memory())
    pixels = random_images([tuple(args.size)])[0][0].transpose(1, 2, 0).astype('uint8')
    content = cv2.imencode('.jpg', pixels)[1].tobytes()
    for name in args.rows:
        model = build(ROWS[name])
        for dtype in args.dtypes:
            forms = [form for form in args.without if 'float' not in form or dtype in form]
            calls = {form: make_call(model, form, DTYPES[dtype], content) for form in ('', *forms)}
            times = measure(calls, args.rounds, f'{name}, {dtype}')
            for form in forms:
                ratio = statistics.median(one / base for one, base in zip(times[form], times[''], strict=True))
                values = dict(ratio=round(ratio, 3), median_ms=statistics.median(times['']), times_ms=times[form])
                results.add(dict(name=name, dtype=dtype, without=form, **setting), values)
    print(table(results.rows))


if __name__ == '__main__':
    main()
