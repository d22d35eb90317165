"""The parts of a trial that need no sandbox: redaction, rewards of steps, networks, clocks, config files."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import JobError, PierError, PolicyError, TaskError, UsageError
from pier.lease import Lease
from pier.network.policy import NONE, NetworkPolicy
from pier.redact import Redactor
from pier.sandbox import open_backend
from pier.sandbox.contract import Capabilities, Limits
from pier.secret import env_on_disk, secret_values
from pier.task.model import Environment
from pier.trial.agent import make_agent, phase_seconds
from pier.trial.config import AgentConfig, EnvironmentConfig
from pier.trial.plan import agent_plan, check_network, check_support, plan_network, verifier_plan, with_hosts
from pier.trial.record import OutputFile, TrialRecord, printable, trial_config
from pier.trial.result import (
    ExceptionInfo,
    StepResult,
    VerifierResult,
    combined_rewards,
    exception_info,
    read_result,
    stops_after,
)
from pier.trial.run import trial_secrets
from pier.trial.spec import SandboxChoice, TrialSpec
from pier.trial.verify import _Logs
from tests.trial_runs import TOML, write_task

SECRET = 'sk-"canary"/+value&1'


def test_secrets_are_found_in_every_form() -> None:
    redactor = Redactor([SECRET, "short"])
    forms = [SECRET, quote(SECRET, safe=""), json.dumps({"k": SECRET}), f"a{SECRET}b"]
    forms += [
        base64.b64encode(f"{'x' * pad}{SECRET}{'y' * end}".encode()).decode() for pad in range(4) for end in range(3)
    ]
    for form in forms:
        cleaned = redactor.text(form)
        assert "[REDACTED]" in cleaned and "canary" not in cleaned
    assert redactor.text("a short word") == "a short word"
    assert redactor.value({"k": [SECRET, 1], SECRET: None}) == {"k": ["[REDACTED]", 1], "[REDACTED]": None}


@given(st.lists(st.binary(max_size=12), max_size=6), st.integers(0, 20), st.data())
def test_a_secret_in_pieces_is_found_in_output(
    tmp_path_factory: pytest.TempPathFactory, noise: list[bytes], cut: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("out") / "log"
    raw = SECRET.encode()
    with OutputFile(path, Redactor([SECRET])) as output:
        for piece in (*noise, raw[:cut], raw[cut:], *noise):
            output("stdout", piece)
    assert raw not in path.read_bytes()
    assert b"[REDACTED]" in path.read_bytes()


def test_output_is_capped_and_says_so(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "log", Redactor(), limit=10) as output:
        for _ in range(5):
            output("stdout", b"12345678")
    assert (tmp_path / "log").read_bytes() == b"1234567812\n[30 more bytes were not kept]\n"


def test_env_on_disk_keeps_templates_and_hides_secrets() -> None:
    env = {"A": "plain", "API_KEY": "${API_KEY}", "MY_TOKEN": "literal", "OTHER_SECRET": "same", "MAX_TOKENS": "10"}
    shown = env_on_disk(env, {"OTHER_SECRET": "same"})
    assert shown == env | {"MY_TOKEN": "****", "OTHER_SECRET": "${OTHER_SECRET}"}


def test_secrets_are_known_by_the_name_of_either_variable() -> None:
    env = {"A": "${MY_TOKEN}", "KEY": "literal", "B": "plain", "PASSWORD": "${X:-default}", "C": "${UNSET_SECRET}"}
    assert list(secret_values(env, {"MY_TOKEN": "value"})) == ["value", "literal", "default", ""]


def test_lines_cannot_be_forged() -> None:
    assert printable("a\x1b[31mb\nc\u202e é") == "a\\x1b[31mb\\nc\\u202e é"


def outcome(rewards: dict | None = None, blame: str | None = None) -> StepResult:
    error = None
    if blame:
        info = {"exception_type": "E", "exception_message": "", "exception_traceback": "", "blame": blame}
        error = ExceptionInfo.model_validate(info | {"occurred_at": "2026-01-01T00:00:00Z"})
    verdict = None if rewards is None else VerifierResult(rewards=rewards)
    return StepResult(step_name="s", verifier_result=verdict, exception_info=error)


def test_rewards_of_steps() -> None:
    two = [outcome({"reward": 1, "a": 1}), outcome({"reward": 0})]
    assert combined_rewards(two, "mean") == {"reward": 0.5, "a": 0.5}
    assert combined_rewards(two, "final") == {"reward": 0}
    assert combined_rewards([*two, outcome(None, "agent")], "mean") == {"reward": 0.5, "a": 0.5}
    assert combined_rewards([*two, outcome(None, "agent")], "final") is None
    assert combined_rewards([], "mean") is None
    for strategy in ("mean", "final"):
        for blame in ("infra", "provider", "task"):
            assert combined_rewards([outcome({"reward": 1}), outcome(None, blame)], strategy) is None


def test_steps_stop_when_there_is_no_way_on(tmp_path: Path) -> None:
    toml = TOML + "[[steps]]\nname='a'\nmin_reward=0.5\n[[steps]]\nname='b'\nmin_reward={x=1}\n[[steps]]\nname='c'\n"
    more = {f"steps__{name}__instruction.md": "x" for name in "abc"}
    a, b, c = write_task(tmp_path / "t", toml=toml, **more).steps
    assert stops_after(a, outcome({"reward": 0.5}), True) is None
    assert "0.5 is needed" in (stops_after(a, outcome({"reward": 0.4}), True) or "")
    assert stops_after(a, outcome({"other": 1}), True) is not None
    assert stops_after(a, outcome(None), False) is None
    assert stops_after(b, outcome({"x": 1, "reward": 0}), True) is None
    assert stops_after(b, outcome({"x": 0}), True) is not None
    assert stops_after(c, outcome({"reward": 0}), True) is None
    assert stops_after(c, outcome(None, "agent"), True) is not None
    assert stops_after(c, outcome({"reward": 0}, "agent"), True) is None


def test_deadlines() -> None:
    assert phase_seconds(None, 10, None, 2) == 20
    assert phase_seconds(5, 10, None, 2) == 10
    assert phase_seconds(None, 10, 4, 2) == 8
    assert phase_seconds(None, None, None, 2) is None
    assert phase_seconds(None, None, 3, 1) == 3
    assert phase_seconds(None, float("inf"), None, 1) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", None),
        ('[metadata.pier]\nbuild_network = "none"\n', NONE),
        ('[metadata.pier]\nbuild_network = ["A.org", "b.org:80"]\n', NetworkPolicy("allowlist", ("a.org", "b.org:80"))),
    ],
)
def test_the_network_of_builds(tmp_path: Path, said: str, expected: NetworkPolicy | None) -> None:
    task = write_task(tmp_path / "t", toml=TOML + said, environment__Dockerfile="")
    assert agent_plan(task, SandboxChoice()).image.network == expected
    assert verifier_plan(task, 0, SandboxChoice()).image.network == expected


def test_a_network_of_builds_that_is_none(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", toml=TOML + "[metadata.pier]\nbuild_network = 7\n")
    with pytest.raises(TaskError, match=r"task\.toml: metadata\.pier\.build_network: 7 is not public"):
        agent_plan(task, SandboxChoice(image="host"))


def test_networks_of_phases(tmp_path: Path) -> None:
    more = '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n'
    task = write_task(tmp_path / "t", toml=TOML.replace("[agent]\n", more))
    plan = plan_network(task.config.environment, task.steps, hosts=("b.org:8443",), agent_hosts=("C.org",))
    assert plan.baseline == NetworkPolicy("allowlist", ("b.org:8443",))
    assert plan.steps[0].agent == NetworkPolicy("allowlist", ("a.org", "c.org"))
    assert plan.steps[0].verifier == plan.baseline
    more = plan_network(task.config.environment, task.steps, verifier_hosts=("d.org",))
    assert more.steps[0].verifier == NetworkPolicy("allowlist", ("d.org",)) and more.baseline == NONE
    closed = plan_network(task.config.environment, task.steps, override=NONE)
    assert (closed.baseline, closed.steps[0].agent, closed.steps[0].verifier) == (NONE, NONE, NONE)
    assert with_hosts(NetworkPolicy("public"), ("a.org",)) == NetworkPolicy("public")
    with pytest.raises(PolicyError, match="allowlist"):
        check_network(plan, Capabilities(), "local")
    with pytest.raises(PolicyError, match="between phases"):
        check_network(plan, Capabilities(networks=frozenset({"none", "allowlist"})), "local")
    check_network(closed, Capabilities(), "local")


def test_where_trials_run(tmp_path: Path) -> None:
    plain = write_task(tmp_path / "a", environment__Dockerfile="FROM x")
    assert agent_plan(plain, SandboxChoice()).image.context == plain.environment_dir
    override = agent_plan(plain, SandboxChoice(image="host"))
    assert (override.image.reference, override.content) == ("host", plain.environment_dir)
    both = write_task(tmp_path / "b", toml=TOML + 'docker_image = "y"\n', environment__Dockerfile="FROM x")
    assert agent_plan(both, SandboxChoice()).image.reference == "y"
    assert agent_plan(both, SandboxChoice(settings=EnvironmentConfig(force_build=True))).image.is_build
    neither = write_task(tmp_path / "c")
    with pytest.raises(TaskError) as refused:
        agent_plan(neither, SandboxChoice())
    assert refused.value.code == "no_image"
    bundled = write_task(tmp_path / "d", toml=TOML + "[verifier.environment]\n", tests__Dockerfile="FROM y")
    plan = verifier_plan(bundled, 0, SandboxChoice())
    assert plan.image.context == bundled.path / "tests" and plan.content is None


async def test_what_a_backend_cannot_run_is_refused(tmp_path: Path) -> None:
    compose = write_task(tmp_path / "a", **{"environment__docker-compose.yaml": "services: {}"})
    with Lease() as lease:
        async with open_backend("local", lease) as backend:
            with pytest.raises(PierError, match="'docker' can") as caught:
                await check_support(compose, backend, SandboxChoice())
            assert caught.value.blame == "user" and not caught.value.retryable
            for line in ('os = "windows"', "gpus = 1", 'tpu = {type = "v5", topology = "2x2"}'):
                task = write_task(tmp_path / line[:2], toml=TOML + line + "\n", **{"tests__test.bat": ""})
                with pytest.raises(PierError, match="local"):
                    await check_support(task, backend, SandboxChoice())
            asking = write_task(tmp_path / "gpu", toml=TOML + "gpus = 1\n")
            await check_support(asking, backend, SandboxChoice(settings=EnvironmentConfig(override_gpus=0)))


def test_the_limits_of_the_settings_are_those_of_the_sandbox() -> None:
    settings = EnvironmentConfig(override_cpus=0.5, override_memory_mb=1, override_storage_mb=2, override_processes=3)
    assert SandboxChoice(settings).limits == Limits(cpus=0.5, memory=1 << 20, disk=2 << 20, processes=3)
    assert SandboxChoice(EnvironmentConfig(override_storage_mb=0)).limits == Limits(disk=0)


def test_options_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'comand'"):
        make_agent(AgentConfig(name="command", kwargs={"comand": "x"}))
    with pytest.raises(UsageError, match="unknown agent 'orcale'"):
        make_agent(AgentConfig(name="orcale"))
    with pytest.raises(UsageError, match="subclass"):
        make_agent(AgentConfig(name="pathlib:Path"))


def test_the_config_holds_no_secret(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    agent = AgentConfig(
        name="command", env={"API_KEY": "canary-value", "B_TOKEN": "${B_TOKEN}"}, kwargs={"command": "x"}
    )
    spec = TrialSpec("n", task, tmp_path / "trial", agent, sandbox=SandboxChoice(image="host", network=NONE))
    text = json.dumps(trial_config(spec, {"B_TOKEN": "other-canary"}))
    assert "canary" not in text and "${B_TOKEN}" in text
    assert trial_config(spec, {})["environment"]["kwargs"] == {"image": "host", "network": "none", "hosts": []}


def test_options_of_the_backend_may_be_secret(tmp_path: Path) -> None:
    choice = SandboxChoice(EnvironmentConfig(kwargs={"api_key": "canary-value-of-a-key"}))
    spec = TrialSpec("n", write_task(tmp_path / "t"), tmp_path / "trial", sandbox=choice)
    assert "canary-value-of-a-key" in set(trial_secrets(spec, {}))


def test_errors_carry_harbors_names_and_our_blame() -> None:
    redactor = Redactor(["canary-value"])
    known = exception_info(PierError("canary-value", code="agent_timeout", blame="agent"), "agent", redactor)
    assert (known.exception_type, known.blame, known.exception_message) == ("AgentTimeoutError", "agent", "[REDACTED]")
    try:
        raise ValueError("canary-value")
    except ValueError as error:
        other = exception_info(error, "collect", redactor)
    assert (other.exception_type, other.blame, other.code) == ("ValueError", "infra", "internal")
    assert "canary" not in other.model_dump_json()


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff", b'{"task_name": 1}'])
def test_broken_results_are_typed_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(JobError, match=r"result\.json"):
        read_result(tmp_path)


def test_missing_results_say_so(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="did not finish"):
        read_result(tmp_path)
    with pytest.raises(JobError, match="no such directory"):
        read_result(tmp_path / "x")


def test_environment_tables_are_closed_values() -> None:
    table = Environment(network_mode="no-network")
    with pytest.raises(ValueError, match="frozen"):
        table.network_mode = "public"  # type: ignore[misc]


class SlowSandbox:
    """Gives its logs only when it is asked again."""

    asked = 0

    async def download(self, source: str, target: Path, **_: object) -> list[str]:
        self.asked += 1
        if self.asked == 1:
            await asyncio.sleep(600)
        target.mkdir()
        (target / "report.txt").write_text("told")
        return []


async def test_logs_that_were_cut_off_are_taken_again(tmp_path: Path) -> None:
    record = TrialRecord(tmp_path, Redactor(()))
    logs = _Logs(SlowSandbox(), tmp_path / "verifier", record)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(logs.take(), 0.01)
    assert not logs.taken
    await logs.take()
    assert logs.taken and (tmp_path / "verifier/report.txt").read_text() == "told"
    record.close()
