"""Formats tables in Markdown."""

from collections.abc import Iterable, Sequence


def format_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table without a newline at its end; the first column is aligned left, the others right."""
    lines = [f'| {" | ".join(cells)} |' for cells in (titles, *rows)]
    lines[0] = lines[0].replace('|  |', '| |')
    lines.insert(1, '|---|' + '---:|' * (len(titles) - 1))
    return '\n'.join(lines)
