"""`pier skills` in a workspace without a sandbox: the task's skills come out of its image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.busybox import import_busybox
from tests.job_tasks import make_task, pier
from tests.workspaces import stop_all

pytestmark = pytest.mark.plain
DOCKERFILE = """\
FROM test/busybox
WORKDIR /app
COPY skills /opt/skills
RUN ln -s /etc/passwd /opt/skills/count/link
"""


@pytest.fixture(autouse=True)
def stopped(pier_home: Path) -> Iterator[None]:
    yield
    stop_all(pier_home)


def test_the_tasks_skills_are_taken_out_of_its_image(tmp_path: Path) -> None:
    import_busybox(tmp_path)
    task = make_task(tmp_path / "task")
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    skill = task / "environment" / "skills" / "count" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: count\ndescription: How to count.\n---\n")
    with (task / "task.toml").open("a") as stream:
        stream.write('skills_dir = "/opt/skills"\n')
    pier("start", "task", "--host", "-d", "ws", cwd=tmp_path, image=None)
    said = pier("skills", "-a", "claude-code", "-a", "codex", cwd=tmp_path / "ws", image=None).stdout
    assert ".claude/skills/count" in said and "for codex" in said
    for place in (".claude", ".agents"):
        found = tmp_path / "ws" / place / "skills" / "count"
        assert sorted(path.name for path in found.iterdir()) == ["SKILL.md"]
    again = json.loads(pier("skills", "-a", "codex", "--json", cwd=tmp_path / "ws", image=None).stdout)
    assert [(row["name"], row["kept"]) for row in again] == [("count", False)]
    (task / "task.toml").write_text((task / "task.toml").read_text().replace("/opt/skills", "/no/where"))
    failed = pier("skills", cwd=tmp_path / "ws", code=2, image=None).stderr
    assert "skills_dir /no/where is not in its image" in failed
