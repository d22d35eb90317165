"""A job whose agent, model and verifier repeat every secret in every form: no file that is kept holds one."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from aiohttp import web

from pier.record.reader import Recording, read
from pier.redact import REDACTED
from tests.gateway_fakes import fake_provider, streams
from tests.job_tasks import pier, trials_of
from tests.redteam import route
from tests.trial_runs import TOML, write_task

pytestmark = pytest.mark.plain

CANARIES = {
    "SERVICE_TOKEN": "canary-argument-8f3a1c77d0",
    "BUILD_NOTE": "canary-plain-name-41ee90b2c6",
    "FROM_FILE": "canary-file-d01b7e5f93aa",
    "TASK_API_KEY": "canary-task-5b0c9e1f42dd",
    "TEMPLATE": "canary-template-77aa10c2fe",
    "ODD_SECRET": 'canary "od/d"+&<é>\\ 9c1d',
    "PRIVATE_KEY": "canary-begin-31f0\nsecond/line+of+it\ncanary-end-77b2",
    "VERIFIER_SECRET": "canary-verifier-0d9e8f7a6b",
    "URL_PASSWORD": "canary-url-6a5b4c3d2e1f",
    "URL_PARAMETER": "canary-parameter-1f2e3d4c",
    "FLAG": "canary-flag-99e8d7c6b5",
    "PROVIDER_KEY": "canary-provider-aa11bb22cc33",
}

AGENT = r"""#!/usr/bin/python3
import base64, json, os, pathlib, socket, subprocess, sys, urllib.parse, urllib.request
values = [value for name, value in os.environ.items() if "canary" in value]
values += [part for value in values for part in urllib.parse.urlsplit(value).netloc.split("@")[0].split(":")[1:]]
values.append(sys.argv[-1])
logs, kept = pathlib.Path("/logs/agent"), pathlib.Path("/logs/artifacts")

