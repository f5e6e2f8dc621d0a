"""Files of benchmarks/results: rows are measured once, replaced by their identity, and keep their environment."""

import json

import pytest

from benchmarks.results import FOLDER, Results


def test_a_row_is_measured_once(tmp_path):
    calls = []

    def measure():
        calls.append(1)
        return dict(AP=0.5)

    for seed in (1, 1, 2):
        row = Results(tmp_path / 'new/a.json').measure_once(dict(name='teacher', seed=seed), measure)
        assert row['AP'] == 0.5 and row['seconds'] >= 0
    assert len(calls) == 2 and [row['seed'] for row in Results(tmp_path / 'new/a.json').rows] == [1, 2]


def test_a_row_is_replaced_in_its_place(tmp_path, monkeypatch):
    results = Results(tmp_path / 'a.json', rounds=5)
    for name, ms in (('a', 1), ('b', 2)):
        results.add(dict(name=name), dict(ms=ms))
    monkeypatch.setattr('benchmarks.results.describe_commit', lambda: 'abc1234')
    monkeypatch.setattr('benchmarks.results.describe_environment', lambda device: dict(device='another'))
    Results(tmp_path / 'a.json', rounds=5).add(dict(name='a'), dict(ms=3))
    again = Results(tmp_path / 'a.json', rounds=5)
    assert again.rows == [dict(name='a', ms=3, environment=1), dict(name='b', ms=2, environment=0)]
    assert again.environments[1] == dict(commit='abc1234', device='another')
    assert again.select(ms=2) == again.rows[1:]


def test_rows_of_different_settings_are_not_mixed(tmp_path):
    Results(tmp_path / 'a.json', size=(800, 1216)).add(dict(name='a'), dict(ms=1))
    Results(tmp_path / 'a.json', size=(800, 1216))
    with pytest.raises(ValueError, match=r'a.json has size \[800, 1216\], not \[480, 640\]'):
        Results(tmp_path / 'a.json', size=(480, 640))


@pytest.mark.parametrize('path', sorted(FOLDER.glob('*.json')), ids=lambda path: path.stem)
def test_every_file_has_the_one_schema(path):
    content = json.loads(path.read_text())
    assert [*content] == ['setting', 'environments', 'rows'] and content['rows']
    assert all(row['name'] for row in content['rows'])
    # "not recorded" where an old file does not say it.
    for row in content['rows']:
        environment = content['environments'][row['environment']]
        assert all(environment[key] for key in ('commit', 'device', 'versions')), row


def test_two_scripts_may_add_to_one_file(tmp_path):
    first, second = (Results(tmp_path / 'rows.json', size=64) for _ in range(2))
    for results, name in ((first, 'a'), (second, 'b'), (first, 'c')):
        results.add(dict(name=name), dict(ms=1.0))
    assert [row['name'] for row in Results(tmp_path / 'rows.json').rows] == ['a', 'b', 'c']
