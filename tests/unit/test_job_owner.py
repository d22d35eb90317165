"""One runner per job: the second is told who the first is, and a dead one is no obstacle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pier.errors import JobError
from pier.job.ledger import current_owner, owning

HOLD = "import sys; from pathlib import Path; from pier.job.ledger import owning\n"
HOLD += "with owning(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()\n"


def _holder(directory: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    return child


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    with _holder(tmp_path) as child:
        with pytest.raises(JobError, match=f"process {child.pid} "), owning(tmp_path):
            pass
        assert f"process {child.pid} " in str(current_owner(tmp_path))
        child.communicate(b"", timeout=60)
    assert current_owner(tmp_path) is None


def test_a_dead_owner_is_followed(tmp_path: Path) -> None:
    with _holder(tmp_path) as child:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
        with owning(tmp_path):
            assert f"({os.getpid()})" in str(current_owner(tmp_path))


def test_the_same_process_owns_only_once(tmp_path: Path) -> None:
    with owning(tmp_path), pytest.raises(JobError, match="this process"), owning(tmp_path):
        pass
    with owning(tmp_path):
        pass


def test_looking_does_not_give_the_ownership_up(tmp_path: Path) -> None:
    with owning(tmp_path):
        current_owner(tmp_path)
        probe = [sys.executable, "-c", HOLD, str(tmp_path)]
        assert subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode != 0
