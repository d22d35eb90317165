"""The check for processes that tests leave behind finds them whatever their name and parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.leaks import Footprint, wait_for_orphans

ORPHAN = (
    "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3).pid)"
)


def start_orphan(**env: str) -> int:
    """The number of a process whose parent has ended."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], env=os.environ | env, capture_output=True, check=True)
    return int(done.stdout)


def test_an_orphan_is_found_with_the_test_that_started_it(request: pytest.FixtureRequest) -> None:
    before = Footprint.take()
    pid = start_orphan()
    row = f"{pid} sleep ({request.node.nodeid} (call))"
    try:
        assert Footprint.take().processes - before.processes == {row}
        assert wait_for_orphans(request.node.nodeid.partition("::")[0], seconds=0.1) == [row]
        assert wait_for_orphans("tests/unit/test_another.py", seconds=0.1) == []
    finally:
        os.kill(pid, signal.SIGKILL)
    assert wait_for_orphans(request.node.nodeid.partition("::")[0], seconds=60) == []


def test_a_process_of_another_session_is_not_ours() -> None:
    before = Footprint.take()
    pid = start_orphan(PIER_TEST_SESSION="1")
    try:
        assert Footprint.take().processes == before.processes
    finally:
        os.kill(pid, signal.SIGKILL)
