"""Job files and flags: what is taken, and that every complaint is typed and names its place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pier.cli.run import given_settings, run
from pier.errors import UsageError
from pier.job.config import BudgetConfig, JobConfig
from pier.job.config import settings as settings_of_jobs
from pier.job.load import UNSUPPORTED, apply_flags, fill, hide, merge, parse, read_env_file, read_job, to_disk
from pier.secret import HIDDEN, secrets_in

GOLDEN = "edba2e8dfb0d231e39547eb52f5a435645d5deee3b40b615b3894bc961053611"
"""Of the default settings as the first version wrote them."""


def given_flags(*args: str) -> list:
    """The settings that a command line sets."""
    return list(given_settings(run.make_context("run", list(args)).params))


def test_a_file_with_several_agents_and_datasets(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "n_attempts": 3,
                "agents": [{"name": "oracle"}, {"name": "codex", "model_name": "openai/x", "kwargs": {"a": 1}}],
                "datasets": [{"path": "one", "n_tasks": 2}, {"path": "two", "task_names": ["a*"]}],
                "environment": {"type": "docker", "env": {"TOKEN": "${TOKEN}"}},
            }
        )
    )
    config = read_job([str(path)])
    assert [agent.label for agent in config.agents] == ["oracle", "codex"]
    assert config.datasets[1].task_names == ["a*"]
    assert config.environment.backend == "docker"


def test_later_files_win_lists_join_and_an_empty_list_clears() -> None:
    low = {
        "n_attempts": 1,
        "agents": [{"name": "a"}],
        "artifacts": ["x"],
        "retry": {"max_retries": 1, "min_wait_sec": 2},
    }
    high = {"n_attempts": 2, "agents": [{"name": "b"}], "artifacts": [], "retry": {"max_retries": 3}}
    merged = merge(low, high)
    assert merged["n_attempts"] == 2
    assert [agent["name"] for agent in merged["agents"]] == ["a", "b"]
    assert merged["artifacts"] == []
    assert merged["retry"] == {"max_retries": 3, "min_wait_sec": 2}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"n_attemps": 2}, ["n_attemps", "n_attempts"]),
        ({"agents": [{"modle_name": "x"}]}, ["agents[0].modle_name", "model_name"]),
        ({"environment": {"forcebuild": True}}, ["environment.forcebuild", "force_build"]),
        ({"n_attempts": 0}, ["n_attempts"]),
        ({"n_attempts": "many"}, ["n_attempts"]),
        ({"job_name": "../up"}, ["job_name"]),
        ({"timeout_multiplier": float("nan")}, ["timeout_multiplier"]),
        ({"datasets": [{}]}, ["datasets[0]", "path"]),
    ],
)
def test_wrong_keys_are_named_with_the_file_and_what_was_meant(data: dict, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(data, "job.yaml")
    assert all(word in caught.value.message for word in ["job.yaml", *words])


def test_what_harbor_has_and_pier_not_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"user_agent.*simulated users"):
        parse({"user_agent": {"name": "x"}}, "job.yaml")
    with pytest.raises(UsageError, match=r"verifier\.import_path"):
        parse({"verifier": {"import_path": "a:B"}}, "job.yaml")


def test_what_pier_does_not_do_is_passed_over_when_it_asks_for_nothing() -> None:
    data: dict = {}
    keys = [name for names, _, _ in UNSUPPORTED for name in names.split() if not name.startswith("-")]
    for key in keys:
        *outer, last = key.split(".")
        if outer == ["agents"]:
            data.setdefault("agents", [{"name": "oracle"}])[0][last] = None
        elif outer and outer[0] in ("datasets", "tasks"):
            data.setdefault(outer[0], [{"path": "x"}])[0][last] = None
        elif outer:
            data.setdefault(outer[0], {})[last] = []
        else:
            data[last] = False
    assert parse(data, "job.yaml").agents[0].name == "oracle"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_keys = st.sampled_from(
    ["agents", "datasets", "environment", "retry", "n_attempts", "job_name", "verifier", "artifacts"]
)


@given(st.dictionaries(_keys | st.text(max_size=5), _json, max_size=4))
def test_any_content_is_a_config_or_a_usage_error(data: dict) -> None:
    try:
        parse(data, "job.json")
    except UsageError as error:
        assert error.message.startswith("job.json: ")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_config_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for suffix in (".yaml", ".json"):
        path = tmp_path_factory.mktemp("job") / f"job{suffix}"
        path.write_bytes(data)
        try:
            read_job([str(path)])
        except UsageError as error:
            assert str(path) in error.message


def test_templates_are_whole_values_and_a_missing_one_is_named() -> None:
    env = {"A": "1"}
    assert fill({"x": ["${A}", "b${A}", "${B:-two}", 3]}, env) == {"x": ["1", "b${A}", "two", 3]}
    with pytest.raises(UsageError, match=r"agents\.env\.X.*NOPE"):
        fill({"agents": {"env": {"X": "${NOPE}"}}}, env)


def test_secrets_are_not_written_and_cannot_be_read_back() -> None:
    env = {"API_KEY": "same-as-host"}
    value = {"env": {"API_KEY": "same-as-host", "OTHER_TOKEN": "sk-literal", "PLAIN": "x", "A_KEY": "${A_KEY}"}}
    hidden = hide(value, env)
    assert hidden["env"] == {"API_KEY": "${API_KEY}", "OTHER_TOKEN": HIDDEN, "PLAIN": "x", "A_KEY": "${A_KEY}"}
    assert set(secrets_in(value, env)) == {"same-as-host", "sk-literal"}
    with pytest.raises(UsageError, match=r"OTHER_TOKEN.*secret"):
        fill(hidden, {"API_KEY": "x", "A_KEY": "y"})


def test_env_files(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# comment\nexport A=1\nB='two words'\nC=x # tail\n\nD=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "x", "D": ""}
    path.write_text("A=1\nwrong\n")
    with pytest.raises(UsageError, match=":2:"):
        read_env_file(path)


def test_flags_win_over_files_and_several_models_make_several_agents(tmp_path: Path) -> None:
    config = apply_flags(
        {"n_attempts": 2, "agents": [{"name": "a", "kwargs": {"x": 1}}], "datasets": [{"path": "gone"}]},
        given_flags(
            *("-k", "5", "-a", "codex", "-m", "m1", "-m", "m2", "--ak", "n=3", "--ak", "s=text"),
            *("-p", str(tmp_path), "-i", "h*"),
        ),
    )
    assert parse(config, "flags").n_attempts == 5
    assert [(agent["name"], agent["model_name"]) for agent in config["agents"]] == [("codex", "m1"), ("codex", "m2")]
    assert config["agents"][0]["kwargs"] == {"n": 3, "s": "text"}
    assert config["datasets"] == [{"path": str(tmp_path), "task_names": ["h*"]}]


def test_limits_of_the_job_and_of_each_trial_are_two_things() -> None:
    given = given_flags("--max-turns", "5", "--job-max-turns", "9", "--job-max-tokens", "10", "--job-max-cost", "1.5")
    config = JobConfig(**apply_flags({"budget": {"wall_time": 60}}, given))
    assert config.agents[0].budget == BudgetConfig(turns=5)
    assert config.budget == BudgetConfig(turns=9, total_tokens=10, cost_usd=1.5, wall_time=60)


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (("-n", "x"), ["'x'", "--n-concurrent", "an integer >= 1"]),
        (("-k", "0"), ["'0'", "--n-attempts", "an integer >= 1"]),
        (("--max-cost", "nan"), ["--max-cost", "a number > 0"]),
        (("--cpus", "some"), ["--cpus", "auto, limit"]),
        (("--base-url", "models"), ["--base-url", "http"]),
        (("--mounts", "{}"), ["--mounts", "list"]),
        (("--job-name", "a/b"), ["invalid value 'a/b' for --job-name: ", "one directory"]),
    ],
)
def test_a_wrong_value_is_named_with_its_flag_and_what_is_expected(flags: tuple[str, ...], facts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read_job([], given_flags(*flags))
    assert caught.value.message.startswith("invalid value") and all(fact in caught.value.message for fact in facts)


def test_values_that_may_be_secret_are_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        parse({"agents": [{"env": {"API_KEY": 12345678}}]}, "job.yaml")
    assert "agents[0].env.API_KEY" in caught.value.message and "12345678" not in caught.value.message


@pytest.mark.parametrize("name", [name for names, _, _ in UNSUPPORTED for name in names.split() if name[0] == "-"])
def test_flags_of_harbor_that_pier_does_not_support_name_an_alternative(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        given_flags(name)
    assert caught.value.code == "not-done" and caught.value.hint and name in caught.value.message


def test_lists_of_hosts_and_instructions_join_those_of_the_files_and_others_replace() -> None:
    files = {"agents": [{"extra_allowed_hosts": ["a"]}], "extra_instructions": ["x"], "artifacts": ["/a"]}
    given = given_flags("--allow-agent-host", "b", "--extra-instruction", "y", "--artifact", "/b")
    config = parse(apply_flags(files, given), "flags")
    assert config.agents[0].extra_allowed_hosts == ["a", "b"]
    assert config.extra_instructions == ["x", "y"] and config.artifacts == ["/b"]


def test_every_setting_has_a_description_and_every_flag_one_setting() -> None:
    assert all(setting.help for setting in settings_of_jobs())
    names = [name for setting in settings_of_jobs() for name in setting.names]
    assert len(names) == len(set(names))


def test_settings_added_later_leave_the_record_of_a_job_unchanged() -> None:
    """An unfinished job of an earlier version is found by the digest of its settings."""
    added = {"base_url", "model_api_key_name", "model_api_format", "extra_allowed_hosts", "skip_credential_checks"}
    disk = to_disk(JobConfig(), {})
    assert disk["agents"][0].keys() & added == {"extra_allowed_hosts"}
    assert disk["verifier"].keys() & added == set() and disk.keys() & added == set()
    assert hashlib.sha256(json.dumps(disk, sort_keys=True).encode()).hexdigest() == GOLDEN
    changed = parse({"agents": [{"base_url": "http://127.0.0.1:1"}]}, "here")
    assert to_disk(changed, {})["agents"][0]["base_url"] == "http://127.0.0.1:1"


def test_pairs_need_an_equals_sign() -> None:
    with pytest.raises(UsageError, match="--agent-env"):
        apply_flags({}, given_flags("--ae", "nothing"))


def test_what_stands_on_disk_is_read_back_the_same() -> None:
    config = parse({"agents": [{"name": "nop"}], "datasets": [{"path": "/x"}], "image": "host"}, "here")
    again = parse(json.loads(json.dumps(to_disk(config, {}))), "config.json")
    assert again.environment.backend == "local"
    assert to_disk(again, {}) == to_disk(config, {})
