"""Attacks on the grade: by what an agent leaves running, and by what a separate verifier collects."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path

import pytest

from pier.sandbox.contract import Change, Mount, Sandbox
from pier.sandbox.linux.sandbox import LinuxSandbox
from pier.task import Task
from pier.tree import Tree
from pier.trial.config import AgentConfig, EnvironmentConfig
from pier.trial.result import TrialResult
from pier.trial.spec import SandboxChoice
from pier.verifier.changes import judge, judge_artifact
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import PASS, TOML, Bench, write_task

REFUSED = {"EACCES", "EPERM", "EBUSY", "EROFS", "ENOENT"}
SURVIVOR = Path(__file__).with_name("survivor.py").read_text()
ASK = """\
exec 3<>/dev/tcp/127.0.0.1/8000
printf 'GET /answer HTTP/1.0\\r\\n\\r\\n' >&3
case "$(cat <&3)" in *forty-two*) echo 1 ;; *) echo 0 ;; esac > /logs/verifier/reward.txt
"""
"""Asks the agent's server."""
BECOME = """\
{} -c 'import os; os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000); \
os.execvp("sleep", ["sleep", "8888"])' &
until tr '\\0' ' ' < /proc/$!/cmdline | grep -qx 'sleep 8888 '; do sleep 0.05; done
"""
"""Starts a child that runs as another user."""


def has_domains() -> bool:
    """Whether the kernel has Landlock with scopes."""
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 6


def python(place: str) -> str:
    """How to run Python in a sandbox; the image of containers has none, and gets this machine's mounted."""
    return "env LD_LIBRARY_PATH=/py/lib/$(uname -m)-linux-gnu PYTHONHOME=/py /py/bin/python3" * (place == "docker") or (
        "python3"
    )


def serve(place: str) -> str:
    """Shell lines that start a server in the background and wait until it answers."""
    return f"""\
mkdir -p /app/www; echo forty-two > /app/www/answer
setsid {python(place)} -m http.server 8000 --bind 127.0.0.1 --directory /app/www < /dev/null > /dev/null 2>&1 &
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2> /dev/null; do sleep 0.05; done
"""


async def run(bench: Bench, place: str, task: Task) -> TrialResult:
    mounts = (Mount("/py", Path("/usr")),) if place == "docker" else ()
    return await bench.run(task, sandbox=SandboxChoice(image=bench.image, mounts=mounts))


def survivors(result: TrialResult) -> list[str]:
    assert result.integrity is not None
    return [note.detail for note in result.integrity.notes if note.kind == "processes" and not note.stopped]


