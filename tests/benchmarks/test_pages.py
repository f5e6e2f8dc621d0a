"""One script writes every table and number of the pages, and what it would write is there."""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.results import ROOT

PAGES = sorted({page for page, _ in pages.BLOCKS} | {*pages.SENTENCES})
# Numbers of prose that are no results: settings, versions and names of what exists.
SETTINGS = {
    pages.LATENCY: {'2.11', '0.49'},  # PyTorch; the rows of a table above
    pages.NORMS: {'0.5'},  # gamma of a measured step
}


@pytest.fixture
def copy(tmp_path):
    """A folder with a copy of all pages."""
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_pages_show_what_the_script_writes(copy):
    pages.write(copy)
    changed = [page for page in PAGES if (copy / page).read_text() != (ROOT / page).read_text()]
    assert not changed, f'python -m benchmarks.pages writes {", ".join(map(str, changed))} again'


def test_the_script_mends_a_wrong_number_and_a_lost_row(copy):
    page = copy / pages.LATENCY
    text = page.read_text()
    wrong = re.sub(r'to \d\.\d\d (?=\(Swin-T\))', 'to 0.99\n', text)
    lines = [line for line in wrong.splitlines(keepends=True) if not line.startswith('| SLAB-Swin-T')]
    assert wrong != text and len(lines) < len(wrong.splitlines())
    page.write_text(''.join(lines))
    pages.write(copy)
    # Lines that were broken elsewhere stay so.
    assert page.read_text().split() == text.split()


def test_a_sentence_that_is_not_there_is_named(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('It takes 0.30\nof the time, and 0.40 of the time.\n')
    pages.write_numbers(page, pages.Sentence('takes {} of the time', ['0.25']))
    assert page.read_text() == 'It takes 0.25\nof the time, and 0.40 of the time.\n'
    for text, times in (('costs {} AP', 0), ('{} of the time', 2)):
        with pytest.raises(ValueError, match=f'{times} times, not once: {re.escape(text)}'):
            pages.write_numbers(page, pages.Sentence(text, ['1.0']))


@pytest.mark.parametrize('page', SETTINGS, ids=str)
def test_every_decimal_in_prose_is_written_by_the_script(page: Path):
    text = re.sub(r'^```.*?^```|^\|.*?$|`[^`]*`', '', (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    known = {number for sentence in pages.SENTENCES[page]() for number in sentence.numbers}
    assert {*re.findall(r'(?<![\w.])\d+\.\d+(?![\w.]*\d)', text)} <= {x.lstrip('+-') for x in known} | SETTINGS[page]


def test_rows_without_a_commit_are_named():
    for page, file, share in (
        (pages.LATENCY, 'gpu', ''),
        (pages.LATENCY, 'runtimes', ''),
        (pages.BENCHMARKS, 'int8', ' (30 of 42)'),
    ):
        commits = pages.describe_unrecorded(page).split('Rows without a device')[0]
        assert f'`{file}.json`{share}' in ' '.join(commits.split()), file
    named = pages.describe_unrecorded(pages.LATENCY)
    assert 'epyc' not in named and 'device' not in named, 'these rows have both'
    # The one table without such a line, because it stands at the top of the README.
    assert 'The rows with AMX and of the H100 have no commit' in ' '.join((ROOT / pages.README).read_text().split())
