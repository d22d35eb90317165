"""Who serves a model, where and with which key; how long to wait; what is taken out of an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pier.errors import UsageError
from pier.gateway.budget import Budget, Meter, Reservation, Retry
from pier.gateway.providers import Directory, Provider, at_address
from pier.wire.body import parse
from pier.wire.faults import retry_after
from pier.wire.headers import Scrubber, redacted, redacted_path
from pier.wire.relayed import Extras, ask
from pier.wire.turn import Usage, cost_of, is_priced

ENV = {"ANTHROPIC_API_KEY": "ka", "OPENAI_API_KEY": "ko", "GOOGLE_API_KEY": "kg", "OPENROUTER_API_KEY": "kr"}


def test_a_model_may_have_another_address_key_and_format(tmp_path: Path) -> None:
    known = Directory.load(ENV, tmp_path / "none.toml")
    there = known.connected("openai/gpt-5", ENV, base_url="http://127.0.0.1:9/v1")
    assert (there.model, there.provider.url, there.provider.key) == ("gpt-5", "http://127.0.0.1:9/v1", "ko")
    own = known.connected("gpt-5", {"MINE": "km"}, model_api_key_name="MINE", model_api_format="openai_responses")
    assert (own.provider.key, own.provider.dialects) == ("km", ("responses",))
    custom = known.connected("org/model", {}, base_url="http://h", model_api_format="anthropic_messages")
    assert (custom.model, custom.provider.key, custom.provider.dialects) == ("org/model", None, ("anthropic",))
    with pytest.raises(UsageError, match="missing API key"):
        known.connected("gpt-5", {}, model_api_key_name="MINE").provider.check()
    with pytest.raises(UsageError):
        known.connected("org/model", {}, model_api_key_name="MINE")


@pytest.mark.parametrize(
    ("model", "provider", "name", "key"),
    [
        ("anthropic/claude-sonnet-4-5", "anthropic", "claude-sonnet-4-5", "ka"),
        ("claude-sonnet-4-5", "anthropic", "claude-sonnet-4-5", "ka"),
        ("openai/gpt-5", "openai", "gpt-5", "ko"),
        ("o3", "openai", "o3", "ko"),
        ("gemini/gemini-2.5-pro", "google", "gemini-2.5-pro", "kg"),
        ("gemini-2.5-pro", "google", "gemini-2.5-pro", "kg"),
        ("openrouter/qwen/qwen3-coder", "openrouter", "qwen/qwen3-coder", "kr"),
    ],
)
def test_names_lead_to_providers(model: str, provider: str, name: str, key: str, tmp_path: Path) -> None:
    target = Directory.load(ENV, tmp_path / "none.toml").target(model)
    assert (target.provider.name, target.model, target.provider.key) == (provider, name, key)
    assert key not in repr(target)
    target.provider.check()


def test_unknown_names_and_missing_keys_say_what_to_do(tmp_path: Path) -> None:
    directory = Directory.load({}, tmp_path / "none.toml")
    with pytest.raises(UsageError, match="no known provider") as unknown:
        directory.target("mystery")
    assert unknown.value.hint
    with pytest.raises(UsageError, match="unknown provider 'anthropc'") as misspelt:
        directory.target("anthropc/x")
    assert misspelt.value.hint == "write anthropic/MODEL"
    with pytest.raises(UsageError, match="missing API key") as keyless:
        directory.target("openai/gpt-5").provider.check()
    assert keyless.value.hint == "export OPENAI_API_KEY=..., or log in to Codex: codex login"


def test_providers_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "providers.toml"
    path.write_text(
        '[lab]\nurl = "http://lab:1/v1"\nkey_env = "LAB"\nheaders = {"X-Team" = "e"}\ntokens = true\n'
        '[openai]\nurl = "https://proxy.example"\ndialects = ["responses"]\nauth = "none"\n'
    )
    directory = Directory.load({"LAB": "secret"}, path)
    lab = directory.target("lab/some/model")
    assert (lab.model, lab.provider.key, lab.provider.tokens, lab.provider.dialects) == (
        *("some/model", "secret"),
        *(True, ("chat",)),
    )
    assert lab.provider.credentials("chat") == {"Authorization": "Bearer secret", "X-Team": "e"}
    assert directory.target("gpt-5").provider.credentials("responses") == {}
    for text, words in (("[x\n", "not TOML"), ('[x]\nurl = "http://u"\nport = 1\n', "x.port"), ("[x]\n", "x.url")):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            Directory.load({}, path)


def test_addresses() -> None:
    assert at_address("http://h:1").address("/v1/messages") == "http://h:1/v1/messages"
    assert at_address("http://h:1/v1/").address("/v1/chat/completions") == "http://h:1/v1/chat/completions"
    assert at_address("http://h/api/v4").address("/v1/chat/completions") == "http://h/api/v4/chat/completions"
    assert at_address("http://h/v1beta").address("/v1beta/models/m:x") == "http://h/v1beta/models/m:x"
    assert at_address("chat,responses+http://h").dialects == ("chat", "responses")
    assert at_address("http://h/a+b").dialects == ("chat",)
    with pytest.raises(UsageError, match="unknown dialect 'latin'"):
        at_address("latin+http://h")


def test_keys_go_where_each_dialect_wants_them() -> None:
    provider = Provider("p", "u", ("chat",), "k")
    assert provider.credentials("anthropic") == {"x-api-key": "k"}
    assert provider.credentials("gemini") == {"x-goog-api-key": "k"}
    assert provider.credentials("responses") == {"Authorization": "Bearer k"}


def test_what_gives_away_is_redacted() -> None:
    assert redacted({"Authorization": "Bearer x", "X-Api-Key": "x", "Accept": "y"}) == {
        "authorization": "[redacted]",
        "x-api-key": "[redacted]",
        "accept": "y",
    }
    assert redacted_path("/a?alt=sse&key=x&b=1") == "/a?alt=sse&key=[redacted]&b=1"
    assert Scrubber("a-secret-of-some-length")(b"<a-secret-of-some-length>") == b"<[redacted]>"
    assert Scrubber("EMPTY", None)(b"EMPTY") == b"EMPTY"


@pytest.mark.parametrize("size", [1, 2, 7, 23, 24])
def test_a_secret_in_pieces_is_scrubbed_from_a_stream(size: int) -> None:
    text = b"a sec a-secret a-secret-of-some-length\n\na-a-secret-of-some-length a-secret-of"
    scrub = Scrubber("a-secret-of-some-length")
    found = b"".join(scrub.feed(text[at : at + size]) for at in range(0, len(text), size)) + scrub.rest()
    assert found == b"a sec a-secret [redacted]\n\na-[redacted] a-secret-of"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "Thu, 01 Jan 1970 00:01:00 GMT"}, 50.0),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after-ms": "250", "Retry-After": "9"}, 0.25),
    ],
)
def test_how_long_a_provider_asks_to_wait(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after(headers, now=10.0) == expected


def test_attempts_end() -> None:
    retry = Retry(attempts=3, patience=10, first=1, longest=4)
    assert 0.5 <= (retry.pause(1, 0, None) or 0) <= 1
    assert retry.pause(2, 0, 9) == 9
    assert retry.pause(2, 2, 9) is None
    assert retry.pause(3, 0, None) is None


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ('url = "gpu.example:8000/v1"', "lab.url"),
        ('url = "http://"', "lab.url"),
        ('url = "http://h"\nconcurrency = 0', "lab.concurrency"),
        ('url = "http://h"\nrequests_per_minute = -1', "lab.requests_per_minute"),
    ],
)
def test_a_provider_that_cannot_be_is_told_by_its_key(table: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "providers.toml"
    path.write_text(f"[lab]\n{table}\n")
    with pytest.raises(UsageError, match=re.escape(f"{path}: {where}")):
        Directory.load({}, path)


@pytest.mark.parametrize("address", ["ftp://h", "chat+h:8000", "http://", "chat+http:///v1", "http://a b"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError, match="not an http or https address"):
        at_address(address)


def test_a_turn_that_was_not_spent_is_given_back() -> None:
    one, two = Meter(Budget(turns=1)), Meter(Budget(total_tokens=10), owner="job")
    with Reservation((one, two)) as turn:
        assert turn.reserve() is None and Reservation((one, two)).reserve() is one
        assert one.exhausted() is None and (one.turns, one.held, two.held) == (0, 1, 1)
    assert not one.is_full and (one.held, two.held) == (0, 0)
    with Reservation((one, two)) as turn:
        assert turn.reserve() is None
        turn.spend()
        turn.spend()
        turn.add(Usage(6, 5), None)
    assert one.exhausted() == "1 of 1 turns of this session are used"
    assert (one.turns, two.turns, one.held, two.held) == (1, 1, 0, 0)
    assert two.exhausted() == "11 of 10 tokens of this job are used"


def test_costs_are_known_or_unknown() -> None:
    assert cost_of(Usage(1, 1, cost_usd=0.5), "any", "custom") == 0.5
    assert cost_of(Usage(1_000_000, 0), "claude-sonnet-4-5", "anthropic") == pytest.approx(3, rel=1)
    assert cost_of(Usage(1, 1), "claude-sonnet-4-5", "custom") is None
    assert cost_of(Usage(1, None), "claude-sonnet-4-5", "anthropic") is None
    assert cost_of(None, "claude-sonnet-4-5", "anthropic") is None
    assert not is_priced("unheard-of", "openai")


def test_extras_are_asked_for_and_taken_out_again() -> None:
    body, extras = ask(parse(b'{"model":"m","stream":true}'), tokens=True, usage=True)
    assert body.value["stream_options"] == {"include_usage": True}
    assert extras == Extras(token_ids=True, logprobs=True, usage=True)
    event = {"id": 1, "prompt_token_ids": [1], "choices": [{"delta": {}, "token_ids": [2], "logprobs": {}}]}
    raw = b"data: " + json.dumps(event).encode() + b"\n\n"
    plain, counted = b'data: {"id": 1}\n\n', b'data: {"choices": [], "usage": {}}\n\n'
    values = [{"id": 1}, event, {"choices": [], "usage": {}}, None, None]
    stripped = extras.strip_events(plain + raw + counted + b": ping\n\ndata: [DONE]\n\n", values)
    assert stripped == plain + b'data: {"id":1,"choices":[{"delta":{}}]}\n\n: ping\n\ndata: [DONE]\n\n'
    assert extras.strip_events(plain, [{"id": 1}]) is plain
    asked = parse(b'{"stream":true,"logprobs":true,"return_token_ids":true,"stream_options":{"include_usage":true}}')
    assert ask(asked, tokens=True, usage=True) == (asked, Extras())
