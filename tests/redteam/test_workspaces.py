"""What sandboxes, directories of strangers and web requests cannot do to this machine through workspaces, the viewer,
reviews and environments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from pier.review.source import open_source
from pier.rollout.sandboxes import SandboxClient
from pier.sandbox import Sandbox
from tests.job_tasks import make_task, pier
from tests.view_jobs import viewing
from tests.workspaces import stop_all

pytestmark = pytest.mark.plain


@pytest.fixture(autouse=True)
def stopped(pier_home: Path) -> Iterator[None]:
    yield
    stop_all(pier_home)


def ask(*args: str, cwd: Path) -> str:
    return pier(*args, cwd=cwd, image=None).stdout


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the user's that nothing may touch."""
    place = tmp_path / "victim"
    place.mkdir()
    (place / "id_rsa").write_text("TOPSECRET")
    return place


def intact(victim: Path) -> bool:
    return [path.name for path in victim.iterdir()] == ["id_rsa"]


@pytest.mark.parametrize("command", ["stop", "fork"])
def test_a_working_directory_that_became_a_link(command: str, victim: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet")
    ws = tmp_path / "ws"
    pier("start", str(task), "-d", "ws", "--image", "host", "--no-mount", cwd=tmp_path, image=None)
    workdir = ask("exec", "pwd", cwd=ws).strip()
    ask("exec", "sh", "-c", f"cd /; rm -rf {workdir}; ln -s {victim} {workdir}", cwd=ws)
    given = ["fork", str(tmp_path / "second")] if command == "fork" else ["stop"]
    pier(*given, cwd=ws, code=None, image=None)
    assert intact(victim)
    assert not any("TOPSECRET" in path.read_text() for path in ws.rglob("id_rsa"))
    pier("stop", cwd=ws, code=None, image=None)


def test_a_workspace_from_elsewhere_needs_consent(victim: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet")
    ws = tmp_path / "ws"
    pier("start", str(task), "-d", "ws", "--image", "host", cwd=tmp_path, image=None)
    pier("stop", cwd=ws, image=None)
    other = tmp_path / "other"
    shutil.copytree(ws, other, symlinks=True)
    path = other / ".pier" / "workspace.json"
    settings = json.loads(path.read_text()) | {"id": "0badc0de", "mounts": [f"{victim}:/mnt:rw"]}
    path.write_text(json.dumps(settings))
    done = pier("start", cwd=other, code=2, image=None)
    assert "-y" in done.stderr and str(victim) in done.stderr


@pytest.mark.parametrize("job", ["%2F{victim}", "..%2Fvictim"])
async def test_a_viewer_serves_nothing_outside_of_its_directory(job: str, victim: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    trial = victim / "t"
    trial.mkdir()
    (trial / "config.json").write_text("{}")
    (trial / "file.txt").write_text("TOPSECRET")
    named = job.format(victim=str(victim)[1:].replace("/", "%2F"))
    async with viewing(tmp_path / "jobs") as viewer, aiohttp.ClientSession() as session:
        from yarl import URL

        own = {"Origin": viewer.origin}
        async with session.get(URL(f"{viewer.origin}/files/{named}/t/file.txt", encoded=True)) as answer:
            assert answer.status == 404 and "TOPSECRET" not in await answer.text()
        note = URL(f"{viewer.origin}/jobs/{named}/t/notes", encoded=True)
        async with session.post(note, json={"text": "x"}, headers=own) as answer:
            assert answer.status in (400, 404)
    assert sorted(path.name for path in trial.iterdir()) == ["config.json", "file.txt"]


def test_a_trial_that_became_a_link_is_not_reviewed(victim: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet")
    pier("run", str(task), "--job-name", "j", "-q", cwd=tmp_path)
    job = tmp_path / "jobs" / "j"
    (trial,) = (trial.directory for trial in open_source(job).trials)
    shutil.rmtree(trial)
    trial.symlink_to(victim)
    assert open_source(job).trials == ()


async def test_links_do_not_come_out_of_environments(victim: Path, tmp_path: Path) -> None:
    import pier as api

    async with api.sandbox("host", workdir="/w") as box:
        assert isinstance(box, Sandbox)
        client = SandboxClient.__new__(SandboxClient)
        await box.exec(["ln", "-s", str(victim / "id_rsa"), "/w/answer.txt"])
        await box.exec(["sh", "-c", f"mkdir /w/all; ln -s {victim} /w/all/more; echo 1 > /w/all/file"])
        client.__class__ = type("_One", (SandboxClient,), {"__getitem__": lambda self, name: box})
        with pytest.raises(FileNotFoundError):
            await client.download_file("box", "/w/answer.txt", tmp_path / "answer.txt")
        await client.download_file("box", "/w/all", tmp_path / "all")
    assert not (tmp_path / "answer.txt").exists()
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["file"]
