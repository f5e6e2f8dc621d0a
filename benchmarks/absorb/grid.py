"""Compares ways to remove hidden channels of FFNs: which channels go, and what is fitted after it; adds the AP.

    python -m benchmarks.absorb.grid hard CONFIG CHECKPOINT --data-root data/hard --seed 0
    python -m benchmarks.absorb.grid hard --table-only

Selectors, by the hidden values h of a channel on the images, the column w of fc2 that reads it, and the row u of
fc1 that writes it: magnitude |w|^2 + |u|^2; Wanda-SP sum |w| (E h^2)^1/2; FLAP Var h |w|^2; CORP (arXiv 2602.05243)
E h^2 times the share of tokens with h > 0; ours (backward elimination); random. Fits: none; the mean of the channels
that go is added to the bias; CORP's affine ridge regression of the channels that go on those that stay; ours (to the
teacher's stream, on the student's inputs).

All norms stay, and every FFN keeps the same share of its channels. Images are training images. A row is measured once
and added to benchmarks/results/grid_NAME.json.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from unittest import mock

import torch
from mmengine.config import Config
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.absorb.run import IN_PROCESS
from benchmarks.results import FOLDER, Results
from slab_det import runtime
from slab_det.absorption import refit, steps
from slab_det.absorption.images import read_images
from slab_det.absorption.plan import make_plan
from slab_det.absorption.elimination import rank_channels
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.student import make_student
from slab_det.checkpoints import build_detector
from slab_det.preflight import set_data_root
from slab_det.fusion.channels import ChannelUnit, find_channels, keep_channels
from slab_det.measure.evaluate import evaluate
from slab_det.common.record import format_table
from slab_det.recalibration import recalibration_dataloader
from slab_det.common.batches import one_pass, prepare_inputs
from slab_det.common.copying import copy_module

SELECTORS = ('magnitude', 'Wanda-SP', 'FLAP', 'CORP', 'ours', 'random 0', 'random 1', 'random 2')
FITS = ('none', 'mean', 'CORP', 'ours')
SHARES = (0.5, 0.25, 0.125)


class Hidden(NamedTuple):
    """An FFN and its hidden values on the images of the teacher.

    Attributes:
        unit: The FFN.
        moments: Sums over the hidden values as x, and the outputs of fc2 without its bias as y.
        active: The share of tokens with a positive value, (C,).
        u, w: Weights of fc1, (C, C_in), and fc2, (C_out, C), in float64.
        bias: That of fc2, (C_out,).
    """

    unit: ChannelUnit
    moments: CrossMoments
    active: Tensor
    u: Tensor
    w: Tensor
    bias: Tensor

    def order(self, selector: str) -> Tensor:
        """The indices of the channels, (C,), the one to remove first at the start."""
        kind, _, seed = selector.partition(' ')
        if kind == 'random':
            return torch.randperm(len(self.active), generator=torch.Generator().manual_seed(int(seed)))
        if kind == 'ours':
            return rank_channels(self.moments)[0]
        variance = self.moments.xx.diagonal() / self.moments.count
        energy, norm = variance + self.moments.mean_x.square(), self.w.square().sum(0)
        scores = {
            'magnitude': norm + self.u.square().sum(1),
            'Wanda-SP': self.w.abs().sum(0) * energy.sqrt(),
            'FLAP': variance * norm,
            'CORP': energy * self.active,
        }
        return scores[kind].argsort()

    def fit(self, kind: str, stay: Tensor) -> tuple[Tensor, Tensor]:
        """Weight, (C_out, K), and bias of fc2 behind the channels that stay."""
        average = self.moments.mean_x
        weight = self.moments.project(self.w, stay) if kind == 'CORP' else self.w[:, stay]
        shift = 0.0 if kind == 'none' else self.w @ average - weight @ average[stay]
        return weight, self.bias + shift


@torch.no_grad()
def look(teacher: nn.Module, images: DataLoader) -> dict[str, Hidden]:
    """Reads the hidden values of every FFN of the backbone in one pass, by the name of the unit."""
    units = {
        name: unit
        for name, unit in find_channels(teacher).items()
        if name.startswith('backbone.') and not unit.tokens and not unit.reason
    }
    moments: dict[str, CrossMoments] = defaultdict(CrossMoments)
    active: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def see(name: str, h: Tensor) -> None:
        tokens = h.flatten(2).transpose(1, 2) if h.ndim == 4 else h
        tokens = tokens.flatten(0, -2)
        moments[name].add(tokens)
        active[name] = active[name] + (tokens > 0).sum(0)

    prepare = prepare_inputs(teacher, images)
    with ExitStack() as stack:
        for name, unit in units.items():
            reader = teacher.get_submodule(unit.readers[0])
            hook = reader.register_forward_pre_hook(lambda module, args, name=name: see(name, args[0]))
            stack.callback(hook.remove)
        for batch in one_pass(images):
            teacher.extract_feat(prepare(batch)[0])
    found = {}
    for name, unit in units.items():
        u, w = (teacher.get_submodule(layer).weight.flatten(1).double() for layer in (unit.writers[0], unit.readers[0]))
        moments[name].xy = moments[name].xx @ w.T
        bias = teacher.get_submodule(unit.readers[0]).bias.double()
        found[name] = Hidden(unit, moments[name], active[name] / moments[name].count, u, w, bias)
    return found


def channels_left(count: int, share: float) -> int:
    """The number of channels that stay, a multiple of 8, when a share of them stays."""
    return 8 * max(1, math.ceil(share * count / 8 - 1e-9))


def prune(teacher: nn.Module, hidden: Mapping[str, Hidden], selector: str, fit: str, share: float) -> nn.Module:
    """A pruned copy of the teacher, with a fit that needs only the hidden values."""
    model = copy_module(teacher)
    for found in hidden.values():
        stay = found.order(selector)[-channels_left(found.unit.count, share) :].sort().values
        weight, bias = found.fit(fit, stay)
        keep_channels(model, found.unit, stay)
        reader = model.get_submodule(found.unit.readers[0])
        with torch.no_grad():
            reader.weight.copy_(weight.view_as(reader.weight))
            reader.bias.copy_(bias)
    return model


def with_order(orders: Mapping[str, Tensor]) -> AbstractContextManager:
    """Lets absorption remove channels in these orders, by the name of the unit."""
    original = steps.prune_and_refit

    def replaced(model: nn.Module, unit: ChannelUnit, *args: object) -> float:
        with mock.patch.object(refit, 'rank_channels', lambda *_: (orders[unit.name], None)):
            return original(model, unit, *args)

    return mock.patch.object(steps, 'prune_and_refit', replaced)


def table(rows: list[dict]) -> str:
    """Mean AP of the seeds for each selector and fit, from 0 to 100; of 'random' also the mean of its orders."""
    cells: dict[tuple, list[float]] = defaultdict(list)
    for row in rows:
        if row['name'] != 'teacher':
            selector = row['selector'].partition(' ')[0]
            cells[row['share'], row['images'], selector, row['fit']].append(100 * row['AP'])
    lines = []
    for share, images in sorted({key[:2] for key in cells}, key=lambda key: (-key[0], key[1])):
        for selector in dict.fromkeys(selector.partition(' ')[0] for selector in SELECTORS):
            values = [cells.get((share, images, selector, fit)) for fit in FITS]
            if any(values):
                columns = (f'{mean(value):.1f}' if value else '–' for value in values)
                lines.append((f'{share:g}', str(images), selector, *columns))
    return format_table(('channels left', 'images', 'which go', *(f'fit: {fit}' for fit in FITS)), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help='of the result file')
    parser.add_argument('detector', nargs='*', metavar='CONFIG CHECKPOINT', help='with val_dataloader and evaluator')
    parser.add_argument('--data-root')
    parser.add_argument('--seed', type=int, default=0, help='of the teacher (default %(default)s)')
    parser.add_argument('--images', type=int, nargs='+', default=[100], help='to look at (default %(default)s)')
    parser.add_argument('--shares', type=float, nargs='+', default=SHARES, help='of channels left')
    parser.add_argument('--selectors', nargs='+', default=SELECTORS, choices=SELECTORS)
    parser.add_argument('--fits', nargs='+', default=FITS, choices=FITS)
    parser.add_argument('--table-only', action='store_true', help='print the table of the stored rows')
    args = parser.parse_args()
    results = Results(FOLDER / f'grid_{args.name}.json')
    if not args.table_only:
        measure(args, results)
    print(table(results.rows))


def measure(args: argparse.Namespace, results: Results) -> None:
    """Measures the rows that are missing."""
    runtime.install()
    torch.set_num_threads(1)
    config, checkpoint = args.detector
    cfg = Config.fromfile(config)
    if args.data_root:
        set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    teacher = build_detector(cfg, checkpoint).eval()

    def measured(model: nn.Module) -> dict:
        values = evaluate(model, cfg)
        return dict(AP=values.get('segm', values['bbox'])['AP'], box_AP=values['bbox']['AP'])

    print(results.measure_once(dict(name='teacher', seed=args.seed), lambda: measured(teacher)), flush=True)
    for count in args.images:
        images = recalibration_dataloader(cfg, count, 'test')
        hidden = look(teacher, images)
        for share, selector, fit in product(args.shares, args.selectors, args.fits):
            make = partial(pruned_student, teacher, images, hidden, selector, fit, share)
            row = dict(name='student', selector=selector, fit=fit, share=share, images=count, seed=args.seed)
            print(results.measure_once(row, lambda make=make: measured(make())), flush=True)


def pruned_student(
    teacher: nn.Module, images: DataLoader, hidden: Mapping[str, Hidden], selector: str, fit: str, share: float
) -> nn.Module:
    """A pruned copy of the teacher."""
    if fit != 'ours':
        return prune(teacher, hidden, selector, fit, share)
    orders = {name: found.order(selector) for name, found in hidden.items()}
    # Ours orders the channels by the student's hidden values.
    counts = {name: channels_left(found.unit.count, share) for name, found in hidden.items()}
    with nullcontext() if selector == 'ours' else with_order(orders), tempfile.TemporaryDirectory() as folder:
        plan = make_plan(teacher, read_images(teacher, images, Path(folder)), True, 'keep')
        return make_student(plan, counts, Path(folder), progress=False)


if __name__ == '__main__':
    main()
