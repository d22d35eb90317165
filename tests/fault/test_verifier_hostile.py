"""Agents that try to steer their verdict, and verifiers that misbehave: the verdict stands, and the result says so."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.trial.config import AgentConfig
from pier.trial.record import OUTPUT_LIMIT
from pier.trial.result import TrialResult, read_result
from tests.trial_runs import PASS, TOML, Bench, kinds, open_bench, write_task

pytestmark = pytest.mark.plain
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="a plain user's sandbox cannot write to the host image's /usr")

CHEAT = "echo 1 > /logs/verifier/reward.txt"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path / "trials") as opened:
        yield opened


async def attack(bench: Bench, tmp_path: Path, command: str, *, test: str = PASS, toml: str = TOML) -> TrialResult:
    """Let an agent run `command` on a task that it has not solved."""
    task = write_task(tmp_path / f"task-{bench.count}", test=test, toml=toml)
    result = await bench.run(task, AgentConfig(name="command", kwargs={"command": command}))
    assert result.rewards is not None, result.exception_info
    return result


def stopped(result: TrialResult, kind: str) -> list[str | None]:
    assert result.integrity is not None
    return [note.path for note in result.integrity.notes if note.kind == kind and note.stopped]


async def test_prepared_rewards_and_tests_are_gone(bench: Bench, tmp_path: Path) -> None:
    command = f"{CHEAT}; echo '{{\"reward\": 1}}' > /logs/verifier/reward.json; "
    command += (
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; echo x > /tests/conftest.py"
    )
    test = "#!/bin/bash\nls -A /tests > /logs/verifier/seen\n" + PASS
    result = await attack(bench, tmp_path, command, test=test)
    assert result.rewards == {"reward": 0}
    assert set(stopped(result, "reward")) == {"/logs/verifier/reward.txt", "/logs/verifier/reward.json"}
    assert set(stopped(result, "tests")) == {"/tests/test.sh", "/tests/conftest.py"}
    assert (bench.last / "verifier/seen").read_text().split() == ["test.sh"]


async def test_background_writers_are_dead(bench: Bench, tmp_path: Path) -> None:
    loop = f"while true; do mkdir -p /logs/verifier; {CHEAT}; touch /app/done; rm -rf /tests; done"
    start = f"(setsid sh -c '{loop}' > /dev/null 2>&1 &)"
    command = f"{start}; {start.replace('setsid', 'setsid setsid')}; rm -f /app/done"
    test = "#!/bin/bash\nrm -f /app/done; for i in 1 2 3 4 5; do sleep 0.05; test -e /app/done && break; done\n" + PASS
    toml = TOML + "[metadata.pier]\nkeep_processes = false\n"
    result = await attack(bench, tmp_path, command, test=test, toml=toml)
    assert result.rewards == {"reward": 0}
    assert "processes" in kinds(result)


async def test_background_writers_that_live_do_not_reach_the_verdict(bench: Bench, tmp_path: Path) -> None:
    loop = (
        f"while true; do mkdir -p /logs/verifier; {CHEAT}; rm -rf /tests /logs; mv /tests /old; ln -s /app /tests; done"
    )
    start = f"(setsid sh -c '{loop}' > /dev/null 2>&1 &)"
    test = "#!/bin/bash\nsleep 0.2; ls /tests > /logs/verifier/seen\n" + PASS
    result = await attack(bench, tmp_path, f"{start}; {start}", test=test)
    assert result.rewards == {"reward": 0}
    assert (bench.last / "verifier/seen").read_text() == "test.sh\n"


BENT = {
    "logs is a link": "rm -rf /logs; mkdir -p /app/f/verifier; echo 1 > /app/f/verifier/reward.txt; ln -s /app/f /logs",
    "verifier is a link": "rm -rf /logs/verifier; mkdir /f; echo 1 > /f/reward.txt; ln -s /f /logs/verifier",
    "verifier is a fifo": "rm -rf /logs/verifier; mkfifo /logs/verifier",
    "logs is a file": "rm -rf /logs; echo not a directory > /logs",
    "tests is a link": f"mkdir /app/f; ln -s /app/f /tests; printf '#!/bin/sh\n{CHEAT}' > /app/f/test.sh",
    "rewards are odd": "mkfifo /logs/verifier/reward.txt; ln -s /app/x /logs/verifier/reward.json",
    "modes are odd": "chmod 000 /logs/verifier; chmod 000 /logs",
    "no working directory": "cd /; rm -rf /app",
}
"""What an agent may do to the places that its verifier uses."""


async def test_places_that_were_bent_are_straight_again(bench: Bench, tmp_path: Path) -> None:
    for name, command in BENT.items():
        result = await attack(bench, tmp_path, command)
        assert result.rewards == {"reward": 0}, name
        assert not (bench.last / "verifier").is_symlink(), name


@only_root
async def test_a_replaced_shell_is_put_back(bench: Bench, tmp_path: Path) -> None:
    fake = f"printf '#!/bin/sh\\n{CHEAT}\\nexit 0\\n' > /tmp/fake; chmod 755 /tmp/fake; "
    command = (
        fake + "for p in bash env rm; do f=$(readlink -f $(command -v $p)); cp -p /tmp/fake $f.new; mv $f.new $f; done"
    )
    result = await attack(bench, tmp_path, command)
    assert result.rewards == {"reward": 0}
    assert any(path and path.endswith("/bash") for path in stopped(result, "program"))


@only_root
async def test_programs_before_others_are_removed(bench: Bench, tmp_path: Path) -> None:
    fake = f"printf '#!/bin/sh\\n{CHEAT}\\n' > /usr/local/bin/cat; chmod 755 /usr/local/bin/cat"
    test = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt; cat /etc/hostname > /dev/null\n"
    result = await attack(bench, tmp_path, fake, test=test)
    assert result.rewards == {"reward": 0}
    assert stopped(result, "program") == ["/usr/local/bin/cat"]


@only_root
async def test_modules_that_python_starts_with_are_removed(bench: Bench, tmp_path: Path) -> None:
    find = "import sysconfig, importlib.util as u; s = u.find_spec('sitecustomize'); "
    find += "print(s.origin if s else sysconfig.get_path('purelib') + '/sitecustomize.py')"
    command = f'f=$(readlink -m $(python3 -c "{find}")); mkdir -p ${{f%/*}}; echo "import os; os._exit(0)" > $f; '
    command += "python3 -c 'raise SystemExit(3)'"
    test = "#!/bin/bash\npython3 -c 'raise SystemExit(3)'; echo $((! $?)) > /logs/verifier/reward.txt\n"
    result = await attack(bench, tmp_path, command, test=test)
    assert result.exception_info is None, "the planted module did not work for the agent itself"
    assert result.rewards == {"reward": 0}
    assert any(path and path.endswith("sitecustomize.py") for path in stopped(result, "startup"))


@only_root
async def test_libraries_for_every_program_are_removed(bench: Bench, tmp_path: Path) -> None:
    command = "echo /app/evil.so > /etc/ld.so.preload; echo x > /app/evil.so"
    test = "#!/bin/bash\ntest -s /etc/ld.so.preload; echo $((! $?)) > /logs/verifier/reward.txt\n"
    result = await attack(bench, tmp_path, command, test=test)
    assert result.rewards == {"reward": 0}
    assert stopped(result, "loader") == ["/etc/ld.so.preload"]


async def test_planted_test_settings_are_noted(bench: Bench, tmp_path: Path) -> None:
    result = await attack(bench, tmp_path, "touch /app/conftest.py /app/pytest.ini /conftest.py; touch /app/other.py")
    assert result.rewards == {"reward": 0} and result.integrity is not None and result.integrity.compared
    found = {note.path: note.stopped for note in result.integrity.notes if note.kind == "pytest"}
    assert found == {"/app/conftest.py": False, "/app/pytest.ini": False, "/conftest.py": True}


async def test_names_that_are_no_text_break_nothing(bench: Bench, tmp_path: Path) -> None:
    command = (
        'd=$(printf \'/app/\\377\\033[31m\'); mkdir -p "$d"; touch "$d/conftest.py" "/logs/agent/$(printf \'x\\376\')"'
    )
    result = await attack(bench, tmp_path, command)
    assert result.rewards == {"reward": 0} and "pytest" in kinds(result)
    assert read_result(bench.last).rewards == {"reward": 0}


async def test_the_agents_variables_do_not_reach_the_verifier(bench: Bench, tmp_path: Path) -> None:
    test = "#!/bin/bash\nenv > /logs/verifier/env; echo 0 > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "t", test=test)
    env = {"LD_PRELOAD": "", "BASH_ENV": "/app/x", "PYTHONPATH": "/app", "PATH": "/app/bin:/usr/bin:/bin"}
    agent = AgentConfig(name="command", kwargs={"command": "mkdir -p /app/bin; true"}, env=env)
    assert (await bench.run(task, agent)).rewards == {"reward": 0}
    seen = (bench.last / "verifier/env").read_text()
    assert "/app" not in seen.replace("PWD=/app\n", "") and "LD_PRELOAD" not in seen


async def test_what_the_environment_brought_is_not_the_agents(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", **{"environment__conftest.py": "x", "environment__pytest.ini": "y"})
    result = await bench.run(task, "nop")
    assert result.rewards == {"reward": 0} and kinds(result) == set()


async def ungraded(bench: Bench, tmp_path: Path, test: str, *, toml: str = TOML) -> TrialResult:
    task = write_task(tmp_path / f"task-{bench.count}", test=f"#!/bin/bash\n{test}\n", toml=toml)
    result = await bench.run(task)
    assert result.rewards is None and result.exception_info is not None
    assert result.exception_info.blame == "task" and result.exception_info.phase == "verify"
    return result


NO_VERDICT = {
    "true": "RewardFileNotFoundError",
    "exit 9": "RewardFileNotFoundError",
    "rm -rf /logs": "RewardFileNotFoundError",
    "touch /logs/verifier/reward.txt": "RewardFileEmptyError",
    "echo NaN > /logs/verifier/reward.txt": "VerifierOutputParseError",
    "echo '{\"reward\": Infinity}' > /logs/verifier/reward.json": "VerifierOutputParseError",
    "echo '{\"\\ud800\": 1}' > /logs/verifier/reward.json": "VerifierOutputParseError",
    "truncate -s 1G /logs/verifier/reward.txt": "VerifierOutputParseError",
    "mkfifo /logs/verifier/reward.txt": "VerifierOutputParseError",
    "ln -s /etc/hostname /logs/verifier/reward.txt": "VerifierOutputParseError",
    "mkdir /logs/verifier/reward.txt": "VerifierOutputParseError",
    "mkdir /x; echo 1 > /x/reward.txt; rm -rf /logs/verifier; ln -s /x /logs/verifier": "VerifierOutputParseError",
}
"""What a verifier may do instead of giving a verdict, and what its trial's error is called."""


