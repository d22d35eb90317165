"""Tasks that make the host fetch what only the host can reach: `ADD` of URLs, registries, token servers."""

from __future__ import annotations

import shutil

import pytest

from tests.engine import missing
from tests.host_fetches import DIRECTORY, PLAIN, REALMS, REGISTRIES, SPECIAL, Fetches, run_fetches
from tests.redteam import route

pytestmark = pytest.mark.plain


@pytest.fixture(scope="module")
def fetches(tmp_path_factory: pytest.TempPathFactory) -> Fetches:
    return _fetches(tmp_path_factory, "local")


@pytest.fixture(scope="module")
def engine_fetches(tmp_path_factory: pytest.TempPathFactory) -> Fetches:
    """What a task has an engine fetch, or its builder."""
    return _fetches(tmp_path_factory, "docker")


def _fetches(tmp_path_factory: pytest.TempPathFactory, place: str) -> Fetches:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so the registry has no certificate")
    directory = tmp_path_factory.mktemp("fetches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(directory / "pier"))
        patch.setenv("DOCKER_HOST", f"unix://{directory}/none.sock")
        patch.setenv("DOCKER_CONFIG", str(directory))
        patch.setenv(DIRECTORY, str(directory))
        patch.setenv("SSL_CERT_FILE", str(directory / "server.pem"))
        return run_fetches(directory, place)


def test_what_may_be_fetched_is_fetched(fetches: Fetches) -> None:
    assert fetches.outcomes["add"] == "got ('file', 'fetched', '0o600', 1700000000)"
    for name in ("add with its checksum", "add by redirect", "add allowlist fine"):
        assert "'fetched', '0o600'" in fetches.outcomes[name], name
    assert fetches.outcomes["add with another checksum"].startswith("digest: ")
    assert fetches.outcomes["realm own"] == fetches.outcomes["realm elsewhere"] == "got 1"
    assert fetches.outcomes["registry private"] == "got 1", "a company's registry is at a private address"


@route("host", "ADD of a URL on loopback, this machine or a metadata address", "refused as for RUN; nothing is sent")
@pytest.mark.parametrize("name", SPECIAL)
def test_add_of_special_addresses(fetches: Fetches, name: str) -> None:
    assert fetches.outcomes[f"add special {name}"].startswith("refused: ")


@route("host", "ADD of a URL that redirects to one of those", "refused at the redirect; nothing is sent there")
@pytest.mark.parametrize("name", SPECIAL)
def test_add_that_is_redirected(fetches: Fetches, name: str) -> None:
    assert fetches.outcomes[f"add redirected {name}"].startswith("refused: ")


@route("host", "ADD of a URL that the build's network does not allow", "refused, also by redirect")
def test_add_under_a_policy(fetches: Fetches) -> None:
    for name in ("none", "allowlist other", "allowlist redirected", "allowlist address", "allowlist inward"):
        assert fetches.outcomes[f"add {name}"].startswith("refused: "), name
    assert "metadata.pier.build_network" in fetches.outcomes["add none"]


@route("host", "ADD of a name whose next lookup leads to loopback", "the address that was checked is dialled")
def test_add_with_rebinding(fetches: Fetches) -> None:
    assert fetches.outcomes["add rebinding"].startswith("got ('file', 'fetched'")


@route("host", "a registry whose 401 names a token server inside", "refused; own host and public addresses work")
@pytest.mark.parametrize(
    "name", ["metadata", "metadata-name", "loopback", "loopback-name", "machine", "private", "redirected"]
)
def test_realms(fetches: Fetches, name: str) -> None:
    assert fetches.outcomes[f"realm {name}"].startswith("refused: cannot pull registry.test:5443/")


@route("host", "a task's image on a registry at loopback or a metadata address", "refused; the user may pull it")
@pytest.mark.parametrize("host", REGISTRIES)
def test_registries(fetches: Fetches, host: str) -> None:
    assert fetches.outcomes[f"registry {host}"].startswith("refused: ")
    assert f"pier image pull {host}/app" in fetches.outcomes[f"registry {host}"]


def test_a_registry_that_the_user_names_is_reached(fetches: Fetches) -> None:
    assert fetches.by_user > 0
    assert fetches.outcomes["registry of the user"].startswith("unreachable: ")


def test_nothing_reached_what_was_refused(fetches: Fetches) -> None:
    _check_reached(fetches)


def _check_reached(fetches: Fetches) -> None:
    assert fetches.touched == []
    reached = {row.split()[1] for row in fetches.seen}
    assert not [row for row in reached if row.startswith(("169.254.", "fd00:ec2", "203.0.113.2"))]
    assert f"10.1.2.3:{PLAIN}" not in reached


engine = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@engine
@route("host", "the same images with `--env docker`", "pier pulls them by the same rules; the engine is not asked to")
def test_an_engine_pulls_nothing_that_only_a_task_named(engine_fetches: Fetches) -> None:
    outcomes = engine_fetches.outcomes
    for name in REALMS:
        outcome = "got 1" if name in ("own", "elsewhere") else "refused: cannot pull registry.test:5443/"
        assert outcomes[f"realm {name}"].startswith(outcome), name
    for host in REGISTRIES:
        assert outcomes[f"registry {host}"].startswith("refused: "), host
    assert outcomes["registry private"] == "got 1"
    assert engine_fetches.by_user > 0 and "the engine cannot pull" in outcomes["registry of the user"]


@engine
@route(
    "host",
    "a Dockerfile for an engine's builder: FROM, COPY --from and RUN --mount of such images, ADD of URLs, `# syntax=`",
    "images are pulled by pier, by the same rules; the rest is refused",
)
def test_an_engines_builder_fetches_nothing(engine_fetches: Fetches) -> None:
    outcomes = {name[14:]: text for name, text in engine_fetches.outcomes.items() if name.startswith("engine builds ")}
    assert outcomes.pop("on an image") == "got ('a \"$b\"', '/there')"
    assert outcomes.pop("FROM elsewhere").startswith("got ")
    for name, text in outcomes.items():
        assert text.startswith("refused: " if name[:3] in ("FRO", "COP", "RUN") else "policy: "), (name, text)
    _check_reached(engine_fetches)
