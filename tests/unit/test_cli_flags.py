"""The command line as a whole: one meaning for each short flag, `--debug` everywhere, completion, the first steps."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pier.cli.main import COMMANDS, FIRST_STEPS, cli, main
from pier.cli.run import COMMON, GroupedOption, run

MEANING = {
    "-C": {"--state-columns"},
    "-S": {"--sampling-args"},
    "-T": {"--temperature"},
    "-b": {"--base-url"},
    "-s": {"--save"},
    "-a": {"--agent"},
    "-c": {"--config"},
    "-d": {"--dataset"},
    "-e": {"--env"},
    "-f": {"--follow"},
    "-h": {"--help"},
    "-i": {"--include-task-name", "--include"},
    "-k": {"--n-attempts", "--attempts"},
    "-l": {"--n-tasks"},
    "-m": {"--model"},
    "-n": {"--n-concurrent", "--concurrency"},
    "-o": {"--jobs-dir", "--output", "--recording", "--out"},
    "-p": {"--path", "--job-path"},
    "-q": {"--quiet"},
    "-r": {"--max-retries"},
    "-t": {"--task"},
    "-u": {"--user"},
    "-v": {"--verbose"},
    "-w": {"--workdir"},
    "-x": {"--exclude-task-name", "--exclude"},
    "-y": {"--yes"},
}
"""The meaning of each short flag; several names where one idea has them (`-o` is where results are kept)."""

EXCEPTIONS = {
    ("-d", "--dir"): {"start", "stop", "verify", "diff", "fork"},
    ("-d", "--detach"): {"exec"},
    ("-e", "--variable"): {"start"},
    ("-f", "--force"): {"start"},
    ("-n", "--num-examples"): {"rollout"},
    ("-p", "--prompt"): {"critique run", "analyze", "summarize", "check"},
    ("-r", "--rubric"): {"analyze", "check"},
    ("-r", "--rollouts"): {"rollout"},
    ("-t", "--trial-name"): {"critique run", "critique show", "analyze"},
}
"""Other meanings, and the commands that have them: see docs/decisions/short-flags.md."""


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, click.Context(inner, parent=context, info_name=name))


ALL = list(commands(cli, click.Context(cli, info_name="pier")))


def test_a_short_flag_means_one_thing_everywhere() -> None:
    others: dict[tuple[str, str], set[str]] = {}
    for command, context in ALL:
        for param in command.get_params(context):
            names = [*param.opts, *param.secondary_opts] if isinstance(param, click.Option) else []
            for short in (name for name in names if not name.startswith("--")):
                if not MEANING[short] & set(names):
                    long = next(name for name in names if name.startswith("--"))
                    others.setdefault((short, long), set()).add(context.command_path.removeprefix("pier "))
    assert others == EXCEPTIONS


def test_every_command_has_debug() -> None:
    for command, context in ALL:
        assert any("--debug" in param.opts for param in command.get_params(context)), context.command_path


def test_debug_shows_the_traceback_of_an_error(tmp_path: Path) -> None:
    for args in (["--debug", "task", "list", "nowhere"], ["task", "list", "nowhere", "--debug"]):
        done = subprocess.run([sys.executable, "-m", "pier", *args], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" in done.stderr and "version" in done.stderr


def test_help_shows_ten_flags_first_and_all_in_groups() -> None:
    params = [param for param in run.get_params(click.Context(run)) if isinstance(param, GroupedOption)]
    assert len([param for param in params if param.group == COMMON]) == 10
    assert {param.group for param in params} == {COMMON, *run.groups}
    assert run.get_help(click.Context(run)).index(f"{COMMON}:") < run.get_help(click.Context(run)).index("Tasks:")


def test_pier_alone_says_what_to_do_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 0 and capsys.readouterr().out.strip() == FIRST_STEPS
    (tmp_path / "jobs").mkdir()
    with pytest.raises(SystemExit):
        main([])
    assert "Evaluate:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pier ", set(COMMANDS)),
        ("pier run --n-c", {"--n-concurrent", "--n-concurrent-builds"}),
        ("pier run -a cl", {"claude-code", "cline"}),
        ("pier run -e d", {"docker"}),
        ("pier run --api-format openai", {"openai_responses", "openai_chat_completions"}),
    ],
)
def test_completion_knows_commands_flags_and_values(words: str, found: set[str]) -> None:
    env = os.environ | {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_PIER_COMPLETE": "bash_complete",
    }
    done = subprocess.run([sys.executable, "-m", "pier"], env=env, capture_output=True, text=True, check=False)
    assert {row.partition(",")[2] for row in done.stdout.split()} == found


def test_completion_knows_jobs_and_their_trials(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "one" / "hello__abc").mkdir(parents=True)
    (tmp_path / "jobs" / ".hidden").mkdir()
    for words, found in (("pier job logs ", "plain,one"), ("pier trial show one/h", "plain,one/hello__abc")):
        env = os.environ | {"COMP_WORDS": words, "COMP_CWORD": "3", "_PIER_COMPLETE": "bash_complete"}
        done = subprocess.run([sys.executable, "-m", "pier"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.split() == [found]


def test_every_command_on_jobs_names_the_alternative_to_a_flag_of_harbor(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "regrade", "resume"):
        with pytest.raises(SystemExit) as stopped:
            main(["job", command, "x", "--launch"])
        assert stopped.value.code == 2 and "--launch: pier does not support" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("completion tcsh", "invalid value 'tcsh' for SHELL: expected one of bash, zsh, fish"),
        ("gateway serve --port x", "invalid value 'x' for --port: expected an integer >= 0 and <= 65535"),
        ("gateway serve --port 70000", "invalid value '70000' for --port: expected an integer >= 0 and <= 65535"),
        ("gateway serve --max-seconds 0", "invalid value '0.0' for --max-seconds: expected a number > 0"),
        ("sandbox run --memory 3x true", "invalid value '3x' for --memory: expected a size such as 500M or 20G"),
        ("sandbox run --cpus x true", "invalid value 'x' for --cpus: expected a number"),
        ("sandbox run --open-files x true", "invalid value 'x' for --open-files: expected an integer"),
        ("job resume one -n x", "invalid value 'x' for --n-concurrent: expected an integer >= 1"),
        ("job retry one --only it's", 'invalid value "it\'s" for --only: expected one of infra, errored, failed'),
    ],
)
def test_an_invalid_value_is_named_with_what_is_expected(
    args: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(args.split(" "))
    assert stopped.value.code == 2 and capsys.readouterr().err.splitlines()[0] == f"pier: {message}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", shell])
    assert stopped.value.code == 0 and "_PIER_COMPLETE" in capsys.readouterr().out


def test_the_version_with_python_platform_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version", "-v"])
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:3])
    assert ended.value.code == 0
    assert rows["python"].startswith(platform.python_version()) and rows["platform"] == platform.platform()
