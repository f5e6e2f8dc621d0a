"""Folds the norms of a trained detector into its linear layers, and writes the fused checkpoint and its config."""

import argparse

from slab_det.cli import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config that the detector was trained with')
    parser.add_argument('checkpoint', help='last checkpoint of the training: recalibrated, gamma = 0')
    parser.add_argument('--out', required=True, metavar='FILE.pth', help='fused checkpoint, beside FILE_config.py')
    size = dict(type=int, nargs=2, default=(203, 331), metavar=('H', 'W'))
    parser.add_argument('--size', **size, help='size of the image of the check (default 203 331)')


@command(add_arguments)
def main(args: argparse.Namespace) -> None:
    """Fuses ``args.checkpoint`` and writes it to ``args.out``."""
    import torch

    import slab_det
    from slab_det.checkpoints import build_detector
    from slab_det.cli.config import check_out, read_config
    from slab_det.common.modules import input_channels
    from slab_det.common.numbers import check_size
    from slab_det.fusion import FusionError, check_statistics, save_fused, verify_fusion
    from slab_det.norms import named_offline_norms

    check_size(args.size, FusionError)
    check_out(args.out, args.checkpoint, args.config)
    cfg = read_config(args.config)
    model = build_detector(cfg, args.checkpoint)
    if not any(named_offline_norms(model)):
        raise FusionError(
            f'{args.config} has no norm to fold: it is fused, or has LayerNorms; slab-det absorb --channels 1 '
            '--norms remove absorbs LayerNorms without training, and a training with '
            "backbone.norm_cfg=dict(type='PRepBN') and load_from=CHECKPOINT replaces them"
        )
    check_statistics(model, args.checkpoint)
    fused = slab_det.fuse(model)
    image = torch.randn(1, input_channels(model), *args.size, generator=torch.Generator().manual_seed(0))
    checks = verify_fusion(model, fused, [image])
    checkpoint, config = save_fused(fused, cfg, args.out, model.dataset_meta)
    print(f'{fused.fusion_report}\nFused against unfused on a random {args.size[0]}x{args.size[1]} image:')
    print(*checks.values(), f'Written to {checkpoint} and {config}', sep='\n')


if __name__ == '__main__':
    main()
