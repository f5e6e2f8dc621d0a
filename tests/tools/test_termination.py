"""SIGTERM, as schedulers send it, leaves no temporary folder behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from conftest import CONFIGS

import slab_det
from slab_det.cli import _leave_on_termination

COMMAND = """
import sys, tempfile, time
from slab_det.cli import command

@command(lambda parser: None)
def main(args):
    with tempfile.TemporaryDirectory(prefix='slab_det_absorb_'):
        print('ready', flush=True)
        time.sleep(60)

main()
"""

# SIGTERM comes while classes are registered, which is when most imports run.
EARLY = """
import os, signal
import slab_det
from slab_det.cli import command

slab_det.register = lambda: os.kill(os.getpid(), signal.SIGTERM)

@command(lambda parser: None)
def main(args):
    print('ran')

main()
"""


def test_a_terminated_command_removes_its_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setenv('PYTHONPATH', str(CONFIGS.parent))
    process = subprocess.Popen([sys.executable, '-c', COMMAND], stdout=subprocess.PIPE, text=True)
    # Imports may print too.
    assert any(line == 'ready\n' for line in process.stdout)
    assert [*tmp_path.glob('slab_det_absorb_*')]
    process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait(30) == 143
    assert not [*tmp_path.glob('slab_det_absorb_*')]


def test_a_command_handles_termination_during_the_imports():
    """The first process of a container gets no signal that it does not handle; any other would end by it."""
    run = subprocess.run([sys.executable, '-c', EARLY], capture_output=True, text=True, cwd=CONFIGS.parent, timeout=120)
    assert run.returncode == 143 and 'ran' not in run.stdout and 'Traceback' not in run.stderr


def test_a_forked_worker_of_a_command_ends_at_once():
    """mmdet's VOCMetric ends its pool by SIGTERM, and would wait forever for a worker that does not end."""
    with _leave_on_termination():
        for _ in range(5):
            worker = os.fork()
            if worker == 0:
                try:
                    time.sleep(20)
                finally:
                    os._exit(0)
            os.kill(worker, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_command_restores_the_handler_of_its_caller(call):
    before = signal.getsignal(signal.SIGTERM)
    call('report.py', 'nowhere.json', '--out', 'table', code=1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupt_during_the_imports_shows_no_traceback(call, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slab_det, 'register', interrupt)
    printed = call('report.py', 'nowhere.json', '--out', 'table', code=130)
    assert not printed.err
