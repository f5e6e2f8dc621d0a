"""docs/results.md says what benchmarks/results has."""

import json
import re
import shutil

import pytest

from benchmarks.experiments import ROOT, replace_table
from benchmarks.norms import latency, table
from benchmarks.norms.studies import STUDIES

PAGE = ROOT / 'docs' / 'results.md'


def stored(name):
    return json.loads((ROOT / 'benchmarks' / 'results' / f'norms_{name}.json').read_text())


def table_of(kind, study):
    results = stored(study)
    if kind == 'norms':
        return table.markdown(results)
    measured = stored(f'{study}_latency')['runs']
    return latency.markdown(results['runs'], measured, f'{results["metric"]}, mean over seeds')


@pytest.mark.parametrize('kind, study', re.findall(r'^<!-- (norms|latency) (\S+) -->$', PAGE.read_text(), re.MULTILINE))
def test_a_table_is_that_of_the_stored_results(kind, study, tmp_path):
    shutil.copy(PAGE, tmp_path)
    assert replace_table(tmp_path / PAGE.name, f'{kind} {study}', table_of(kind, study))
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text(), f'write the tables of {study} again: --table-only'


def test_every_stored_study_is_on_the_page_with_its_picture():
    text = PAGE.read_text()
    for file in (ROOT / 'benchmarks' / 'results').glob('norms_*.json'):
        study, latency_suffix = re.fullmatch(r'norms_(.*?)(_latency)?\.json', file.name).groups()
        assert study in STUDIES
        assert f'<!-- {"latency" if latency_suffix else "norms"} {study} -->' in text
    for picture in re.findall(r'\]\((results_\S+\.png)\)', text):
        assert (ROOT / 'docs' / picture).exists(), picture
