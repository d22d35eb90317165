"""`CliAgentEnv` in all four dialects, truly streamed and with parallel calls, and with real agents as they are, on the
local backend and on a Docker engine. The model is a policy in this process."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import pier.rollout as vf
from pier.rollout.samples import broken_promises
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Delta, PartDelta, Request, Text, Turn, stream_turn
from tests.agent_rig import PACKS, need_pack
from tests.busybox import add_python, busybox_image
from tests.engine import engine, missing
from tests.policies import VOCABULARY, tokens_of
from tests.python_image import pack_layer

AGENT = """
import json, os, sys, urllib.error, urllib.request
dialect = sys.argv[1]
openai, anthropic = os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"]
gemini = os.environ["GOOGLE_GEMINI_BASE_URL"] + "/v1beta/models/m:"

def ask(text, stream, key=os.environ["OPENAI_API_KEY"]):
    said = [{"role": "user", "content": text}]
    url, body = {
        "chat": (openai + "/chat/completions", {"messages": said}),
        "responses": (openai + "/responses", {"input": text}),
        "anthropic": (anthropic + "/v1/messages", {"messages": said, "max_tokens": 99}),
        "gemini": (
            gemini + ("streamGenerateContent?alt=sse" if stream else "generateContent"),
            {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        ),
    }[dialect]
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    if dialect != "gemini":
        body |= {"model": "m", "stream": stream}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120)

answer, seen = ask("stream", True), b""
while b"first" not in seen:
    seen += answer.readline()
print("unary", b"second" in ask("unary", False).read())  # while the stream is open
print("early", b"last" not in seen)
print("whole", b"last" in seen + answer.read())
try:
    ask("other", False, "sk-other")
except urllib.error.HTTPError as error:
    print("refused", error.code, sorted(json.load(error)) != [])
"""


class Meeting:
    """A stream goes on only when another call of the same rollout came."""

    vocab_size = VOCABULARY

    def for_session(self, labels: Any) -> Meeting:
        return Meeting()

    def __init__(self) -> None:
        self.met = asyncio.Event()

    def __call__(self, request: Request) -> Any:
        said = request.messages[-1].text
        turn = Turn((Text("first and last" if said == "stream" else "second"),))
        turn = Turn(turn.parts, tokens=tokens_of(request, turn))
        return self._stream(turn) if said == "stream" else self._answer(turn)

    async def _answer(self, turn: Turn) -> Turn:
        self.met.set()
        return turn

    async def _stream(self, turn: Turn) -> AsyncIterator[Delta]:
        for delta in stream_turn(turn, 10):
            if isinstance(delta, PartDelta) and "last" in delta.text:
                await asyncio.wait_for(self.met.wait(), 60)
            yield delta


@pytest.fixture(scope="module", params=["local", "docker"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The backend, and an image with Python on it."""
    if request.param == "local":
        yield {"backend": "local", "docker_image": "host"}
        return
    if (why := missing()) is not None:
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("image")
    with engine() as running, pytest.MonkeyPatch.context() as patch:
        layer = busybox_image(directory / "made").layers[0]
        add_python(layer)
        running.docker("import", "-", "test/python", stdin=pack_layer(layer, directory / "made.tar").read_bytes())
        patch.setenv("DOCKER_HOST", running.url)
        yield {"backend": "docker", "docker_image": "test/python"}
        assert running.containers() == []


async def test_every_dialect_is_streamed_with_parallel_calls(place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))

    class Dialects(vf.CliAgentEnv):
        async def post_sandbox_setup(self, state: vf.State) -> None:
            await self.sandbox_client.upload_file(state["sandbox_id"], "/app/agent.py", str(tmp_path / "agent.py"))

        async def build_env_vars(self, state: vf.State) -> dict[str, str]:
            return {**await super().build_env_vars(state), "DIALECT": state["info"]["dialect"]}

    rows = [{"question": "go", "info": {"dialect": name}} for name in DIALECTS]
    env = Dialects(
        run_command="python3 /app/agent.py $DIALECT",
        dataset=vf.Environment.make_dataset(rows),
        rubric=vf.Rubric(lambda state: float(state["agent_exit_code"] == 0)),
        **place,
    )
    states: list[vf.State] = []
    columns = ["agent_stdout", "agent_stderr", "rollout_id"]
    found = await env.evaluate(Meeting(), "tiny", state_columns=columns, on_state=states.append)
    assert len({row["rollout_id"] for row in found["outputs"]}) == 4
    for row in found["outputs"]:
        assert row["error"] is None and row["reward"] == 1.0, row
        said = "unary True\nearly True\nwhole True\nrefused 401 True\n"
        assert row["agent_stdout"] == said, (row["info"], row["agent_stderr"])
    for state in states:
        assert [step["extras"]["dialect"] for step in state["trajectory"]] == [state["info"]["dialect"]] * 2
        trained = {
            bytes(sample.input_ids[span.start : span.end - 1]) for sample in state["samples"] for span in sample.spans
        }
        assert trained == {b"first and last", b"second"} and list(broken_promises(state["samples"])) == []


AGENTS = {
    "claude-code": ("anthropic", 'IS_SANDBOX=1 claude --print "$(cat $HARBOR_INSTRUCTION_PATH)"'),
    "codex": (
        "responses",
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m tiny"
        ' -c model_provider=here -c \'model_providers.here={name="here", base_url="\'$OPENAI_BASE_URL\'",'
        ' env_key="OPENAI_API_KEY", wire_api="responses"}\' - < $HARBOR_INSTRUCTION_PATH',
    ),
}


@pytest.mark.parts
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_real_agent_is_rolled_out_as_it_is(
    agent: str, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed, in its own dialect, with the published variables and nothing of pier's own; its tokens are exact, and
    titles do not count as its conversation."""
    need_pack(agent)
    monkeypatch.setenv("PIER_PACKS", str(PACKS))
    dialect, command = AGENTS[agent]
    asked: set[str | None] = set()

    async def model(request: Request) -> Turn:
        asked.add(request.dialect)
        turn = Turn((Text("forty-two"),))
        return Turn(turn.parts, tokens=tokens_of(request, turn))

    env = vf.CliAgentEnv(
        run_command=command,
        dataset=vf.Environment.make_dataset([{"question": "What is the answer?"}]),
        rubric=vf.Rubric(lambda completion: float(completion[-1].content == "forty-two")),
        agent=agent,
        **place,
    )
    states: list[vf.State] = []
    columns = ["agent_stdout", "agent_stderr"]
    (row,) = (await env.evaluate(model, "tiny", state_columns=columns, on_state=states.append))["outputs"]
    assert row["reward"] == 1.0 and "forty-two" in row["agent_stdout"], row
    assert asked == {dialect}
    (state,) = states
    (sample,) = [sample for sample in state["samples"] if sample.kind == "main"]
    assert bytes(sample.input_ids[sample.prompt_length : -1]) == b"forty-two" and sample.trained == 10
