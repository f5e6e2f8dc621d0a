"""Starts the command ``slab-det`` and the programs of tools/.

``import slab_det`` registers classes, and for that imports torch, which takes seconds. A command that was started here
registers them itself after it has parsed its arguments, so that ``--help`` takes under a second.
"""

import signal
from importlib import import_module
from typing import Any

# True once a command has started. The workers of a data loader may import this module too, but start none.
registers_late = False


def run(module: str = '') -> None:
    """Runs the command of ``slab_det/cli/<module>.py``; without a name, the one that the first argument names."""
    global registers_late
    registers_late = True
    import_module(f'slab_det.cli.{module}' if module else 'slab_det.cli').main()


def create_worker() -> Any:
    """Makes the application of one of several processes of ``slab-det serve``.

    uvicorn holds back the signals that end a process, here until the detector is loaded, which may take longer than
    ``docker stop`` waits. It is made here, where nothing slow is imported before.
    """
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return import_module('slab_det.cli.serve').create_worker()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
