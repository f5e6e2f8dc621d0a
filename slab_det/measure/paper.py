"""Published numbers, to stand beside ours in columns of their own."""

from typing import NamedTuple


class PaperRow(NamedTuple):
    """One row of a paper's table.

    Attributes:
        ms: Latency in milliseconds; None where the table has none.
        box: Box AP times 100, then AP50, AP75, APs, APm and APl where the table has them.
        mask: Mask AP in the same order; None for a detector without masks.
    """

    ms: float | None
    box: tuple[float, ...]
    mask: tuple[float, ...] | None


class PaperTable(NamedTuple):
    """One table, on COCO val2017 with an FPN.

    Attributes:
        source: Paper and table.
        detector: Type of its detectors in mmdet.
        epochs: How long they were trained.
        latency: What its ``ms`` are; None where it has none.
        rows: Its rows, called as :func:`slab_det.measure.reporting.describe_model` calls them.
    """

    source: str
    detector: str
    epochs: int
    latency: str | None
    rows: dict[str, PaperRow]

    def describe(self) -> str:
        """The source, and what its numbers were measured with."""
        latency = f'; ms: {self.latency}' if self.latency else ''
        return f'{self.source}: {self.detector}, {self.epochs} epochs, COCO val2017{latency}'


SLAB_TABLE_3 = PaperTable(
    source='SLAB (ICML 2024), Table 3',
    detector='MaskRCNN',
    epochs=12,
    latency='V100, batch 1, mean of 100 rounds',
    rows={
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
    },
)
UN_TABLE_3 = PaperTable(
    source='UN (ACM MM 2022), Table 3',
    detector='FasterRCNN',
    epochs=36,
    latency=None,
    rows={
        'Swin-T': PaperRow(None, (45.5,), None),
        'Swin-T-BN': PaperRow(None, (44.6,), None),
        'Swin-T-MABN': PaperRow(None, (44.8,), None),
        'Swin-T-PowerNorm': PaperRow(None, (44.3,), None),
        'Swin-T-UN': PaperRow(None, (45.2,), None),
    },
)
UN_TABLE_4 = PaperTable(
    source='UN (ACM MM 2022), Table 4',
    detector='MaskRCNN',
    epochs=36,
    latency=None,
    rows={
        'Swin-T': PaperRow(None, (46.0,), (41.6,)),
        'Swin-T-BN': PaperRow(None, (44.9,), (40.8,)),
        'Swin-T-MABN': PaperRow(None, (45.1,), (41.0,)),
        'Swin-T-PowerNorm': PaperRow(None, (44.6,), (40.7,)),
        'Swin-T-UN': PaperRow(None, (45.6,), (41.4,)),
    },
)
PAPER_TABLES = (SLAB_TABLE_3, UN_TABLE_3, UN_TABLE_4)


def tables_with_latency(detector: str) -> list[PaperTable]:
    """The tables that have a latency beside every AP, for one type of detector, for example 'MaskRCNN'."""
    return [table for table in PAPER_TABLES if table.detector == detector and table.latency]


def published_rows(name: str, detector: str) -> list[tuple[PaperTable, PaperRow]]:
    """Every published row of a model, with its table: the same model may stand in two, trained differently.

    Args:
        name: Row label, for example 'SLAB-Swin-T'.
        detector: Type of the detector, for example 'MaskRCNN'.
    """
    return [(table, table.rows[name]) for table in PAPER_TABLES if table.detector == detector and name in table.rows]
