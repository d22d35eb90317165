"""Programs that fetch things work behind an allowlist without being told of it, on every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import engine
from tests.clients import CLIENTS, DIRECTORY, HOST, missing, run_clients
from tests.once import made_once


@pytest.fixture(
    scope="module",
    params=[
        "local",
        pytest.param(
            "docker",
            marks=[pytest.mark.docker, pytest.mark.skipif(engine.missing() is not None, reason=str(engine.missing()))],
        ),
    ],
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def run(root: Path) -> None:
        root.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIER_HOME", str(root / "pier"))
            patch.setenv(DIRECTORY, str(root))
            run_clients(request.param, root)

    return json.loads((made_once(tmp_path_factory, f"clients-{request.param}", run) / "answer.json").read_text())


@pytest.mark.parametrize("client", CLIENTS)
def test_it_fetches_what_is_allowed(outcome: dict[str, Any], client: str) -> None:
    if why := missing(client):
        pytest.skip(why)
    code, text, errors = outcome["told"][client]
    assert code == 0, f"{text}\n{errors}"
    assert "hello" in text


def test_nothing_else_was_reached(outcome: dict[str, Any]) -> None:
    assert {row.split()[1].rpartition(":")[0] for row in outcome["seen"]} == {"93.184.216.60"}
    allowed = {row["name"] for row in outcome["decisions"] if row["allowed"] and row["kind"] == "tcp"}
    assert allowed == {HOST}
