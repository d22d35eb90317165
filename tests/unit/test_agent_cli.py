"""`pier agent`: lists, shows, removes and examines, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pier.agent.contract import AGENTS, pack_spec, resolved
from pier.agent.pack.store import PackStore, digest_tree
from pier.cli.agent import agent
from pier.errors import UsageError
from pier.files import write_json
from pier.job.directory import write_lock
from pier.job.plan import Plan
from tests.npm_registry import serve


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackStore:
    monkeypatch.setenv("PIER_PACKS", str(tmp_path / "packs"))
    return PackStore()


def put_pack(store: PackStore, name: str) -> Path:
    """A pack with one file, as a build would leave it."""
    spec = pack_spec(name)
    assert spec is not None
    work = store.root / "work"
    (work / "bin").mkdir(parents=True)
    (work / "bin" / name).write_text("program")
    digest, size = digest_tree(work)
    (store.root / "trees").mkdir()
    (store.root / "refs").mkdir()
    work.rename(store.root / "trees" / digest)
    row = {"digest": digest, "bytes": size, "version": spec.version, "package": spec.package}
    write_json(store._reference(spec), row)
    return store.root / "trees" / digest


def run(*args: str) -> str:
    result = CliRunner().invoke(agent, args)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_agent_is_listed_with_its_pack(store: PackStore) -> None:
    put_pack(store, "codex")
    rows = {row["name"]: row for row in json.loads(run("list", "--json"))}
    assert set(AGENTS) <= set(rows)
    assert rows["codex"]["pack"]["built"] and not rows["claude-code"]["pack"]["built"]
    assert rows["oracle"]["pack"] is None
    assert "built on first use" in run("list")


def test_one_agent_is_shown_with_its_options(store: PackStore) -> None:
    shown = json.loads(run("show", "codex", "--json"))
    assert shown["dialect"] == "responses" and "config_toml" in shown["options"]
    assert "config_toml" in run("show", "codex")


def test_a_built_pack_is_not_built_again_and_can_be_removed(store: PackStore) -> None:
    path = put_pack(store, "codex")
    assert json.loads(run("pack", "codex", "--json"))[0]["path"] == str(path)
    assert "needs no pack" in run("pack", "oracle")
    assert "nothing to remove" in run("rm", "codex@9.9.9")
    assert "removed codex" in run("rm", "codex")
    assert not path.exists() and store.all() == []


def test_the_doctor_sees_a_pack_that_has_changed(store: PackStore) -> None:
    path = put_pack(store, "codex")
    before = {row["subject"]: row for row in _doctor()}
    assert before["@openai/codex"]["ok"]
    (path / "bin" / "codex").write_text("something else")
    after = {row["subject"]: row for row in _doctor()}
    assert not after["@openai/codex"]["ok"] and after["@openai/codex"]["fix"]


def _doctor() -> list[dict[str, str]]:
    return json.loads(CliRunner().invoke(agent, ["doctor", "--json"]).output)


def test_an_unknown_agent_is_told_with_a_near_one(store: PackStore) -> None:
    result = CliRunner().invoke(agent, ["show", "codx"])
    assert isinstance(result.exception, UsageError) and "codex" in (result.exception.hint or "")
    with pytest.raises(UsageError, match="version"):
        pack_spec("oracle@1.0")


def test_latest_becomes_a_number_once(store: PackStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serve() as registry:
        monkeypatch.setenv("npm_config_registry", registry.url)
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm-cache"))
        registry.add("@openai/codex", "9.8.7", {})
        assert resolved("codex@latest") == "codex@9.8.7"
    assert resolved("codex") == "codex" and resolved("codex@1.0.0") == "codex@1.0.0"


def test_a_jobs_lock_tells_what_packs_are_made_of(tmp_path: Path) -> None:
    plan = Plan((), ({"name": "codex@1.2.3"}, {"name": "oracle"}, {"name": "no-such-agent"}), ())
    write_lock(tmp_path, {"n_concurrent_trials": 1, "retry": {}}, plan)
    packs = json.loads((tmp_path / "lock.json").read_text())["pier"]["packs"]
    assert packs == {"codex@1.2.3": {"source": "npm", "package": "@openai/codex", "version": "1.2.3"}}