@route("grading", "a survivor opens /proc/PID/root, cwd, fd, environ, maps or mem of the verifier", "permission denied")
@route("grading", "a survivor joins the verifier's mount namespace with setns", "permission denied")
@route("grading", "a survivor attaches to the verifier with ptrace", "permission denied")
@route(
    "grading", "a survivor uses process_vm_readv, process_vm_writev or pidfd_getfd on the verifier", "permission denied"
)
@route(
    "grading",
    "a survivor traces a child of the verifier that became the survivor's user",
    "permission denied (Linux 6.12 or later)",
)
@route("grading", "a survivor stops or kills the verifier", "not permitted (Linux 6.12 or later)")
@route(
    "grading",
    "a survivor takes CPU time, memory or open files away from the verifier by its limits, priority or CPUs",
    "not permitted",
)
@route(
    "grading",
    "a survivor reads mapped files, registers, stack or counters of the verifier in /proc",
    "permission denied",
)
@route("grading", "a survivor renames, removes or mounts over /tests or /logs/verifier", "the kernel refuses")
@route("grading", "a survivor writes a reward through a directory or cwd that it held open", "nothing reads that place")
@route("grading", "a survivor watches /tests and /logs/verifier with inotify", "it sees no event of the verifier")
@route("grading", "an agent leaves a server running that the tests ask", "it answers, and the result lists it")
@everywhere
@pytest.mark.parametrize("user", ["root", "1000"])
async def test_survivors_do_not_reach_the_verifier(place: str, user: str, tmp_path: Path) -> None:
    solve = f"""\
mkdir -p /app/out /tests /logs/verifier; chmod 777 /app/out
{serve(place)}
setsid sleep 7777 < /dev/null > /dev/null 2>&1 &
for uid in 0 1000; do
  setsid {python(place)} /solution/survivor.py /app/out $uid < /dev/null > /app/out/log-$uid 2>&1 &
  until test -e /app/out/ready-$uid; do sleep 0.05; done
done
"""
    wait = "for i in $(seq 100); do test -e /app/out/0.json -a -e /app/out/1000.json && break; sleep 0.1; done\n"
    test = f"#!/bin/bash\n{BECOME.format(python(place)) if user == 'root' else ''}touch /app/out/go\n"
    test += f"{wait}cp /app/out/* /logs/verifier/\n{ASK}"
    toml = TOML.replace("[verifier]", f'[verifier]\nuser = "{user}"')
    task = write_task(tmp_path / "task", toml=toml, solve=solve, test=test, **{"solution__survivor.py": SURVIVOR})
    async with open_place(place, tmp_path / "trials") as bench:
        if user != "root" and not (await bench.services.backend.capabilities()).users:
            pytest.skip("this machine's sandboxes have one user only")
        result = await run(bench, place, task)
        assert result.rewards == {"reward": 1}, result.exception_info
        attached = []
        for uid in ("0", "1000"):
            report = json.loads((bench.last / f"verifier/{uid}.json").read_text())
            assert report.pop("inotify") == "nothing"
            siblings = {name: report.pop(name) for name in list(report) if name.startswith("sibling: ")}
            attached.append(siblings["sibling: ptrace attach"])
            if uid == "0":
                for way in ("fd", "environ", "maps", "pidfd_getfd"):
                    assert siblings[f"sibling: {way}"].startswith("got"), "the routes work on processes of the agent"
            others = {name: report.pop(name) for name in list(report) if name.startswith("other user: ")}
            assert bool(others) == (user == "root")
            for way in ("CPUs", "priority", "policy"):  # what costs it time, and gains no reward
                others.pop(f"other user: {way}", None)
            workers = [name for name in report if name == "pier-worker: signal"]
            for name in workers if has_domains() else [name for name in report if name.endswith(": signal")]:
                del report[name]
            if has_domains():
                report |= others
            assert any(name.startswith("test.sh: ") for name in report)
            assert {name: what for name, what in report.items() if what not in REFUSED} == {}
        assert "got attached" in attached
        assert sum("http.server" in line for line in survivors(result)) == 1
        assert sum("survivor.py" in line for line in survivors(result)) == 2


EAT = """
for p in /proc/[0-9]*; do echo 1000 > $p/oom_score_adj; done 2> /dev/null
for i in $(seq 100); do { head -c 1500000 /dev/zero; sleep 600; } 2> /dev/null | tail -c 1500000 > /dev/null 2>&1 & done
sleep 3
"""


@route(
    "grading",
    "an agent, or what it leaves running, has what serves the sandbox or the tests killed for its memory",
    "the tests run again; the zero stands",
)
@everywhere
@pytest.mark.parametrize("survives", [False, True])
async def test_memory_that_kills_the_verifier_loses_no_zero(place: str, survives: bool, tmp_path: Path) -> None:
    later = (
        f"setsid bash -c 'until [ -e /tmp/go ]; do sleep 0.02; done\n{EAT}\nsleep 100' < /dev/null > /dev/null 2>&1 &"
    )
    test = "#!/bin/bash\ntouch /tmp/go; sleep 4; echo 0 > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        agent = AgentConfig(name="command", kwargs={"command": ["bash", "-c", later if survives else EAT]})
        where = SandboxChoice(EnvironmentConfig(override_memory_mb=64), image=bench.image)
        result = await bench.run(write_task(tmp_path / "t", test=test), agent, sandbox=where)
    error = result.exception_info
    assert result.rewards == {"reward": 0} and (error is None or error.blame == "agent"), error


