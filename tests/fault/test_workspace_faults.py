"""Bad input and faults of workspaces: each has a clear message, and no work of the user's is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.home import pier_home as home_of_pier
from tests.job_tasks import PIER, make_task, pier, wait_for
from tests.workspaces import kill_supervisor, states, stop_all, supervisor

pytestmark = pytest.mark.plain


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
        (("start", "-d", "ws"), "neither a task nor --image"),
        (("start", str(task), "-d", "full"), "is not empty"),
        (("start", str(task), "-d", "task/inside"), "which no sandbox may see"),
        (("start", str(task), "-d", "full/work.txt"), "is a file"),
        (("start", "--image", "host", "-d", "ws", "-a", "no-such-agent"), "no-such-agent"),
        (("start", "--image", "host", "-d", "ws", "-a", "oracle"), "comes in no pack"),
        (("start", "--image", "host", "-d", "ws", "--ports", "http"), "invalid value 'http' for --ports"),
        (("start", "--image", "host", "-d", "ws", "--mounts-json", "{"), "--mounts-json is not JSON"),
        (("start", "--image", "host", "-d", "ws", "--mounts-json", '["./gone:/x"]'), "it does not exist"),
        (("start", "--image", "host", "-d", "ws", "-e", "1=2"), "invalid value '1=2' for -e"),
        (("start", "--image", "host", "-d", "ws", "--env", "moon"), "invalid value 'moon' for --env"),
        (("start", str(nosy), "-d", "ws"), "tasks want these variables of yours"),
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


def test_a_workspace_comes_back_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    ask("exec", "sh", "-c", "echo mine > work.txt", cwd=ws)
    waiting = subprocess.Popen([*PIER, "exec", "sleep", "1000"], cwd=ws, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: b"sleep\x001000" in _commands())
    kill_supervisor(ws)
    assert waiting.wait(60) != 0 and "pier start" in str(waiting.communicate()[1])
    assert "is not running" in refused("exec", "true", cwd=ws)
    assert "stopped" in ask("list", cwd=ws)
    pier("gc", cwd=tmp_path, image=None)
    ask("start", cwd=ws)
    assert ask("exec", "cat", "work.txt", cwd=ws) == "mine\n"


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
    assert "no reward" in pier("verify", cwd=ws, image=None, code=1).stderr


def test_a_full_disk_ends_no_command(tmp_path: Path) -> None:
    """The terminal of an agent cannot be kept any more; its command goes on."""
    from pier.redact import Redactor
    from pier.workspace.terminal import CastWriter

    cast = CastWriter(tmp_path / "cast", 24, 80, {}, Redactor())
    os.dup2(os.open("/dev/full", os.O_WRONLY), cast._fd)
    cast.output(b"more\n")
    cast.output(b"and more\n")
    assert cast.fault is not None
    cast.close()
