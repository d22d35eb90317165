"""Which values are secret, and how they are removed from text, streams, files and recordings."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier.errors import UsageError
from pier.gateway import Gateway
from pier.job.config import JobConfig
from pier.job.load import fill, to_disk
from pier.record.reader import read
from pier.redact import REDACTED, Redactor, StreamRedactor
from pier.rollout.samples import samples_of
from pier.secret import is_secret, looks_secret, secrets_in_text
from pier.tree import Tree
from pier.wire.turn import Text, Tokens, Turn
from tests.gateway_fakes import PATHS, fake_provider, post, request_body, streams

SECRET = "sk-canary-4f1d9c0b7e22"


@pytest.mark.parametrize(
    "value",
    [
        *("postgres", "Password1", "changeme", "localhost", "true", "1234567", "20250101", "xxxxxxxxxxxx", "elephant"),
        *("gpt-4o-mini-2024-07-18", "anthropic/claude-sonnet-4-5-20250929", "/etc/ssl/private/key.pem", "my-secret"),
        *("https://auth.example.com/login", "~/.config/tool/token", "administrator"),
    ],
)
def test_short_values_and_common_words_are_never_secret(value: str) -> None:
    assert not is_secret("DB_PASSWORD", value, given=True)


@pytest.mark.parametrize(
    "value",
    [
        *("hunter2-hunter", "correct horse battery", "Tr0ub4dor&3", "xkqzvbnm", "12345678901234567890", SECRET),
        "key-8374658374658376",
    ],
)
def test_a_value_is_secret_by_its_name(value: str) -> None:
    assert is_secret("DB_PASSWORD", value) and not is_secret("GREETING", value)


def test_a_given_value_is_secret_when_it_looks_random() -> None:
    random = [
        "sk-ant-api03-Xk3jf",
        "3f9a2b7c11",
        "550e8400-e29b-41d4-a716-446655440000",
        "eyJhbGciOiJIUzI1NiJ9.e30.abc",
    ]
    random += ["correct-horse-battery-staple", "build-note-93412", "AKIAIOSFODNN7EXAMPLE"]
    plain = [
        "production",
        "America/New_York",
        "en_US.UTF-8",
        "us-east-1",
        "python3.12",
        "localhost:8080",
        "--jobs=4096",
    ]
    plain += ["http://proxy.example.com:3128", "/opt/tools/bin:/usr/bin", "alpha-tools,beta-ui", "a helpful sentence"]
    assert [value for value in random if not is_secret("NOTE", value, given=True)] == []
    assert [value for value in plain if is_secret("NOTE", value, given=True)] == []


def test_names_that_look_secret() -> None:
    names = ["API_KEY", "x-api-key", "Authorization", "GITHUB_TOKEN", "DB_PASS", "MYSQL_PWD", "Cookie", "sessionToken"]
    plain = ["MAX_TOKENS", "GIT_AUTHOR_NAME", "PWD", "PATH", "COMPASS_URL", "x-ratelimit-remaining-tokens"]
    assert [name for name in names if not looks_secret(name)] == []
    assert [name for name in plain if looks_secret(name)] == []


def test_secrets_inside_a_text() -> None:
    text = "curl -H 'Authorization: Bearer bearer-31fe' --api-key=flag-77aa --name plain https://u:pa%2Fss@h/p?k=1&token=t-9"
    assert set(secrets_in_text(text)) == {"bearer-31fe", "flag-77aa", "pa%2Fss", "pa/ss", "t-9"}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([SECRET, 'odd "se/c"ret+\\é 77', "two\nlines 4f1d9c"]),
    st.lists(st.integers(1, 12), max_size=12),
    st.booleans(),
    st.lists(st.integers(1, 200), max_size=8),
)
def test_a_secret_in_the_texts_of_json_lines_is_removed(
    secret: str, cuts: list[int], ascii_only: bool, chunks: list[int]
) -> None:
    text, pieces = f"before {secret} after", list[str]()
    for cut in cuts:
        pieces.append(text[:cut])
        text = text[cut:]
    pieces.append(text)
    lines = [{"index": 0, "delta": {"text": piece}} for piece in pieces]
    data = b"".join(b"data: " + json.dumps(line, ensure_ascii=ascii_only).encode() + b"\n\n" for line in lines)
    stream, out = StreamRedactor(Redactor([secret])), b""
    for size in chunks:
        out += stream.feed(data[:size])
        data = data[size:]
    out += stream.feed(data) + stream.close()
    found = [json.loads(line.removeprefix(b"data: ")) for line in out.splitlines() if line]
    assert "".join(line["delta"]["text"] for line in found) == f"before {REDACTED} after"
    assert len(found) == len(pieces)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_bytes_without_a_secret_come_out_as_they_are(parts: list[bytes]) -> None:
    for lines in (True, False):
        stream = StreamRedactor(Redactor([SECRET, "two\nlines 4f1d9c"]), lines=lines)
        assert b"".join([*map(stream.feed, parts), stream.close()]) == b"".join(parts)


def test_events_are_passed_on_unless_a_secret_may_have_begun() -> None:
    stream = StreamRedactor(Redactor([SECRET]))
    assert stream.feed(b'data: {"text":"hello"}\n\n') == b'data: {"text":"hello"}\n\n'
    assert stream.feed(b'data: {"text":"it is sk-ca"}\n\n') == b""
    assert stream.feed(b'data: {"text":"lendar"}\n\n') == b'data: {"text":"it is sk-ca"}\n\ndata: {"text":"lendar"}\n\n'


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\\n", "\\\\r\\\\n", "\n  +"])
@pytest.mark.parametrize("width", [64, 76])
@pytest.mark.parametrize(
    "value", [SECRET, f"sk-proj-{SECRET * 7}", f"9f8e{'~~~' * 9}7d"], ids=["short", "long", "plus"]
)
def test_a_secret_in_wrapped_base64_is_removed(width: int, newline: str, value: str) -> None:
    for before in range(0, 81, 9) if value != SECRET else range(60):
        encoded = base64.b64encode(b"x" * before + value.encode() * 3 + b"y" * 60).decode()
        secrets = [
            encoded[-(-at // 3) * 4 : (at + len(value)) // 3 * 4]
            for at in range(before, before + 3 * len(value), len(value))
        ]
        lines = [encoded[at : at + width] for at in range(0, len(encoded), width)]
        wrapped = newline.join(lines)
        stream = StreamRedactor(Redactor([value]))
        streamed = [*(stream.feed(f"{line}{newline}".encode()) for line in lines), stream.close()]
        for kept in (Redactor([value]).text(f"a\n{wrapped}\nb"), b"".join(streamed).decode()):
            joined = kept.replace(newline, "")
            assert REDACTED in kept and not any(secret in joined for secret in secrets), (before, kept)
    assert stream.feed(b"a line\n") == b"a line\n"
    for harmless in ("a" * 200 + newline, newline.join(["QUJD" * 16] * 3)):
        assert Redactor([value]).text(harmless) == harmless


@pytest.mark.parametrize("value", [SECRET, "p\u00e4ss-9fQz-7d\U0001f511"])
def test_a_secret_as_hex_or_utf_16_is_removed(value: str) -> None:
    digits = value.encode().hex().encode()
    for form in (digits, digits.upper(), value.encode("utf-16-le"), value.encode("utf-16-be")):
        assert Redactor([value]).data(b"a " + form + b" b") == b"a [REDACTED] b"
        stream = StreamRedactor(Redactor([value]), lines=False)
        pieces = [stream.feed(b"a " + form[:7]), stream.feed(form[7:] + b" b"), stream.close()]
        assert b"".join(pieces) == b"a [REDACTED] b"


def test_a_long_run_next_to_a_secret_is_searched_once() -> None:
    """A screenshot in base64 has no line breaks: a search from each of its characters would take hours."""
    value, run = "kX3-hunter2-9fQz", "aB3/" * 250_000
    for text in (f"{value} {run}", f"{run}\n{value}", f"{run}\n{run}\n.{value}"):
        assert Redactor([value]).text(text) == text.replace(value, REDACTED)


KEY = "\n".join(["-----BEGIN PRIVATE KEY-----", *(f"{n:02}mIEpQ/9a+X7" * 4 for n in range(20)), "-----END-----"])


@pytest.mark.parametrize("size", [4096, 1 << 20])
@pytest.mark.parametrize(
    "part",
    [
        b'{"a":["s","s","s","s","s","s"]}\n',
        b'{"a":["\\n","s","sk","\\n"]}\n',
        b'{"a":"x sk-canary-4f1d9c0b7e"}\n',
        b'"s",',
        b"\\" * 8 + b"%25",
        b'{"a":"' + b"-" * 4000 + b'"}\n',
    ],
    ids=["lists", "escapes", "beginnings", "one line", "no line", "key"],
)
def test_hostile_texts_take_little_time(part: bytes, size: int) -> None:
    data, stream = part * ((1 << 20) // len(part)), StreamRedactor(Redactor([SECRET, KEY]))
    data = b'{"a":[' + data[:-1] + b"]}\n" if part == b'"s",' else data
    began, out = time.process_time(), b""
    for at in range(0, len(data), size):
        out += stream.feed(data[at : at + size])
    assert out + stream.close() == data
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "secret", ["x9k2" + "\\" * 8 + "b7q4", 'x9k2\\"\\"\\"\\"\\\'b7q4', "x9k2b7q4" + "\\" * 5, r"\\host\x9k2 7"]
)
def test_backslashes_of_a_secret_are_found_once(secret: str) -> None:
    """A run of them can be divided between those of the secret and those that escape them in very many ways."""
    redactor, escaped = Redactor([secret]), secret
    for _ in range(4):
        assert redactor.text(f"a{escaped}b") == f"a{REDACTED}b"
        escaped = json.dumps(escaped)[1:-1]
    escaped = "".join(f"\\u{ord(character):04x}" if not character.isalnum() else character for character in secret)
    assert redactor.text(f"{escaped} {quote(secret)}") == f"{REDACTED} {REDACTED}"
    hostile, began = f"{secret[:-4]}{secret[:4]}" + "\\" * 60 + "!", time.process_time()
    assert redactor.text(hostile * 1000) == hostile * 1000
    assert time.process_time() - began < 5


def test_a_secret_that_begins_and_does_not_go_on_holds_back_little() -> None:
    stream = StreamRedactor(Redactor([SECRET]))
    assert stream.feed(b'{"a":"sk-"}\n') == b""
    out = sum(len(stream.feed(b'{"b":"text\\n"}\n' * 1000)) for _ in range(100))
    assert out > 300_000


def test_a_secret_over_two_lines_is_removed_at_the_end_of_a_large_piece() -> None:
    stream, other = StreamRedactor(Redactor([SECRET]), lines=True), b'{"text": "%b"}\n' % (b"x" * 1000)
    halves = [json.dumps({"text": half}).encode() + b"\n" for half in (SECRET[:9], SECRET[9:])]
    out = stream.feed(other * 1100 + halves[0]) + stream.feed(halves[1]) + stream.close()
    assert SECRET[9:].encode() not in out and REDACTED.encode() in out


def test_a_text_that_begins_like_a_secret_hides_no_later_one() -> None:
    stream, other = StreamRedactor(Redactor([SECRET]), lines=True), b'{"text": "%b"}\n' % (b"x" * 1000)
    begins, *halves = (
        json.dumps(each).encode() + b"\n" for each in ({"a": SECRET[:3]}, {"b": SECRET[:9]}, {"b": SECRET[9:]})
    )
    out = b"".join(map(stream.feed, [begins, *[other] * 900, halves[0], *[other] * 500, halves[1]])) + stream.close()
    assert SECRET[9:].encode() not in out and REDACTED.encode() in out


@pytest.mark.parametrize("text", ["é" * 3, "x"])
def test_a_secret_that_a_list_of_texts_repeats_is_removed_each_time(text: str) -> None:
    line = json.dumps({"a": [*SECRET, text, SECRET[:5], f"{SECRET[5:]}{text}{SECRET}", ""] * 500}, ensure_ascii=False)
    stream = StreamRedactor(Redactor([SECRET]))
    (out,) = json.loads(stream.feed(f"{line}\n".encode()) + stream.close()).values()
    assert len(out) == len(json.loads(line)["a"])
    assert "".join(out) == f"{REDACTED}{text}{REDACTED}{text}{REDACTED}" * 500


def test_deep_and_broken_json_is_passed_on() -> None:
    for data in (
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"a": sk-ca}',
        b"{" * 300_000,
        b'{"type": {"x": "s"}, "a": "s"}',
    ):
        stream = StreamRedactor(Redactor([SECRET]))
        assert stream.feed(data) + stream.feed(b"\n") + stream.close() == data + b"\n"


def test_files_names_and_links_are_cleaned(tmp_path: Path) -> None:
    place = tmp_path / f"dir-{SECRET}"
    place.mkdir()
    (place / "run.sh").write_text(f"echo {SECRET}\n")
    (place / "run.sh").chmod(0o755)
    (place / "closed").write_text("x")
    (place / "closed").chmod(0)
    (place / "link").symlink_to(f"/{SECRET}")
    (place / "outside").symlink_to("/etc/passwd")
    (place / "big").write_bytes(b"\0" * ((1 << 20) - 5) + SECRET.encode() + b"\0" * 9)
    with Tree(tmp_path) as tree:
        Redactor([SECRET]).tree(tree)
    clean = tmp_path / f"dir-{REDACTED}"
    assert (clean / "run.sh").read_text() == f"echo {REDACTED}\n" and os.stat(clean / "run.sh").st_mode & 0o777 == 0o755
    assert str((clean / "link").readlink()) == f"/{REDACTED}" and str((clean / "outside").readlink()) == "/etc/passwd"
    assert (clean / "big").read_bytes() == b"\0" * ((1 << 20) - 5) + REDACTED.encode() + b"\0" * 9
    before = os.stat("/etc/passwd").st_mode
    with Tree(tmp_path) as tree:
        Redactor().tree(tree, mode=0o600)
    assert os.stat(clean / "run.sh").st_mode & 0o777 == 0o600 and os.stat("/etc/passwd").st_mode == before


async def test_a_redacted_recording_answers_again(tmp_path: Path) -> None:
    """The secret may even be another one by then."""
    path = tmp_path / "calls.jsonl"
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), recording=path, redactor=Redactor([SECRET]))
        await post(url, PATHS["chat"], session.key, request_body("chat", f"use {SECRET} and {SECRET}!"))
        await session.close()
        assert SECRET not in path.read_text()
        for text, expected in ((f"use {SECRET} and {SECRET}!", 200), ("use new and other!", 200), ("use new!", 400)):
            again = gateway.session(f"replay:{path}")
            status, _, _ = await post(url, PATHS["chat"], again.key, request_body("chat", text))
            assert status == expected, text


@pytest.mark.parametrize("where", ["prompt", "answer", "nowhere"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_with_a_secret_keeps_no_tokens(tmp_path: Path, where: str, stream: bool) -> None:
    """Token ids spell the text, so such a call makes no exact sample."""
    path = tmp_path / "calls.jsonl"
    said = SECRET if where == "answer" else "nothing at all"

    async def policy(_: object) -> Turn:
        return Turn((Text(said),), tokens=Tokens((1, 2), (3, 4), (-0.1, -0.2)))

    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=policy, recording=path, redactor=Redactor([SECRET]))
        asked = request_body("chat", SECRET if where == "prompt" else "hello") | {"stream": stream}
        status, _, raw = await post(url, PATHS["chat"], session.key, asked)
        await session.close()
    assert status == 200 and (stream or said.encode() in raw)
    samples, _ = samples_of(path)
    assert [sample.exact for sample in samples] == [where == "nowhere"]
    assert SECRET not in path.read_text() and os.stat(path).st_mode & 0o777 == 0o600


async def test_tokens_of_a_server_are_removed_with_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    pieces = ["it is ", SECRET[:7], SECRET[7:], " ok"]
    events = [
        {"prompt_token_ids": [1], "choices": [{"index": 0, "delta": {"content": text}, "token_ids": [ord(text[0])]}]}
        for text in pieces
    ]
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    async with fake_provider(streams(*lines, end)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(tokens=True), recording=path, redactor=Redactor([SECRET]))
        _, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat", "hi") | {"stream": True})
        await session.close()
    assert SECRET[:7].encode() in raw
    (call,) = read(path).calls
    kept = [event.data for event in call.attempts[0].answer.events() if "token_ids" in event.data]  # type: ignore
    assert [json.loads(data)["choices"][0]["delta"]["content"] for data in kept] == ["it is ", " ok"]
    assert not samples_of(path)[0][0].exact


def test_a_configuration_on_disk_shows_no_secret_and_says_so_when_it_is_read() -> None:
    env = {"FROM_FILE": "file-31f0a9c2d7", "PATH": os.environ["PATH"]}
    agent = {"name": "oracle", "env": {"NOTE": "note-31f0a9c2d7", "A": "${FROM_FILE}", "MODE": "fast"}}
    agent |= {"kwargs": {"url": "https://me:pass-31f0a9@host/", "b": "file-31f0a9c2d7"}}
    disk = to_disk(JobConfig.model_validate({"agents": [agent]}), env)
    (shown,) = disk["agents"]
    assert shown["env"] == {"NOTE": "****", "A": "${FROM_FILE}", "MODE": "fast"}
    assert shown["kwargs"] == {"url": f"https://me:{REDACTED}@host/", "b": REDACTED}
    for hidden in (shown["env"]["NOTE"], shown["kwargs"]["url"]):
        with pytest.raises(UsageError, match="was not written to disk"):
            fill(hidden, env)
