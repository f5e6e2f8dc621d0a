"""CPU time of full-size backbones whose FFNs lost hidden channels, with and without LayerNorm, over LayerNorm's own.

    python -m benchmarks.absorb.ffn_latency swin_t pvt_s

Weights are random. Models take turns in one process on one thread, whose CPU time counts: other processes hardly change
it. Rows go to benchmarks/results/ffn_latency.json.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import statistics
import time

import torch
from mmengine.config import Config
from torch import nn

from benchmarks.results import FOLDER, ROOT, Results
from slab_det import runtime
from slab_det.checkpoints import build_detector
from slab_det.fusion.channels import find_channels, resize_channels

SIZE = (800, 1216)
FORMS = {'eager': None, 'deployed': torch.float32, 'deployed bfloat16': torch.bfloat16}


def build(model: str, norms: str, share: float) -> nn.Module:
    """A backbone with 'LayerNorm' or 'none', and a share of the hidden channels of each FFN gone."""
    prefix = '' if norms == 'LayerNorm' else 'prepbn_'
    detector = build_detector(Config.fromfile(ROOT / f'configs/mask_rcnn_{prefix}{model}.py'))
    slab_det.set_gamma(detector, 0.0)
    detector = slab_det.fuse(detector) if prefix else detector
    ffns = [place for place in find_channels(detector.backbone).values() if place.name.endswith('.ffn')]
    resize_channels(detector.backbone, {ffn.name: round(ffn.count * (1 - share)) for ffn in ffns})
    return detector.backbone


@torch.inference_mode()
def measure(backbones: dict[tuple[str, float], nn.Module], image: torch.Tensor, rounds: int) -> dict:
    """Seconds of each backbone in each round, behind one round that does not count."""
    seconds = {key: [] for key in backbones}
    for _ in range(rounds + 1):
        for key, backbone in backbones.items():
            start = time.thread_time()
            backbone(image)
            seconds[key].append(time.thread_time() - start)
    return {key: values[1:] for key, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', help='such as swin_t and pvt_s')
    parser.add_argument('--shares', type=float, nargs='+', default=[0.0, 0.5, 0.75])
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    results = Results(FOLDER / 'ffn_latency.json', size=SIZE, threads=1, clock='CPU time of the thread')
    for model in args.models:
        built = {(norms, share): build(model, norms, share) for norms in ('LayerNorm', 'none') for share in args.shares}
        for form, dtype in FORMS.items():
            backbones = {key: slab_det.deploy(value, dtype) if dtype else value for key, value in built.items()}
            image = torch.rand(1, 3, *SIZE).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
            seconds = measure(backbones, image, args.rounds)
            base = seconds['LayerNorm', 0.0]
            for (norms, share), values in seconds.items():
                ratio = statistics.median(one / other for one, other in zip(values, base, strict=True))
                identity = dict(name=model, form=form, norms=norms, share=share)
                row = dict(seconds=round(statistics.median(values), 3), ratio=round(ratio, 3))
                print(results.add(identity, row), flush=True)


if __name__ == '__main__':
    main()
