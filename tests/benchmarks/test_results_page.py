"""docs/results.md shows what benchmarks/results has."""

import math
import re
import shutil
import statistics

import pytest

from benchmarks.norms.run import ROOT, publish
from benchmarks.norms.table import markdown, replace_table, t_interval

PAGE = ROOT / 'docs' / 'results.md'
RESULTS = ROOT / 'benchmarks' / 'results'


@pytest.mark.parametrize('study', sorted(re.findall(r'^<!-- norms (\S+) -->$', PAGE.read_text(), re.MULTILINE)))
def test_a_table_is_that_of_the_stored_results(study, tmp_path):
    shutil.copy(PAGE, tmp_path)
    publish(study, tmp_path / PAGE.name, RESULTS)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text(), f'write the table of {study} again'


def test_every_stored_result_has_its_script_or_is_named_on_a_page():
    texts = [*(ROOT / 'benchmarks').rglob('*.py'), *(ROOT / 'docs').glob('*.md'), ROOT / 'README.md']
    text = ''.join(path.read_text() for path in texts)
    for file in RESULTS.glob('*.json'):
        names = (file.name, file.stem.removeprefix('norms_'), file.stem.rsplit('_', 1)[0])
        assert any(name in text for name in names), file.name


def test_table_compares_seed_by_seed():
    control, other = [0.512, 0.498, 0.530], [0.505, 0.499, 0.502]

    def finished(**ap):
        return {seed.removeprefix('s'): dict(status='finished', ap=value) for seed, value in ap.items()}

    runs = dict(
        ln=dict(label='LN', setting='', control='ln', seeds=finished(s0=control[0], s1=control[1], s10=control[2])),
        bn=dict(label='BN', setting='deep', control='ln', seeds=finished(s10=other[2], s0=other[0], s1=other[1])),
    )
    first, second = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in markdown(dict(metric='box AP', runs=runs)).splitlines()[2:]
    ]
    assert first == ['LN', '0.512, 0.498, 0.530', '0.513 ± 0.016', '–', '–', '–']
    difference = [b - a for a, b in zip(control, other, strict=True)]
    mean, std = statistics.mean(difference), statistics.stdev(difference)
    # 4.303 is the 97.5 % quantile of Student's t with two degrees of freedom.
    half = 4.303 * std / math.sqrt(3)
    assert second == [
        'deep: BN',
        '0.505, 0.499, 0.502',
        '0.502 ± 0.003',
        '-0.007, +0.001, -0.028',
        f'{mean:+.3f} ± {std:.3f}',
        f'[{mean - half:+.3f}, {mean + half:+.3f}]',
    ]
    assert t_interval(difference[:2]) is None, 'two seeds have no interval'


def test_only_the_rows_below_the_mark_are_replaced(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('a | b\n<!-- one -->\n| old |\n| rows |\n\nwords\n<!-- two -->\n| last |\n')
    replace_table(page, 'one', '| new |')
    replace_table(page, 'two', '| end |\n| end |')
    assert page.read_text() == 'a | b\n<!-- one -->\n| new |\n\nwords\n<!-- two -->\n| end |\n| end |\n'
