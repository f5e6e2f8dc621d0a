"""Prices of hidden channels: which share of the AP goes with those of a kind of layers, measured on drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from slab_det.absorption.channels.estimates import Price
from slab_det.absorption.channels.judge import Judge
from slab_det.absorption.channels.survey import Survey
from slab_det.absorption.digest import teacher_digest
from slab_det.absorption.images import NTH_HELD_OUT
from slab_det.common.errors import ComparisonError
from slab_det.common.files import whole_file
from slab_det.common.progress import Progress
from slab_det.compare.ruler import FEW_DETECTIONS

# Shares of a kind's multiply-adds that its drafts have lost, where prices are measured.
PRICED = (0.9, 0.6)
# A kind that loses less AP at the first share needs no second one.
CHEAP = 0.005


def measure_prices(survey: Survey, judge: Judge, work_dir: Path) -> dict[str, Price]:
    """Measures the price of each kind of layers on drafts that lose channels of this kind alone.

    Within a kind the estimates order the channels well, but the same estimated loss costs far more AP in a box
    head than in an RPN. Prices are kept in a file of ``work_dir``. Where there are too few detections to tell, the
    estimates stay the prices.

    Args:
        survey: Makes the drafts.
        judge: Compares drafts with the teacher.
        work_dir: Folder of the file; an interrupted call goes on with the kinds that are left.

    Returns:
        The price of each kind, by its name.
    """
    digest = teacher_digest(survey.observer.model, survey.observer.images)
    digest.update(repr(survey.observer.int8).encode())
    file = work_dir / f'prices_{digest.hexdigest()[:16]}.json'
    found = json.loads(file.read_text()) if file.exists() else {}
    try:
        if len(found) < len(survey.kinds) and (
            judge.images.count < NTH_HELD_OUT or judge.count_detections(judge.batches) < FEW_DETECTIONS
        ):
            return survey.prices
        left = [kind for kind in survey.kinds if kind not in found]
        for kind in Progress(left, 'Prices of channels', disable=not (survey.progress and left)):
            found[kind] = _measure_price(survey, judge, survey.kinds[kind])
            with whole_file(file) as path:
                path.write_text(json.dumps(found))
    except ComparisonError:
        # There are no detections, or none in the mirrored images, or only in a few images.
        return survey.prices
    finally:
        judge.drop_maps()
    return {kind: Price(points) for kind, points in found.items()}


def _measure_price(survey: Survey, judge: Judge, names: Sequence[str]) -> list[tuple[float, float]]:
    least, points = survey.multiply_adds({name: survey.estimates[name].counts[-1] for name in names}), []
    for share in PRICED:
        counts = survey.counts_for(survey.total - share * (survey.total - least), names)
        retained = survey.judge_draft(judge, counts)
        if not math.isfinite(retained.error):
            raise ComparisonError('too few images show objects')
        # What chance may hide counts too.
        points.append((survey.estimate(counts), max(0.0, 1 - retained.value) + retained.error))
        if points[0][1] < CHEAP:
            break
    return points
