"""A job whose agent, model and verifier repeat every secret in every form: no file that is kept holds one."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from aiohttp import web

from pier.record.reader import Recording, read
from pier.redact import REDACTED, Redactor
from pier.secret import is_secret, looks_random
from tests.gateway_fakes import fake_provider, streams
from tests.host_logs import claude_log
from tests.job_tasks import pier, trials_of
from tests.redteam import route
from tests.redteam.places import IMAGE, everywhere
from tests.trial_runs import TOML, write_task
from tests.workspaces import stop_all

pytestmark = pytest.mark.plain

CANARIES = {
    "SERVICE_TOKEN": "canary-argument-8f3a1c77d0",
    "BUILD_NOTE": "canary-plain-name-41ee90b2c6",
    "FROM_FILE": "canary-file-d01b7e5f93aa",
    "TASK_API_KEY": "canary-task-5b0c9e1f42dd",
    "TEMPLATE": "canary-template-77aa10c2fe",
    "ODD_SECRET": 'canary "od/d"+&<é>\\ 9c1d',
    "PRIVATE_KEY": "canary-begin-31f0\nsecond/line+of+it\ncanary-end-77b2",
    "PEM_KEY": "-----BEGIN KEY-----\nMIICcanary0q7Zx9Tt4Rr2\nb8canary5y6Wv3Uu1Ss0\n-----END KEY-----\n",
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

for number, value in enumerate(values):
    for line in value.splitlines():
        print(" > ", line)
    pathlib.Path(f"/app/work-{number}.txt").write_text(value)

with open(logs / "session.jsonl", "w") as session, open(kept / "notes.txt", "w") as notes:
    for number, value in enumerate(values):
        forms = [value, base64.b64encode(("ab" + value + "\n").encode()).decode(), urllib.parse.quote(value, safe=""),
            urllib.parse.quote_plus(value), json.dumps(value), json.dumps({"text": json.dumps(value)}),
            base64.urlsafe_b64encode(("x" + value).encode()).decode(),
            base64.encodebytes(("y" * 50 + value).encode()).decode()]
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
sys.exit("failed with " + " ".join(values))
"""

TEST = """#!/bin/bash
env
env | base64 -w0
env | base64
env > /logs/verifier/environment.txt
env > /logs/verifier/name-$VERIFIER_SECRET
test -e /logs/artifacts/notes.txt; echo $((! $?)) > /logs/verifier/reward.txt
"""

