"""Bad input and faults of workspaces: each has a clear message, and no work of the user's is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.home import pier_home as home_of_pier
from tests.host_logs import claude_log
from tests.job_tasks import PIER, make_task, pier, wait_for
from tests.workspaces import BACKENDS, backend, docker, kill_supervisor, states, stop_all, supervisor

pytestmark = pytest.mark.plain
mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system that is full or read-only")
__all__ = ["backend", "docker"]


@pytest.fixture(autouse=True)
def stopped(pier_home: Path) -> Iterator[None]:
    yield
    stop_all(pier_home)


def refused(*args: str, cwd: Path, code: int | None = 2, **env: str) -> str:
    return pier(*args, cwd=cwd, image=None, code=code, **env).stderr


def ask(*args: str, cwd: Path) -> str:
    return pier(*args, cwd=cwd, image=None).stdout


def test_what_is_asked_for_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    nosy = make_task(tmp_path / "nosy")
    with (nosy / "task.toml").open("a") as stream:
        stream.write('env = { WHERE = "${HOME}" }\n')
    full = tmp_path / "full"
    full.mkdir()
    (full / "work.txt").write_text("mine\n")
    for args, wanted in (
        (("start", "nowhere", "-d", "ws"), "no such task"),
        (("start", str(task)), "needs a directory"),
        (("start", "-d", "ws"), "--image"),
        (("start", str(task), "-d", "full"), "is not empty"),
        (("start", str(task), "-d", "task/inside"), "which no sandbox may see"),
        (("start", str(task), "-d", "full/work.txt"), "expected a directory"),
        (("start", "--image", "host", "-d", "ws", "-a", "no-such-agent"), "no-such-agent"),
        (("start", "--image", "host", "-d", "ws", "-a", "oracle"), "oracle"),
        (("start", "--image", "host", "-d", "ws", "--ports", "http"), "invalid value 'http' for --ports"),
        (("start", "--image", "host", "-d", "ws", "--mounts-json", "{"), "--mounts-json is not JSON"),
        (("start", "--image", "host", "-d", "ws", "--mounts-json", '["./gone:/x"]'), "it does not exist"),
        (("start", "--image", "host", "-d", "ws", "-e", "1=2"), "invalid value '1=2' for -e"),
        (("start", "--image", "host", "-d", "ws", "--env", "moon"), "invalid value 'moon' for --env"),
        (("start", str(nosy), "-d", "ws"), "HOME"),
        (("start", f"file://{tmp_path}/no.git#task", "-d", "ws"), "git"),
    ):
        error = refused(*args, cwd=tmp_path, code=None)
        assert wanted in error, (args, error)
        assert not (tmp_path / "ws" / ".pier").exists(), args
    assert not states(home_of_pier())
    assert "git is not installed" in refused(
        "start", "https://host.invalid/r#t", "-d", "ws", cwd=tmp_path, code=1, PATH="/nowhere"
    )
    for option in (("--ports", "8000"), ("--no-mount",)):
        assert f"cannot use {option[0]} with --host" in refused("start", "--host", "-d", "ws", *option, cwd=tmp_path)
    assert not (tmp_path / "ws" / ".pier").exists()
    assert "cannot use --json with --watch" in refused("verify", "--watch", "--json", cwd=tmp_path)
    assert [path.name for path in full.iterdir()] == ["work.txt"]
    for command in ("exec ls", "verify", "stop", "diff"):
        assert "lies in no workspace" in refused(*command.split(), cwd=tmp_path)
    assert "no workspaces" in pier("list", cwd=tmp_path, image=None).stderr


def test_an_image_that_cannot_be_had_leaves_files_alone(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "work.txt").write_text("mine\n")
    error = refused("start", "--image", "127.0.0.1:9/no/image", "-d", "ws", "-f", cwd=tmp_path, code=None)
    assert "no/image" in error
    assert (tmp_path / "ws" / "work.txt").read_text() == "mine\n"
    ask("start", "--image", "host", cwd=tmp_path / "ws")
    assert ask("exec", "cat", "work.txt", cwd=tmp_path / "ws") == "mine\n"


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_workspace_comes_back_after_its_supervisor_was_killed(backend: str, tmp_path: Path) -> None:
    """Files outside of the mounted directory are brought back too, whatever was swept meanwhile."""
    ws = tmp_path / "ws"
    ask("start", "--image", "test/busybox", "-d", "ws", "--env", backend, cwd=tmp_path)
    script = "echo mine > work.txt; echo kept > /opt/kept; rm /bin/yes"
    ask("exec", "sh", "-c", f"mkdir -p /opt; {script}", cwd=ws)
    waiting = subprocess.Popen([*PIER, "exec", "sleep", "1000"], cwd=ws, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: b"sleep\x001000" in _commands())
    kill_supervisor(ws)
    assert waiting.wait(60) != 0 and "pier start" in str(waiting.communicate()[1])
    assert "is not running" in refused("exec", "true", cwd=ws)
    assert "stopped" in ask("list", cwd=ws)
    other = "local" if backend == "docker" else "docker"
    assert "was not stopped" in refused("start", "--env", other, cwd=ws)
    pier("gc", cwd=tmp_path, image=None)
    ask("start", "--image", "test/busybox", "-d", "other", "--env", backend, cwd=tmp_path)
    started = pier("start", "-e", "MORE=x", cwd=ws, image=None)
    assert "saving the files of its sandbox" in started.stderr
    check = "cat work.txt /opt/kept; test ! -e /bin/yes && echo $MORE"
    assert ask("exec", "sh", "-c", check, cwd=ws) == "mine\nkept\nx\n"
    ask("stop", cwd=ws)
    assert "saving" not in pier("start", cwd=ws, image=None).stderr
    assert ask("exec", "sh", "-c", check, cwd=ws) == "mine\nkept\nx\n"


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_files_that_are_not_mounted_come_back_after_two_kills(backend: str, tmp_path: Path, pier_home: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "test/busybox", "-d", "ws", "--no-mount", "--env", backend, cwd=tmp_path)
    ask("exec", "sh", "-c", "echo one > one.txt", cwd=ws)
    kill_supervisor(ws)
    pier("gc", cwd=tmp_path, image=None)
    ask("start", cwd=ws)
    ask("exec", "sh", "-c", "rm one.txt; echo two > two.txt", cwd=ws)
    kill_supervisor(ws)
    ask("start", cwd=ws)
    assert ask("exec", "sh", "-c", "ls", cwd=ws) == "two.txt\n"
    ask("stop", cwd=ws)
    assert (ws / "two.txt").read_text() == "two\n"
    pier("gc", cwd=tmp_path, image=None)
    assert not list(pier_home.glob("workspaces/*/sandbox")) and not list(pier_home.glob("sandboxes/*"))


@mounts
def test_a_stop_that_cannot_save_leaves_the_sandbox_for_the_next_start(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    ask("exec", "sh", "-c", "echo kept > /opt/kept", cwd=ws)
    (ws / ".pier" / ".state.new").mkdir()
    (ws / ".pier" / ".state.new").rename(ws / ".pier" / "state")
    (ws / ".pier" / "state" / "in-the-way").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", ws / ".pier" / "state"], check=True)
    try:
        said = pier("stop", cwd=ws, image=None).stderr
        assert "saved by the next pier start" in said
        error = refused("start", cwd=ws, code=1)
        assert "the files of its sandbox cannot be saved" in error and "pier start tries again" in error
    finally:
        subprocess.run(["umount", ws / ".pier" / "state"], check=True)
    ask("start", cwd=ws)
    assert ask("exec", "cat", "/opt/kept", cwd=ws) == "kept\n"


def _commands() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes()
        except OSError:
            continue
    return found


def test_collecting_garbage_leaves_workspaces_alone(tmp_path: Path) -> None:
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    pid = supervisor(tmp_path / "ws")
    pier("gc", cwd=tmp_path, image=None)
    ask("exec", "sh", "-c", "echo kept > /opt/kept", cwd=tmp_path / "ws")
    assert supervisor(tmp_path / "ws") == pid
    ask("stop", cwd=tmp_path / "ws")
    pier("gc", cwd=tmp_path, image=None)
    ask("start", cwd=tmp_path / "ws")
    assert ask("exec", "cat", "/opt/kept", cwd=tmp_path / "ws") == "kept\n"


def test_a_workspace_that_was_moved_copied_deleted_or_comes_from_elsewhere(tmp_path: Path, pier_home: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    ask("start", "--image", "host", "-d", "one", "-e", "API_KEY=a-long-5ecret-value", cwd=tmp_path)
    assert "5ecret" not in (one / ".pier" / "workspace.json").read_text()
    nested = refused("start", "--image", "host", "-d", "one/inner", cwd=tmp_path)
    assert "cannot be inside another" in nested

    shutil.copytree(one, two, symlinks=True)
    assert "is not running" in refused("exec", "true", cwd=two)
    assert ask("exec", "sh", "-c", "echo $API_KEY", cwd=one) == "a-long-5ecret-value\n"
    assert "API_KEY is not on this machine" in refused("start", cwd=two)
    ask("start", "-e", "API_KEY=another-5ecret", cwd=two)
    assert ask("exec", "sh", "-c", "echo $API_KEY", cwd=two) == "another-5ecret\n"
    assert ask("exec", "sh", "-c", "echo $API_KEY", cwd=one) == "a-long-5ecret-value\n"
    ask("stop", cwd=two)

    ask("stop", cwd=one)
    one.rename(three)
    ask("list", cwd=tmp_path)
    assert "cannot apply --no-mount" in refused("start", "--no-mount", cwd=three)
    ask("start", cwd=three)
    assert ask("exec", "sh", "-c", "echo $API_KEY", cwd=three) == "a-long-5ecret-value\n"
    ask("stop", cwd=three)
    shutil.rmtree(three)
    listed = pier("list", "--json", cwd=tmp_path, image=None)
    assert [row["workspace"] for row in json.loads(listed.stdout)] == [str(two.resolve())]
    assert "no longer listed" in listed.stderr

    (two / ".pier" / "workspace.json").write_text("{")
    assert "cannot be read" in refused("exec", "true", cwd=two)
    assert (two / ".pier").is_dir()


def test_a_workspace_that_is_moved_or_deleted_while_it_runs(tmp_path: Path, pier_home: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ask("start", "--image", "host", "-d", "one", "--no-mount", cwd=tmp_path)
    ask("exec", "sh", "-c", "echo mine > work.txt", cwd=one)
    pid = supervisor(one)
    one.rename(two)
    assert ask("exec", "cat", "work.txt", cwd=two) == "mine\n"
    assert "running already" in pier("start", cwd=two, image=None).stderr
    assert supervisor(two) == pid
    ask("stop", cwd=two)
    assert (two / "work.txt").read_text() == "mine\n" and not one.exists()

    ask("start", cwd=two)
    pid = supervisor(two)
    ask("exec", "-d", "sleep", "1000", cwd=two)
    shutil.rmtree(two)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    assert not two.exists() and json.loads(ask("list", "--json", cwd=tmp_path)) == []
    (rescued,) = pier_home.glob("workspaces/*/rescued/*/files/work.txt")
    assert rescued.read_text() == "mine\n"


def test_a_task_that_is_gone_or_has_changed(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", test="echo 1 > /logs/verifier/reward.txt")
    ask("start", str(task), "-d", "ws", "--image", "host", cwd=tmp_path)
    ws = tmp_path / "ws"
    assert "already" in refused("start", str(make_task(tmp_path / "other")), "-d", "ws", cwd=tmp_path)
    (task / "tests" / "test.sh").unlink()
    assert "the test script is missing" in refused("verify", cwd=ws)
    task.rename(tmp_path / "elsewhere")
    assert "is not there" in refused("verify", cwd=ws)
    ask("exec", "true", cwd=ws)
    ask("stop", cwd=ws)
    assert "is not there" in refused("start", cwd=ws)
    (tmp_path / "elsewhere").rename(task)
    (task / "tests" / "test.sh").write_text("exit 3\n")
    ask("start", cwd=ws)
    stderr = pier("verify", cwd=ws, image=None, code=1).stderr
    assert "no reward" in stderr and "hint: look at verifier/test-stdout.txt" in stderr


def test_a_full_disk_ends_no_command(tmp_path: Path) -> None:
    """The terminal of an agent cannot be kept any more; its command goes on."""
    from pier.redact import Redactor
    from pier.workspace.commands import CastWriter

    cast = CastWriter(tmp_path / "cast", (24, 80), "", Redactor())
    os.dup2(os.open("/dev/full", os.O_WRONLY), cast._fd)
    cast.output(b"more\n")
    cast.output(b"and more\n")
    assert cast.fault is not None
    cast.close()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused("start", "--image", "host", "-d", "ws", "--ports", str(port), cwd=tmp_path)
        assert f"cannot listen on port {port}" in error and f"--ports {port + 1}:{port}" in error
        assert not (tmp_path / "ws").exists()
        ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
        assert f"cannot listen on port {port}" in refused("start", "--ports", str(port), cwd=tmp_path / "ws")
        ask("exec", "true", cwd=tmp_path / "ws")


def test_a_full_disk_at_capture_leaves_nothing_half_saved(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    claude_log(home, work, "11111111-own", "From here. " * 500)
    command = " ".join([*PIER, "capture"])
    done = subprocess.run(
        ["sh", "-c", f"ulimit -f 1; exec {command}"],
        cwd=work,
        env={**os.environ, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "could not be saved" in done.stderr and "then pier capture again" in done.stderr
    assert not (work / ".pier").exists()
    pier("capture", cwd=work, image=None, HOME=str(home))


_DIE = """
import os, signal, sys
from pier.workspace import state, supervisor