@route("grading", "a survivor plants a file for the tests while they run", "the result notes it")
@everywhere
async def test_planting_while_the_tests_run_is_noted(place: str, tmp_path: Path) -> None:
    plant = (
        "until grep -qs /tests/test[.]sh /proc/[0-9]*/cmdline; do :; done; echo x > /conftest.py; touch /app/planted"
    )
    solve = f"setsid bash -c '{plant}; sleep 600' < /dev/null > /dev/null 2>&1 &"
    wait = "for i in $(seq 100); do test -e /app/planted && break; sleep 0.1; done\n"
    test = f"#!/bin/bash\n{wait}echo 1 > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "task", solve=solve, test=test))
    assert result.rewards == {"reward": 1} and result.integrity is not None
    (note,) = (note for note in result.integrity.notes if note.kind == "pytest")
    assert note.path == "/conftest.py" and not note.stopped and "while processes of the agent ran" in note.detail


@route("grading", "a survivor has a secret in its command line", "the result lists it without the secret")
@everywhere
async def test_survivors_are_listed_without_secrets(place: str, tmp_path: Path) -> None:
    long = "x" * 1000
    survivor = (
        f"(setsid bash -c 'touch /tmp/up; sleep 600; true' canary-of-a-secret {long} < /dev/null > /dev/null 2>&1 &)"
    )
    solve = f"{survivor}\nuntil [ -e /tmp/up ]; do sleep 0.05; done"
    task = write_task(tmp_path / "task", solve=solve, test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(task, secrets=("canary-of-a-secret",))
    (line,) = (line for line in survivors(result) if "bash -c" in line)
    assert "user 0: bash -c touch /tmp/up; sleep 600; true [REDACTED] xxx" in line and len(line) < 400


STEPS = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'


@route(
    "grading", "an agent of a later step looks for the tests of an earlier one", "neither files nor processes are left"
)
@everywhere
async def test_a_service_lives_through_steps(place: str, tmp_path: Path) -> None:
    """The agent's server answers the tests of both steps; of the first step's verifier nothing is left."""
    look = """\
ls -A /tests /logs/verifier > /app/seen 2>&1
for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; ls $p/root/tests; done >> /app/seen 2> /dev/null
"""
    first = "(setsid sleep 4321 < /dev/null > /dev/null 2>&1 &)\necho secret-of-step-one > /tests/left\n"
    second = "cp /app/seen /logs/verifier/\n"
    task = write_task(
        tmp_path / "task",
        toml=TOML + STEPS,
        test="",
        **{f"steps__{name}__instruction.md": "Do it." for name in ("one", "two")},
        steps__one__tests__test_of_one="",
        **{"steps__one__tests__test.sh": f"#!/bin/bash\n{first}{ASK}"},
        **{"steps__two__tests__test.sh": f"#!/bin/bash\n{second}{ASK}"},
        **{"steps__one__solution__solve.sh": f"#!/bin/bash\n{serve(place)}"},
        **{"steps__two__solution__solve.sh": f"#!/bin/bash\n{look}"},
    )
    async with open_place(place, tmp_path / "trials") as bench:
        result = await run(bench, place, task)
        assert [step.verifier_result and step.verifier_result.rewards for step in result.step_results or []] == [
            {"reward": 1},
            {"reward": 1},
        ], result.step_results
        seen = (bench.last / "steps/two/verifier/seen").read_text()
    assert "http.server" in seen
    assert "sleep 4321" not in seen and "test.sh" not in seen and "test_of_one" not in seen and "left" not in seen


@route(
    "grading", "the backend cannot isolate a verifier", "what the agent left running is killed, and the result says so"
)
@everywhere
async def test_without_isolation_everything_is_killed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinuxSandbox, "isolate", Sandbox.isolate)
    await _killed(place, tmp_path, "cannot be isolated")


