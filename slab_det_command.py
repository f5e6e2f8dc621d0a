"""The command ``slab-det``: each program of tools/ is a subcommand.

Stands beside the package: importing slab_det takes torch's seconds, and a list of commands should not.
"""

import ast
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

PROGRAMS = {
    'quickstart': 'quickstart.py',
    'train': 'train.py',
    'test': 'test.py',
    'latency': 'latency.py',
    'absorb': 'absorb.py',
    'recalibrate': 'recalibrate.py',
    'fuse': 'fuse.py',
    'convert': 'convert_checkpoint.py',
    'export': 'export_onnx.py',
    'test-onnx': 'test_onnx.py',
    'report': 'report.py',
}


def find_tools() -> Path:
    """The folder of the programs: in the package where it is installed, beside it in a checkout."""
    package = Path(find_spec('slab_det').origin).parent
    installed = package / '.mim' / 'tools'
    return installed if installed.is_dir() else package.parent / 'tools'


def usage(tools: Path) -> str:
    """Every subcommand with the first sentence of its program's docstring."""
    lines = ['usage: slab-det COMMAND [arguments]; slab-det COMMAND --help lists them', '']
    for command, program in PROGRAMS.items():
        docstring = ast.get_docstring(ast.parse((tools / program).read_text(encoding='utf-8')))
        sentence = ' '.join(docstring.split()).partition('. ')[0].partition(': ')[0]
        lines.append(f'  {command:13}{sentence.removesuffix(".")}')
    return '\n'.join(lines)


def main() -> None:
    """Runs the program that the first argument names, with the others."""
    tools, (command, *arguments) = find_tools(), sys.argv[1:] or ['--help']
    if command not in PROGRAMS:
        wrong = command not in ('-h', '--help')
        print(usage(tools), file=sys.stderr if wrong else sys.stdout)
        raise SystemExit(f'slab-det: no command {command}' if wrong else 0)
    sys.argv = [f'slab-det {command}', *arguments]
    # As runpy does it, which would name the file instead of the command in every message.
    spec = spec_from_file_location('__main__', tools / PROGRAMS[command])
    sys.modules['__main__'] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules['__main__'])
