"""Raising the pinned versions of agents: what is newer, where the pin stands, and what must pass before it is kept."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from pier.agent.contract import AGENTS, find_agent
from pier.errors import UsageError

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "bump"


@pytest.fixture
def bump(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = SourceFileLoader("pier_bump", str(SCRIPT))
    spec = importlib.util.spec_from_loader("pier_bump", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "pier_bump", module)
    loader.exec_module(module)
    return module


def has_pack(name: str) -> bool:
    try:
        return find_agent(name).pack is not None
    except UsageError:
        return False  # it needs a package that is not here


def test_every_agent_with_a_pack_is_pinned_where_it_can_be_raised(bump: ModuleType) -> None:
    found = bump.pins([])
    assert {pin.agent for pin in found} == {name for name in AGENTS if has_pack(name)}
    for pin in found:
        text = pin.file.read_text()
        raised = pin.raised(text, "99.0.1")
        assert raised.count('"99.0.1"') == 1 and len(raised.splitlines()) == len(text.splitlines())
        with pytest.raises(ValueError, match="exactly once"):
            pin.raised(raised, "99.0.2")


def test_what_must_pass_is_what_the_acceptance_list_names(bump: ModuleType) -> None:
    proofs = bump.proofs()
    assert "tests/e2e/test_agent_real.py::test_an_agent_fixes_the_bug_without_a_network" in proofs
    assert "tests/fault/test_agent_patience.py::test_codex_waits_for_a_generation_longer_than_its_own_limit" in proofs
    assert len(proofs) == len(set(proofs)) >= 10
    assert not any("job_budget" in proof for proof in proofs)


def test_what_is_newer_is_told_and_nothing_else_done(
    bump: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho '\"99.0.1\"'\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    before = SCRIPT.parents[1].joinpath("src/pier/agent/codex.py").read_text()
    assert bump.main(["--check", "codex"]) == 1
    assert " -> 99.0.1" in capsys.readouterr().out
    assert SCRIPT.parents[1].joinpath("src/pier/agent/codex.py").read_text() == before
    npm.write_text(f"#!/bin/sh\necho '{find_agent('codex').pack.version}'\n")  # type: ignore[union-attr]
    assert bump.main(["codex"]) == 0
