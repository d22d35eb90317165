"""The closing lines of `make test`, from logs that pytest itself wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUMMARY = Path(__file__).resolve().parents[2] / ".ci" / "summary"
TESTS = """
import pytest, pathlib

def test_passes(): pass

def test_fails(): assert pathlib.Path("fixed").exists()

def test_second():
    if pathlib.Path("fixed").exists(): {second}
    assert False

@pytest.mark.skip
def test_skipped(): pass
"""


TEARDOWN = """
import pytest, pathlib

@pytest.fixture(scope="session", autouse=True)
def nothing_leaked():
    yield
    assert {second}, "leaked:\\ncgroup {place}/group\\ncgroup {place}/used-by-another-suite"

@pytest.fixture
def untidy():
    yield
    assert pathlib.Path("fixed").exists(), "untidy"

def test_untidy(untidy): pass

def test_fails_untidy(untidy): assert pathlib.Path("fixed").exists()

def test_last(): pass
"""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    place = tmp_path / "logs"
    place.mkdir()
    (place / "lint.code").write_text("0\n")
    return place


def run_suite(logs: Path, name: str, *args: str) -> str:
    """Run the tests beside the logs, as one suite; the exit code goes to a file next to the log."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir=.", *args]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=logs.parent, env=env, capture_output=True, text=True, timeout=120)
    (logs / name).write_text(done.stdout)
    (logs / f"{name.removesuffix('.log')}.code").write_text(f"{done.returncode}\n")
    return done.stdout


def summarize(logs: Path, *suites: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, SUMMARY, logs, *suites], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def run_twice(logs: Path, second: str, tests: str = TESTS) -> None:
    (logs.parent / "test_it.py").write_text(tests.format(second=second, place=logs.parent))
    run_suite(logs, "own.log")
    (logs.parent / "fixed").touch()
    run_suite(logs, "own.again", "--last-failed", "-rA")


def test_what_passes_the_second_time_is_named_and_counted(logs: Path) -> None:
    run_twice(logs, "return")
    code, lines = summarize(logs)
    assert code == 0 and lines[-1] == "3 passed, 0 failed, 1 skipped"
    assert [line for line in lines if line.startswith("own: ")] == [
        "own: test_it.py::test_fails",
        "own: test_it.py::test_second",
    ]
    assert any("2 tests passed only on the second try" in line for line in lines)


@pytest.mark.parametrize("second", ["pytest.skip()", "assert False"])
def test_what_is_skipped_or_fails_the_second_time_has_failed(logs: Path, second: str) -> None:
    run_twice(logs, second)
    code, lines = summarize(logs)
    assert code == 1 and lines[-1] == "2 passed, 1 failed, 1 skipped"


@pytest.mark.parametrize("code", ["2", "3", "4", "124", "137", ""])
def test_a_suite_that_crashed_has_failed(logs: Path, code: str) -> None:
    (logs / "own.log").write_text("bringing up nodes...\n")
    (logs / "own.code").write_text(code)
    result, lines = summarize(logs)
    assert result == 1 and lines[-1] == "0 passed, 0 failed, 0 skipped"
    assert any(line.startswith("own: ") for line in lines)


def test_a_suite_that_cannot_run_here_is_named(logs: Path) -> None:
    (logs / "python3.99.missing").write_text("a warning\nthere is no python3.99\n")
    code, lines = summarize(logs)
    assert code == 0 and "== not run: python3.99: there is no python3.99" in lines


def test_lint_counts(logs: Path) -> None:
    (logs / "lint.code").write_text("1\n")
    assert summarize(logs)[0] == 1


def test_a_suite_of_which_nothing_is_left_has_failed(logs: Path) -> None:
    (logs / "own.log").write_text("")
    assert summarize(logs)[0] == 1


def test_a_test_with_an_error_in_its_teardown_counts_once(logs: Path) -> None:
    run_twice(logs, "True", TEARDOWN)
    code, lines = summarize(logs)
    assert code == 0 and lines[-1] == "3 passed, 0 failed, 0 skipped"
    assert any("2 tests passed only on the second try" in line for line in lines)


def test_a_test_with_an_error_in_each_teardown_has_failed(logs: Path) -> None:
    run_twice(logs, "True", TEARDOWN.replace('Path("fixed").exists(), "untidy"', 'Path("never").exists(), "untidy"'))
    code, lines = summarize(logs)
    assert code == 1 and lines[-1] == "1 passed, 2 failed, 0 skipped"
    assert not any("second try" in line for line in lines)


def test_what_leaked_and_is_still_there_in_the_end_is_a_failure(logs: Path) -> None:
    run_twice(logs, 'pathlib.Path("fixed").exists()', TEARDOWN)
    assert (logs / "own.again.code").read_text() == "0\n"
    code, lines = summarize(logs)
    assert code == 0 and lines[-1] == "3 passed, 0 failed, 0 skipped"
    (logs.parent / "group").mkdir()
    code, lines = summarize(logs)
    assert code == 1 and lines[-2] == f"own: leaked cgroup {logs.parent}/group"


def test_a_suite_that_never_ran_has_failed(logs: Path) -> None:
    (logs / "python3.99.missing").write_text("there is no python3.99\n")
    (logs / "python3.98.missing").write_text("")
    code, lines = summarize(logs, "python3.99", "python3.98", "packs")
    assert code == 1
    assert [line for line in lines if "never ran" in line] == ["python3.98: it never ran", "packs: it never ran"]