PYTHON = json.dumps([{"type": "bind", "source": "/usr", "target": "/usr", "read_only": True}])
PLACES = {
    "local": ["--image", "host"],
    "docker": ["--env", "docker", "--image", IMAGE, "--mounts", PYTHON],
}


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
    yield from (line for line in value.splitlines() if looks_random(line))
    yield from (value, quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1])
    yield json.dumps(json.dumps(value)[1:-1])[1:-1]
    for pad in range(3):
        whole = base64.b64encode(b"x" * pad + value.encode()).decode()
        yield whole[4 : len(whole) // 4 * 4 - 4]
        yield whole[4 : len(whole) // 4 * 4 - 4].replace("+", "-").replace("/", "_")


def leaks(root: Path) -> list[str]:
    """Which file holds which canary, in its bytes, its name or the target of a link; also over the ends of lines."""
    found = []
    for path in root.rglob("*"):
        data = str(path.relative_to(root)).encode()
        if path.is_symlink():
            data += b"\n" + os.fsencode(path.readlink())
        elif path.is_file():
            data += b"\n" + path.read_bytes()
        data += re.sub(rb"\\+[rn]|[\r\n]", b"", data)
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
@route("secrets", "the lines of a private key are indented, or stand in the diff of a file", "each line is removed")
@route("secrets", "training samples, exported pages and reviews of such a job", "no file that is kept holds one")
@route("secrets", "another user reads a recording, a trajectory or a log", "only the owner may read them")
@everywhere
async def test_no_file_of_a_job_holds_a_secret(place: str, tmp_path: Path) -> None:
    toml = TOML + '[environment.env]\nTASK_API_KEY = "{TASK_API_KEY}"\nASKED = "${{TEMPLATE}}"\n'.format(**CANARIES)
    toml += '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n[steps.verifier]\nenvironment_mode = "separate"\n'
    parts = {"instruction.md": "Do it.\n", "tests__test.sh": TEST}
    steps = {f"steps__{name}__{part}": text for name in ("one", "two") for part, text in parts.items()}
    write_task(tmp_path / "tasks" / "one", toml=toml, test="", **steps)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / ".env").write_text(f"FROM_FILE={CANARIES['FROM_FILE']}\nTEMPLATE={CANARIES['TEMPLATE']}\n")
    url = "https://user:{URL_PASSWORD}@host.example/path?access_token={URL_PARAMETER}&x=1".format(**CANARIES)
    given = {name: CANARIES[name] for name in ("SERVICE_TOKEN", "BUILD_NOTE", "ODD_SECRET", "PRIVATE_KEY", "PEM_KEY")}
    given |= {"INDIRECT": "${FROM_FILE}", "REMOTE": url}
    async with fake_provider(echo) as fake:
        words = ["run", "-p", "tasks", "-m", "openai/m", "--job-name", "j", "--env-file", ".env", "-y", *PLACES[place]]
        words += ["-a", "command", "--ak", "script=agent.py", "--ak", f"command=--api-key {CANARIES['FLAG']}"]
        words += ["--ve", f"VERIFIER_SECRET={CANARIES['VERIFIER_SECRET']}"]
        for name, value in given.items():
            words += ["--ae", f"{name}={value}"]
        home = {"PIER_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": CANARIES["PROVIDER_KEY"]}
        done = await asyncio.to_thread(pier, *words, cwd=tmp_path, code=None, OPENAI_BASE_URL=fake.url, **home)
    job = tmp_path / "jobs" / "j"
    (trial,) = trials_of(job)
    asked = b"".join(asked.body for asked in fake.asked)
    result = json.loads((trial / "result.json").read_text())
    assert [step["verifier_result"]["rewards"] for step in result["step_results"]] == [{"reward": 1}] * 2, done.stderr
    assert all(json.dumps(given[name])[1:-1].encode() in asked for name in given if name != "INDIRECT")
    diffs = [(trial / "steps" / name / "changes.diff").read_text() for name in ("one", "two")]
    assert all("work-0.txt" in diff and "canary" not in diff for diff in diffs)
    assert leaks(job) == []
    assert leaks(tmp_path / "home") == []
    out = tmp_path / "out"
    out.mkdir()
    for asks in (
        ["samples", "export", "jobs/j", "-o", "out/samples.jsonl"],
        ["samples", "export", "jobs/j", "-o", "out/sft.jsonl", "--format", "sft"],
        ["view", "export", "jobs/j", "-o", "out/pages"],
        ["analyze", "jobs/j", "--no-model"],
    ):
        shown = await asyncio.to_thread(pier, *asks, cwd=tmp_path, image=None, PIER_HOME=home["PIER_HOME"])
        (out / f"{asks[0]}.txt").write_text(shown.stdout + shown.stderr)
    assert REDACTED in (out / "samples.jsonl").read_text() and list(out.rglob("*.html"))
    assert leaks(tmp_path / "jobs") == leaks(out) == []
    for text in (done.stdout, done.stderr):
        assert not [name for name, value in CANARIES.items() if value in text]
    for step in (trial / "steps" / "one", trial / "steps" / "two"):
        joined = texts_of(read(step / "agent" / "recording.jsonl")) + "".join(
            json.loads(line)["delta"] for line in (step / "agent" / "session.jsonl").read_text().splitlines()
        )
        assert not [name for name, value in CANARIES.items() if value in joined]
        assert joined.count(REDACTED) > len(given) * 2
        recorded = (step / "agent" / "recording.jsonl").read_text()
        assert "logprobs" not in recorded.partition(REDACTED)[2].partition("}")[0]
        private = [path for name in ("agent", "verifier") for path in (step / name).rglob("*") if path.is_file()]
        assert len(private) > 6
        assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


WORKSPACE_TEST = """#!/bin/bash
env
env > /logs/verifier/environment.txt
echo 1 > /logs/verifier/reward.txt
"""


@route("secrets", "a workspace prints, captures, verifies and exports its variables", "only its secrets.json has them")
def test_no_file_of_a_workspace_holds_a_secret(tmp_path: Path, pier_home: Path) -> None:
    write_task(tmp_path / "task", toml=TOML, test=WORKSPACE_TEST)
    url = "https://user:{URL_PASSWORD}@host.example/path?access_token={URL_PARAMETER}&x=1".format(**CANARIES)
    given = {name: CANARIES[name] for name in ("SERVICE_TOKEN", "BUILD_NOTE", "ODD_SECRET", "PRIVATE_KEY", "PEM_KEY")}
    words = ["start", "task", "-d", "ws", "--image", "host", "-e", f"REMOTE={url}"]
    for name, value in given.items():
        words += ["-e", f"{name}={value}"]
    ws, key = tmp_path / "ws", CANARIES["PROVIDER_KEY"]
    try:
        pier(*words, cwd=tmp_path, image=None)
        pier("exec", "-d", "--", "sh", "-c", "env; touch /tmp/said", cwd=ws, image=None)
        pier("exec", "sh", "-c", "until test -e /tmp/said; do sleep 0.05; done", cwd=ws, image=None)
        claude_log(tmp_path / "uhome", ws, "s1", "It says " + " ".join([*given.values(), url, key]))
        shutil.copytree(tmp_path / "uhome" / ".claude" / "projects", ws / ".pier" / "agent" / "logs")
        pier("capture", "--session-dir", "/logs/agent/logs", cwd=ws, image=None, OPENAI_API_KEY=key)
        shutil.rmtree(ws / ".pier" / "agent" / "logs")
        pier("verify", cwd=ws, image=None)
        pier("traces", "--all", "-o", str(tmp_path / "out.tar.gz"), cwd=ws, image=None, OPENAI_API_KEY=key)
        pier("view", "export", ".", "-o", str(tmp_path / "page"), cwd=ws, image=None)
    finally:
        stop_all(pier_home)
    shutil.unpack_archive(tmp_path / "out.tar.gz", tmp_path / "traces")
    (settings,) = pier_home.glob("workspaces/*/secrets.json")
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600 and json.loads(settings.read_text())["REMOTE"] == url
    settings.unlink()
    trials = sorted((ws / ".pier" / "trials").iterdir())
    assert len(trials) == 2 and REDACTED in (trials[0] / "agent" / "trajectory.json").read_text()
    for place in (ws, pier_home, tmp_path / "traces", tmp_path / "page"):
        assert leaks(place) == [], place


@route("secrets", "a variable with a secret name holds the name of a file", "the name stays in every text")
@pytest.mark.plain
@pytest.mark.parametrize("name", ["data.csv", "config.yaml", "test-data.json", "server.key", "main.test.py"])
def test_names_of_files_are_no_secrets(name: str) -> None:
    assert not is_secret("KEY_FILE", name) and not Redactor([name])
    assert is_secret("KEY_FILE", f"x7Kp2mQ9{name}")
