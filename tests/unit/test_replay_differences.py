"""What a replay says about a request that it does not know: the nearest call, and the place where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.gateway.replay import differences
from tests.gateway_fakes import PATHS, fake_provider, post, request_body


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({"a": 1}, {"a": 2}, ["$.a was 1, is 2"]),
        ({"a": 1}, {"b": 1}, ["$.a is missing now", "$.b is new"]),
        ([1, 2], [1], ["$ has 1 entries instead of 2"]),
        ({"a": ["x", {"b": "3 passed"}]}, {"a": ["x", {"b": "2 passed"}]}, ['$.a[1].b was "3 passed", is "2 passed"']),
        ("same", "same", []),
    ],
)
def test_places_are_named(old: Any, new: Any, words: list[str]) -> None:
    assert list(differences(old, new)) == words


def test_a_long_text_is_shown_where_it_differs() -> None:
    old = "x" * 5000 + " three of them passed " + "y" * 5000
    (words,) = differences(old, old.replace("three", "two"))
    assert "three of them passed" in words and "two of them passed" in words
    assert len(words) < 500
    (longer,) = differences("z" * 300, "z" * 300 + " and more")
    assert "and more" in longer


async def test_the_nearest_call_is_compared_not_the_next_one(tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider("anthropic"), recording=tmp_path / "calls.jsonl")
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.abc;"}
        title = {**request_body("anthropic", "Write a title"), "system": "Titles."}
        work = {**request_body("anthropic", "fix it: 3 passed"), "system": [billing, {"type": "text", "text": "You."}]}
        for body in (title, work):
            await post(url, PATHS["anthropic"], session.key, body)
        await session.close()
        again = gateway.session(f"replay:{tmp_path / 'calls.jsonl'}")
        other = {**work, "messages": request_body("anthropic", "fix it: 2 passed")["messages"]}
        status, _, raw = await post(url, PATHS["anthropic"], again.key, other)
        assert status == 400
        assert b"call 2 differs" in raw and b"3 passed" in raw and b"2 passed" in raw and b"billing" not in raw
        billing["text"] = "x-anthropic-billing-header: cc_version=1.other;"
        status, _, _ = await post(url, PATHS["anthropic"], again.key, work)
        assert status == 200
