"""How far noise in the image grows on its way through fresh backbones with PRepBN at gamma = 0, by the start of eta.

    python -m benchmarks.eta_start

Random weights, float64, statistics recalibrated on two images of noise (2, 3, 224, 224). Writes
benchmarks/results/eta_start.json: for each backbone and eta the relative change of the last stage's map over that of
the image, and the root mean square of the map.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import json
from pathlib import Path

import torch
from mmdet.registry import MODELS

ROOT = Path(__file__).resolve().parents[1]
SWIN, PVT = dict(type='SLABSwin'), dict(type='SLABPVT', pretrain_img_size=224)
BACKBONES = {
    'Swin-T': dict(SWIN, depths=(2, 2, 6, 2)),
    'Swin-S': dict(SWIN, depths=(2, 2, 18, 2)),
    'Swin-B': dict(SWIN, depths=(2, 2, 18, 2), embed_dims=128, num_heads=(4, 8, 16, 32)),
    'PVT-T': dict(PVT, num_layers=(2, 2, 2, 2)),
    'PVT-S': dict(PVT, num_layers=(3, 4, 6, 3)),
    'PVT-M': dict(PVT, num_layers=(3, 4, 18, 3)),
    'PVT-L': dict(PVT, num_layers=(3, 8, 27, 3)),
}
NOISE = 1e-12


@torch.no_grad()
def measure(name: str, eta: float) -> dict[str, float]:
    """Growth of noise, and size of the last stage's map."""
    torch.manual_seed(0)
    backbone = MODELS.build(dict(BACKBONES[name], norm_cfg=dict(type='PRepBN', eta=eta), drop_path_rate=0.0))
    backbone.init_weights()
    backbone.double().eval()
    slab_det.set_gamma(backbone, 0.0)
    image = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    slab_det.recalibrate(backbone, [image], progress=False)
    changed = image * (1 + NOISE * torch.randn_like(image))
    one, other = (backbone(inputs)[-1] for inputs in (image, changed))
    return dict(growth=float((one - other).norm() / one.norm()) / NOISE, rms=float(one.square().mean().sqrt()))


def main() -> None:
    results: dict[str, dict] = {}
    for name in BACKBONES:
        for eta in (1.0, 0.3, 0.1, 0.0):
            values = results.setdefault(name, {})[str(eta)] = measure(name, eta)
            print(f'{name}, eta {eta}: noise grows {values["growth"]:.2g} times, rms {values["rms"]:.2g}', flush=True)
    (ROOT / 'benchmarks/results/eta_start.json').write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main()
