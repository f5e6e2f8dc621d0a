"""Forms are compared in the rounds of both, where there are enough."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_choice import form

from slab_det.optimization.records import Records
from slab_det.optimization.standing import Standing


@pytest.mark.parametrize(('common', 'is_faster'), [(20, True), (19, False)])
def test_what_slows_a_round_slows_both_forms(tmp_path: Path, common: int, is_faster: bool) -> None:
    records = Records(tmp_path, {})
    for index in range(30):
        # A form takes 0.9 of the time of another one, of which each round takes another multiple.
        noise = 1 + index % 5
        times = dict(fast=0.9 * noise, slow=1.0 * noise) if index < common else dict(slow=1.0 * noise)
        records.add(index, dict(times, eager=10.0), {})
    # Over eager, quartiles and ranges overlap.
    fast, slow = form('fast', 0.27, 1, spread=0.1), form('slow', 0.3, 1, spread=0.1)
    standing = Standing(records, SimpleNamespace(), max_loss=0.5)
    assert standing.is_faster(fast, slow) == is_faster and not standing.is_faster(slow, fast)