async def test_no_usable_verdict_is_no_reward(bench: Bench, tmp_path: Path) -> None:
    for test, name in NO_VERDICT.items():
        result = await ungraded(bench, tmp_path, test)
        assert result.exception_info is not None and result.exception_info.exception_type == name, test
        assert (bench.last / "exception.txt").exists()


async def test_a_verifier_that_hangs_is_ended(bench: Bench, tmp_path: Path) -> None:
    toml = TOML.replace("[verifier]\ntimeout_sec = 120", "[verifier]\ntimeout_sec = 1")
    result = await ungraded(bench, tmp_path, f"{CHEAT}; (setsid sleep 600 &); sleep 600", toml=toml)
    assert result.exception_info is not None and result.exception_info.exception_type == "VerifierTimeoutError"


async def test_a_verifier_that_floods_is_capped(bench: Bench, tmp_path: Path) -> None:
    size = OUTPUT_LIMIT + 8 * 1024 * 1024
    task = write_task(tmp_path / "t", test=f"#!/bin/bash\nhead -c {size} /dev/zero\n{PASS}")
    result = await bench.run(task)
    assert result.rewards == {"reward": 1}
    kept = bench.last / "verifier/test-stdout.txt"
    assert OUTPUT_LIMIT < kept.stat().st_size < OUTPUT_LIMIT + 200
    assert kept.read_bytes()[-60:].endswith(b"more bytes were not kept]\n")


async def test_a_verifiers_exit_code_and_left_overs_do_not_count(bench: Bench, tmp_path: Path) -> None:
    test = f"#!/bin/bash\n{CHEAT}\n(setsid sleep 600 > /dev/null 2>&1 &)\nexit 1\n"
    result = await bench.run(write_task(tmp_path / "t", test=test))
    assert result.rewards == {"reward": 1}
    assert "processes" in kinds(result)


async def test_a_disagreement_is_told(bench: Bench, tmp_path: Path) -> None:
    test = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\necho '{\"reward\": 0.5}' > /logs/verifier/reward.json\n"
    result = await bench.run(write_task(tmp_path / "t", test=test))
    assert result.rewards == {"reward": 0.5}
    assert "disagreement" in kinds(result)
