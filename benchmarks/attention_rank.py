"""Draws window attention as matrices, and their rank with and without the depthwise convolution.

    python benchmarks/attention_rank.py configs/quickstart_mask_rcnn_slab_swin.py --out rank.png

SLAB (Guo et al., ICML 2024), Figure 3. Linear attention is a product of N x d features, normalised by rows: its rank is
at most d, however many tokens there are. The depthwise convolution of the values adds a banded matrix of high rank.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mmcv
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from mmengine.config import DictAction
from torch import Tensor, nn

from slab_det.checkpoints.build import build_detector
from slab_det.cli import read_config, run_cli
from slab_det.data.synthetic import draw_image
from slab_det.measure.environment import library_versions
from slab_det.measure.report import describe_model
from slab_det.runtime.errors import SlabDetError

SEED = 0
# Unit values mixed in one call of the attention.
CHUNK = 32
FONT_SIZE = 8
# Part of the largest singular value; below lies nothing that an output would show.
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

    def to_dict(self) -> dict:
        """The ranks and the spectrum of the median channel as JSON types."""
        middle = np.argsort(self.effective_ranks)[len(self.effective_ranks) // 2]
        return {
            'effective_ranks': self.effective_ranks,
            'numerical_ranks': self.numerical_ranks,
            'singular_values': self.singular_values[middle].tolist(),
        }


@dataclass(frozen=True)
class AttentionRank:
    """The maps of one head in one window: ``alone``, and ``convolved`` with the convolution (None for softmax)."""

    kind: str
    place: str
    alone: MapRank
    convolved: MapRank | None

    @property
    def maps(self) -> dict[str, MapRank]:
        """The maps by name."""
        found = {self.kind: self.alone, f'{self.kind} + depthwise convolution': self.convolved}
        return {name: rank for name, rank in found.items() if rank is not None}


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
    backbone: nn.Module,
    image: Tensor,
    stage: int = 0,
    block: int = 0,
    head: int = 0,
    window: int | None = None,
    num_channels: int = 8,
) -> AttentionRank:
    """The attention maps of one head in one window, as matrices, and their ranks; all in float64.

    Args:
        backbone: SLABSwin, fused or not; it becomes float64 and goes to eval mode.
        image: A normalised image, (1, 3, H, W).
        stage: Index of the stage.
        block: Index of the block in it.
        head: Index of the head.
        window: Index of the window in reading order after the shift; None is the middle one.
        num_channels: How many channels of the head, evenly spaced, have their convolution written out: each channel
            has a matrix of its own.

    Raises:
        SlabDetError: If the backbone has no such block, head or window.
    """
    backbone.double().eval()
    try:
        attention = backbone.stages[stage].blocks[block].attn
        num_heads = attention.w_msa.num_heads
    except (AttributeError, IndexError) as error:
        message = f'{type(backbone).__name__} has no window attention at stage {stage}, block {block}; give a SLABSwin'
        raise SlabDetError(message) from error
    if not 0 <= head < num_heads:
        raise SlabDetError(f'stage {stage}, block {block} has heads 0 to {num_heads - 1}, not {head}')
    calls: list[tuple] = []
    handle = attention.register_forward_pre_hook(lambda module, args: calls.append(args))
    backbone(image.double())
    handle.remove()
    x, hw_shape = calls[0]
    windows = window_tokens(hw_shape, attention.w_msa.window_size, attention.shift_size)
    window = len(windows) // 2 if window is None else window
    if not 0 <= window < len(windows):
        raise SlabDetError(f'the map has windows 0 to {len(windows) - 1}, not {window}')
    tokens, dims = windows[window], x.shape[-1] // num_heads
    channels = (torch.linspace(0, dims - 1, min(num_channels, dims)).long() + head * dims).tolist()
    convolution = getattr(attention.w_msa, 'dwc', None)
    convolved = None
    if convolution is not None:
        convolved = rank_maps(attention_matrices(attention, x, hw_shape, tokens, channels))
        kept = {name: value.clone() for name, value in convolution.state_dict().items()}
        for parameter in convolution.parameters():
            parameter.zero_()
    # Without the convolution all channels of a head share one matrix.
    alone = rank_maps(attention_matrices(attention, x, hw_shape, tokens, channels[:1]))
    if convolution is not None:
        convolution.load_state_dict(kept)
    kind = 'softmax' if convolution is None else 'focused' if hasattr(attention.w_msa, 'scale') else 'sla'
    place = f'stage {stage}, block {block}, head {head}, {len(tokens)} tokens of window {window}, d = {dims}'
    return AttentionRank(kind, place, alone, convolved)


def window_tokens(hw_shape: tuple[int, int], window_size: int, shift: int) -> list[Tensor]:
    """Tokens of the map in each window of a shifted partition, in reading order; padding is left out."""
    height, width = hw_shape
    rows, columns = -(-height // window_size), -(-width // window_size)
    slots = torch.full((rows * window_size, columns * window_size), -1)
    slots[:height, :width] = torch.arange(height * width).view(height, width)
    slots = slots.roll((-shift, -shift), (0, 1))
    windows = slots.unflatten(0, (rows, -1)).unflatten(2, (columns, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
    return [window[window >= 0] for window in windows]


def attention_matrices(
    attention: nn.Module, x: Tensor, hw_shape: tuple[int, int], tokens: Tensor, channels: Sequence[int]
) -> Tensor:
    """The matrices (channels, N, N) that the values of one window's N tokens are multiplied with.

    With fixed queries and keys every attention here is an affine map of the values that keeps channels apart. So value
    j set to 1 in every channel, all others to 0, gives column j of the matrices of all channels at once: no formula is
    repeated, and any attention with a ``qkv`` and a ``proj`` layer can be measured.

    Args:
        attention: Shifted or unshifted window attention.
        x: (1, L, C), its input.
        hw_shape: (H, W) with H * W = L.
        tokens: (N,), tokens of the window.
        channels: Which matrices to return; channels of one head share a matrix but for the convolution.
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
        return mixed.pop()[:, tokens][..., list(channels)]

    try:
        offset = mix(torch.zeros_like(x))
        columns = []
        for part in tokens.split(CHUNK):
            units = x.new_zeros(len(part), *x.shape[1:])
            units[torch.arange(len(part)), part] = 1
            columns.append(mix(units) - offset)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(columns).permute(2, 1, 0)


