"""The allowlist's grammar, and what its rules let through."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import UsageError
from pier.network.outside import Outside, Refused, Targets
from pier.network.policy import CAPACITY, NetworkPolicy, Rules, Synthetic, normal_name, objection, parse

four = ipaddress.IPv4Address


@pytest.mark.parametrize(
    ("rule", "name", "port", "allowed"),
    [
        ("example.org", "example.org", 443, True),
        ("Example.ORG.", "example.org", 443, True),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "notexample.org", 443, False),
        ("*.example.org", "www.example.org", 80, True),
        ("*.example.org", "a.b.example.org", 80, True),
        ("*.example.org", "example.org", 80, False),
        ("*.example.org", "badexample.org", 80, False),
        ("example.org:8443", "example.org", 8443, True),
        ("example.org:8443", "example.org", 443, False),
        ("example.org:8443", "example.org", None, True),
        ("*.example.org:22", "git.example.org", 22, True),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("10.0.0.0/8", "example.org", 443, False),
    ],
)
def test_names(rule: str, name: str, port: int | None, allowed: bool) -> None:
    assert Rules([rule]).allows_name(name, port) is allowed


@pytest.mark.parametrize(
    ("rule", "address", "port", "allowed"),
    [
        ("192.0.2.7", "192.0.2.7", 443, True),
        ("192.0.2.7", "192.0.2.8", 443, False),
        ("192.0.2.7:443", "192.0.2.7", 80, False),
        ("10.0.0.0/8", "10.200.3.4", 1, True),
        ("2001:db8::1", "2001:db8::1", 443, True),
        ("[2001:db8::1]:443", "2001:db8::1", 443, True),
        ("[2001:db8::1]:443", "2001:db8::1", 80, False),
        ("2001:db8::/32", "2001:db8:1::5", 80, True),
        ("example.org", "192.0.2.7", 443, False),
    ],
)
def test_addresses(rule: str, address: str, port: int, allowed: bool) -> None:
    assert Rules([rule]).allows_address(ipaddress.ip_address(address), port) is allowed


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "*", "*.", "*.org", "a.*.org", "www.*", "http://example.org", "example.org/path", "example.org:",
        ":80", "example.org:0", "example.org:65536", "example.org:http", "10.0.0.1/8", "300.1.1.1", "1.2.3", "[::1",
        "ex ample", "-bad.example", "a" * 64 + ".example", "user@example.org",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_told(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.code == "bad_host_rule" and caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1", "127.0.0.1:8080", "127.0.0.0/8", "0.0.0.0", "::1", "[::1]:80", "::ffff:127.0.0.1", "192.0.0.1"],
)
def test_an_address_inside_the_sandbox_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError, match="is an address inside the sandbox") as caught:
        parse(text)
    assert caught.value.code == "bad_host_rule" and "listen on another of its addresses" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "0.0.0.0", "0.1.2.3", "::1", "::", "::ffff:127.0.0.1", "64:ff9b::7f00:1"]
)
def test_no_rule_leads_to_the_loopback_of_this_machine(text: str) -> None:
    targets = Targets(NetworkPolicy("allowlist", ("0.0.0.0/0", "::/0")), Outside())
    assert not targets.allows_address(ipaddress.ip_address(text), 80)
    with pytest.raises(Refused):
        targets.of_address(ipaddress.ip_address(text), 80)


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_a_usage_error(text: str) -> None:
    try:
        parse(text)
    except UsageError:
        return
    assert text.strip()


def test_names_are_compared_in_one_form() -> None:
    assert normal_name("WWW.Example.Org.") == "www.example.org"
    assert normal_name("a..b") is None and normal_name("") is None


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "169.254.169.254", "169.254.0.1", "224.0.0.1", "255.255.255.255", "::1",
        "::", "fe80::1", "ff02::1", "fd00:ec2::254", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
        "2002:7f00:1::", "::127.0.0.1", "168.63.129.16", "100.100.100.200", "192.0.0.1", "198.18.0.1",
    ],
)  # fmt: skip
def test_some_addresses_are_never_dialled_by_name(text: str) -> None:
    for private_too in (True, False):
        assert objection(ipaddress.ip_address(text), private_too=private_too)


@pytest.mark.parametrize("text", ["10.1.2.3", "172.31.0.1", "192.168.0.1", "100.64.0.1", "fc00::1", "::ffff:10.0.0.1"])
def test_private_addresses_need_a_rule_of_their_own(text: str) -> None:
    assert objection(ipaddress.ip_address(text), private_too=True) == "private address"
    assert objection(ipaddress.ip_address(text), private_too=False) == ""


@pytest.mark.parametrize("text", ["93.184.216.34", "1.1.1.1", "2606:4700::1111"])
def test_public_addresses_are_fine(text: str) -> None:
    assert objection(ipaddress.ip_address(text), private_too=True) == ""


def test_synthetic_addresses_stand_for_names() -> None:
    table = Synthetic()
    one, six = table.addresses("one.test")
    assert table.addresses("one.test") == (one, six)
    assert table.addresses("two.test")[0] != one
    assert table.name(one) == table.name(six) == "one.test"
    assert table.name(four("198.18.200.1")) is None and table.name(four("8.8.8.8")) is None
    assert table.holds(one) and table.holds(six) and not table.holds(four("8.8.8.8"))


def test_synthetic_addresses_do_not_run_out() -> None:
    table = Synthetic()
    first = table.addresses("name0.test")[0]
    for number in range(1, CAPACITY + 10):
        address, _ = table.addresses(f"name{number}.test")
        assert table.holds(address)
    assert table.name(address) == f"name{CAPACITY + 9}.test"
    assert table.name(first) != "name0.test"
