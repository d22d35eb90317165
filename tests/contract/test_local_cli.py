"""`pier sandbox`, `pier doctor` and `pier gc` as a person types them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.plain

PIER = [sys.executable, "-m", "pier"]


def pier(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PIER, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_run_passes_streams_and_the_exit_code(pier_home: Path) -> None:
    script = 'cat; echo "$A $PWD" >&2; exit 5'
    done = pier(
        "sandbox", "run", "--interactive", "--env", "A=b", "-w", "/tmp", "--", "sh", "-c", script, stdin="given"
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "given", "b /tmp\n")
    assert list((pier_home / "sandboxes").iterdir()) == []
    assert list((pier_home / "leases").iterdir()) == []


def test_run_takes_limits_and_mounts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mounted\n")
    options = ["--cpus", "1", "--memory", "256M", "--processes", "40", "--disk", "1G", "--open-files", "99"]
    script = "cat /data/file; ulimit -n; echo x > /data/file"
    done = pier("sandbox", "run", *options, "--volume", f"{tmp_path}:/data", "--", "sh", "-c", script)
    assert done.stdout == "mounted\n99\n" and "Read-only file system" in done.stderr


def test_wrong_usage_is_told() -> None:
    for options, told in (
        (["--volume", "nowhere", "--", "true"], "SRC:DST"),
        (["--volume", "/does/not/exist:/x", "--", "true"], "does not exist"),
        (["--memory", "much", "--", "true"], "expected a size"),
        (["--allow", "example.org", "--network", "public", "--", "true"], "--allow"),
        (["--image", "no/such:image-at-all", "--", "true"], "no/such"),
    ):
        done = pier("sandbox", "run", *options)
        assert done.returncode in (1, 2) and told in done.stderr, (options, done.stderr)
    assert pier("sandbox", "exec", "nobody", "true").returncode == 2


def test_a_missing_program_is_127() -> None:
    done = pier("sandbox", "run", "--", "no-such-program")
    assert done.returncode == 127 and "not found" in done.stderr


def test_a_named_sandbox_is_listed_reached_and_stopped(pier_home: Path) -> None:
    with subprocess.Popen([*PIER, "sandbox", "run", "--name", "one", "--", "sleep", "1000"]) as running:
        try:
            rows = _wait_for_one()
            assert rows[0]["name"] == "one" and rows[0]["image"] == "host" and rows[0]["pid"] == running.pid
            done = pier(
                "sandbox",
                "exec",
                "--interactive",
                "--env",
                "A=b",
                "one",
                "--",
                "sh",
                "-c",
                "cat; echo $A; exit 3",
                stdin="in",
            )
            assert (done.returncode, done.stdout) == (3, "inb\n")
            assert pier("sandbox", "exec", rows[0]["id"][:6], "true").returncode == 0
            assert pier("sandbox", "stop", "one").stdout == "one\n"
            assert running.wait(60) == 137
        finally:
            running.kill()
    assert json.loads(pier("sandbox", "list", "--json").stdout) == []
    assert list((pier_home / "sandboxes").iterdir()) == []


def _wait_for_one() -> list[dict[str, object]]:
    deadline = time.monotonic() + 60
    while not (rows := json.loads(pier("sandbox", "list", "--json").stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return rows


def test_a_terminal_is_passed_through() -> None:
    pid, master = pty.fork()
    if pid == 0:
        os.execv(
            sys.executable,
            [*PIER, "sandbox", "run", "--interactive", "--tty", "--", "sh", "-c", "test -t 0 && read x && echo got-$x"],
        )
    seen = b""
    os.write(master, b"typed\n")
    while b"got-typed" not in seen:
        data = os.read(master, 4096)
        assert data, seen
        seen += data
    _, status = os.waitpid(pid, 0)
    os.close(master)
    assert os.waitstatus_to_exitcode(status) == 0


def test_gc_removes_what_a_killed_run_left(pier_home: Path) -> None:
    with subprocess.Popen([*PIER, "sandbox", "run", "--", "sleep", "1000"]) as running:
        _wait_for_one()
        running.send_signal(signal.SIGKILL)
        running.wait(60)
    planned = json.loads(pier("gc", "--dry-run", "--json").stdout)
    assert {row["kind"] for row in planned["removed"]} == {"sandbox"} and len(planned["removed"]) == 2
    done = pier("gc")
    assert done.returncode == 0 and done.stdout.count("removed sandbox") == 2
    assert pier("gc").stdout == "nothing to remove\n"
    assert list((pier_home / "sandboxes").iterdir()) == []


def test_doctor_speaks_to_people_and_programs() -> None:
    done = pier("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and {"local", "docker"} <= set(found)
    assert any(row["subject"] == "sandboxes" and row["ok"] for row in found["local"])
    assert "sandboxes" in pier("doctor").stdout
