"""Published numbers, to stand beside ours in columns of their own."""

from typing import NamedTuple


class PaperRow(NamedTuple):
    """One row of a paper's table.

    Attributes:
        ms: Latency in milliseconds.
        box: Box AP, AP50, AP75, APs, APm, APl times 100.
        mask: Mask AP in the same order.
    """

    ms: float
    box: tuple[float, ...]
    mask: tuple[float, ...]


# SLAB (Guo et al., ICML 2024), Table 3: Mask R-CNN 1x, COCO val2017, V100, batch 1, mean of 100 rounds.
# Rows are called as slab_det.reporting.describe_model calls them.
PAPER_ROWS = {
    'Swin-T': PaperRow(51.0, (43.1, 66.0, 47.0, 27.3, 46.4, 56.0), (39.4, 62.8, 42.0, 23.0, 42.9, 53.7)),
    'Swin-T-PRepBN': PaperRow(43.0, (42.9, 65.8, 46.8, 27.7, 46.2, 55.4), (39.3, 62.6, 41.9, 23.1, 42.8, 53.6)),
    'Swin-S': PaperRow(63.1, (46.2, 68.7, 50.9, 30.2, 49.7, 60.8), (41.7, 65.6, 44.5, 25.1, 45.5, 57.3)),
    'Swin-S-PRepBN': PaperRow(57.3, (45.9, 68.4, 50.2, 29.8, 49.3, 60.2), (41.4, 65.0, 44.7, 24.9, 44.9, 57.0)),
    'PVT-T': PaperRow(46.0, (36.6, 58.9, 39.2, 21.3, 38.9, 48.9), (34.9, 56.2, 37.0, 19.6, 37.2, 48.2)),
    'PVT-T-PRepBN': PaperRow(43.2, (36.5, 59.0, 39.2, 20.9, 38.4, 50.1), (34.4, 55.7, 36.5, 18.7, 36.3, 48.9)),
    'PVT-S': PaperRow(64.0, (40.5, 63.2, 44.1, 23.4, 43.4, 54.9), (37.9, 60.2, 40.6, 20.8, 40.6, 52.6)),
    'PVT-S-PRepBN': PaperRow(59.6, (40.6, 63.3, 43.9, 24.4, 43.1, 55.4), (38.0, 60.6, 40.5, 21.4, 40.5, 53.5)),
    'Flatten-Swin-T': PaperRow(60.0, (44.2, 67.3, 48.5, 29.4, 47.5, 57.0), (40.2, 63.8, 43.0, 24.5, 43.8, 54.7)),
    'SLAB-Swin-T': PaperRow(54.1, (43.9, 66.5, 48.1, 28.6, 47.4, 56.7), (40.1, 63.3, 43.1, 24.3, 43.8, 54.2)),
}
