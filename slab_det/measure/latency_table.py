"""Latencies side by side: one table, and no comparison of what was measured differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from slab_det.measure.measured_scopes import NOISE
from slab_det.runtime.errors import LatencyError

if TYPE_CHECKING:
    from slab_det.measure.latency import LatencyResult


def latency_table(results: Sequence[LatencyResult]) -> str:
    """A Markdown table with ratios to the first result, and the scope of the numbers below it.

    Where the measurement was repeated, a ratio is the median of those within the repeats: a slow minute of the machine
    is in both of its numbers.

    Raises:
        LatencyError: If the results were not measured alike.
    """
    check_comparable([result.to_dict() for result in results])
    first = results[0]
    columns = [
        ('model', lambda result: result.name),
        ('median ms', lambda result: f'{result.median_ms:.2f}'),
        ('mean ± std', lambda result: f'{result.mean_ms:.2f} ± {result.std_ms:.2f}'),
        ('p95', lambda result: f'{result.p95_ms:.2f}'),
        ('min', lambda result: f'{result.min_ms:.2f}'),
        ('ratio', lambda result: f'{median(repeat_ratios(result, first)):.3f}'),
    ]
    if len({result.dtype for result in results}) > 1:
        columns.insert(1, ('dtype', lambda result: result.dtype))
    if first.repeats > 1:
        columns += [
            (f'medians of {first.repeats} repeats', lambda result: _range(result.repeat_medians_ms, '.2f')),
            ('their ratios', lambda result: _range(repeat_ratios(result, first), '.3f')),
        ]
    if all(result.cost for result in results):
        columns += [
            ('G multiply-adds', lambda result: f'{result.cost.multiply_adds / 1e9:.3f}'),
            ('M parameters', lambda result: f'{result.cost.parameters / 1e6:.2f}'),
            ('peak MiB', lambda result: f'{result.cost.peak_bytes / 2**20:.0f}'),
            ('norms left', lambda result: str(result.cost.norms_left)),
        ]
    rows = [[cell(result) for _, cell in columns] for result in results]
    lines = [f'| {" | ".join(cells)} |' for cells in [[title for title, _ in columns], *rows]]
    lines.insert(1, '|---|' + '---:|' * (len(columns) - 1))
    lines += ['', f'{_describe_shared(results)}, {_describe_rounds(first)}', f'timed: {first.timed}']
    if first.detections is not None:
        found = ', '.join(f'{result.name} {result.detections}' for result in results)
        lines.append(f'objects found in {first.image}: {found}')
    if first.device_type == 'cpu' and any(result.page_faults for result in results):
        pages = ', '.join(f'{result.name} {result.page_faults}' for result in results)
        lines.append(
            f'fresh pages of memory per round: {pages}'
            + ('' if first.kept_memory else '; --keep-memory measures without')
        )
    if first.scope == 'end-to-end':
        lines.append(
            f'{first.image}: {first.image_bytes / 1024:.0f} KiB'
            + ('; noise takes longer to decode than a photograph' if first.image == NOISE else '')
        )
    if first.cost:
        lines += _describe_costs(results)
    return '\n'.join(lines)


def check_comparable(latencies: Sequence[Mapping]) -> None:
    """Raises unless the latencies may stand in one ratio; takes ``LatencyResult.to_dict()``.

    They must share scope, size, device, dtype, TF32 and, on a CPU, threads and whether freed memory was kept. How a
    model is run there (fused, compiled, channels_last, deployed and in which dtype) is what one compares.

    Raises:
        LatencyError: Names the first two that differ, and in what.
    """
    for other in latencies[1:]:
        ours, theirs = _conditions(latencies[0]), _conditions(other)
        if latencies[0].get('deployed') or other.get('deployed'):
            # Its dtype is part of the form.
            ours['dtype'] = theirs['dtype']
        if differences := [key for key in ours if ours[key] != theirs[key]]:
            said = '; '.join(f'{key} {ours[key]} and {theirs[key]}' for key in differences)
            raise LatencyError(
                f'{latencies[0]["name"]!r} and {other["name"]!r} were measured differently and cannot be compared: '
                f'{said}. Measure them in one call of tools/latency.py'
            )


def repeat_ratios(result: LatencyResult, base: LatencyResult) -> tuple[float, ...]:
    """The ratio of the medians within each repeat of one interleaved measurement."""
    return tuple(mine / theirs for mine, theirs in zip(result.repeat_medians_ms, base.repeat_medians_ms, strict=True))


def describe_scope(latency: Mapping) -> str:
    """What a latency was measured on, as one line; takes ``LatencyResult.to_dict()``, also of earlier versions."""
    height, width = latency['size']
    device = latency['device']
    if latency['device_type'] == 'cpu':
        device += f', {latency["threads"]} thread{"s" if latency["threads"] != 1 else ""}'
    how = [
        latency['dtype'] + (' autocast' if latency.get('autocast') else ''),
        'TF32' if latency.get('tf32') else '',
        'channels_last' if latency.get('channels_last') else '',
        'freed memory kept' if latency.get('kept_memory') else '',
        'deployed' if latency.get('deployed') else '',
        _describe_compile(latency),
    ]
    return f'{latency["scope"]}, batch 1, {height}x{width} (HxW), {", ".join(filter(None, how))}, {device}'


def _describe_shared(results: Sequence[LatencyResult]) -> str:
    """The scope of all; what only some of them are has to stand in their names."""
    shared = results[0].to_dict()
    for flag in ('autocast', 'channels_last', 'deployed', 'compiled'):
        shared[flag] = all(getattr(result, flag) for result in results)
    if len({result.dtype for result in results}) > 1:
        shared['dtype'] = 'dtype as above'
    return describe_scope(shared)


def _describe_compile(latency: Mapping) -> str:
    if not latency['compiled']:
        return ''
    mode = latency.get('compile_mode') or 'default'
    return 'torch.compile' if mode == 'default' else f'torch.compile ({mode})'


def _conditions(latency: Mapping) -> dict:
    conditions = {key: latency[key] for key in ('scope', 'size', 'device', 'dtype')}
    conditions['TF32'] = latency.get('tf32', False)
    on_cpu = latency['device_type'] == 'cpu'
    conditions['threads'] = latency['threads'] if on_cpu else None
    conditions['kept memory'] = latency.get('kept_memory', False) if on_cpu else None
    return conditions


def _describe_rounds(result: LatencyResult) -> str:
    repeats = f', {result.repeats} repeats' if result.repeats > 1 else ''
    return f'warm-up {result.warmup}, {result.rounds} rounds interleaved{repeats}'


def _describe_costs(results: Sequence[LatencyResult]) -> list[str]:
    lines = [
        'multiply-adds of matrix products, convolutions and attention as executed, at this input; '
        f'peak: weights, what is kept for this size, and what a forward holds ({results[0].cost.memory_source})'
    ]
    if uncounted := sorted({name for result in results for name in result.cost.uncounted}):
        lines.append(f'not counted: {", ".join(uncounted)}')
    norms = [(result.name, result.cost.norm_types) for result in results if result.cost.norms_left]
    if norms:
        kinds = [f'{name}: ' + ', '.join(f'{count} {kind}' for kind, count in types.items()) for name, types in norms]
        lines.append(f'norms left in {"; ".join(kinds)}')
    return lines


def _range(values: Sequence[float], spec: str) -> str:
    return f'{min(values):{spec}} – {max(values):{spec}}'
