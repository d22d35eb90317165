"""Gemini CLI on the pack's node. Speaks the Gemini API; its home is in the agent's logs."""

from __future__ import annotations

from typing import Any

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import choice, mapping, merged, words
from pier.agent.packed import PackedAgent, bare, mcp_servers, model_of

HOME = f"{AGENT_LOGS}/gemini"
ENTRY = f"{PACK_PATH}/node_modules/@google/gemini-cli/bundle/gemini.js"


class GeminiCli(PackedAgent):
    """`--model` keeps its router from asking another model to choose one. Plan mode is disallowed by default."""

    name = "gemini-cli"
    skills = f"{HOME}/.gemini/skills"
    dialect = "gemini"
    direct = True
    direct_hosts = ("*.googleapis.com",)
    pack = PackSpec("npm", "@google/gemini-cli", "0.61.0")
    options = ("reasoning_effort", "max_turns", "settings", "disallowed_tools", "disable_web_search", "model")

    def launch(self, run: AgentRun) -> Launch:
        model = bare(model_of(run))
        argv = [f"{PACK_PATH}/bin/node", ENTRY, "--yolo", "--output-format", "stream-json"]
        argv += ["--model", model] if model else []
        env = {"GEMINI_CLI_HOME": HOME, "GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_CLI_TRUST_WORKSPACE": "true"}
        if run.endpoint:
            env |= {"GEMINI_API_KEY": run.endpoint.key, "GOOGLE_GEMINI_BASE_URL": run.endpoint.url}
        settings = AgentFile.json(f"{HOME}/.gemini/settings.json", self._settings(run, model))
        return Launch([*argv, "--prompt", run.instruction], env, (settings,))

    def _settings(self, run: AgentRun, model: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "mcpServers": trusted_mcp(run),
        }
        if turns := run.options.get("max_turns"):
            settings["model"] = {"maxSessionTurns": int(turns)}
        denied = words(run.options, "disallowed_tools", ["enter_plan_mode"])
        denied += ["google_web_search", "web_fetch"] if run.options.get("disable_web_search") else []
        settings["tools"] = {"exclude": denied}
        if effort := choice(self.name, run.options, "reasoning_effort", ("minimal", "low", "medium", "high")):
            thinking = {"thinkingLevel": effort.upper(), "includeThoughts": True}
            config = {"generateContentConfig": {"thinkingConfig": thinking}}
            settings["modelConfigs"] = {"customOverrides": [{"match": {"model": model}, "modelConfig": config}]}
        return merged(settings, mapping(self.name, run.options, "settings"))


def trusted_mcp(run: AgentRun) -> dict[str, dict[str, Any]]:
    """The MCP servers in the settings of Gemini CLI and its forks."""
    servers = mcp_servers(run)
    for server in servers.values():
        if server.pop("type") == "http":
            server["httpUrl"] = server.pop("url")
        server["trust"] = True
    return servers
