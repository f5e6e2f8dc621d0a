"""Small models for all tests."""

import os

# Small tensors: more threads only wait for each other. Set before torch is loaded, for child processes too.
os.environ['OMP_NUM_THREADS'] = '1'
# A test run tells nobody that it ran; commands set this too.
os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')
# Without a GPU Triton's kernels run in its interpreter; it asks when they are defined.
if not os.path.exists('/dev/nvidia0'):
    os.environ['TRITON_INTERPRET'] = '1'

import slab_det  # noqa: F401, I001 (first: it makes mmdet's models importable)

import gc
import resource
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, wraps
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import mmengine.config.utils
import mmengine.dataset.base_dataset
import mmengine.runner.runner
import pytest
import torch
from coco_files import write_split
from mmdet.models.backbones.swin import WindowMSA
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmengine.visualization import Visualizer
from torch import nn
from yapf.yapflib import yapf_api

from slab_det.machine import MACHINE
from slab_det.common import memory
from slab_det.common.errors import SlabDetError, describe_error
from slab_det.export import in_onnxruntime, in_openvino
from slab_det.export.extras import Loader, limit_threads

CONFIGS = Path(__file__).parents[1] / 'configs'
SMALL_SWIN = dict(
    type='SLABSwin', embed_dims=8, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 4), norm_cfg=dict(type='PRepBN')
)
SLA = dict(attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(10, 6, 7, 7))
SMALL_PVT = dict(
    type='SLABPVT',
    embed_dims=8,
    num_stages=2,
    num_layers=(2, 1),
    num_heads=(1, 2),
    patch_sizes=(4, 2),
    strides=(4, 2),
    paddings=(0, 0),
    sr_ratios=(4, 1),
    mlp_ratios=(4, 4),
    out_indices=(0, 1),
    pretrain_img_size=64,
)
FOUR_STAGE_PVT = dict(
    type='SLABPVT',
    embed_dims=8,
    num_layers=(2, 1, 1, 1),
    num_heads=(1, 2, 3, 4),
    mlp_ratios=(3, 2, 2, 2),
    sr_ratios=(4, 2, 2, 1),
    pretrain_img_size=64,
    norm_cfg=dict(type='PRepBN', ln_eps=1e-6),
)
PVT_V2 = dict(
    patch_sizes=(7, 3, 3, 3), paddings=(3, 1, 1, 1), use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)
SMALL_PVT_V2 = {**SMALL_PVT, **PVT_V2, 'patch_sizes': (7, 3), 'paddings': (3, 1)}
NEEDS_MMPRETRAIN = pytest.mark.skipif(
    find_spec('mmpretrain') is None, reason='mmpretrain is not installed: pip install "slab_det[pretrain]"'
)

# As every program in tools/ does.
slab_det.runtime.install()

# Each `mmdet::` in a config reads all of mmdet's hundred metafiles, only to find out that it is none of theirs.
mmengine.config.utils.load = cache(mmengine.config.utils.load)

# A run formats its config five times, and once more for each checkpoint: a third of the time of a test that trains.
yapf_api.FormatCode = lambda text, **_: (text, True)
# The same in a process that a test starts with this PYTHONPATH.
PYTHONPATH = os.pathsep.join((str(CONFIGS.parent), str(Path(__file__).parent / 'unformatted')))

# A run also asks compilers for their versions.
mmengine.runner.runner.collect_env = cache(mmengine.runner.runner.collect_env)

# Building a dataset collects all garbage of the process: a tenth of that time.
mmengine.dataset.base_dataset.gc = SimpleNamespace(collect=lambda: 0)


def share_sessions(load: Loader) -> Loader:
    """Loads a file once in this process: a session takes longer to make than a small file to run."""
    load_once, process = lru_cache(8)(load), os.getpid()

    @wraps(load)
    def shared(model: str | bytes, threads: int, precision: str = 'float32'):
        if os.getpid() != process:
            # A fork has no threads of the sessions that it inherits: to drop one from the cache would wait for ever.
            return load(model, threads, precision)
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        return load_once(content, limit_threads(threads), precision)

    return shared


