"""task.toml: all of Harbor's format, and typed errors that name the file and the key for everything else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import PierError, TaskError
from pier.task import load_task
from pier.task.load import read_config, strip_canary
from pier.task.model import (
    TaskConfig,
    parse_size_mb,
    resolve_env,
    resolve_headers,
    wanted_in_headers,
    wanted_variables,
)
from tests.trial_runs import TOML, write_task

FULL = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", {source = "/var/log/x", destination = "logs/x", exclude = ["*.tmp"], service = "main"}]

[task]
name = "org/short"
version = "1.0.0"
description = "text"
authors = [{name = "A", email = "a@example.org"}]
keywords = ["k"]

[metadata]
anything = {goes = [1, 2]}

[agent]
timeout_sec = 10
user = 1000
network_mode = "allowlist"
allowed_hosts = ["Example.ORG.", "*.example.net", "10.0.0.0/8", "::1"]

[verifier]
timeout_sec = 20
user = "nobody"
env = {TOKEN = "${HOST_TOKEN}", OTHER = "${MISSING:-fallback}"}
environment_mode = "separate"
network_mode = "no-network"
[verifier.environment]
docker_image = "verifier:1"
[[verifier.collect]]
command = "pg_dump"
timeout_sec = 5
user = 0

[solution]
env = {A = "b"}

[environment]
build_timeout_sec = 30
docker_image = "x:1"
os = "Linux"
cpus = 2
memory_mb = 1024
storage_mb = 2048
gpus = 0
gpu_types = ["H100"]
tpu = {type = "v6e", topology = "2x2x1"}
env = {A = "1"}
skills_dir = "/skills"
workdir = "/work"
network_mode = "public"
[environment.healthcheck]
command = "true"
interval_sec = 1
timeout_sec = 2
start_period_sec = 3
start_interval_sec = 4
retries = 5
[[environment.mcp_servers]]
name = "one"
transport = "http"
url = "http://127.0.0.1:1"
[[environment.mcp_servers]]
name = "two"
transport = "stdio"
command = "server"
args = ["--x"]
"""


def config(text: str) -> TaskConfig:
    return TaskConfig.model_validate(tomllib.loads(text))


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "task.toml"
    path.write_text(text)
    with pytest.raises(TaskError) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["cpus", "memory_mb", "storage_mb"])
@pytest.mark.parametrize("value", ["1e308", "1" + "0" * 30])
def test_sizes_that_no_kernel_can_count_are_refused(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"environment.{key}"):
        config(f"[environment]\n{key} = {value}")


def test_cpus_may_be_a_fraction() -> None:
    assert config("[environment]\ncpus = 0.5").environment.cpus == 0.5
    assert isinstance(config("[environment]\ncpus = 2").environment.cpus, int)


def test_headers_of_mcp_servers_are_checked_and_filled(tmp_path: Path) -> None:
    server = "[[environment.mcp_servers]]\nname = 'x'\nurl = 'http://h'\n"
    (found,) = config(
        server + "headers = {Authorization = 'Bearer ${TOKEN}', X-Mode = '${MODE:-fast}'}"
    ).environment.mcp_servers
    assert wanted_in_headers(found.headers) == {"TOKEN": None, "MODE": "fast"}
    filled = resolve_headers(found.headers, where="x", environ={"TOKEN": "t"})
    assert filled == {"Authorization": "Bearer t", "X-Mode": "fast"}
    with pytest.raises(TaskError, match="TOKEN"):
        resolve_headers(found.headers, where="x", environ={})
    assert "header" in refused(tmp_path, server + "headers = {'a b' = 'c'}")
    stdio = "[[environment.mcp_servers]]\nname = 'x'\ntransport = 'stdio'\ncommand = 'c'\nheaders = {A = 'b'}"
    assert "headers" in refused(tmp_path, stdio)


def test_all_keys_of_the_format_are_read(tmp_path: Path) -> None:
    path = tmp_path / "task.toml"
    path.write_text(FULL)
    read, unknown = read_config(path)
    assert unknown == []
    assert read.agent.allowed_hosts == ("example.org", "*.example.net", "10.0.0.0/8", "::1")
    assert read.environment.os == "linux"
    assert read.environment.mcp_servers[0].transport == "streamable-http"
    assert read.verifier.mode == "separate"
    assert [artifact.source for artifact in read.artifacts] == ["/app/out", "/var/log/x"]
    assert read.environment.policy.mode == "public"
    assert read.agent.policy is not None and read.agent.policy.mode == "allowlist"


def test_legacy_keys_get_their_present_names() -> None:
    read = config('version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n')
    assert read.schema_version == "1.0"
    assert (read.environment.memory_mb, read.environment.storage_mb) == (2048, 512)
    assert read.environment.policy.mode == "none"
    assert config("[environment]\nallow_internet = true\n").environment.policy.mode == "public"
    mixed = config('[environment]\nallow_internet = true\nnetwork_mode = "no-network"\n')
    assert mixed.environment.policy.mode == "none"


