"""One Docker engine for the whole suite of a worker, started when the first test needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import Engine
from tests.redteam.places import bash_engine


@pytest.fixture(scope="session")
def redteam_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with bash_engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(autouse=True)
def docker_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point tests that are marked `docker` at the suite's engine."""
    if request.node.get_closest_marker("docker"):
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("redteam_engine").url)
