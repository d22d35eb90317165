"""Task directories: steps in one shape, digests as Harbor's, links that lead out refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import TaskError
from pier.task import load_task
from pier.task.check import Problem, create_task, lint
from pier.task.load import DEFAULT_PATTERNS, is_left_over, read_patterns
from tests.trial_runs import PASS, TOML, write_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"

STEPS = (
    TOML
    + """
[[verifier.collect]]
command = "task"
[[steps]]
name = "one"
[steps.agent]
timeout_sec = 5
[[steps]]
name = "two"
min_reward = {a = 0.5}
[steps.verifier]
environment_mode = "separate"
env = {B = "2"}
[[steps.verifier.collect]]
command = "step"
"""
)


def test_a_task_without_steps_has_one_nameless_step(tmp_path: Path) -> None:
    task = write_task(tmp_path / "plain")
    (step,) = task.steps
    assert (step.name, step.instruction, step.verifier_mode) == ("", "Do it.\n", "shared")
    assert step.tests == (task.path / "tests",)
    assert step.solution == task.path / "solution"
    assert (task.name, task.short_name, task.is_multi_step) == ("plain", "plain", False)


def test_steps_take_over_what_the_task_says(tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "t",
        toml=STEPS.replace("[verifier]\n", '[verifier]\nenv = {A = "1"}\n'),
        steps__one__instruction_md="",
        **{"steps__one__instruction.md": "First.", "steps__two__instruction.md": "Second."},
        **{"steps__two__tests__more.sh": "x", "steps__one__workdir__setup.sh": "true"},
    )
    one, two = task.steps
    assert (one.agent.timeout_sec, two.agent.timeout_sec) == (5, 120)
    assert (one.verifier.timeout_sec, two.verifier.timeout_sec) == (120, 120)
    assert (one.verifier_mode, two.verifier_mode) == ("shared", "separate")
    assert two.verifier.env == {"A": "1", "B": "2"}
    assert [hook.command for hook in two.collect] == ["task", "step"]
    assert two.tests == (task.path / "tests", task.path / "steps/two/tests")
    assert one.workdir == task.path / "steps/one/workdir" and two.workdir is None
    assert two.min_reward == {"a": 0.5}


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("task.toml", "task.toml"),
        ("instruction.md", "instruction.md"),
        ("tests/test.sh", "tests/test.sh"),
        ("environment", "environment"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, gone: str, named: str) -> None:
    write_task(tmp_path / "t")
    path = tmp_path / "t" / gone
    path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(TaskError, match=named):
        load_task(tmp_path / "t")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('[environment.env]\n"" = "1"', "environment.env: invalid variable name ''"),
        ('[solution.env]\n"A=B" = "1"', "solution.env: invalid variable name 'A=B'"),
        ('[solution.env]\nA = "a\\u0000b"', "NUL"),
        ('[[environment.mcp_servers]]\nname = "a\\u0000"\nurl = "http://x"', "NUL"),
    ],
)
def test_what_no_process_can_be_given_is_the_tasks_fault(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        write_task(tmp_path / "task", toml=f"{TOML}{more}\n")
    assert said in caught.value.message and caught.value.blame == "task"


@pytest.mark.parametrize(("text", "said"), [(b"do \0 it", "NUL"), (b"do \xed\xa0\xbd it", "cannot be read")])
def test_an_instruction_that_no_agent_can_be_given_is_the_tasks_fault(tmp_path: Path, text: bytes, said: str) -> None:
    write_task(tmp_path / "task")
    (tmp_path / "task" / "instruction.md").write_bytes(text)
    with pytest.raises(TaskError, match=said):
        load_task(tmp_path / "task")


def test_tests_are_not_needed_when_nothing_is_verified_or_the_image_brings_them(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_task(root)
    (root / "tests" / "test.sh").unlink()
    assert load_task(root, verify=False).steps[0].test_script is None
    (root / "task.toml").write_text(
        TOML.replace("[environment]", '[verifier.environment]\ndocker_image="v"\n[environment]')
    )
    step = load_task(root).steps[0]
    assert step.verifier_environment.bundled and step.verifier_mode == "separate"


def test_links_may_not_lead_out(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_task(root)
    (root / "environment" / "inside").symlink_to("../instruction.md")
    load_task(root)
    (root / "tests" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="tests/secret"):
        load_task(root)
    (root / "tests" / "secret").unlink()
    (root / "tests" / "loop").symlink_to("loop")
    with pytest.raises(TaskError, match="loop"):
        load_task(root)


def test_the_digest_is_harbors(tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "t", **{"environment__a.pyc": "ignored", "environment__b~": "ignored", "other": "no part"}
    )
    lines = ""
    for name in sorted(["task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh"]):
        lines += f"{name}\0{hashlib.sha256((task.path / name).read_bytes()).hexdigest()}\n"
    assert task.digest == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    (task.path / "other").write_text("changed")
    assert load_task(task.path).digest == task.digest
    (task.path / "tests" / "test.sh").write_text("changed")
    assert load_task(task.path).digest != task.digest


def test_a_gitignore_replaces_the_usual_list() -> None:
    rules = read_patterns(
        ["# comment", "", "*.log", "!keep.log", "/top", "build/", "a/**/z", "\\#x", "q?.[ab]", "sp\\ "]
    )
    ignored = [
        "x.log",
        "deep/x.log",
        "top",
        "top/below",
        "build/x",
        "deep/build/x",
        "a/z",
        "a/b/c/z",
        "#x",
        "q1.a",
        "sp ",
    ]
    kept = ["keep.log", "deep/top", "build", "b/z", "q1.c", "q12.a", "comment"]
    assert [name for name in ignored if not rules.match_file(name)] == []
    assert [name for name in kept if rules.match_file(name)] == []


@given(st.lists(st.text(max_size=12), max_size=5), st.text(min_size=1, max_size=12))
def test_any_gitignore_can_be_read(lines: list[str], path: str) -> None:
    assert read_patterns(lines).match_file(path) in (True, False)


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_examples_are_clean(path: Path) -> None:
    assert lint(path) == []
    assert load_task(path, strict=True).name.startswith("pier/")


def test_a_new_task_is_clean(tmp_path: Path) -> None:
    create_task(tmp_path / "my task!")
    assert lint(tmp_path / "my task!") == []
    assert load_task(tmp_path / "my task!").name == "local/my-task"
    with pytest.raises(TaskError, match="not empty"):
        create_task(tmp_path / "my task!")


def test_lint_names_file_and_key(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_task(
        root, toml='version = "1"\n[environment]\nmemroy = "1G"\n', test="echo 1 > /logs/verifier/rewards.json\n"
    )
    found = {problem.where.removeprefix(f"{root.resolve()}/"): problem.message for problem in lint(root)}
    found = {where.removeprefix(f"{root}/"): message for where, message in found.items()}
    assert "did you mean environment.memory?" in found["task.toml: environment.memroy"]
    assert "schema_version" in found["task.toml: version"]
    assert "rewards.json" in found["tests/test.sh"]
    assert "docker_image" in found["environment"]
    assert any("network_mode" in where for where in found)
    (root / "task.toml").write_text("[agent]\ntimeout_sec = 'x'\n")
    (problem,) = lint(root)
    assert problem.level == "error" and "agent.timeout_sec" in problem.message


def rules(root: Path) -> dict[str, str]:
    """The rules that a task breaks, with the place of the last finding each."""
    return {problem.rule: problem.where.removeprefix(f"{root.resolve()}/") for problem in lint(root)}


def test_lint_reads_the_dockerfile(tmp_path: Path) -> None:
    broken = "FROM x\nRUN cat << 'EOF' > /a\nhello\nEOF\n"
    root = tmp_path / "spaced"
    write_task(root, environment__Dockerfile=broken)
    (problem,) = [problem for problem in lint(root) if problem.rule == "invalid-dockerfile"]
    assert problem.where.endswith("Dockerfile:3") and "without a space" in problem.message
    root = tmp_path / "sources"
    copies = (
        "COPY here there/\nCOPY gone there/\nCOPY --from=other gone .\nADD http://x/y .\nCOPY $NAME .\nCOPY *.none .\n"
    )
    write_task(root, environment__Dockerfile=f"FROM x\n{copies}", environment__here="x")
    found = [problem for problem in lint(root) if problem.rule == "missing-source"]
    assert [problem.where.rpartition(":")[2] for problem in found] == ["3"] and "gone" in found[0].message


def test_lint_finds_tests_that_the_image_holds(tmp_path: Path) -> None:
    own = {"environment__Dockerfile": "FROM x\nCOPY . /app/\n", "environment__tests__test_app.py": "assert 1"}
    assert "copies-tests" not in rules_of(tmp_path / "own", own)
    assert "copies-tests" not in rules_of(tmp_path / "some", own | {"tests__test_app.py": "assert 1"})
    every = own | {"environment__tests__test.sh": PASS}
    assert "copies-tests" in rules_of(tmp_path / "every", every | {"tests__test_app.py": "assert 1"})
    assert "copies-tests" in rules_of(tmp_path / "fix", own | {"environment__x": "fix", "solution__x": "fix"})


def rules_of(root: Path, content: dict[str, str]) -> dict[str, str]:
    write_task(root, **content)
    return rules(root)


def test_lint_knows_reward_files_from_others(tmp_path: Path) -> None:
    test = "echo 1 > /logs/verifier/reward.txt; echo {} > /logs/verifier/reward-details.json\n"
    write_task(tmp_path / "details", test=test, environment__Dockerfile="FROM x")
    assert rules(tmp_path / "details") == {}
    write_task(tmp_path / "wrong", test="echo 1 > /logs/verifier/reward\n", environment__Dockerfile="FROM x")
    assert rules(tmp_path / "wrong") == {"reward-path": "tests/test.sh"}


def test_only_docker_compose_yaml_describes_services(tmp_path: Path) -> None:
    for name in ("docker-compose.yml", "compose.yaml", "compose.yml"):
        content = {"environment__Dockerfile": "FROM x", f"environment__{name}": "services: {}"}
        assert write_task(tmp_path / name, **content).compose is None
    (problem,) = [p for p in _lint_of(tmp_path / "alone", {"environment__compose.yml": ""}) if p.rule == "no-image"]
    assert "rename compose.yml to docker-compose.yaml" in problem.message


def _lint_of(root: Path, content: dict[str, str]) -> list[Problem]:
    write_task(root, **content)
    return lint(root)


def test_a_public_default_matters_only_if_a_phase_uses_it(tmp_path: Path) -> None:
    toml = TOML.replace('network_mode = "no-network"\n', "")
    write_task(tmp_path / "open", toml=toml, environment__Dockerfile="FROM x")
    assert "public-by-default" in rules(tmp_path / "open")
    closed = toml.replace("timeout_sec = 120", 'timeout_sec = 120\nnetwork_mode = "no-network"')
    write_task(tmp_path / "closed", toml=closed, environment__Dockerfile="FROM x")
    assert rules(tmp_path / "closed") == {}


@given(
    st.lists(
        st.sampled_from([*"ab~", "__pycache__", ".DS_Store", "x.pyc", ".pyc", "y.swp", "z.swo", "a~", "pyc"]),
        min_size=1,
    )
)
def test_default_patterns_without_their_library(parts: list[str]) -> None:
    path = "/".join(parts)
    assert is_left_over(path) == read_patterns(DEFAULT_PATTERNS).match_file(path)