def rank_maps(matrices: Tensor) -> MapRank:
    """The ranks of the matrices (channels, N, N) of one head."""
    singular_values = torch.linalg.svdvals(matrices)
    effective = [effective_rank(values) for values in singular_values]
    middle = np.argsort(effective)[len(effective) // 2]
    return MapRank(matrices[middle], singular_values, effective, [numerical_rank(values) for values in singular_values])


def rank_table(results: Mapping[str, AttentionRank], image: str) -> str:
    """A Markdown table of results by title, with the scope of its numbers below it."""
    lines = ['| model | map | effective rank | numerical rank |', '|---|---|---:|---:|']
    for title, result in results.items():
        for name, found in result.maps.items():
            effective, numerical = _spread(found.effective_ranks, '.1f'), _spread(found.numerical_ranks, '.0f')
            lines.append(f'| {title} | {name} | {effective} | {numerical} |')
    place = next(iter(results.values())).place
    lines += ['', f'On {image}; {place}; float64. Median (least to most) over channels where each has its own map.']
    return '\n'.join(lines)


def draw_attention_rank(results: Mapping[str, AttentionRank], image: str, path: str | Path) -> None:
    """Draws, per result, the map without and with the depthwise convolution, and the spectra of both, to a PNG.

    Maps show ``|weight|`` of query (row) and value (column) in grey, on one logarithmic scale for all rows. The map
    with the convolution is that of the median channel, and a band spans the spectra of all channels.
    """
    figure = Figure(figsize=(7.2, 3.0 * len(results) + 0.9), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    figure.suptitle(f'Attention maps on {image}; float64', fontsize=FONT_SIZE + 1)
    parts = figure.subfigures(len(results) + 1, 1, height_ratios=[3.0] * len(results) + [0.55])
    # White is a hundredth of uniform attention.
    norm = LogNorm(0.01 / max(len(result.alone.matrix) for result in results.values()), 1.0, clip=True)
    for part, (title, result) in zip(parts, results.items(), strict=False):
        part.suptitle(f'{title}\n{result.place}', fontsize=FONT_SIZE)
        _draw_row(part, result, norm)
    bar = parts[-1].colorbar(ScalarMappable(norm, 'gray_r'), cax=parts[-1].subplots(), orientation='horizontal')
    bar.set_label('|weight| of a value (column) for a query (row)', fontsize=FONT_SIZE)
    bar.ax.tick_params(labelsize=FONT_SIZE)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_row(figure: SubFigure, result: AttentionRank, norm: LogNorm) -> None:
    *panels, spectra = figure.subplots(1, 3, width_ratios=[1, 1, 1.05])
    panels[1].axis('off')
    for axes, (name, found) in zip(panels, result.maps.items(), strict=False):
        _draw_map(axes, name, found, norm)
    for style, (name, found) in zip(('--', '-'), result.maps.items(), strict=False):
        index = np.arange(1, found.singular_values.shape[1] + 1)
        relative = (found.singular_values / found.singular_values[:, :1]).clamp(min=FLOOR / 10)
        spectra.plot(index, relative.median(0).values, style, color='black', linewidth=1.4, label=name)
        if len(relative) > 1:
            label = f'{len(relative)} channels'
            spectra.fill_between(index, relative.amin(0), relative.amax(0), color='0.75', linewidth=0, label=label)
    spectra.set_yscale('log')
    spectra.set_ylim(FLOOR, 1.5)
    spectra.set_title('singular values over the largest', fontsize=FONT_SIZE)
    spectra.set_xlabel('index', fontsize=FONT_SIZE)
    spectra.tick_params(labelsize=FONT_SIZE)
    spectra.grid(color='0.9', linewidth=0.6)
    spectra.legend(fontsize=FONT_SIZE - 1, loc='center right')


def _draw_map(axes: Axes, name: str, found: MapRank, norm: LogNorm) -> None:
    axes.axis('on')
    axes.imshow(found.matrix.abs().clamp(min=norm.vmin), cmap='gray_r', norm=norm)
    ranks = f'effective rank {np.median(found.effective_ranks):.1f} of {len(found.matrix)}'
    axes.set_title(f'{name}\n{ranks}\nnumerical rank {np.median(found.numerical_ranks):.0f}', fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = (format(value, form) for value in (np.median(values), min(values), max(values)))
    return middle if low == high else f'{middle} ({low} to {high})'


def load_image(preprocess: nn.Module, image: str | None, size: tuple[int, int]) -> Tensor:
    """An image file, or an image of the quick start's, resized to (height, width): (1, 3, H, W), normalised, padded.

    Raises:
        SlabDetError: If the file cannot be decoded.
    """
    if image is None:
        # The random stream of the first validation image.
        pixels, _ = draw_image(np.random.default_rng([0, 1, 0]), (size[1], size[0]))
    else:
        pixels = mmcv.imread(image)
        if pixels is None:
            raise SlabDetError(f'image {image} cannot be decoded; give a JPEG or PNG file')
        pixels = mmcv.imresize(pixels, (size[1], size[0]))
    tensor = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    return preprocess({'inputs': [tensor]}, training=False)['inputs']


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
    parser.add_argument('--image', metavar='FILE', help='photograph to run on (default: a generated image)')
    parser.add_argument('--size', type=int, nargs=2, default=(160, 192), metavar=('H', 'W'), help='of the image')
    for name in ('stage', 'block', 'head'):
        parser.add_argument(f'--{name}', type=int, default=0, help='(default %(default)s)')
    parser.add_argument('--window', type=int, help='index in reading order (default: the middle one)')
    parser.add_argument('--channels', type=int, default=8, help='whose convolution is written out (default 8)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE', help='for every CONFIG')
    return parser.parse_args()


def measure(config: str, checkpoint: str | None, args: argparse.Namespace) -> tuple[str, AttentionRank]:
    """Title and ranks of one backbone."""
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
    image = load_image(model.data_preprocessor, args.image, tuple(args.size))
    where = {name: getattr(args, name) for name in ('stage', 'block', 'head', 'window')}
    result = measure_attention_rank(model.backbone, image, **where, num_channels=args.channels)
    return f'{describe_model(cfg.model)["name"]}, {weights}', result


def main() -> None:
    args = parse_arguments()
    results = {}
    for config, *checkpoint in [[args.config, args.checkpoint], *args.others]:
        title, result = measure(config, checkpoint[0] if checkpoint else None, args)
        results[f'{title} ({len(results) + 1})' if title in results else title] = result
    image = f'{Path(args.image).name if args.image else "a generated image"} at {args.size[0]}x{args.size[1]} (HxW)'
    print(rank_table(results, image))
    out = Path(args.out)
    draw_attention_rank(results, image, out)
    maps = {title: {name: found.to_dict() for name, found in result.maps.items()} for title, result in results.items()}
    content = {'image': image, 'dtype': 'float64', 'versions': library_versions(), 'maps': maps}
    out.with_suffix('.json').write_text(json.dumps(content, indent=1) + '\n')
    print(f'Written to {out} and {out.with_suffix(".json")}')


if __name__ == '__main__':
    run_cli(main)
