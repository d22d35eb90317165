"""Routes to this machine's own files, and to more of it than a sandbox's share."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from pier.image.build import build_image
from pier.image.host import host_image
from pier.image.store import ImageStore
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.local import LocalBackend
from pier.trial.spec import AgentChoice, SandboxChoice
from tests.job_tasks import make_task, pier
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import PASS, TOML, write_task

SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
ASKING = {
    "docker_image": {"toml": TOML + 'docker_image = "host"\n'},
    "a Dockerfile": {"environment__Dockerfile": "FROM host\n"},
    "an earlier stage": {"environment__Dockerfile": "FROM host AS x\nFROM scratch\nCOPY --from=x /etc/passwd /p\n"},
    "an argument": {"environment__Dockerfile": "ARG B=ho\nFROM ${B}${TARGETOS:+st}\n"},
}


@route(
    "host",
    'a task says `docker_image = "host"` or `FROM host`, in any stage or through an argument',
    "refused; the user may type `--image host`",
)
@pytest.mark.parametrize("way", ASKING)
@everywhere
async def test_a_task_cannot_choose_this_machines_root(way: str, place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(tmp_path / "t", **ASKING[way])
        result = await bench.run(task, sandbox=SandboxChoice())
        assert result.exception_info is not None and not result.has_verdict
        assert (result.exception_info.exception_type, result.exception_info.blame) == ("TaskError", "task")
        assert result.exception_info.code == "host_image"
        assert "--image host" in (result.exception_info.hint or "")


@route("host", "a separate verifier asks for `host`", "refused unless the user typed `--image host`")
@pytest.mark.plain
async def test_a_verifier_cannot_choose_this_machines_root(tmp_path: Path) -> None:
    async with open_place("local", tmp_path / "trials") as bench:
        asking = SEPARATE + '[verifier.environment]\nnetwork_mode = "no-network"\ndocker_image = "host"\n'
        task = write_task(tmp_path / "t", toml=asking.replace('environment_mode = "separate"\n', ""))
        store = ImageStore()
        (tmp_path / "context").mkdir()
        (tmp_path / "context" / "Dockerfile").write_text("FROM host\nENV A=b\n")
        await build_image(store, tmp_path / "context", tag="mine")
        result = await bench.run(task, sandbox=SandboxChoice(image="mine"))
        assert result.exception_info is not None and result.exception_info.code == "host_image"


@route("host", "a task names an image that the user built on `host`", "refused unless the user typed its name")
@pytest.mark.plain
async def test_a_task_cannot_choose_an_image_on_this_machines_root(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text("FROM host\nENV A=b\n")
    await build_image(ImageStore(), tmp_path / "context", tag="mine")
    untagged = await build_image(ImageStore(), tmp_path / "context")
    async with open_place("local", tmp_path / "trials") as bench:
        for number, reference in enumerate(("mine", "docker.io/library/mine:latest", untagged.reference)):
            named = write_task(tmp_path / f"{number}", toml=TOML + f'docker_image = "{reference}"\n')
            built = write_task(tmp_path / f"{number}b", environment__Dockerfile=f"FROM {reference}\n")
            for task in (named, built):
                result = await bench.run(task, sandbox=SandboxChoice())
                assert result.exception_info is not None and result.exception_info.code == "host_image"
        assert (await bench.run(named, sandbox=SandboxChoice(image="mine"))).rewards == {"reward": 1}


NOT_SHOWN = (
    "/etc/shadow-", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh", "/etc/environment", "/etc/gitconfig", "/etc/npmrc",
    "/etc/pip.conf", "/etc/machine-id", "/etc/ssl/private", "/etc/docker", "/etc/cron.d", "/etc/nginx", "/boot",
    "/var/lib/docker", "/var/lib/postgresql", "/var/lib/cloud", "/var/lib/private", "/var/www", "/var/backups",
)  # fmt: skip

SHOWN = set(
    "app bin dev etc gnu home lib lib32 lib64 libx32 logs media mnt nix opt proc root run sbin solution srv sys tests "
    "tmp usr var workspace".split()
)


@route(
    "host",
    "root in the image `host` reads secrets and state of the machine",
    "only listed software and public files are there",
)
@pytest.mark.plain
async def test_the_host_image_shows_what_is_listed(backend: LocalBackend) -> None:
    secrets = {}
    if os.geteuid() == 0:
        for place in ("/srv", "/var/lib", "/etc", "/opt", "/", "/usr/local/etc"):
            secrets[place] = Path(tempfile.mkdtemp(prefix="pier-redteam-", dir=place))
            (secrets[place] / "secret").write_text("secret")
            (secrets[place] / "bin").mkdir()
    try:
        async with await backend.start(SandboxSpec(host_image())) as sandbox:
            for path in (*NOT_SHOWN, *(str(path / "secret") for path in secrets.values())):
                assert not (await sandbox.exec(["test", "-e", path])).ok, path
            assert (await sandbox.exec("ls -A /root /home /srv /run /mnt /media /var/log /var/spool")).ok
            assert (await sandbox.exec("find /root /home /srv /mnt /media /var/log /var/spool -type f")).text == ""
            assert set((await sandbox.exec("ls -A /")).text.split()) <= SHOWN
            works = (
                "id root && python3 -c 'import ssl; assert ssl.create_default_context().get_ca_certs()' && ldconfig -p"
            )
            assert (await sandbox.exec(f"{works} && dpkg -s bash && bash -lc true")).ok
    finally:
        for path in secrets.values():
            shutil.rmtree(path)


@route(
    "host",
    "an agent looks for the task, other tasks, results and packs in software directories or in a mount",
    "hidden",
)
@everywhere
async def test_tasks_and_state_are_hidden(
    place: str, tmp_path: Path, pier_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "shown"
    for name in ("jobs/other", "tasks/other/solution", "packs", "home/pier", "data"):
        (shown / name).mkdir(parents=True)
        (shown / name / "canary").write_text("canary")
    monkeypatch.setenv("PIER_PACKS", str(shown / "packs"))
    choice = SandboxChoice(image="host", mounts=(Mount("/seen", shown),), hidden=(shown / "jobs", shown / "tasks"))
    script = (
        "find /seen -name canary; ls /seen/tasks /seen/jobs /seen/packs; find / -xdev -name solve.sh; touch /app/done"
    )
    async with open_place(place, shown / "jobs" / "mine") as bench:
        task = write_task(shown / "tasks" / "mine", test=PASS)
        agent = AgentChoice("command", options={"command": script})
        result = await bench.run(task, agent, sandbox=replace(choice, image=bench.image))
        assert result.rewards == {"reward": 1}, result.exception_info
        seen = (bench.last / "agent" / "command.txt").read_text()
    assert "/seen/data/canary" in seen and "/seen/home/pier/canary" in seen
    assert "solve.sh" not in seen and seen.count("canary") == 2


@route("host", "the task's directory lies below `/usr/local` or `/opt`", "hidden")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write there")
@pytest.mark.parametrize("above", ["/usr/local", "/opt"])
async def test_a_task_among_the_software_is_hidden(above: str, tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="pier-redteam-", dir=above))
    try:
        directory.chmod(0o755)
        (directory / "bin").mkdir()
        (directory / "bin" / "tool").write_text("#!/bin/sh\n")
        async with open_place("local", tmp_path / "trials") as bench:
            task = write_task(directory / "task")
            agent = AgentChoice(
                "command", options={"command": f"find {directory}; bash {directory}/task/solution/solve.sh"}
            )
            result = await bench.run(task, agent)
            assert result.rewards == {"reward": 0}
            seen = (bench.last / "agent" / "command.txt").read_text()
        assert f"{directory}/bin/tool" in seen and "instruction.md" not in seen
    finally:
        shutil.rmtree(directory)


@route("host", "a mount names the task's or pier's own directory", "refused")
@everywhere
async def test_hidden_directories_cannot_be_mounted(place: str, tmp_path: Path, pier_home: Path) -> None:
    (pier_home / "images").mkdir(parents=True)
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(tmp_path / "task")
        for source in (task.path / "solution", task.path, pier_home, pier_home / "images"):
            result = await bench.run(task, sandbox=SandboxChoice(image=bench.image, mounts=(Mount("/seen", source),)))
            assert result.exception_info is not None and result.exception_info.code == "hidden_mount"


@route("host", "an agent of a job looks for other tasks and results in a mount", "hidden")
@pytest.mark.plain
def test_a_job_hides_its_tasks_and_results(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name, solve="find /seen; echo hi > /tmp/answer")
    (tmp_path / "data").mkdir()
    mounts = json.dumps([{"type": "bind", "source": str(tmp_path), "target": "/seen", "read_only": True}])
    pier("run", "-p", "tasks", "-i", "one", "--job-name", "j", "--mounts", mounts, cwd=tmp_path)
    (seen,) = tmp_path.glob("jobs/j/*/agent/oracle.txt")
    assert set(seen.read_text().split()) >= {"/seen", "/seen/data", "/seen/tasks", "/seen/jobs"}
    assert not any(name in seen.read_text() for name in ("solve.sh", "task.toml", "result.json", "/seen/jobs/"))
