"""Where the published page is silent, pier does as verifiers 0.3.1 does: scores, advantages, rows and numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".cache" / "peers" / "verifiers-0.3"
CLOUD = {
    *("team_id", "advanced_configs", "labels", "timeouts", "max_retries", "base_delay", "backoff_factor"),
    *("max_backoff_seconds", "jitter", "sandbox_wait_for_creation_max_attempts", "sandbox_creations_per_minute"),
    *("sandbox_client_max_workers", "sandbox_client_max_connections", "sandbox_client_max_keepalive_connections"),
}
"""Arguments about one vendor's service of sandboxes: taken, and without effect."""
ABSENT = {
    "CliAgentEnv": {
        # asked by the loop that pops one request at a time; overriding one is refused
        *("get_prompt_messages", "get_model_response", "add_model_response", "env_response", "render_completion"),
        *("normalize_intercepted_tools", "wait_for_completion", "poll_job_completion"),
        *("max_turns_reached", "max_total_completion_tokens_reached"),  # limits of the session
        *("increment_state_usage", "increment_state_usage_from_response"),
        # the tunnel, the service of sandboxes, and clean-up: leases and contexts do it
        *("get_tunnel_url", "init_interception", "TUNNEL_CHECK_INTERVAL", "cleanup_interception_context"),
        *("create_sandbox", "delete_sandbox", "bulk_delete_sandboxes", "register_sandbox", "deregister_sandbox"),
        *("init_sandbox_client", "SANDBOX_MAX_TIMEOUT_MINUTES", "SANDBOX_SCORING_BUFFER_MINUTES"),
        *("teardown_resources", "teardown_sandboxes", "teardown_sandbox_client", "teardown_mixin_sandboxes"),
        *("teardown_mixin_sandbox_client", "BACKGROUND_JOB_POLL_READ_ERROR_MAX_ATTEMPTS"),
        # the environment server, and pools of threads
        *("start_server", "stop_server", "set_concurrency", "provides_advantages"),
    },
    "Rubric": {
        *("add_score_object_provider", "add_group_score_object_provider", "add_cleanup_handler", "cleanup_objects"),
        *("score_objects", "group_score_objects", "task_for_state", "task_score_fields"),
        *("dummy_score_group", "dummy_score_rollout", "has_advantages"),
    },
    "Parser": {"get_format_reward_func", "get_system_messages", "get_tool_messages", "get_user_messages"},
}
ABSENT["JudgeRubric"] = ABSENT["Rubric"]
OTHER = {
    *("SingleTurnEnv", "ToolEnv", "StatefulToolEnv", "SandboxEnv", "PythonEnv", "EnvGroup", "GymEnv", "HarborEnv"),
    *("MCPEnv", "BrowserEnv", "OpenEnvEnv", "ReasoningGymEnv", "TextArenaEnv"),
    *("ThinkParser", "MaybeThinkParser", "XMLParser", "MathRubric", "extract_boxed_answer", "extract_hash_answer"),
    *("Client", "OpenAIChatCompletionsClient", "OpenAICompletionsClient", "OpenAIResponsesClient"),
    *("AnthropicMessagesClient", "RendererClient", "EndpointConfig", "Endpoints", "DatasetBuilder", "TaskSplit"),
    *("load_example_dataset", "setup_logging", "log_level", "quiet_verifiers", "print_prompt_completions_sample"),
    *("metric", "reward", "advantage", "setup", "update"),
}
"""Other environments, their parsers and clients, and decorators of its tasksets."""


def run(python: str, who: str) -> dict:
    command = [python, str(ROOT / "tests" / "verifiers_peer" / "scores.py"), who]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_scores_rows_and_numbers_are_the_same() -> None:
    if not (PEER / ".ready").is_file():
        pytest.skip("verifiers 0.3.1 is not installed: .ci/peers verifiers-0.3")
    theirs, ours = run(str(PEER / "bin" / "python"), "verifiers"), run(sys.executable, "pier")
    for name in ("rewards", "advantages", "metrics", "steps", "alone", "timing", "pass"):
        assert ours[name] == theirs[name], name
    assert set(theirs["keys"]) - set(ours["keys"]) == set()
    assert set(ours["keys"]) - set(theirs["keys"]) == {"termination_reason", "advantage"}
    assert set(theirs["metadata"]) - set(ours["metadata"]) == set()
    taken = {*ours["evaluate"], *ours["generate"]}
    assert {*theirs["evaluate"], *theirs["generate"]} - taken == {"kwargs"}
    assert set(theirs["flags"]) - set(ours["flags"]) == {"-h", "--help"}
    assert set(theirs["names"]) - set(ours["names"]) == OTHER
    for kind, absent in ABSENT.items():
        assert set(theirs[kind]) - set(ours[kind]) == absent, kind
    assert set(theirs["constructor"]) - set(ours["constructor"]) == CLOUD
    differs = {name for name, value in theirs["constructor"].items() if ours["constructor"].get(name, value) != value}
    assert differs == {"interception_port"}  # the published page has 8765