def ask(text, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions?key=" + "x" * 20,
        json.dumps(body).encode(), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json", "X-Service-Token": values[0], "X-Note": values[-1]})
    try:
        return urllib.request.urlopen(request).read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()

with open(logs / "session.jsonl", "w") as session, open(kept / "notes.txt", "w") as notes:
    for number, value in enumerate(values):
        forms = [value, base64.b64encode(("ab" + value + "\n").encode()).decode(), urllib.parse.quote(value, safe=""),
            urllib.parse.quote_plus(value), json.dumps(value), json.dumps({"text": json.dumps(value)}),
            base64.urlsafe_b64encode(("x" + value).encode()).decode()]
        for form in forms:
            print(form)
            print("and an error with", form, file=sys.stderr)
            notes.write(form + "\n")
        for start in range(0, len(value), 3):
            session.write(json.dumps({"type": "delta", "delta": value[start:start + 3]}) + "\n")
            print(json.dumps({"part": {"text": value[start:start + 3]}}), flush=True)
        if "/" not in value:
            (kept / ("name-" + value)).write_text("x")
            (kept / f"link-{number}").symlink_to("no/" + value)
        print(ask("the value is " + value, stream=True, stream_options={"include_usage": True}))
        print(ask("whole: " + value))
        print(ask("fail: " + value))
        if number < 2:
            try:
                socket.getaddrinfo(value + ".example.com", 80)
            except OSError as error:
                print(value, error)
pathlib.Path("/app/done").touch()
sys.exit("failed with " + " ".join(values))
"""

TEST = """#!/bin/bash
env
env | base64 -w0
env > /logs/verifier/environment.txt
env > /logs/verifier/name-$VERIFIER_SECRET
test -e /app/done; echo $((! $?)) > /logs/verifier/reward.txt
"""


def piece(text: str, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, **more}
    return (
        b"data: " + json.dumps({"id": "c1", "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"
    )


async def echo(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
    """Say again what was said, in pieces of four characters with their tokens; or fail with it."""
    body = json.loads(raw)
    text = body["messages"][-1]["content"]
    key = request.headers["Authorization"]
    if text.startswith("fail"):
        return web.json_response({"error": {"message": f"no {text} for {key}", "type": "invalid"}}, status=400)
    if not body.get("stream"):
        message = {"role": "assistant", "content": f"{text} {key}"}
        return web.json_response({"id": "c1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    parts = [text[start : start + 4] for start in range(0, len(text), 4)]
    tokens = [{"content": [{"token": part, "logprob": -1.0, "bytes": list(part.encode())}]} for part in parts]
    events = [piece(part, logprobs=token) for part, token in zip(parts, tokens, strict=True)]
    return await streams(*events, piece("", finish_reason="stop"), b"data: [DONE]\n\n")(request, raw)


def forms(value: str) -> Iterator[str]:
    yield from (value, quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1])
    yield json.dumps(json.dumps(value)[1:-1])[1:-1]
    for pad in range(3):
        whole = base64.b64encode(b"x" * pad + value.encode()).decode()
        yield whole[4 : len(whole) // 4 * 4 - 4]
        yield whole[4 : len(whole) // 4 * 4 - 4].replace("+", "-").replace("/", "_")


def leaks(root: Path) -> list[str]:
    """Which file holds which canary, in its bytes, its name or the target of a link."""
    found = []
    for path in root.rglob("*"):
        data = str(path.relative_to(root)).encode()
        if path.is_symlink():
            data += b"\n" + os.fsencode(path.readlink())
        elif path.is_file():
            data += b"\n" + path.read_bytes()
        for name, value in CANARIES.items():
            found += [f"{path}: {name} as {form}" for form in forms(value) if form.encode() in data]
    return found


def texts_of(recording: Recording) -> str:
    """All that was streamed to the agent, joined."""
    events = [
        event for call in recording.calls if call.answer and call.answer.streamed for event in call.answer.events()
    ]
    choices = [json.loads(event.data)["choices"][0] for event in events if event.data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@route("secrets", "agent, model and verifier repeat every secret in many encodings", "no file that is kept holds one")
@route("secrets", "a secret is split over stream events or JSON lines", "removed from the recording and the logs")
@route("secrets", "another user reads a recording, a trajectory or a log", "only the owner may read them")
async def test_no_file_of_a_job_holds_a_secret(tmp_path: Path) -> None:
    toml = TOML + '[environment.env]\nTASK_API_KEY = "{TASK_API_KEY}"\nASKED = "${{TEMPLATE}}"\n'.format(**CANARIES)
    write_task(tmp_path / "tasks" / "one", toml=toml, test=TEST)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / ".env").write_text(f"FROM_FILE={CANARIES['FROM_FILE']}\nTEMPLATE={CANARIES['TEMPLATE']}\n")
    url = "https://user:{URL_PASSWORD}@host.example/path?access_token={URL_PARAMETER}&x=1".format(**CANARIES)
    given = {name: CANARIES[name] for name in ("SERVICE_TOKEN", "BUILD_NOTE", "ODD_SECRET", "PRIVATE_KEY")}
    given |= {"INDIRECT": "${FROM_FILE}", "REMOTE": url}
    async with fake_provider(echo) as fake:
        words = [
            "run",
            "-p",
            "tasks",
            "-m",
            "openai/m",
            "--image",
            "host",
            "--job-name",
            "j",
            "--env-file",
            ".env",
            "-y",
        ]
        words += ["-a", "command", "--ak", "script=agent.py", "--ak", f"command=--api-key {CANARIES['FLAG']}"]
        words += ["--ve", f"VERIFIER_SECRET={CANARIES['VERIFIER_SECRET']}"]
        for name, value in given.items():
            words += ["--ae", f"{name}={value}"]
        home = {"PIER_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": CANARIES["PROVIDER_KEY"]}
        done = await asyncio.to_thread(pier, *words, cwd=tmp_path, code=None, OPENAI_BASE_URL=fake.url, **home)
    job = tmp_path / "jobs" / "j"
    (trial,) = trials_of(job)
    asked = b"".join(asked.body for asked in fake.asked)
    assert json.loads((trial / "result.json").read_text())["verifier_result"]["rewards"] == {"reward": 1}, done.stderr
    assert all(json.dumps(given[name])[1:-1].encode() in asked for name in given if name != "INDIRECT")
    assert leaks(job) == []
    assert leaks(tmp_path / "home") == []
    for shown in (done.stdout, done.stderr):
        assert not [name for name, value in CANARIES.items() if value in shown]
    recording = read(trial / "agent" / "recording.jsonl")
    joined = texts_of(recording) + "".join(
        json.loads(line)["delta"] for line in (trial / "agent" / "session.jsonl").read_text().splitlines()
    )
    assert not [name for name, value in CANARIES.items() if value in joined]
    assert joined.count(REDACTED) > len(given) * 2
    assert "logprobs" not in (trial / "agent" / "recording.jsonl").read_text().partition(REDACTED)[2].partition("}")[0]
    private = [path for path in (*(trial / "agent").rglob("*"), *(trial / "verifier").rglob("*")) if path.is_file()]
    assert len(private) > 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
