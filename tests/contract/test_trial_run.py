"""Trials on the real local backend: every phase, every kind of task, and what lands on disk."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pier.network.policy import NONE, NetworkPolicy
from pier.sandbox.linux.sandbox import LinuxSandbox
from pier.task import load_task
from pier.task.model import Artifact
from pier.trial.check import prove
from pier.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
from pier.trial.result import TrialResult, read_result
from pier.trial.run import run_trial
from pier.trial.spec import SandboxChoice, TrialSpec
from tests.trial_runs import ON_HOST, PASS, TOML, Bench, kinds, open_bench, write_task

pytestmark = [pytest.mark.plain, pytest.mark.skipif(not os.path.exists("/proc/self/ns/user"), reason="no namespaces")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
CANARY = "canary-0123456789-value"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path / "trials", {"PATH": os.environ["PATH"], "HOST_TOKEN": CANARY}) as opened:
        yield opened


def rewards(result: TrialResult) -> float | int | None:
    assert result.rewards is not None, result.exception_info
    return result.rewards.get("reward")


async def test_the_examples_are_solved_by_the_oracle_only(bench: Bench, tmp_path: Path) -> None:
    tasks = [load_task(path) for path in sorted(EXAMPLES.iterdir())]
    proofs = await prove(tasks, bench.services, tmp_path / "proofs", sandbox=ON_HOST, concurrency=2)
    assert [proof for proof in proofs if not proof.ok] == []
    assert len(proofs) == 2 * len(tasks)
    step = read_result(next((tmp_path / "proofs").glob("*-multi-step/oracle-1")))
    assert [each.step_name for each in step.step_results or ()] == ["collect", "summarise"]
    kept = next((tmp_path / "proofs").glob("*-artifacts/oracle-1")) / "artifacts"
    assert sorted(path.name for path in (kept / "site").iterdir()) == [
        "contact.html",
        "index.html",
        "rules.html",
        "welcome.html",
    ]
    assert (kept / "logs/artifacts/listing.txt").read_text().split() == sorted(
        ["contact.html", "draft.tmp", "index.html", "rules.html", "welcome.html"]
    )


async def test_the_files_of_a_trial(bench: Bench, tmp_path: Path) -> None:
    phases: list[str] = []
    task = write_task(tmp_path / "t", solve="echo solved; touch /app/done")
    job_id = "00000000-0000-4000-8000-000000000000"
    spec = TrialSpec("one", task, tmp_path / "one", AgentConfig(name="oracle"), sandbox=ON_HOST, job_id=job_id)
    result = await run_trial(spec, bench.services, phases.append)
    assert phases == ["prepare", "start", "health", "setup", "agent", "collect", "verify", "seal"]
    assert rewards(result) == 1
    assert (tmp_path / "one/agent/oracle.txt").read_text() == "solved\n"
    assert (tmp_path / "one/verifier/reward.txt").read_text() == "1\n"
    assert json.loads((tmp_path / "one/artifacts/manifest.json").read_text())[0]["status"] == "empty"
    assert read_result(tmp_path / "one").model_dump() == result.model_dump()
    assert json.loads((tmp_path / "one/config.json").read_text()) == result.config
    assert result.pier is not None and set(phases) - {"seal"} <= set(result.pier.phases)
    log = (tmp_path / "one/trial.log").read_text()
    assert all(f"phase {phase}" in log for phase in phases)
    assert not (tmp_path / "one/exception.txt").exists()
    assert result.task_checksum == task.digest.removeprefix("sha256:")


async def test_a_trial_that_is_not_recorded_writes_no_more_than_its_verifier_needs(
    bench: Bench, tmp_path: Path
) -> None:
    for path in sorted(EXAMPLES.iterdir()):
        place, task = tmp_path / "unrecorded" / path.name, load_task(path)
        spec = TrialSpec(path.name, task, place, AgentConfig(name="oracle"), sandbox=ON_HOST, recorded=False)
        assert rewards(await run_trial(spec, bench.services)) == 1, path.name
        kept = [entry.relative_to(place).parts for entry in place.rglob("*") if entry.is_file()]
        assert all("artifacts" in parts for parts in kept), kept
        assert bool(kept) == any(step.verifier_mode == "separate" for step in task.steps), path.name


async def test_an_agents_time_is_limited_and_the_trial_still_graded(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", toml=TOML.replace("timeout_sec = 120\n[verifier]", "timeout_sec = 1\n[verifier]"))
    agent = AgentConfig(name="command", kwargs={"command": "touch /app/done; sleep 600 & sleep 600"})
    result = await bench.run(task, agent)
    assert rewards(result) == 1
    assert result.exception_info is not None
    assert (result.exception_info.exception_type, result.exception_info.blame) == ("AgentTimeoutError", "agent")
    assert "AgentError" in (bench.last / "exception.txt").read_text()


async def test_an_agent_that_fails_is_still_graded(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    result = await bench.run(
        task, AgentConfig(name="command", kwargs={"command": "touch /app/done; echo why >&2; exit 3"})
    )
    assert rewards(result) == 1
    assert result.exception_info is not None and "exit code 3" in result.exception_info.exception_message
    assert (bench.last / "agent/command.txt").read_text() == "why\n"
    oracle = write_task(tmp_path / "o", solve="touch /app/done; exit 4")
    result = await bench.run(oracle)
    assert rewards(result) == 1 and result.exception_info is None
    assert (bench.last / "agent/exit-code.txt").read_text() == "4\n"


async def test_the_command_agent(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\ncat $PIER_INSTRUCTION_FILE; cat; touch /app/$1\n")
    result = await bench.run(task, AgentConfig(name="command", kwargs={"script": str(script), "command": "done"}))
    assert rewards(result) == 1
    assert (bench.last / "agent/command.txt").read_text() == "Do it.\nDo it.\n"
    tools = tmp_path / "tools" / "bin"
    tools.mkdir(parents=True)
    (tools / "solver").write_text("#!/bin/sh\ntouch $2/done; echo $1\n")
    (tools / "solver").chmod(0o755)
    argv = ["solver", "{instruction}", "{workdir}"]
    result = await bench.run(task, AgentConfig(name="command", kwargs={"mount": str(tools.parent), "command": argv}))
    assert rewards(result) == 1
    assert (bench.last / "agent/command.txt").read_text() == "Do it.\n"


async def test_a_failed_infrastructure_has_no_reward(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", toml=TOML + 'docker_image = "no-such-image.invalid/x:1"\n')
    result = await bench.run(task, sandbox=SandboxChoice())
    assert result.verifier_result is None and not result.has_verdict
    assert result.exception_info is not None and result.exception_info.phase == "prepare"
    assert result.exception_info.blame in ("infra", "user")
    broken = write_task(tmp_path / "b", toml=TOML + 'env = {X = "${NOT_SET_ANYWHERE}"}\n')
    result = await bench.run(broken)
    assert not result.has_verdict and "NOT_SET_ANYWHERE" in (
        result.exception_info.exception_message if result.exception_info else ""
    )


async def test_variables_users_and_working_directories(bench: Bench, tmp_path: Path) -> None:
    toml = TOML.replace('workdir = "/app"', 'workdir = "/some/place"\nenv = {FROM_TASK = "1", T = "${HOST_TOKEN}"}')
    toml = toml.replace("[verifier]\n", '[verifier]\nenv = {FOR_TESTS = "${UNSET:-two}"}\n')
    toml += '[solution]\nenv = {FOR_SOLUTION = "3"}\n'
    test = '#!/bin/bash\necho "$FROM_TASK $FOR_TESTS ${FOR_SOLUTION:-none} $EXTRA $PWD" > /logs/verifier/seen\n'
    test += f'[ "$T" = {CANARY} ] && echo 1 > /logs/verifier/reward.txt\n'
    solve = 'echo "$FROM_TASK ${FOR_TESTS:-none} $FOR_SOLUTION $PWD"'
    task = write_task(tmp_path / "t", toml=toml, solve=solve, test=test)
    result = await bench.run(task, verifier=VerifierConfig(env={"EXTRA": "4"}))
    assert rewards(result) == 1
    assert (bench.last / "agent/oracle.txt").read_text() == "1 none 3 /some/place\n"
    assert (bench.last / "verifier/seen").read_text() == "1 two none 4 /some/place\n"


async def test_users(bench: Bench, tmp_path: Path) -> None:
    if not (await bench.services.backend.capabilities()).users:
        pytest.skip("this machine's sandboxes have one user only")
    toml = TOML.replace("[agent]\n", "[agent]\nuser = 1234\n").replace("[verifier]\n", '[verifier]\nuser = "nobody"\n')
    test = "#!/bin/bash\nid -un > /logs/verifier/seen; echo 1 > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "t", toml=toml, solve="id -u; id -u > /logs/agent/uid", test=test)
    for script in ("solution/solve.sh", "tests/test.sh"):
        (task.path / script).chmod(0o600)
    assert rewards(await bench.run(task)) == 1
    assert (bench.last / "agent/oracle.txt").read_text() == (bench.last / "agent/uid").read_text() == "1234\n"
    assert (bench.last / "verifier/seen").read_text() == "nobody\n"


LONG_PATHS = """\
import os
for place in ("/logs/agent", "/logs/artifacts"):
    os.chdir(place)
    for _ in range(30):
        os.mkdir("n" * 250)
        os.chdir("n" * 250)
    with open("large", "wb") as stream:
        stream.write(bytes(1 << 20))