for runtime in (in_onnxruntime, in_openvino):
    runtime.load = share_sessions(runtime.load)


def small_mmdet_cfg(name: str, backbone: dict, **neck) -> Config:
    """The model of one of mmdet's configs with an FPN, on a backbone with the channels of SMALL_SWIN."""
    cfg = Config.fromstring(f"_base_ = ['mmdet::{name}.py']", '.py').model
    cfg.backbone = backbone
    cfg.neck.update(in_channels=[8, 16, 32, 64], out_channels=16, **neck)
    if 'roi_head' in cfg:
        narrow_heads(cfg)
        for head in cfg.roi_head.bbox_head:
            head.update(fc_out_channels=16, num_classes=3)
    else:
        cfg.bbox_head.update(in_channels=16, feat_channels=64, num_classes=3)
    return cfg


# What MACHINE says of a processor with AVX2 alone, with AVX-512 and bfloat16, with AMX, and of a machine with a GPU.
PRETENDED = {
    'avx2': dict(
        has_gpu=False, multiplies_bfloat16=False, multiplies_float16=False, openvino_precisions=('FP32', 'INT8')
    ),
    'avx512': dict(
        has_gpu=False, multiplies_bfloat16=True, multiplies_float16=False, openvino_precisions=('FP32', 'BF16', 'INT8')
    ),
    'amx': dict(
        has_gpu=False,
        multiplies_bfloat16=True,
        multiplies_float16=True,
        openvino_precisions=('FP32', 'BF16', 'FP16', 'INT8'),
    ),
    'gpu': dict(
        has_gpu=True, multiplies_bfloat16=True, multiplies_float16=True, openvino_precisions=('FP32', 'BF16', 'INT8')
    ),
}


def pretend_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes :data:`slab_det.machine.MACHINE` say what it would say on one of :data:`PRETENDED`."""
    for name, value in PRETENDED[kind].items():
        monkeypatch.setattr(MACHINE, name, value)


class HalfWindowMSA(WindowMSA):
    """mmdet's attention, halved: a subclass that computes something else."""

    def forward(self, x, mask=None):
        return super().forward(x, mask) / 2


class RunsCode:
    """Calls a function when it is unpickled, as a malicious checkpoint does."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def layer_norms(model: nn.Module) -> list[str]:
    """The names of the LayerNorms of a model."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]