@route(
    "grading",
    "tests are too large to be kept in memory away from survivors",
    "survivors are killed, and the result says so",
)
@everywhere
async def test_large_tests_are_not_isolated(place: str, tmp_path: Path) -> None:
    await _killed(place, tmp_path, "too large", large=65 << 20, memory=256)


async def _killed(place: str, tmp_path: Path, why: str, large: int = 0, memory: int | None = None) -> None:
    solve = "(setsid sleep 4321 < /dev/null > /dev/null 2>&1 &)"
    test = "#!/bin/bash\ngrep -qsx sleep /proc/[0-9]*/comm; echo $? > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(tmp_path / "task", solve=solve, test=test, tests__data="")
        os.truncate(task.steps[0].tests[0] / "data", large)
        result = await bench.run(
            task, sandbox=SandboxChoice(image=bench.image, settings=EnvironmentConfig(override_memory_mb=memory))
        )
    assert result.rewards == {"reward": 1} and result.integrity is not None, result.exception_info
    (note,) = result.integrity.notes
    assert note.kind == "processes" and note.stopped and why in note.detail and note.detail.endswith(": 1")


SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')


async def graded(bench: Bench, root: Path, solve: str, test: str, artifacts: str = '["/app/out"]') -> TrialResult:
    task = write_task(root, toml=f"artifacts = {artifacts}\n{SEPARATE}", solve=solve, test=f"#!/bin/bash\n{test}\n")
    return await bench.run(task)


def noted(result: TrialResult) -> dict[str | None, tuple[str, bool]]:
    assert result.integrity is not None
    return {note.path: (note.kind, note.stopped) for note in result.integrity.notes}