async def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

state.clear_directory = die
supervisor.main(sys.argv[1])
"""


def test_a_kill_while_files_are_copied_in_leaves_the_directory_alone(tmp_path: Path, pier_home: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "host", "-d", "ws", "--no-mount", cwd=tmp_path)
    ask("exec", "sh", "-c", "echo mine > work.txt", cwd=ws)
    ask("stop", cwd=ws)
    assert subprocess.run([sys.executable, "-c", _DIE, str(ws)], check=False).returncode == -9
    started = pier("start", cwd=ws, image=None)
    assert "saving" not in started.stderr and (ws / "work.txt").read_text() == "mine\n"
    assert ask("exec", "cat", "work.txt", cwd=ws) == "mine\n"


@mounts
def test_a_disk_that_is_full_at_the_stop_loses_no_files(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "host", "-d", "ws", "--no-mount", cwd=tmp_path)
    ask("exec", "sh", "-c", "head -c 1000000 /dev/zero > large; echo mine > work.txt", cwd=ws)
    (ws / ".pier" / "incoming").mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", ws / ".pier" / "incoming"], check=True)
    try:
        assert "saved by the next pier start" in pier("stop", cwd=ws, image=None).stderr
        assert "the files of its sandbox cannot be saved" in refused("start", cwd=ws, code=1)
    finally:
        subprocess.run(["umount", ws / ".pier" / "incoming"], check=True)
    assert "pier start, then pier fork" in refused("fork", str(tmp_path / "two"), cwd=ws)
    ask("start", cwd=ws)
    assert ask("exec", "sh", "-c", "cat work.txt; wc -c < large", cwd=ws).split() == ["mine", "1000000"]


@pytest.mark.parametrize("backend", BACKENDS[:1], indirect=True)
def test_what_a_sandbox_held_is_not_saved_over_another_image(backend: str, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "test/busybox", "-d", "ws", cwd=tmp_path)
    ask("exec", "sh", "-c", "mkdir -p /opt; echo kept > /opt/kept", cwd=ws)
    kill_supervisor(ws)
    assert "its image was different" in refused("start", "--image", "host", cwd=ws)
    ask("start", "--image", "test/busybox", cwd=ws)
    assert ask("exec", "cat", "/opt/kept", cwd=ws) == "kept\n"


def test_a_start_that_fails_keeps_what_was_in_the_directory(tmp_path: Path, pier_home: Path) -> None:
    task = make_task(tmp_path / "task")
    kept = tmp_path / "ws" / ".pier" / "trials" / "one" / "result.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    (tmp_path / "ws" / ".task").write_text("a file\n")
    assert "behind a link or a file" in refused("start", str(task), "-d", "ws", "-f", "--image", "host", cwd=tmp_path)
    assert kept.read_text() == "{}" and (tmp_path / "ws" / ".task").read_text() == "a file\n"
    assert not (tmp_path / "ws" / ".pier" / "workspace.json").exists() and not states(pier_home)


def test_a_start_that_fails_late_leaves_no_mark_of_a_crash(tmp_path: Path, pier_home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    ask("start", "--image", "host", "-d", "ws", "--ports", port, cwd=tmp_path)
    ask("stop", cwd=tmp_path / "ws")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()
        assert f"cannot listen on port {port}" in refused("start", cwd=tmp_path / "ws", code=None)
    assert not list(pier_home.glob("workspaces/*/sandbox"))


def test_a_command_that_reads_no_input_can_be_interrupted(tmp_path: Path) -> None:
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        command = [*PIER, "exec", "sh", "-c", "echo begun; exec sleep 1001"]
        endless = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
        waiting = subprocess.Popen(command, cwd=tmp_path / "ws", stdin=endless.stdout, stdout=subprocess.PIPE)
        try:
            assert waiting.stdout is not None and waiting.stdout.readline() == b"begun\n"
            time.sleep(0.5)  # until no more input fits anywhere
            waiting.send_signal(number)
            assert waiting.wait(30) == code
            wait_for(lambda: b"sleep\x001001" not in _commands())
        finally:
            waiting.kill()
            endless.kill()
            endless.wait()


def test_a_command_without_streams(tmp_path: Path) -> None:
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    script = f"{' '.join(PIER)} exec sh -c 'cat; echo done' <&-"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path / "ws", capture_output=True, timeout=60, check=True)
    assert done.stdout == b"done\n"
