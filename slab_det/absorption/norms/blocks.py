"""absorb_norms: fits and folds the norms of a student block by block, beside its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.norms.block_cache import BlockCache
from slab_det.absorption.norms.pair import Pair
from slab_det.absorption.norms.plan import NormPlan
from slab_det.absorption.norms.walk import Walk
from slab_det.common.progress import Progress


def absorb_norms(
    plan: NormPlan,
    student: nn.Module,
    maps: Mapping[str, Tensor],
    report: AbsorptionReport,
    work_dir: Path,
    progress: bool = True,
) -> None:
    """Absorbs the norms of a plan.

    Args:
        plan: The norms, the steps and the images.
        student: A copy of the teacher, which may have lost hidden channels; changed in place.
        maps: The combinations of the teacher's channels that a layer of the neck now writes, (K, C), by the name of the
            layer.
        report: What is known of the student; the norms and fits are added.
        work_dir: Folder for finished blocks, from which a later call resumes.
        progress: Show a progress bar.

    Raises:
        ConversionError: If values are not finite.
    """
    blocks, cache = [*plan.blocks], BlockCache(plan, student, work_dir)
    finished = cache.load(student, report)
    models = dict(teacher=plan.teacher, student=student)
    walks = (Walk(model, plan.reads, plan.images.store, name) for name, model in models.items())
    pair = Pair(*walks, plan.images, plan.fusions, maps, plan.int8, report)
    left = blocks[len(finished) :]
    pair.finish(finished if left else ())
    title = f'Norms, {len(left)} of {len(blocks)} blocks'
    for block in Progress(left, title, disable=not (progress and left)):
        for step in plan.blocks[block]:
            # Nothing reads the last block.
            pair.block, pair.is_last = block, block != blocks[-1] and step == plan.blocks[block][-1]
            step.fit(pair)
        cache.save(block, student, report)
        pair.finish([block] if block != blocks[-1] else [])
