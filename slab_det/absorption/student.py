"""make_student: fits and folds a student block by block, beside its teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from slab_det.absorption.absorption_report import NormAbsorption
from slab_det.absorption.block_cache import BlockCache
from slab_det.absorption.pair import Pair
from slab_det.absorption.plan import AbsorptionPlan
from slab_det.absorption.walk import Walk
from slab_det.common.progress import Progress
from slab_det.fusion.folding import past_report
from slab_det.fusion.fusion_report import FusionReport


def make_student(plan: AbsorptionPlan, counts: Mapping[str, int], work_dir: Path, progress: bool = True) -> nn.Module:
    """Makes a student that has absorbed the norms of a plan and lost hidden channels.

    Args:
        plan: The steps and the images.
        counts: Number of channels to leave in each unit that loses some, by its name.
        work_dir: Folder for finished blocks, from which a later call resumes.
        progress: Show a progress bar.

    Returns:
        The fused student, with its reports.

    Raises:
        ConversionError: If values are not finite.
    """
    model, blocks = plan.copy_teacher(), [*plan.blocks]
    cache = BlockCache(plan, counts, work_dir)
    finished, report = cache.load(model)
    teacher, student = (
        Walk(net, plan.forward(net), plan.reads, plan.images.store, name)
        for name, net in (('teacher', plan.model), ('student', model))
    )
    pair = Pair(teacher, student, plan.images, plan.fusions, counts, plan.int8, report)
    left = blocks[len(finished) :]
    pair.finish(finished if left else ())
    title = f'Absorption, {len(left)} of {len(blocks)} blocks'
    for block in Progress(left, title, disable=not (progress and left)):
        for step in plan.blocks[block]:
            # Nothing reads the last block.
            pair.begin(block, '' if block == step.finishes == blocks[-1] else step.finishes)
            step.fit(pair)
            pair.end()
        cache.save(block, model, report)
    past = past_report(plan.model)
    report.norms += [NormAbsorption(name, 'kept', reason=reason) for name, reason in plan.reasons.items() if reason]
    model.absorption_report = report
    model.fusion_report = FusionReport([*past.norms, *plan.fusions.values()], past.channels | report.counts)
    return model