"""


@pytest.mark.parametrize("left", ["true", "(while :; do kill -STOP -1; done) >/dev/null 2>&1 &"])
async def test_what_an_agent_leaves_behind_keeps_nobody_from_grading_it(
    bench: Bench, tmp_path: Path, left: str
) -> None:
    """Trees that no directory of this machine can hold, and a process that stops all others."""
    solve = f"touch /app/done\n/usr/bin/python3 - <<'END'\n{LONG_PATHS}END\n{left}\n"
    test = "#!/bin/bash\n[ -e /app/done ] && echo 1 > /logs/verifier/reward.txt\n"
    result = await bench.run(write_task(tmp_path / "t", solve=solve, test=test))
    assert rewards(result) == 1


async def test_files_of_the_environment_come_into_the_working_directory(bench: Bench, tmp_path: Path) -> None:
    test = "#!/bin/bash\nls -A /app > /logs/verifier/seen; echo 1 > /logs/verifier/reward.txt\n"
    more = {"environment__Dockerfile": "FROM x", "environment__sub__data": "x", "environment__top": "y"}
    result = await bench.run(write_task(tmp_path / "t", test=test, **more), "nop")
    assert rewards(result) == 1
    assert (bench.last / "verifier/seen").read_text().split() == ["sub", "top"]


async def test_health_checks(bench: Bench, tmp_path: Path) -> None:
    check = '[environment.healthcheck]\ncommand = "{}"\ninterval_sec = 0.01\nstart_interval_sec = 0.01\nretries = {}\n'
    good = "n=$(cat /tmp/n 2>/dev/null || echo 0); echo $((n+1)) > /tmp/n; [ $n -ge 2 ]"
    task = write_task(tmp_path / "good", toml=TOML + check.format(good, 3))
    assert rewards(await bench.run(task)) == 1
    result = await bench.run(write_task(tmp_path / "bad", toml=TOML + check.format("exit 7", 2)))
    assert not result.has_verdict and result.exception_info is not None
    assert (result.exception_info.exception_type, result.exception_info.phase) == ("HealthcheckError", "health")
    assert "exit code 7" in result.exception_info.exception_message


async def test_artifacts_and_hooks(bench: Bench, tmp_path: Path) -> None:
    toml = 'artifacts = ["out", "/missing", {source = "/app/tree", destination = "kept", exclude = ["*.o", "skip"]}]\n'
    toml += TOML + '[[verifier.collect]]\ncommand = "echo hooked > /logs/artifacts/hook"\n'
    toml += '[[verifier.collect]]\ncommand = "exit 3"\n[[verifier.collect]]\ncommand = "x"\nservice = "db"\n'
    solve = "mkdir -p tree/skip tree/sub out; echo 1 > out/a; echo 2 > tree/sub/b; touch tree/c.o tree/skip/d; "
    solve += "ln -s /etc/passwd tree/link; mkfifo tree/pipe; touch /app/done"
    pre = "echo pre > /logs/artifacts/pre\n"
    task = write_task(tmp_path / "t", toml=toml, solve=solve, **{"pre_artifacts.sh": pre})
    result = await bench.run(task, artifacts=(Artifact(source="/app/done"),))
    assert rewards(result) == 1
    kept = bench.last / "artifacts"
    assert (kept / "app/out/a").read_text() == "1\n"
    assert (kept / "kept/sub/b").read_text() == "2\n"
    assert sorted(path.name for path in (kept / "kept").iterdir()) == ["link", "sub"]
    assert os.readlink(kept / "kept/link") == "/etc/passwd"
    assert (kept / "logs/artifacts/hook").read_text() == "hooked\n"
    assert (kept / "logs/artifacts/pre").read_text() == "pre\n"
    assert (kept / "app/done").is_file()
    manifest = {row["source"]: row["status"] for row in json.loads((kept / "manifest.json").read_text())}
    assert manifest == {
        "/logs/artifacts": "ok",
        "/app/out": "ok",
        "/missing": "failed",
        "/app/tree": "ok",
        "/app/done": "ok",
    }
    assert result.pier is not None
    assert any("exit 3" in warning for warning in result.pier.warnings)
    assert any("'db'" in warning for warning in result.pier.warnings)


SEPARATE = 'artifacts = ["/app/done"]\n' + TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')


async def test_a_separate_verifier_sees_artifacts_only(bench: Bench, tmp_path: Path) -> None:
    test = "#!/bin/bash\nls /app /logs/verifier /tmp/mark > /logs/verifier/seen 2>&1\n" + PASS
    solve = "echo x > /app/done; echo y > /app/other; echo z > /tmp/mark; echo 1 > /logs/verifier/reward.txt"
    task = write_task(tmp_path / "t", toml=SEPARATE, solve=solve, test=test)
    result = await bench.run(task)
    assert rewards(result) == 1 and result.verifier_environment_mode == "separate"
    seen = (bench.last / "verifier/seen").read_text()
    assert "done" in seen and "other" not in seen and "reward.txt" not in seen and "cannot access" in seen
    result = await bench.run(task, "nop")
    assert rewards(result) == 0


async def test_a_separate_verifier_may_bring_its_tests(bench: Bench, tmp_path: Path) -> None:
    own = '[verifier.environment]\nnetwork_mode = "no-network"\n'
    toml = SEPARATE.replace('environment_mode = "separate"\n', "") + own
    built = write_task(tmp_path / "a", toml=toml, tests__Dockerfile="FROM host\nCOPY test.sh /tests/\n")
    result = await bench.run(built)
    assert rewards(result) == 1 and result.verifier_environment_mode == "separate"
    assert rewards(await bench.run(built, "nop")) == 0
    result = await bench.run(write_task(tmp_path / "b", toml=toml + 'docker_image = "host"\n', test=""))
    assert not result.has_verdict and result.exception_info is not None
    assert "/tests/test.sh" in result.exception_info.exception_message


STEPS = (
    TOML
    + """
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
artifacts = ["/app/two"]
"""
)


def steps(root: Path, *, strategy: str = "mean", one: str = "1", two: str = "0"):
    return write_task(
        root,
        toml=f'multi_step_reward_strategy = "{strategy}"\n{STEPS}',
        test="#!/bin/bash\nls /tests > /logs/verifier/seen\n. /tests/check\n",
        solve="exit 1",
        **{
            "steps__one__instruction.md": "First.",
            "steps__two__instruction.md": "Second.",
            "steps__one__tests__check": f"echo {one} > /logs/verifier/reward.txt; touch /app/leak\n",
            "steps__two__tests__check": f"[ -e /app/one ] && echo {two} > /logs/verifier/reward.txt\n",
            "steps__one__solution__solve.sh": "#!/bin/bash\ncat given > one; ls /tests /logs/agent\n",
            "steps__two__solution__solve.sh": "#!/bin/bash\ncat one > two; ls /tests /logs/agent /logs/verifier\n",
            "steps__one__workdir__setup.sh": "echo from-setup > given\n",
        },
    )


async def test_steps_share_a_sandbox_and_have_their_own_verdicts(bench: Bench, tmp_path: Path) -> None:
    result = await bench.run(steps(tmp_path / "a"))
    assert result.rewards == {"reward": 0.5}
    one, two = result.step_results or []
    assert one.verifier_result is not None and one.verifier_result.rewards == {"reward": 1}
    assert two.verifier_result is not None and two.verifier_result.rewards == {"reward": 0}
    home = bench.last / "steps"
    assert (home / "two/artifacts/app/two").read_text() == "from-setup\n"
    assert "check" not in (home / "two/agent/oracle.txt").read_text()
    assert sorted((home / "one/verifier/seen").read_text().split()) == ["check", "test.sh"]
    assert not (bench.last / "agent").exists()
    assert (await bench.run(steps(tmp_path / "b", strategy="final"))).rewards == {"reward": 0}
    stopped = await bench.run(steps(tmp_path / "c", one="0.4", two="1"))
    assert stopped.rewards == {"reward": 0.4} and len(stopped.step_results or []) == 1


async def test_limits_and_overrides(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", toml=TOML + "cpus = 1\nmemory_mb = 512\nstorage_mb = 1000\n")
    sandbox = SandboxChoice(image="host", settings=EnvironmentConfig(override_memory_mb=256))
    result = await bench.run(task, sandbox=sandbox, multipliers={"timeout_multiplier": 2.0})
    assert rewards(result) == 1
    assert result.config["environment"]["override_memory_mb"] == 256


async def test_secrets_are_in_no_file(bench: Bench, tmp_path: Path) -> None:
    toml = TOML.replace(
        'workdir = "/app"', 'workdir = "/app"\nenv = {TASK_TOKEN = "${HOST_TOKEN}", N = "${HOST_TOKEN}"}'
    )
    solve = "touch /app/done; echo said $TASK_TOKEN; echo $TASK_TOKEN | base64 -w0 > /logs/agent/encoded; "
    solve += 'echo "{\\"k\\": \\"$AGENT_KEY\\"}" > /logs/artifacts/x.json; printf "%s" "$AGENT_KEY" > /logs/agent/raw; '
    solve += "mkdir -p /app/$N; touch /app/$N/conftest.py"
    test = PASS + "env > /logs/verifier/env; echo $TASK_TOKEN; echo $VERIFIER_SECRET\n"
    task = write_task(tmp_path / "t", toml=toml, solve=solve, test=test)
    agent = AgentConfig(name="oracle", env={"AGENT_KEY": "second-canary-literal"})
    verifier = VerifierConfig(env={"VERIFIER_SECRET": "third-canary-literal"})
    result = await bench.run(task, agent, verifier=verifier, secrets=("fourth-canary-literal",))
    assert rewards(result) == 1
    files = [path for path in bench.last.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        content = path.read_bytes()
        for form in (CANARY, "canary-literal"):
            assert form.encode() not in content, path
    assert (bench.last / "agent/oracle.txt").read_text() == "said [REDACTED]\n"
    assert "[REDACTED]" in (bench.last / "agent/encoded").read_text()


async def test_without_verification(bench: Bench, tmp_path: Path) -> None:
    result = await bench.run(write_task(tmp_path / "t"), verifier=VerifierConfig(disable=True))
    assert result.verifier_result is None and result.exception_info is None and result.integrity is None


async def test_a_cancelled_trial_leaves_no_result_and_no_sandbox(bench: Bench, tmp_path: Path) -> None:
    started = asyncio.Event()
    await bench.run(write_task(tmp_path / "first"))
    before = bench.services.backend.lease.held()
    task = write_task(tmp_path / "t", solve="sleep 600")
    spec = TrialSpec("x", task, tmp_path / "x", sandbox=ON_HOST)
    running = asyncio.create_task(
        run_trial(spec, bench.services, lambda phase: started.set() if phase == "agent" else None)
    )
    await asyncio.wait_for(started.wait(), 120)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 120)
    assert not (tmp_path / "x/result.json").exists()
    assert "CancelledError" in (tmp_path / "x/trial.log").read_text()
    assert bench.services.backend.lease.held() == before


async def test_kept_processes(bench: Bench, tmp_path: Path) -> None:
    solve = "touch /app/done; setsid sleep 600 > /dev/null 2>&1 & until grep -qsx sleep /proc/[0-9]*/comm; do :; done"
    test = "#!/bin/bash\ngrep -qsx sleep /proc/[0-9]*/comm; echo $((! $?)) > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "a", solve=solve, test=test)
    kept = await bench.run(task)
    assert rewards(kept) == 1 and kept.integrity is not None
    assert [note.detail.partition(", ")[2] for note in kept.integrity.notes] == ["user 0: sleep 600"]
    asked = await bench.run(task, verifier=VerifierConfig(kill_processes=True))
    assert rewards(asked) == 0 and "processes" in kinds(asked)
    toml = TOML + "[metadata.pier]\nkeep_processes = false\n"
    assert rewards(await bench.run(write_task(tmp_path / "b", toml=toml, solve=solve, test=test))) == 0


async def test_each_phase_has_its_network(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = await bench.services.backend.capabilities()
    if "allowlist" not in capabilities.networks or not capabilities.switch_network:
        pytest.skip("this machine's local backend cannot switch networks")
    switched: list[NetworkPolicy] = []
    switch = LinuxSandbox.set_network

    async def watched(sandbox: LinuxSandbox[Any], policy: NetworkPolicy) -> None:
        switched.append(policy)
        await switch(sandbox, policy)

    monkeypatch.setattr(LinuxSandbox, "set_network", watched)
    agent = '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["allowed.example"]\n'
    task = write_task(tmp_path / "t", toml=TOML.replace("[agent]\n", agent))
    assert rewards(await bench.run(task)) == 1
    assert switched == [NetworkPolicy("allowlist", ("allowed.example",)), NONE]
    switched.clear()
    assert rewards(await bench.run(task, sandbox=SandboxChoice(image="host", network=NONE))) == 1
    assert switched == []


async def test_steps_may_be_graded_apart(bench: Bench, tmp_path: Path) -> None:
    one = '[[steps]]\nname = "one"\nartifacts = ["/app/one"]\n[steps.verifier]\nenvironment_mode = "separate"\n'
    two = '[[steps]]\nname = "two"\nartifacts = ["/app/two"]\n[steps.verifier.environment]\nworkdir = "/elsewhere"\n'
    task = write_task(
        tmp_path / "t",
        toml=TOML + one + two + 'network_mode = "no-network"\n',
        test="#!/bin/bash\nls /app > /logs/verifier/seen; pwd >> /logs/verifier/seen; . /tests/check\n",
        **{f"steps__{name}__instruction.md": "Do it." for name in ("one", "two")},
        **{f"steps__{name}__tests__check": f"cat /app/{name} > /logs/verifier/reward.txt\n" for name in ("one", "two")},
        **{"steps__one__solution__solve.sh": "#!/bin/bash\necho 1 > one\n"},
        **{"steps__two__solution__solve.sh": "#!/bin/bash\ncat one > two\n"},
    )
    result = await bench.run(task)
    assert result.rewards == {"reward": 1}, result.step_results
    seen = [(bench.last / f"steps/{name}/verifier/seen").read_text().split() for name in ("one", "two")]
    assert seen == [["one", "/app"], ["two", "/elsewhere"]]


async def test_what_the_agent_changed_is_kept_as_a_diff(bench: Bench, tmp_path: Path) -> None:
    more = {"environment__a.txt": "one\ntwo\n", "environment__gone.txt": "bye\n", "environment__same.txt": "same\n"}
    task = write_task(tmp_path / "task", **more)
    lines = [
        "sed -i s/two/2/ a.txt; rm gone.txt; touch same.txt done; mkdir -p .git node_modules",
        "echo x > .git/x; echo x > node_modules/x; printf 'token %s' $SECRET_KEY > new.txt; printf 'a\\0b' > blob",
        "ln -s /etc/passwd link; echo out > /tmp/out; chmod 000 new.txt",
    ]
    agent = AgentConfig(name="command", env={"SECRET_KEY": CANARY}, kwargs={"command": "; ".join(lines)})
    result = await bench.run(task, agent)
    assert rewards(result) == 1
    text = (bench.last / "changes.diff").read_text()
    assert "--- a/app/a.txt\n+++ b/app/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n" in text
    assert "-bye\n" in text and "+token [REDACTED]\n" in text and CANARY not in text
    assert "Binary or large file app/blob differs\n" in text and "Empty file /app/done\n" in text
    assert "same" not in text and ".git" not in text and "node_modules" not in text and "/tmp/out" not in text
    assert "root:" not in text


async def test_no_diff_is_kept_without_changes_or_of_the_solution(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", environment__a="a")
    await bench.run(task, "oracle")
    assert not (bench.last / "changes.diff").exists()
    await bench.run(task, AgentConfig(name="command", kwargs={"command": "true"}))
    assert not (bench.last / "changes.diff").exists()


async def test_a_diff_has_limits(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", environment__a="a\n" * 3000)
    script = "seq 9000 > a; head -c 300000 /dev/zero | tr '\\0' x > big; for n in $(seq 300); do echo $n > f$n; done"
    await bench.run(task, AgentConfig(name="command", kwargs={"command": script}))
    text = (bench.last / "changes.diff").read_text()
    assert "@@ -1,3000 +1,9000 @@\n" in text and "Binary or large file app/big differs\n" in text
    assert text.endswith("# 102 more files changed\n")
