"""Aider on the pack's Python. Speaks Chat Completions in plain text; it edits files itself and runs no commands."""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, Launch, PackSpec
from pier.agent.options import EFFORTS, AgentFlag, flags
from pier.agent.packed import CLIENT_TIMEOUT, PackedAgent, model_of

HOME = f"{AGENT_LOGS}/aider"
FLAGS = (
    AgentFlag("reasoning_effort", "--reasoning-effort", EFFORTS),
    AgentFlag("thinking_tokens", "--thinking-tokens"),
    AgentFlag("cache_prompts", "--cache-prompts"),
    AgentFlag("auto_lint", "--auto-lint"),
    AgentFlag("auto_test", "--auto-test"),
    AgentFlag("test_cmd", "--test-cmd"),
    AgentFlag("map_tokens", "--map-tokens"),
)
QUIET = (
    "--yes-always",
    "--no-show-model-warnings",
    "--no-check-update",
    "--no-analytics",
    "--no-gitignore",
    "--no-auto-commits",
    "--no-pretty",
    "--no-show-release-notes",
    "--no-detect-urls",
)


class Aider(PackedAgent):
    """If the image has git, it creates a repository in a working directory without one; else it has no repository
    map."""

    name = "aider"
    dialect = "chat"
    takes_mcp = False
    pack = PackSpec("pypi", "aider-chat", "0.86.2", pythons=("3.12", "3.11"))
    options = (*(row.option for row in FLAGS), "edit_format", "stream", "model")

    def launch(self, run: AgentRun) -> Launch:
        model = f"openai/{model_of(run)}" if run.endpoint else model_of(run)
        argv = [f"{PACK_PATH}/python/bin/python3", "-I", "-m", "aider", *QUIET, "--timeout", str(CLIENT_TIMEOUT)]
        argv += ["--model", model] if model else []
        argv += flags(self.name, run.options, FLAGS)
        argv += ["--edit-format", str(run.options.get("edit_format") or "diff")]
        argv += ["--no-stream"] if run.options.get("stream") is False else []
        argv += ["--chat-history-file", f"{HOME}.history.md", "--llm-history-file", f"{HOME}.llm.txt"]
        argv += ["--input-history-file", f"{HOME}.input.txt", "--message", run.instruction]
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        if run.endpoint:
            env |= {"OPENAI_API_KEY": run.endpoint.key, "OPENAI_API_BASE": f"{run.endpoint.url}/v1"}
        return Launch(argv, env)