def test_sizes() -> None:
    assert [parse_size_mb(text) for text in ("1G", "1.5g", " 10M ", "2048K")] == [1024, 1536, 10, 2]
    with pytest.raises(ValueError, match="invalid size"):
        parse_size_mb("lots")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[agent]\ntimeout_sec = 'soon'", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
        ("[verifier]\nenvironment_mode = 'other'", "verifier.environment_mode"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\n", "verifier"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", "environment"),
        ("[environment]\nallowed_hosts = ['a.org']", "environment"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a.org']", "environment.allowed_hosts"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.*.org']", "environment.allowed_hosts"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.1/8']", "environment.allowed_hosts"),
        ("[environment.healthcheck]\nretries = 1", "environment.healthcheck.command"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers[0]"),
        ("[environment]\ntpu = {type = 'x', topology = '2'}", "environment.tpu.topology"),
        ("[task]\nname = 'noslash'", "task.name"),
        ("[task]\nname = 'a/b..c'", "task.name"),
        ("artifacts = ['../x']", "artifacts[0]"),
        ("artifacts = [{source = '/x', destination = '/abs'}]", "artifacts[0]"),
        ("artifacts = [{source = '/x', destination = 'a/../b'}]", "artifacts[0]"),
        ("artifacts = [{source = '/x', destination = 'manifest.json'}]", "artifacts[0]"),
        ("artifacts = [{source = 'x', service = 'db'}]", "artifacts[0]"),
        ("[[steps]]\nname = 'a/b'", "steps[0].name"),
        ("[[steps]]\nname = 'nul'", "steps[0].name"),
        ("[[steps]]\nname = 'A'\n[[steps]]\nname = 'a'", "steps"),
        ("multi_step_reward_strategy = 'best'", "multi_step_reward_strategy"),
        ("not toml", "TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, key: str) -> None:
    assert key in refused(tmp_path, text)


def test_unknown_keys_are_reported_with_the_nearest_name(tmp_path: Path) -> None:
    text = TOML + "memmory_mb = 5\n[metadata]\nfree = 1\n[[steps]]\nname = 'x'\nmin_rewards = 1\n"
    task_toml = tmp_path / "task.toml"
    task_toml.write_text(text)
    _, unknown = read_config(task_toml)
    assert {key.key: key.nearest for key in unknown} == {
        "environment.memmory_mb": "environment.memory_mb",
        "steps[0].min_rewards": "steps[0].min_reward",
    }
    write_task(tmp_path / "t", toml=TOML + "memmory_mb = 5\n")
    assert load_task(tmp_path / "t").unknown[0].nearest == "environment.memory_mb"
    with pytest.raises(TaskError, match="memmory_mb"):
        load_task(tmp_path / "t", strict=True)


def test_canary_lines_are_dropped() -> None:
    assert (
        strip_canary("<!-- CANARY guid -->\n# canary two\n\n\nDo it.\n# canary later\n") == "Do it.\n# canary later\n"
    )
    assert strip_canary("# Title\ncanary\n") == "# Title\ncanary\n"
    assert strip_canary("") == ""


def test_templates_are_whole_values() -> None:
    env = {"A": "${X}", "B": "${Y:-two words}", "C": "x${X}", "D": "${X:-}", "E": "plain"}
    filled = resolve_env(env, where="here", environ={"X": "secret"})
    assert filled == {"A": "secret", "B": "two words", "C": "x${X}", "D": "secret", "E": "plain"}
    assert wanted_variables(env) == {"X": "", "Y": "two words"}
    with pytest.raises(TaskError, match="here: A needs the variable X"):
        resolve_env({"A": "${X}"}, where="here", environ={})


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=8),
    st.just(None),
    st.just([]),
    st.just({}),
)
KEYS = st.sampled_from(
    "timeout_sec user network_mode allowed_hosts env memory memory_mb healthcheck command docker_image os collect name "
    "steps artifacts source min_reward task metadata environment agent verifier solution version schema_version "
    "mcp_servers tpu cpus".split()
)
TREES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5))
)


@given(st.dictionaries(KEYS, TREES, max_size=8))
def test_any_tree_is_a_task_or_a_named_problem(data: dict) -> None:
    try:
        TaskConfig.model_validate(data)
    except ValueError as error:
        assert type(error).__name__ == "ValidationError"


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode())))
def test_any_bytes_are_a_task_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("task") / "task.toml"
    path.write_bytes(content)
    try:
        read_config(path)
    except PierError as error:
        assert str(path) in str(error)


@given(data=st.data())
def test_a_line_more_is_read_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lines = FULL.splitlines()
    place = data.draw(st.integers(0, len(lines)))
    key = data.draw(KEYS)
    value = data.draw(st.sampled_from(["1", "-1", "nan", "inf", '"x"', "[]", "[1]", "{}", '{a = "b"}', "true", '""']))
    path = tmp_path_factory.mktemp("task") / "task.toml"
    path.write_text("\n".join([*lines[:place], f"{key} = {value}", *lines[place:]]))
    try:
        read_config(path)
    except PierError as error:
        assert str(path) in str(error) and len(str(error)) > len(str(path)) + 3
