"""Draws window attention as matrices, and their rank with and without the depthwise convolution.

    python benchmarks/attention_rank.py configs/quickstart_mask_rcnn_slab_swin.py --out rank.png

SLAB (Guo et al., ICML 2024), Figure 3. Linear attention is a product of N x d features, normalised by rows: its rank is
at most d, however many tokens there are. The depthwise convolution of the values adds a banded matrix of high rank.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from mmengine.config import DictAction
from torch import Tensor, nn

from slab_det.checkpoints.build import build_detector
from slab_det.cli import read_config, run_cli
from slab_det.data.synthetic import draw_image
from slab_det.measure.environment import library_versions
from slab_det.measure.figure import WIDTH, save_figure, styled
from slab_det.measure.report import describe_model
from slab_det.runtime.errors import SlabDetError

SEED = 0
# Unit values mixed in one call of the attention.
CHUNK = 32
# Share of the largest singular value; smaller values, which no output would show, are not drawn.
FLOOR = 1e-5


@dataclass(frozen=True)
class MapRank:
    """One attention map in some channels of a head.

    Attributes:
        matrix: (N, N), the map of the channel whose effective rank is the median.
        singular_values: (channels, N), falling.
        effective_ranks: One per channel.
        numerical_ranks: One per channel.
    """

    matrix: Tensor
    singular_values: Tensor
    effective_ranks: list[float]
    numerical_ranks: list[int]


def effective_rank(singular_values: Tensor) -> float:
    """``exp(-sum_i p_i log p_i)`` with ``p = sigma / sum(sigma)`` (Roy and Vetterli, EUSIPCO 2007).

    1 for a matrix of rank one, n for n equal singular values; 0 for a matrix of zeros.
    """
    total = singular_values.sum()
    return float(torch.special.entr(singular_values / total).sum().exp()) if total else 0.0


def numerical_rank(singular_values: Tensor) -> int:
    """Singular values above ``N * eps * sigma_1``, as ``numpy.linalg.matrix_rank`` counts them."""
    tolerance = len(singular_values) * torch.finfo(singular_values.dtype).eps * singular_values.max()
    return int((singular_values > tolerance).sum())


@torch.no_grad()
def measure_attention_rank(
    backbone: nn.Module, image: Tensor, stage: int = 0, block: int = 0
) -> tuple[str, dict[str, MapRank]]:
    """The attention maps of the first head in the middle window, as matrices, and their ranks; all in float64.

    Args:
        backbone: SLABSwin, fused or not; it becomes float64 and goes to eval mode.
        image: A normalised image, (1, 3, H, W).
        stage: Index of the stage.
        block: Index of the block in it.

    Returns:
        Which tokens were looked at, in words, and the ranks by the name of the map: without the depthwise convolution,
        and with it where the attention has one, in every channel.

    Raises:
        SlabDetError: If the backbone has no such block.
    """
    backbone.double().eval()
    try:
        attention = backbone.stages[stage].blocks[block].attn
        heads = attention.w_msa.num_heads
    except (AttributeError, IndexError) as error:
        message = f'{type(backbone).__name__} has no window attention at stage {stage}, block {block}; give a SLABSwin'
        raise SlabDetError(message) from error
    calls: list[tuple] = []
    handle = attention.register_forward_pre_hook(lambda module, args: calls.append(args))
    backbone(image.double())
    handle.remove()
    x, hw_shape, *_ = calls[0]
    windows = window_tokens(hw_shape, attention.w_msa.window_size, attention.shift_size)
    tokens, dims = windows[len(windows) // 2], x.shape[-1] // heads
    convolution = getattr(attention.w_msa, 'dwc', None)
    kind = 'softmax' if convolution is None else 'focused' if hasattr(attention.w_msa, 'scale') else 'sla'
    matrices = attention_matrices(attention, x, hw_shape, tokens)[:dims]
    place = f'stage {stage}, block {block}, head 0, {len(tokens)} tokens of the middle window, d = {dims}'
    if convolution is None:
        return place, {kind: rank_maps(matrices[:1])}
    kept = {name: value.clone() for name, value in convolution.state_dict().items()}
    for parameter in convolution.parameters():
        parameter.zero_()
    # Without the convolution all channels of a head share one matrix.
    alone = attention_matrices(attention, x, hw_shape, tokens)[:1]
    convolution.load_state_dict(kept)
    return place, {kind: rank_maps(alone), f'{kind} + depthwise convolution': rank_maps(matrices)}


def window_tokens(hw_shape: tuple[int, int], window_size: int, shift: int) -> list[Tensor]:
    """Tokens of the map in each window of a shifted partition, in reading order; padding is left out."""
    height, width = hw_shape
    rows, columns = -(-height // window_size), -(-width // window_size)
    slots = torch.full((rows * window_size, columns * window_size), -1)
    slots[:height, :width] = torch.arange(height * width).view(height, width)
    slots = slots.roll((-shift, -shift), (0, 1))
    windows = slots.unflatten(0, (rows, -1)).unflatten(2, (columns, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
    return [window[window >= 0] for window in windows]


def attention_matrices(attention: nn.Module, x: Tensor, hw_shape: tuple[int, int], tokens: Tensor) -> Tensor:
    """The matrices (C, N, N), one per channel, that the values of one window's N tokens are multiplied with.

    With fixed queries and keys every attention here is an affine map of the values that keeps channels apart. So value
    j set to 1 in every channel, all others to 0, gives column j of the matrices of all channels at once: no formula is
    repeated, and any attention with a ``qkv`` and a ``proj`` layer can be measured.

    Args:
        attention: Shifted or unshifted window attention.
        x: (1, L, C), its input.
        hw_shape: (H, W) with H * W = L.
        tokens: (N,), tokens of the window.
    """
    values, mixed = [], []
    layers = attention.w_msa.qkv, attention.w_msa.proj
    handles = [
        layers[0].register_forward_hook(lambda _, args, qkv: torch.cat([qkv[..., : -x.shape[-1]], values[-1]], -1)),
        layers[1].register_forward_pre_hook(lambda _, args: mixed.append(args[0])),
    ]

    def mix(value: Tensor) -> Tensor:
        values.append(value)
        attention(x.repeat(len(value), 1, 1), hw_shape)
        return mixed.pop()[:, tokens]

    offset = mix(torch.zeros_like(x))
    columns = []
    for part in tokens.split(CHUNK):
        units = x.new_zeros(len(part), *x.shape[1:])
        units[torch.arange(len(part)), part] = 1
        columns.append(mix(units) - offset)
    for handle in handles:
        handle.remove()
    return torch.cat(columns).permute(2, 1, 0)


def rank_maps(matrices: Tensor) -> MapRank:
    """The ranks of the matrices (channels, N, N) of one head."""
    singular_values = torch.linalg.svdvals(matrices)
    effective = [effective_rank(values) for values in singular_values]
    middle = np.argsort(effective)[len(effective) // 2]
    return MapRank(matrices[middle], singular_values, effective, [numerical_rank(values) for values in singular_values])


def rank_table(results: Mapping[str, Mapping[str, MapRank]], scope: str) -> str:
    """A Markdown table of results by title, with the scope of its numbers below it."""
    lines = ['| model | map | effective rank | numerical rank |', '|---|---|---:|---:|']
    for title, maps in results.items():
        for name, found in maps.items():
            low, middle, high = (f(found.effective_ranks) for f in (min, np.median, max))
            effective = f'{middle:.1f}' + f' ({low:.1f} to {high:.1f})' * (low != high)
            lines.append(f'| {title} | {name} | {effective} | {np.median(found.numerical_ranks):.0f} |')
    return '\n'.join([*lines, '', f'{scope}. Median (least to most) over channels where each has its own map.'])


@styled
def draw_attention_rank(results: Mapping[str, Mapping[str, MapRank]], scope: str, path: Path) -> None:
    """Draws, per result, the map without and with the depthwise convolution, and the spectra of both.

    Maps show ``|weight|`` of query (row) and value (column) in grey, on one logarithmic scale for all rows. The map
    with the convolution is that of the median channel, and a band spans the spectra of all channels.
    """
    figure = Figure(figsize=(WIDTH, 3.0 * len(results) + 0.9))
    figure.suptitle(f'Attention maps; {scope}')
    parts = figure.subfigures(len(results) + 1, 1, height_ratios=[3.0] * len(results) + [0.55])
    # White is a hundredth of uniform attention.
    norm = LogNorm(0.01 / max(len(found.matrix) for maps in results.values() for found in maps.values()), 1, clip=True)
    for part, (title, maps) in zip(parts, results.items(), strict=False):
        part.suptitle(title)
        _draw_row(part, maps, norm)
    bar = parts[-1].colorbar(ScalarMappable(norm, 'gray_r'), cax=parts[-1].subplots(), orientation='horizontal')
    bar.set_label('|weight| of a value (column) for a query (row)')
    save_figure(figure, path)


def _draw_row(figure: SubFigure, maps: Mapping[str, MapRank], norm: LogNorm) -> None:
    *panels, spectra = figure.subplots(1, 3, width_ratios=[1, 1, 1.05])
    panels[1].axis('off')
    for axes, style, (name, found) in zip(panels, ('--', '-'), maps.items(), strict=False):
        axes.axis('on')
        axes.imshow(found.matrix.abs().clamp(min=norm.vmin).numpy(), cmap='gray_r', norm=norm)
        ranks = f'effective rank {np.median(found.effective_ranks):.1f} of {len(found.matrix)}'
        axes.set_title(f'{name}\n{ranks}\nnumerical rank {np.median(found.numerical_ranks):.0f}')
        axes.grid(visible=False)
        index = np.arange(1, found.singular_values.shape[1] + 1)
        relative = (found.singular_values / found.singular_values[:, :1]).clamp(min=FLOOR / 10).numpy()
        spectra.plot(index, np.median(relative, 0), style, color='black', label=name)
        if len(relative) > 1:
            label = f'{len(relative)} channels'
            spectra.fill_between(index, relative.min(0), relative.max(0), color='0.75', linewidth=0, label=label)
    spectra.set_yscale('log')
    spectra.set_ylim(FLOOR, 1.5)
    spectra.set_title('singular values over the largest')
    spectra.set_xlabel('index')
    spectra.legend(loc='center right')


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', metavar='CONFIG')
    parser.add_argument('checkpoint', nargs='?', metavar='CHECKPOINT', help='left out: random weights')
    parser.add_argument(
        '--with',
        dest='others',
        nargs='+',
        action='append',
        default=[],
        metavar='FILE',
        help='CONFIG [CHECKPOINT] of one more backbone, in a row below; may be repeated',
    )
    parser.add_argument('--out', required=True, metavar='FILE.png', help='the picture; numbers go to FILE.json')
    parser.add_argument('--size', type=int, nargs=2, default=(160, 192), metavar=('H', 'W'), help='of the image')
    parser.add_argument('--stage', type=int, default=0, help='(default %(default)s)')
    parser.add_argument('--block', type=int, default=0, help='(default %(default)s)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE', help='for every CONFIG')
    return parser.parse_args()


def measure(config: str, checkpoint: str | None, args: argparse.Namespace) -> tuple[str, dict[str, MapRank]]:
    """Title and ranks of one backbone, on the first validation image of the quick start."""
    cfg = read_config(config, args.cfg_options)
    torch.manual_seed(SEED)
    model = build_detector(cfg, checkpoint)
    weights = f'RANDOM WEIGHTS (seed {SEED})'
    if checkpoint is None:
        # As before any training; nothing is downloaded.
        model.backbone.init_cfg = None
        model.backbone.init_weights()
    else:
        # Every run has an iter_500.pth: its folder tells it apart.
        weights = f'weights of {"/".join(Path(checkpoint).absolute().parts[-2:])}'
    pixels, _ = draw_image(np.random.default_rng([0, 1, 0]), tuple(reversed(args.size)))
    tensor = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    image = model.data_preprocessor({'inputs': [tensor]}, training=False)['inputs']
    place, maps = measure_attention_rank(model.backbone, image, args.stage, args.block)
    return f'{describe_model(cfg.model)["name"]}, {weights}, {place}', maps


def main() -> None:
    args = parse_arguments()
    results = {}
    for config, *checkpoint in [[args.config, args.checkpoint], *args.others]:
        title, maps = measure(config, checkpoint[0] if checkpoint else None, args)
        results[f'{title} ({len(results) + 1})' if title in results else title] = maps
    scope, out = f'a generated image at {args.size[0]}x{args.size[1]} (HxW), float64', Path(args.out)
    print(rank_table(results, scope))
    draw_attention_rank(results, scope, out)
    content = {'scope': scope, 'versions': library_versions(), 'maps': {}}
    for title, maps in results.items():
        content['maps'][title] = {
            name: {'effective_ranks': found.effective_ranks, 'numerical_ranks': found.numerical_ranks}
            for name, found in maps.items()
        }
    out.with_suffix('.json').write_text(json.dumps(content, indent=1) + '\n')
    print(f'Written to {out} and {out.with_suffix(".json")}')


if __name__ == '__main__':
    run_cli(main)
