"""Draws the attention maps of a backbone on an image, and their rank with and without the depthwise convolution."""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
from pathlib import Path

import torch
from mmengine.config import DictAction

from slab_det.measure.attention_rank import SYNTHETIC, AttentionRank, load_image, measure_attention_rank, rank_table
from slab_det.cli import read_config, run_cli
from slab_det.checkpoints.build import build_detector
from slab_det.measure.environment import library_versions
from slab_det.runtime.errors import AttentionRankError
from slab_det.measure.figures import draw_attention_rank
from slab_det.measure.reporting import describe_model

SEED = 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
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
    parser.add_argument(
        '--size',
        type=int,
        nargs=2,
        default=(160, 192),
        metavar=('H', 'W'),
        help="what the image is resized to (default: the quick start's 160 192)",
    )
    for name in ('stage', 'block', 'head'):
        parser.add_argument(f'--{name}', type=int, default=0, help='(default %(default)s)')
    parser.add_argument('--window', type=int, help='index in reading order (default: the middle one)')
    parser.add_argument(
        '--channels', type=int, default=8, help='how many channels get their convolution written out (default 8)'
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE', help='for every CONFIG')
    return parser.parse_args()


def measure(config: str, checkpoint: str | None, args: argparse.Namespace) -> tuple[str, AttentionRank]:
    cfg = read_config(config, args.cfg_options)
    torch.manual_seed(SEED)
    model = build_detector(cfg, checkpoint)
    if checkpoint is None:
        # As before any training: nothing is downloaded.
        model.backbone.init_cfg = None
        model.backbone.init_weights()
    # Every run has an iter_500.pth: its folder tells it.
    weights = (
        f'RANDOM WEIGHTS (seed {SEED})'
        if checkpoint is None
        else f'weights of {"/".join(Path(checkpoint).absolute().parts[-2:])}'
    )
    inputs = load_image(model.data_preprocessor, args.image, tuple(args.size))
    options = {name: getattr(args, name) for name in ('stage', 'block', 'head', 'window')}
    result = measure_attention_rank(model.backbone, inputs, **options, num_channels=args.channels)
    return f'{describe_model(cfg.model)["name"]}, {weights}', result


def main() -> None:
    args = parse_arguments()
    results, sources = {}, {}
    for config, *checkpoint in [[args.config, args.checkpoint], *args.others]:
        if len(checkpoint) > 1:
            raise AttentionRankError(f'--with takes CONFIG [CHECKPOINT], got {len(checkpoint) + 1} files')
        checkpoint = checkpoint[0] if checkpoint else None
        title, result = measure(config, checkpoint, args)
        # Two runs of one config have checkpoints of the same name.
        title = f'{title} ({len(results) + 1})' if title in results else title
        results[title] = result
        sources[title] = {'config': config, 'checkpoint': checkpoint}
    image = f'{SYNTHETIC if args.image is None else Path(args.image).name} at {args.size[0]}x{args.size[1]} (HxW)'
    print(rank_table(results, image))
    out = Path(args.out)
    draw_attention_rank(results, image, out)
    content = {
        'image': image,
        'dtype': 'float64',
        'versions': library_versions(),
        'maps': [{'title': title, **sources[title], **result.to_dict()} for title, result in results.items()],
    }
    out.with_suffix('.json').write_text(json.dumps(content, indent=1) + '\n')
    print(f'Written to {out} and {out.with_suffix(".json")}')


if __name__ == '__main__':
    run_cli(main)
