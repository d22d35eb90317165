"""Ways out of a closed network, tried by a sandbox's root, in a fake internet that counts what reaches it."""

from __future__ import annotations

import shutil

import pytest

from tests.egress import ALLOWED, World, run_world

pytestmark = pytest.mark.plain

REFUSED = ("ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "ENETUNREACH")
SECRET_PLACES = (
    "93.184.216.36",
    "10.",
    "172.16.",
    "192.168.",
    "169.254.",
    "8.8.8.8",
    "fd",
    "2001:db8::2",
    "203.0.113.2",
)


@pytest.fixture(scope="module")
def allowlist(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("allowlist", ALLOWED, tmp_path_factory)


@pytest.fixture(scope="module")
def none(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("none", (), tmp_path_factory)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("public", (), tmp_path_factory)


def outcomes(world: World, start: str) -> dict[str, str]:
    found = {name: outcome for name, outcome in world.attempts.items() if name.startswith(start)}
    assert found, world.attempts
    return found


@pytest.mark.parametrize("start", ["tcp ", "tcp6 ", "udp", "dns ", "own resolv.conf"])
def test_addresses_are_refused_at_once(allowlist: World, start: str) -> None:
    assert {name: outcome for name, outcome in outcomes(allowlist, start).items() if outcome not in REFUSED} == {}


def test_icmp_is_answered_with_unreachable(allowlist: World) -> None:
    assert allowlist.attempts["icmp"] == "got 'unreachable'"


def test_names_that_no_rule_has_do_not_exist(allowlist: World) -> None:
    for name, outcome in outcomes(allowlist, "name ").items():
        if not name.startswith("name leads"):
            assert "Name or service not known" in outcome, name


def test_no_data_leaves_by_dns(allowlist: World) -> None:
    assert {outcome[:15] for outcome in outcomes(allowlist, "tunnel").values()} == {"got ('NXDOMAIN'"}


def test_names_that_lead_inward_are_not_dialled(allowlist: World) -> None:
    assert set(outcomes(allowlist, "name leads inward").values()) == {"ECONNRESET"}
    assert allowlist.refused("inward.test")[0]["reason"] == "resolves to a private address"


@pytest.mark.parametrize(
    "start", ["http", "connect method", "tls server name disagrees", "tls without server name", "port of another rule"]
)
def test_what_disagrees_with_its_name_is_reset(allowlist: World, start: str) -> None:
    assert set(outcomes(allowlist, start).values()) == {"ECONNRESET"}


def test_sockets_that_no_namespace_binds_cannot_be_made(allowlist: World, none: World) -> None:
    for name in ("vsock", "packet socket", "alg socket"):
        assert {allowlist.attempts[name], none.attempts[name]} == {"EAFNOSUPPORT"}


def test_routes_are_out_of_reach(allowlist: World, none: World) -> None:
    assert {allowlist.attempts["new route"], none.attempts["new route"]} == {"EPERM"}


def test_nothing_reached_what_was_not_allowed(allowlist: World) -> None:
    assert [row for place in SECRET_PLACES for row in allowlist.reached(place)] == []
    assert allowlist.touched == []
    assert {row.split()[0] for row in allowlist.seen} == {"tcp"}


def test_every_attempt_is_in_the_log(allowlist: World) -> None:
    for name in ("93.184.216.36", "169.254.169.254", "10.1.2.3", "2001:470::34", "refused.test", "8.8.8.8"):
        assert allowlist.refused(name), name
    kinds = {row["kind"] for row in allowlist.decisions if not row["allowed"]}
    assert kinds == {"tcp", "udp", "dns", "icmp"}
    passed = [row for row in allowlist.decisions if row.get("name") == "other.test" and row.get("port") == 8443]
    assert passed[0]["allowed"] and passed[0]["received"] > 0 and passed[0]["sent"] > 0


def test_the_policy_was_proven_first(allowlist: World, none: World, public: World) -> None:
    for world in (allowlist, none, public):
        assert world.decisions[0]["kind"] == "probe"
    assert "dns: NXDOMAIN, tcp: ECONNREFUSED, metadata: ECONNREFUSED" in allowlist.decisions[0]["reason"]


@pytest.mark.parametrize(
    "name", ["curl", "curl over IPv6", "curl to an IPv6 host", "curl over TLS", "git", "python", "node"]
)
def test_allowed_names_work_with_unmodified_programs(allowlist: World, name: str) -> None:
    code, output = allowlist.commands[name]
    if "TLS" in name and shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so the world has no certificate")
    if code == 127:
        pytest.skip(f"{name} is not installed")
    assert code == 0, output
    assert "hello from" in output or "refs/heads/main" in output


@pytest.mark.parametrize(
    "name",
    [
        "redirect to a refused name",
        "redirect to an address",
        "curl with another address",
        "curl over TLS with another name",
    ],
)
def test_detours_fail(allowlist: World, name: str) -> None:
    assert allowlist.commands[name][0] in (6, 7, 35, 56), allowlist.commands[name]


def test_other_protocols_and_ports_pass_by_their_name(allowlist: World) -> None:
    assert allowlist.attempts["server speaks first"] == "got b'220 93.184.216.34\\r\\n'"
    assert "hello from 93.184.216.35" in allowlist.attempts["port of its rule"]
    assert "hello from 93.184.216.37" in allowlist.attempts["wildcard"]
    assert "hello from 93.184.216.99" in allowlist.attempts["address by its rule"]
    assert allowlist.attempts["tls server name agrees"].startswith("got b")


def test_none_has_no_way_out_at_all(none: World) -> None:
    expected = ("ENETUNREACH", "ECONNREFUSED", "EAFNOSUPPORT", "EPERM", "gaierror", "ENOENT", "got ('NXDOMAIN', 0)")
    assert {name: out for name, out in none.attempts.items() if not out.startswith(expected)} == {}
    assert all(code != 0 for code, _ in none.commands.values())
    assert none.touched == []
    assert [row for row in none.seen if "93.184.216.34" not in row and "93.184.216.35" not in row] == []


def test_without_a_network_every_attempt_is_in_the_log_too(none: World) -> None:
    told = [(row["kind"], row["name"], row.get("port", 0)) for row in none.decisions if not row["allowed"]]
    for address, port in (line.removeprefix("tcp ").split(":") for line in none.attempts if line.startswith("tcp ")):
        if address not in ("127.0.0.1", "224.0.0.1", "255.255.255.255"):
            assert ("tcp", address, int(port)) in told, (address, port)
    for address in ("2001:470::34", "fd00:ec2::254", "2001:db8::2", "fd70:6965:72::1"):
        assert ("tcp", address, 80) in told, address
    assert ("udp", "93.184.216.34", 9999) in told and ("udp", "8.8.8.8", 53) in told
    assert {("icmp", "93.184.216.36", 0), ("udp", "93.184.216.36", 5)} <= set(told), "raw packets"
    for name in ("refused.test", "allowed.test", "c2vjcmv0lwrhdge.refused.test"):
        assert ("dns", name, 0) in told, name
    assert {row["reason"] for row in none.decisions if not row["allowed"]} == {"no network", "not allowed"}


def test_public_reaches_the_world_but_not_this_machine_or_metadata(public: World) -> None:
    assert "hello from 93.184.216.36" in public.attempts["tcp 93.184.216.36:80"]
    assert "hello from 2001:470::34" in public.attempts["tcp6 2001:470::34"]
    for name in ("tcp 169.254.169.254:80", "tcp 203.0.113.2:7777", "tcp6 fd00:ec2::254", "tcp6 2001:db8::2"):
        assert public.attempts[name] == "ECONNRESET", name
    for name in ("loop.test", "metadata.test", "mapped.test"):
        assert public.attempts[f"name leads inward: {name}"] == "ECONNRESET", name
    assert public.touched == []
    assert public.reached("169.254.") == public.reached("203.0.113.2") == []


@pytest.mark.parametrize("name", ["curl", "git", "python", "node"])
def test_public_works_with_unmodified_programs(public: World, name: str) -> None:
    code, output = public.commands[name]
    if code == 127:
        pytest.skip(f"{name} is not installed")
    assert code == 0, output


def test_other_sandboxes_are_out_of_reach(allowlist: World, none: World, public: World) -> None:
    for world in (allowlist, none, public):
        assert [code for code in world.neighbour if code not in (7, 56)] == []


def test_a_new_policy_ends_connections_that_were_open(allowlist: World, none: World, public: World) -> None:
    for world in (allowlist, none, public):
        assert "ended" in world.held


def test_policies_are_switched_while_the_sandbox_runs(allowlist: World, none: World, public: World) -> None:
    for world in (allowlist, none, public):
        assert world.after["none"] == ["refused", "refused"]
        assert world.after["allowlist"] == ["refused", "hello from 93.184.216.35/"]
        assert world.after["public"] == ["hello from 93.184.216.34/", "hello from 93.184.216.35/"]
