"""Qwen Code on the pack's node. Speaks Chat Completions; its home is in the agent's logs."""

from __future__ import annotations

from typing import Any

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.gemini_cli import trusted_mcp
from pier.agent.options import AgentFlag, flags, mapping, merged, words
from pier.agent.packed import CLIENT_TIMEOUT, PackedAgent, model_of

HOME = f"{AGENT_LOGS}/qwen"
ENTRY = f"{PACK_PATH}/node_modules/@qwen-code/qwen-code/cli-entry.js"


class QwenCode(PackedAgent):
    """The option `settings` overrides pier's own settings."""

    name = "qwen-code"
    skills = f"{HOME}/skills"
    dialect = "chat"
    direct = True
    direct_hosts = ("api.openai.com",)
    pack = PackSpec("npm", "@qwen-code/qwen-code", "0.24.4")
    options = ("max_turns", "settings", "disallowed_tools", "model")

    def launch(self, run: AgentRun) -> Launch:
        model = model_of(run)
        argv = [f"{PACK_PATH}/bin/node", ENTRY, "--yolo", "--output-format", "stream-json"]
        argv += flags(self.name, run.options, (AgentFlag("max_turns", "--max-session-turns"),))
        env = {"QWEN_HOME": HOME, "QWEN_CODE_NO_RELAUNCH": "true"}
        if run.endpoint:
            env |= {"OPENAI_API_KEY": run.endpoint.key, "OPENAI_BASE_URL": f"{run.endpoint.url}/v1"}
        if model:
            env["OPENAI_MODEL"] = model
        settings = AgentFile.json(f"{HOME}/settings.json", self._settings(run))
        return Launch([*argv, "--prompt", run.instruction], env, (settings,))

    def _settings(self, run: AgentRun) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": {"timeout": CLIENT_TIMEOUT * 1000}},
            "permissions": {"deny": words(run.options, "disallowed_tools", ["enter_plan_mode"])},
            "mcpServers": trusted_mcp(run),
        }
        return merged(settings, mapping(self.name, run.options, "settings"))