@everywhere
@route(
    "grading",
    "point links of an artifact into /tests or the verifier's image",
    "these links are left out and noted; the answer is missing",
)
async def test_links_into_the_verifiers_own_files(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = (
            "mkdir -p /app/out/sub; cd /app/out; ln -s /tests/answer answer; ln -s /etc/passwd sub/passwd;"
            "ln -s ../../../tests/answer sub/up; ln -s sub/../../../tests/answer detour; ln -s /app/out/../../tests abs"
        )
        task = write_task(
            tmp_path / "t",
            toml=f'artifacts = ["/app/out"]\n{SEPARATE}',
            solve=solve,
            test="#!/bin/bash\nls /app/out /app/out/sub; cmp /app/out/answer /tests/answer\n"
            "echo $((! $?)) > /logs/verifier/reward.txt\n",
            tests__answer="42\n",
        )
        result = await bench.run(task)
        assert result.rewards == {"reward": 0}
        names = ("answer", "sub/passwd", "sub/up", "detour", "abs")
        assert noted(result) == {f"/app/out/{name}": ("link", True) for name in names}


@everywhere
@route(
    "grading",
    "use links inside of an artifact that stay in it",
    "they come to the verifier as they are, without a note",
)
async def test_links_that_stay_in_their_artifact(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = (
            "mkdir -p /app/out/a/b; cd /app/out; echo 1 > a/file; ln -s a/file one; ln -s ../file a/b/two;"
            "ln -s /app/out/a three; ln -s three/b/two four; ln -s missing dangling"
        )
        test = "cd /app/out; cat one a/b/two three/file four; test -L dangling && cat four > /logs/verifier/reward.txt"
        result = await graded(bench, tmp_path / "t", solve, test)
        assert result.rewards == {"reward": 1} and noted(result) == {}


@everywhere
@route(
    "grading",
    "put modules, start-up files or settings of the test runner into an artifact",
    "they come along, since projects have their own, and each is noted",
)
async def test_files_that_shadow_the_runner_are_noted(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        steering = {
            "pytest/__main__.py": "module",
            "random.py": "module",
            "json/__init__.py": "module",
            "conftest.py": "pytest",
            "sub/pytest.ini": "pytest",
            "sitecustomize.py": "startup",
            "venv/lib/python3.12/site-packages/x.pth": "startup",
            "jest.config.js": "runner",
            "node_modules/.bin/jest": "runner",
            "pyproject.toml": "runner",
            "evil.dist-info/entry_points.txt": "runner",
            "pkg/pytest.py": "module",
            "dotted/pyproject.toml": "runner",
            "inline/pyproject.toml": "runner",
            "returns/tox.ini": "runner",
            "evil.egg-info/entry_points.txt": "runner",
            "escaped/package.json": "runner",
            "sub/.pytest.toml": "pytest",
            "odd.dist-info/entry_points.txt": "runner",
            "usercustomize/__init__.py": "startup",
            ".npmrc": "runner",
            "sub/phpunit.dist.xml": "runner",
        }
        harmless = [
            "model.pth",
            "pkg/__init__.py",
            "pkg/types.py",
            "code/solution.py",
            "tests/test_x.py",
            "package.json",
            "__init__.py",
            "pkg/pyproject.toml",
        ]
        files = " ".join(f"/app/{name}" for name in (*steering, *harmless))
        sections = {
            "pyproject.toml": "[tool.pytest.ini_options]",
            "evil.dist-info/entry_points.txt": "[pytest11]",
            "evil.egg-info/entry_points.txt": " [pytest11]",
            "odd.dist-info/entry_points.txt": "[]pytest11[]",
            "dotted/pyproject.toml": 'tool.pytest.ini_options.addopts = "-x"',
            "inline/pyproject.toml": 'tool = {"p\\u0079test" = {ini_options = {addopts = "-x"}}}',
            "pkg/pyproject.toml": '[tool.poetry]\n[dependency-groups]\ndev = ["pytest"]',
            "returns/tox.ini": "[tox]\r[pytest]\raddopts=-x",
            "escaped/package.json": '{"je\\u0073t": {}}',
            "package.json": '{"devDependencies": {"jest": "^29"}}',
        }
        solve = f"for f in {files}; do mkdir -p ${{f%/*}}; echo x > $f; done"
        for name, text in sections.items():
            solve += f"; printf '%s\\n' '{text}' > /app/{name}"
        test = f"for f in {files}; do test -f $f || exit; done; echo 1 > /logs/verifier/reward.txt"
        result = await graded(bench, tmp_path / "t", solve, test, '["/app"]')
        assert result.rewards == {"reward": 1}, "nothing is taken away"
        assert noted(result) == {f"/app/{name}": (kind, False) for name, kind in steering.items()}


@route(
    "grading",
    "give modules or settings of the test runner another name in an artifact, and a link to it their own",
    "they come along, and each link is noted",
)
@pytest.mark.plain
def test_links_to_what_steers_the_runner_are_noted(tmp_path: Path) -> None:
    top = tmp_path / "kept" / "top"
    (top / "stuff").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "settings.txt"):
        (top / "stuff" / name).write_text("")
    names = {
        **dict.fromkeys(("pytest", "json", "pytest_evil"), "module"),
        **dict.fromkeys(("pyproject.toml", "package.json", "node_modules", "x.dist-info", "site-packages"), "runner"),
        "sitecustomize": "startup",
        "conftest.py": "pytest",
    }
    for name in (*names, "current", "docs", "data.json"):
        (top / name).symlink_to("stuff/settings.txt" if name.endswith((".toml", ".json", ".py")) else "stuff")
    with Tree(tmp_path / "kept") as kept:
        judged = judge_artifact(kept, "top", "/app")
    assert not judged.left_out and {note.path: note.kind for note in judged.notes} == {
        f"/app/{name}": kind for name, kind in names.items()
    }


@route(
    "grading",
    "plant a module that every Python imports in the form of a package, of compiled code or of a link",
    "undone before the tests run",
)
@pytest.mark.plain
def test_startup_modules_of_every_form_are_undone() -> None:
    place = "/usr/lib/python3/dist-packages"
    names = ("sitecustomize/__init__.py", "usercustomize", "sitecustomize.cpython-312-x86_64-linux-gnu.so")
    for name in (*names, "sitecustomize.pyc", "usercustomize.abi3.so", "sitecustomize/__init__.abi3.so"):
        (found,) = judge([Change(f"{place}/{name}", "added")], workdir="/app")
        assert (found.kind, found.action) == ("startup", "remove")
    assert judge([Change(f"{place}/sites/customize.py", "added")], workdir="/app") == []


@route("grading", "link the name of a module to a directory elsewhere, in the working directory", "noted")
@pytest.mark.plain
@pytest.mark.parametrize("name", ["pytest", "json", "pytest_evil"])
def test_links_in_the_working_directory_are_noted(name: str) -> None:
    (found,) = judge([Change(f"/app/{name}", "added")], workdir="/app")
    assert (found.kind, found.action) == ("module", "note")
    assert judge([Change(f"/app/src/{name}", "added"), Change("/app/current", "added")], workdir="/app") == []


@route(
    "faults",
    "hand over an artifact with many configuration files that take long to parse",
    "2 MiB of them are looked into, the others are noted",
)
@pytest.mark.plain
def test_configuration_files_take_little_time(tmp_path: Path) -> None:
    """Each of them takes about a second, in the process that serves all trials."""
    slow = b"a=[" + b"1," * 65_000 + b"]"
    for number in range(60):
        place = tmp_path / "kept" / "top" / str(number)
        place.mkdir(parents=True)
        (place / "pyproject.toml").write_bytes(slow)
    began = time.process_time()
    with Tree(tmp_path / "kept") as kept:
        judged = judge_artifact(kept, "top", "/app")
    assert time.process_time() - began < 30
    (detail,) = {(note.kind, note.detail) for note in judged.notes}
    assert detail == ("runner", "it may configure a test runner") and 40 <= len(judged.notes) < 60


@everywhere
@route(
    "grading",
    "put a reward or tests into an artifact that covers /logs or /",
    "they do not reach the verifier, and are noted",
)
async def test_an_artifact_that_covers_the_verifiers_places(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = "echo 1 > /logs/verifier/reward.txt; echo mine > /logs/mine"
        test = "ls -R /logs; test -e /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
        result = await graded(bench, tmp_path / "t", solve, test, '["/logs"]')
        assert result.rewards == {"reward": 0}
        assert noted(result)["/logs/verifier/reward.txt"] == ("tests", True)
        assert "mine" in (bench.last / "verifier/test-stdout.txt").read_text()
        result = await graded(bench, tmp_path / "root", "touch /app/done", PASS, '["/"]')
        assert result.rewards == {"reward": 0} and noted(result) == {}, result.exception_info
        (row,) = (
            row for row in json.loads((bench.last / "artifacts/manifest.json").read_text()) if row["source"] == "/"
        )
        assert row["status"] == "skipped"


HOSTILE = r"""
truncate -s 999999999999 sparse; mkfifo fifo; ln -s /etc/shadow shadow; ln -s /proc/self/environ env; ln -s / root
printf x > "$(printf 'name\n+++ b-etc')"; printf x > "$(printf 'esc\033[2J')"; printf x > "$(printf '\377bad')"
echo closed > none; chmod 0 none; mkdir -p /logs/agent/changes.diff; touch done
"""


@route("grading", "fifos, sparse files, links and names with newlines in the working directory", "the diff lists them")
@everywhere
async def test_a_hostile_working_directory_is_kept_as_a_diff(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(tmp_path / "t", test=PASS)
        result = await bench.run(task, AgentConfig(name="command", kwargs={"command": HOSTILE}))
        assert result.rewards == {"reward": 1} and result.exception_info is None
        assert result.pier is not None and result.pier.warnings == []
        lines = (bench.last / "changes.diff").read_text().splitlines()
        for name in ("sparse", "fifo", "shadow", "env", "root"):
            assert f"Binary or large file app/{name} differs" in lines
        assert r"+++ b/app/name\n+++ b-etc" in lines and r"+++ b/app/esc\x1b[2J" in lines
        assert "+closed" in lines and not any("root:" in line for line in lines)
