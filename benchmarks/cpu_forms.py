"""Measures what each CPU form of slab_det.deploy gains: whole detectors without one form, over detectors with all.

    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=16000000000
    python -m benchmarks.cpu_forms --threads 2

Weights are random, with 32 objects in every detector. All detectors of one model and dtype take turns in one process.
Rows go to benchmarks/results/cpu_forms.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import os
import statistics
from functools import partial
from importlib import import_module
from unittest import mock

import cv2
import torch
from torch import nn

from benchmarks.results import FOLDER, Results
from benchmarks.runtimes import ROWS, STEPS, build, measure
from slab_det.deployment import ServedDetector
from slab_det.deployment.export import random_images
from slab_det.measure.markdown import format_table

# What slab_det.deployment.deploy calls for each form.
FORMS = {
    'tiles': 'tile_blocks',
    'linear layers by oneDNN': 'deployed_linear',
    'RoIAlign': 'deployed_roi_align',
    'Winograd convolutions (float32)': 'winograd_conv',
    'convolutions as products (bfloat16)': 'patch_conv',
}
DTYPES = {'float32': None, 'bfloat16': torch.bfloat16}


def deploy_without(model: nn.Module, form: str, dtype: torch.dtype | None) -> nn.Module:
    """Deploys a copy of a model without one form; with all of them for ''."""
    # A function that replaces one layer returns None to leave it. The trial of each detector would take minutes.
    patches = {'try_deployed': lambda *_: None, **({FORMS[form]: lambda *_: None} if form else {})}
    with mock.patch.multiple(import_module('slab_det.deployment.deploy'), **patches):
        return slab_det.deploy(model, dtype)


def table(rows: list[dict]) -> str:
    """Time without a form over the time with it, a column for each model and dtype."""
    columns = list(dict.fromkeys((row['name'], row['dtype']) for row in rows))
    found = {(row['name'], row['dtype'], row['without']): row['ratio'] for row in rows}
    lines = [
        [form, *(f'{found[(*column, form)]:.2f}' if (*column, form) in found else '–' for column in columns)]
        for form in FORMS
    ]
    return format_table(('without', *(f'{name}, {dtype}' for name, dtype in columns)), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', nargs='+', choices=list(ROWS), default=['Swin-T, LayerNorm', 'PVT-S, LayerNorm'])
    parser.add_argument('--dtypes', nargs='+', choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'))
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    if 'MALLOC_MMAP_MAX_' not in os.environ:
        parser.error('export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=16000000000 first')
    torch.set_num_threads(args.threads)
    results = Results(FOLDER / 'cpu_forms.json', size=list(args.size), threads=args.threads, rounds=args.rounds)
    pixels = random_images([tuple(args.size)])[0][0].transpose(1, 2, 0).astype('uint8')
    content = cv2.imencode('.jpg', pixels)[1].tobytes()
    for name in args.rows:
        model = build(ROWS[name])
        for dtype in args.dtypes:
            forms = [form for form in FORMS if 'float' not in form or dtype in form]
            calls = {
                form: partial(ServedDetector(deploy_without(model, form, DTYPES[dtype]), STEPS), content)
                for form in ('', *forms)
            }
            times = measure(calls, args.rounds, f'{name}, {dtype}')
            for form in forms:
                ratio = statistics.median(one / base for one, base in zip(times[form], times[''], strict=True))
                values = dict(ratio=round(ratio, 3), median_ms=statistics.median(times['']), times_ms=times[form])
                results.add(dict(name=name, dtype=dtype, without=form), values)
    print(table(results.rows))


if __name__ == '__main__':
    main()
