"""The same ways out of a closed network, tried by the root of a container, with an engine in the fake internet."""

from __future__ import annotations

import shutil

import pytest

from tests.contract import test_egress_local as same
from tests.egress import ALLOWED, World, run_world
from tests.engine import missing

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module", params=["entered by pier", "entered by a helper"])
def helper(request: pytest.FixtureRequest) -> str:
    return "1" if "helper" in request.param else ""


@pytest.fixture(scope="module")
def allowlist(helper: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("allowlist", ALLOWED, tmp_path_factory, "docker", helper)


@pytest.fixture(scope="module")
def none(helper: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("none", (), tmp_path_factory, "docker", helper)


test_addresses_are_refused_at_once = same.test_addresses_are_refused_at_once
test_icmp_is_answered_with_unreachable = same.test_icmp_is_answered_with_unreachable
test_names_that_no_rule_has_do_not_exist = same.test_names_that_no_rule_has_do_not_exist
test_no_data_leaves_by_dns = same.test_no_data_leaves_by_dns
test_names_that_lead_inward_are_not_dialled = same.test_names_that_lead_inward_are_not_dialled
test_what_disagrees_with_its_name_is_reset = same.test_what_disagrees_with_its_name_is_reset
test_sockets_that_no_namespace_binds_cannot_be_made = same.test_sockets_that_no_namespace_binds_cannot_be_made
test_routes_are_out_of_reach = same.test_routes_are_out_of_reach
test_nothing_reached_what_was_not_allowed = same.test_nothing_reached_what_was_not_allowed
test_every_attempt_is_in_the_log = same.test_every_attempt_is_in_the_log
test_detours_fail = same.test_detours_fail
test_other_protocols_and_ports_pass_by_their_name = same.test_other_protocols_and_ports_pass_by_their_name
test_none_has_no_way_out_at_all = same.test_none_has_no_way_out_at_all
test_without_a_network_every_attempt_is_in_the_log_too = same.test_without_a_network_every_attempt_is_in_the_log_too


@pytest.mark.parametrize("name", ["curl", "curl over IPv6", "curl to an IPv6 host", "git", "python"])
def test_allowed_names_work_with_unmodified_programs(allowlist: World, name: str) -> None:
    code, output = allowlist.commands[name]
    if shutil.which(name.split()[0]) is None:
        pytest.skip(f"{name} is not installed")
    assert code == 0, output
    assert "hello from" in output or "refs/heads/main" in output


def test_the_engine_is_out_of_reach(allowlist: World, none: World) -> None:
    for world in (allowlist, none):
        found = same.outcomes(world, "engine ")
        assert any("pier-engine-" in name for name in found)
        assert set(found.values()) == {"ENOENT"}


def test_the_policy_was_proven_first(allowlist: World, none: World) -> None:
    for world in (allowlist, none):
        assert world.decisions[0]["kind"] == "probe"


def test_other_containers_are_out_of_reach(allowlist: World, none: World) -> None:
    for world in (allowlist, none):
        assert [code for code in world.neighbour if code not in (7, 56)] == []


def test_a_new_policy_ends_connections_and_holds_from_then_on(allowlist: World, none: World) -> None:
    for world in (allowlist, none):
        assert "ended" in world.held
        assert world.after["none"] == ["refused", "refused"]
        assert world.after["allowlist"] == ["refused", "hello from 93.184.216.35/"]
        assert world.after["public"] == ["hello from 93.184.216.34/", "hello from 93.184.216.35/"]
