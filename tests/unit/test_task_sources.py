"""Where tasks come from, and which are taken."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pier.errors import PierError, TaskError, UsageError
from pier.task.sources import Selection, parse_git_reference, resolve_sources
from tests.trial_runs import write_task


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    for name in ("delta", "alpha", "charlie", "bravo", "echo"):
        write_task(root / name, environment__data="kept by git\n")
    (root / "not-a-task").mkdir()
    return root


def names(*sources: object, **selection: object) -> list[str]:
    return [task.name for task in resolve_sources([str(source) for source in sources], Selection(**selection))]  # type: ignore[arg-type]


def test_a_task_and_a_directory_of_tasks(dataset: Path) -> None:
    assert names(dataset / "bravo") == ["bravo"]
    assert names(dataset) == ["alpha", "bravo", "charlie", "delta", "echo"]
    assert {task.origin.source for task in resolve_sources([dataset])} == {"set"}


def test_selection(dataset: Path) -> None:
    assert names(dataset, include=["*a", "echo"]) == ["alpha", "delta", "echo"]
    assert names(dataset, exclude=["*a"]) == ["bravo", "charlie", "echo"]
    assert names(dataset, include=["set/*lph*"]) == ["alpha"]
    assert names(dataset, n_tasks=2) == ["alpha", "bravo"]
    first = names(dataset, n_tasks=3, sample_seed=7)
    assert first == names(dataset, n_tasks=3, sample_seed=7)
    assert len({tuple(names(dataset, n_tasks=3, sample_seed=seed)) for seed in range(20)}) > 1
    with pytest.raises(UsageError, match="'zulu'"):
        names(dataset, include=["zulu"])


def test_a_task_is_found_by_the_name_that_it_gives_itself(dataset: Path) -> None:
    toml = dataset / "alpha" / "task.toml"
    toml.write_text('[task]\nname = "greek/first"\n' + toml.read_text())
    (dataset / "bravo" / "task.toml").write_text("not = [toml")
    assert names(dataset, include=["greek/*"]) == ["greek/first"]
    assert names(dataset, exclude=["greek/*", "bravo"]) == ["charlie", "delta", "echo"]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such task"):
        names(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="neither a task"):
        names(tmp_path / "empty")


def git(repository: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *args], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_repository_is_pinned_and_cached(dataset: Path, tmp_path: Path) -> None:
    git(dataset, "init", "-q", "-b", "main")
    git(dataset, "add", ".")
    git(dataset, "commit", "-qm", "one")
    first = git(dataset, "rev-parse", "HEAD")
    url = dataset.as_uri()
    (task,) = resolve_sources([f"{url}#alpha"])
    assert (task.origin.git_commit, task.origin.git_path, task.origin.git_url) == (first, "alpha", url)
    assert names(url) == ["alpha", "bravo", "charlie", "delta", "echo"]
    (dataset / "alpha" / "instruction.md").write_text("Changed.")
    git(dataset, "commit", "-qam", "two")
    (new,) = resolve_sources([f"{url}#alpha"])
    assert new.steps[0].instruction == "Changed." and new.digest != task.digest
    (old,) = resolve_sources([f"{url}@{first}#alpha"])
    assert old.digest == task.digest
    dataset.rename(tmp_path / "gone")
    (cached,) = resolve_sources([f"{url}@{first}#alpha"])
    assert cached.digest == task.digest
    with pytest.raises(TaskError, match="git fetch failed"):
        resolve_sources([f"{url}#alpha"])


def test_paths_in_repositories_stay_inside(dataset: Path) -> None:
    for path in ("../x", "/etc", "a/../../b"):
        with pytest.raises(TaskError, match="inside the repository"):
            resolve_sources([f"{dataset.as_uri()}#{path}"])


def test_references() -> None:
    reference = parse_git_reference("https://example.org/o/r.git@v1.0#a/b")
    assert reference is not None
    assert (reference.url, reference.ref, reference.path) == ("https://example.org/o/r.git", "v1.0", "a/b")
    assert parse_git_reference("git@example.org:o/r.git#x").url == "git@example.org:o/r.git"  # type: ignore[union-attr]
    assert parse_git_reference("some/directory") is None


def test_dataset_toml(dataset: Path) -> None:
    digest = resolve_sources([dataset / "alpha"])[0].digest
    rows = f'[[tasks]]\nname = "org/alpha"\ndigest = "{digest}"\n[[tasks]]\nname = "org/echo"\n'
    (dataset / "dataset.toml").write_text(f'[dataset]\nname = "org/set"\n{rows}')
    assert names(dataset / "dataset.toml") == ["alpha", "echo"]
    (dataset / "alpha" / "instruction.md").write_text("Other.")
    with pytest.raises(TaskError, match="sha256:"):
        names(dataset / "dataset.toml")
    (dataset / "dataset.toml").write_text("[dataset]\n")
    with pytest.raises(TaskError, match=r"dataset\.name"):
        names(dataset / "dataset.toml")


def test_a_directory_is_walked_whatever_its_dataset_toml_says(dataset: Path) -> None:
    everything = ["alpha", "bravo", "charlie", "delta", "echo"]
    file, warnings = dataset / "dataset.toml", []
    rows = "".join(f'[[tasks]]\nname = "org/{name}"\ndigest = "sha256:0"\n' for name in ("alpha", "gone"))
    for content in (f'[dataset]\nname = "org/set"\n{rows}', "[dataset]\n"):
        file.write_text(content)
        found = resolve_sources([dataset], warn=warnings.append)
        assert [task.name for task in found] == everything
    assert "4 tasks here are not listed, 1 listed ones are missing" in warnings[0]
    assert "dataset.name" in warnings[1] and len(warnings) == 2


def test_a_pattern_must_match_in_one_of_the_sources(dataset: Path, tmp_path: Path) -> None:
    write_task(tmp_path / "more" / "zulu")
    assert names(dataset, tmp_path / "more", include=["zulu", "al*"]) == ["alpha", "zulu"]
    with pytest.raises(UsageError, match="'yankee'"):
        names(dataset, tmp_path / "more", include=["zulu", "yankee"])


def test_tasks_that_lie_deeper_are_pointed_at(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="in 1 of its directories: set") as caught:
        names(tmp_path)
    assert caught.value.hint is not None and caught.value.hint.startswith(f"{tmp_path}/set")


def test_registry_json(dataset: Path, tmp_path: Path) -> None:
    git(dataset, "init", "-q", "-b", "main")
    git(dataset, "add", ".")
    git(dataset, "commit", "-qm", "one")
    commit = git(dataset, "rev-parse", "HEAD")
    local = {"name": "echo", "path": "set/echo"}
    remote = {"name": "alpha", "git_url": dataset.as_uri(), "git_commit_id": commit, "path": "alpha"}
    entries = [
        {"name": "one", "version": "1.0", "tasks": [local, remote], "metrics": [{"type": "mean"}]},
        {"name": "one", "version": "2.0", "tasks": [local]},
    ]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps(entries))
    assert names(f"{registry}#one@1.0") == ["alpha", "echo"]
    assert names(f"{registry}#one") == ["echo"]
    with pytest.raises(TaskError, match="'two'"):
        names(f"{registry}#two")
    with pytest.raises(TaskError, match="several"):
        names(registry)


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"name": 1}]', '{"name": "x"}', "[" * 5000])
def test_broken_lists_are_typed_errors(tmp_path: Path, content: str) -> None:
    for name in ("registry.json", "dataset.toml"):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(PierError, match=name):
            names(path)
