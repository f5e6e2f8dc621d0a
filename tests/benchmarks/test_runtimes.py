"""The channels that benchmarks.runtimes removes are those of the stored rows."""

import pytest

from benchmarks.runtimes import HALF, THIRD, remove_channels
from slab_det.fusion.channels import find_channels


@pytest.mark.parametrize(('eighths', 'outputs'), [(HALF, 8), (THIRD, 4)], ids=['half', 'third'])
def test_channels_stay_as_the_page_says(small_detector, eighths, outputs):
    """docs/latency.md: an eighth in each FFN, three of the RPN's, all inside the FPN, half elsewhere."""
    model = small_detector(norm_cfg=dict(type='LN'))
    before = {unit.name: unit.count for unit in find_channels(model).values()}
    remove_channels(model, eighths)
    left = {unit.name: unit.count for unit in find_channels(model).values()}
    assert left.keys() == before.keys() > {'neck', 'neck.lateral_convs', 'rpn_head.rpn_conv'}
    for name, count in before.items():
        last = name.rpartition('.')[2]
        share = {'ffn': 1, 'rpn_conv': 3, 'lateral_convs': 8, 'neck': outputs}.get(last, 4)
        assert left[name] == count * share // 8, name
