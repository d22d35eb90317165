"""Routes to this machine's own files, and to more of it than a sandbox's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.image.build import build_image
from pier.image.store import ImageStore
from pier.trial.spec import SandboxChoice
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import TOML, write_task

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