def make_affine(model):
    """Makes each LayerNorm of a model affine: with a large eps, 1 / sigma is the same for all tokens."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.data *= 1e6
            module.eps = 1e12
    return model


def on_a_full_disk(write: Callable[[], object]) -> str:
    """The message of a command line when no file may grow beyond 4 kB while ``write`` runs."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        write()
    except (SlabDetError, OSError) as error:
        return describe_error(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ''


def pictures(count=6, size=(66, 70), seed=0):
    """Images of coarse blobs, whose tokens differ within an image and between images."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(1, 3, 9, 9, generator=generator) for _ in range(count)]
    return [nn.functional.interpolate(n, size=size, mode='bicubic') * (1 + i % 3) for i, n in enumerate(noise)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the slowest files first: a worker of pytest-xdist takes whole files, and would run a slow last one alone."""
    slow = {'e2e', 'export', 'inference', 'optimization', 'tools', 'test_bad_input.py', 'test_fuzz.py', 'test_wheel.py'}
    items.sort(key=lambda item: not {item.path.parent.name, item.path.name} & slow)


def pytest_collection_finish() -> None:
    """Leaves what was imported out of each collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _deterministic():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Of a command that an earlier test ran in this process.
    memory._is_kept = False
    init_default_scope('mmdet')


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a training and a validation set of :mod:`coco_files`."""
    for split in ('train', 'val'):
        write_split(tmp_path, split)
    return tmp_path


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the logger says: mmengine's pass nothing on to the root logger."""
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the logger warns of."""
    found: list[str] = []
    monkeypatch.setattr(MMLogger.get_current_instance(), 'warning', found.append)
    return found


def narrow_heads(model: Config) -> None:
    """Makes the neck and heads of a Faster, Mask or Cascade R-CNN as narrow as small backbones are, in place."""
    heads = model.roi_head
    model.neck.out_channels = model.rpn_head.in_channels = model.rpn_head.feat_channels = 16
    heads.bbox_roi_extractor.out_channels = 16
    for head in heads.bbox_head if isinstance(heads.bbox_head, list) else [heads.bbox_head]:
        head.update(in_channels=16, fc_out_channels=64)
    if heads.get('mask_head'):
        heads.mask_roi_extractor.out_channels = 16
        heads.mask_head.update(in_channels=16, conv_out_channels=16)


def build_detector_cfg(detector: str = 'mask_rcnn', **backbone) -> Config:
    """The config of a small Mask or Faster R-CNN for arguments of its backbone."""
    backbone = {**SMALL_SWIN, **backbone}
    channels = [backbone['embed_dims'] * 2**i for i in backbone.get('out_indices', range(4))]
    model = Config.fromfile(CONFIGS / '_base_/models/mask_rcnn_swin_small.py').model
    model.backbone = backbone
    model.neck.in_channels = channels
    narrow_heads(model)
    model.roi_head.bbox_head.num_classes = model.roi_head.mask_head.num_classes = 3
    # On so small an image, the heads that look at regions take most of the time.
    model.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    model.train_cfg.rpn_proposal.update(nms_pre=100, max_per_img=50)
    model.train_cfg.rcnn.sampler.num = 32
    if detector == 'faster_rcnn':
        model.type = 'FasterRCNN'
        model.roi_head.mask_head = model.roi_head.mask_roi_extractor = None
    return model


@pytest.fixture(scope='session')
def small_detector_cfg():
    """A function: see :func:`build_detector_cfg`."""
    return build_detector_cfg


@pytest.fixture
def small_detector():
    """A function: a small detector with every weight, bias, eta and statistic random, in eval mode at gamma 0."""

    def build(detector: str = 'mask_rcnn', seed: int = 0, **backbone) -> nn.Module:
        return as_trained(MODELS.build(build_detector_cfg(detector, **backbone)), seed)

    return build


def run_cfg_builder(folder: Path) -> Callable[..., Config]:
    """A function: the config of a run of a few iterations on a few generated images, in ``folder / name``."""

    def build(name: str = 'run', max_iters: int = 6, **backbone) -> Config:
        cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
        cfg.model = build_detector_cfg(**{**SLA, **backbone})
        cfg.model.roi_head.bbox_head.num_classes = cfg.model.roi_head.mask_head.num_classes = 4
        cfg.model.test_cfg.rcnn.max_per_img = 20
        for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
            loader.dataset.generator = dict(num_train=10, num_val=4, size=(96, 80))
            loader.num_workers = 0
            loader.persistent_workers = False
        cfg.train_dataloader.batch_size = 2
        cfg.train_cfg.max_iters = cfg.train_cfg.val_interval = max_iters
        cfg.default_hooks.checkpoint.interval = 2
        cfg.default_hooks.checkpoint.max_keep_ckpts = -1
        cfg.custom_hooks[1].update(num_images=6, max_passes=3)
        cfg.work_dir = str(folder / name)
        cfg.experiment_name = f'{folder.name}-{name}'
        return cfg

    return build


@pytest.fixture
def small_run_cfg(tmp_path, monkeypatch):
    """See :func:`run_cfg_builder`; for the runs of one test."""
    monkeypatch.setenv('SLAB_DET_CACHE', str(tmp_path / 'cache'))
    return run_cfg_builder(tmp_path)


@pytest.fixture(scope='module')
def module_run_cfg(tmp_path_factory):
    """See :func:`run_cfg_builder`; for runs that several tests of a file look at."""
    folder = tmp_path_factory.mktemp('runs')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SLAB_DET_CACHE', str(folder / 'cache'))
        yield run_cfg_builder(folder)


class StopAfter(Hook):
    """Interrupts a run when ``count`` iterations are over and all other hooks have seen the last one."""

    priority = 'LOWEST'

    def __init__(self, count: int) -> None:
        self.count = count

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        if runner.iter + 1 == self.count:
            raise KeyboardInterrupt


def run_tool(patch: pytest.MonkeyPatch, tool: str, *arguments: object) -> object:
    """Runs a tool as ``python tools/<tool> …`` would, without paying for a new interpreter; returns its exit code."""
    patch.setattr(sys, 'argv', [tool, *map(str, arguments)])
    # A new process has none yet; the logger and visualizer of the last call write to its closed stream and folder.
    for kind in (MMLogger, Visualizer, *Visualizer.__subclasses__()):
        patch.setattr(kind, '_instance_dict', {})
    try:
        runpy.run_path(str(CONFIGS.parent / 'tools' / tool), run_name='__main__')
    except SystemExit as stop:
        return stop.code or 0
    return 0


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """A function: :func:`run_tool` in an empty folder.

    The tool must leave with the exit code ``code``. The result has what it printed, ``out`` and ``err``.
    """
    monkeypatch.chdir(tmp_path)

    def run(tool: str, *arguments: object, code: int = 0):
        found = run_tool(monkeypatch, tool, *arguments)
        printed = capsys.readouterr()
        assert found == code, f'{tool} {arguments}: {found}\n{printed.out[-3000:]}\n{printed.err[-3000:]}'
        return printed

    return run


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fills parameters and statistics with different random values that keep the size of activations."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for name, tensor in state.items():
        if not tensor.is_floating_point() or name.endswith('_gamma'):
            continue
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        if name.endswith('running_var'):
            state[name] = noise.abs() + 0.5
        else:
            state[name] = noise / tensor[0].numel() ** 0.5 if tensor.ndim > 1 else noise * 0.5
    model.load_state_dict(state)
    return model


def as_trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """Makes a model as a finished training leaves it: filled by :func:`randomize`, in eval mode, at gamma 0."""
    slab_det.set_gamma(randomize(model, seed), 0.0)
    # mmdet's Swin returns None.
    model.eval()
    return model


@torch.no_grad()
def find_objects(model: nn.Module) -> nn.Module:
    """Keeps the boxes of a random detector near their anchors; most boxes of extreme shape are clipped to nothing."""
    for layer in (model.rpn_head.rpn_reg, model.roi_head.bbox_head.fc_reg):
        layer.weight.mul_(0.1)
        layer.bias.zero_()
    return model


def differing(model: nn.Module | dict, other: nn.Module | dict) -> list[str]:
    """The keys whose values differ between two state dicts, or between the state dicts of two models."""
    state, other = (x if isinstance(x, dict) else x.state_dict() for x in (model, other))
    assert state.keys() == other.keys()
    return [key for key, value in state.items() if not torch.equal(value, other[key])]


def random_sizes(count: int, seed: int) -> list[list[int]]:
    """Heights and widths of images; few are multiples of a patch or a window."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(32, 150, (count, 2), generator=generator).tolist()


@torch.no_grad()
def relative_difference(outputs: Iterable[torch.Tensor], references: Iterable[torch.Tensor]) -> float:
    """Largest difference over the largest value, of the worst output; NaN where one is."""
    differences = []
    for output, reference in zip(outputs, references, strict=True):
        assert output.shape == reference.shape
        output, reference = output.cpu().double(), reference.cpu().double()
        differences.append((output - reference).abs().max() / reference.abs().max())
    # Python's max drops NaN.
    return torch.stack(differences).max().item()


@torch.no_grad()
def raw_outputs(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Everything that the detector computes before its last NMS: proposals, class scores, box deltas, mask logits."""
    height, width = images.shape[-2:]
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'batch_input_shape', 'pad_shape'), (height, width))
    samples = [DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0))) for _ in images]
    features = model.extract_feat(images)
    proposals = model.rpn_head.predict(features, samples, rescale=False)
    return [*(p.bboxes for p in proposals), *model.roi_head.forward(features, proposals, samples)]
