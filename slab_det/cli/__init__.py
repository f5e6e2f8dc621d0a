"""The command ``slab-det``. Each module here is one of its commands, and each program of tools/ calls one of them.

A command parses its arguments before it imports torch, so that ``--help`` takes under a second.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path

# Command: the module with its ``main()``. tools/test_onnx.py is an older name of test, and no command.
COMMANDS = {
    'quickstart': 'quickstart',
    'train': 'train',
    'test': 'test',
    'optimize': 'optimize',
    'latency': 'latency',
    'absorb': 'absorb',
    'recalibrate': 'recalibrate',
    'fuse': 'fuse',
    'convert': 'convert_checkpoint',
    'export': 'export_onnx',
    'serve': 'serve',
    'report': 'report',
}


def main() -> None:
    """Runs the command named by the first argument, with the remaining arguments."""
    name, *arguments = sys.argv[1:] or ['--help']
    if name in ('-h', '--help'):
        print('usage: slab-det COMMAND [arguments]; slab-det COMMAND --help lists the arguments\n')
        for name, module in COMMANDS.items():
            summary = import_module(f'slab_det.cli.{module}').__doc__.partition('.')[0]
            print(f'  {name:13}{" ".join(summary.split())}')
    elif name in COMMANDS:
        sys.argv = [f'slab-det {name}', *arguments]
        import_module(f'slab_det.cli.{COMMANDS[name]}').main()
    else:
        raise SystemExit(f'slab-det: no command {name}; slab-det --help lists the commands')


def command(add_arguments: Callable[[argparse.ArgumentParser], None]) -> Callable[[Callable], Callable[[], None]]:
    """Turns a function of the parsed arguments into a command, with the docstring of the module as ``--help`` text.

    Before the function runs, slab_det registers its classes and patches mmengine. A SlabDetError or OSError becomes
    ``error: …`` on stderr and the exit code 1.
    """

    def decorate(function: Callable[[argparse.Namespace], None]) -> Callable[[], None]:
        @wraps(function)
        def main() -> None:
            parser = argparse.ArgumentParser(description=sys.modules[function.__module__].__doc__)
            add_arguments(parser)
            args = parser.parse_args()
            # ONNX Runtime reports its use to its maker otherwise, from a thread beside what is timed.
            os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')
            # The imports take seconds, in which Ctrl-C and SIGTERM come too.
            try:
                with _leave_on_termination(at_once=True):
                    import slab_det

                    slab_det.register()
                    slab_det.runtime.install()
                    from slab_det.common.errors import SlabDetError, describe_error

                try:
                    with _leave_on_termination(), _close_process_group():
                        function(args)
                except (SlabDetError, OSError) as error:
                    print(f'error: {describe_error(error)}', file=sys.stderr)
                    raise SystemExit(1) from error
            except KeyboardInterrupt:
                # 130 is the exit code of shells after Ctrl-C.
                raise SystemExit(130) from None

        return main

    return decorate


@contextmanager
def _close_process_group() -> Iterator[None]:
    """Closes the process group that the block opens.

    The threads of gloo may abort an interpreter that ends with an open one, so that a finished training would exit with
    an error: github.com/pytorch/pytorch/pull/179291.
    """
    from torch import distributed

    def is_open() -> bool:
        return distributed.is_available() and distributed.is_initialized()

    was_open = is_open()
    yield
    # After an error another process may be about to communicate, and closing would wait for it.
    if is_open() and not was_open:
        distributed.destroy_process_group()


@contextmanager
def _leave_on_termination(at_once: bool = False) -> Iterator[None]:
    """Lets SIGTERM end the block as an exception does, so that temporary files are removed.

    Args:
        at_once: End the process itself: an import may turn an exception into another one. Without any handler the first
            process of a container would not end: Linux withholds signals from it that it does not handle.
    """

    def leave(*_: object) -> None:
        # 143 is the exit code of shells after SIGTERM.
        if at_once:
            os._exit(143)
        raise SystemExit(143)

    # Whoever has a handler of their own keeps it; other threads than the main one cannot set any.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    if not at_once:
        _ends_in_order.set()
    try:
        yield
    finally:
        _ends_in_order.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# Set while a command handles SIGTERM.
_ends_in_order = threading.Event()


def _mask_termination(how: int) -> None:
    if _ends_in_order.is_set():
        signal.pthread_sigmask(how, {signal.SIGTERM})


def _end_forked_workers() -> None:
    """Lets SIGTERM end a forked process at once: a pool waits forever for a worker whose handler missed the signal."""
    if _ends_in_order.is_set():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _ends_in_order.clear()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


if hasattr(os, 'register_at_fork'):
    # Python drops the signals that a process gets before it is whole, so they are held back until then.
    os.register_at_fork(
        before=lambda: _mask_termination(signal.SIG_BLOCK),
        after_in_parent=lambda: _mask_termination(signal.SIG_UNBLOCK),
        after_in_child=_end_forked_workers,
    )


def find_folder(name: str) -> Path:
    """Returns the folder ``configs`` or ``tools``: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / '.mim' / name
    return installed if installed.is_dir() else package.parent / name
