"""mkdocs.yml makes a site of docs/ in which every page is reached and every link and anchor leads somewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip('material', reason='the site needs mkdocs-material, of the extras test and docs')
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    pages = {page.stem for page in (ROOT / 'docs').glob('*.md')}
    assert pages - {'index'} == {page.parent.name for page in tmp_path.glob('*/index.html')}
    # A page that the index does not name is not found.
    index = (ROOT / 'docs' / 'index.md').read_text()
    assert not [page for page in pages - {'index'} if f'({page}.md)' not in index]
