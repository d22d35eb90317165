"""Cline's command line, a native program. Speaks Chat Completions; its data is in the agent's logs."""

from __future__ import annotations

from typing import Any

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import AgentFlag, flags
from pier.agent.packed import SHARED_SKILLS, PackedAgent, mcp_servers, model_of

HOME = f"{AGENT_LOGS}/cline"
PROVIDER = "openai-compatible"
FLAGS = (
    AgentFlag("thinking", "--thinking", ("none", "low", "medium", "high", "xhigh")),
    AgentFlag("reasoning_effort", "--thinking", ("none", "low", "medium", "high", "xhigh")),
    AgentFlag("max_consecutive_mistakes", "--retries"),
)


class Cline(PackedAgent):
    """It starts a daemon that runs until the sandbox ends. The image must have `/bin/bash`."""

    name = "cline"
    skills = SHARED_SKILLS
    dialect = "chat"
    pack = PackSpec("npm", "cline", "3.0.65", program="@cline/cli-linux-{arch}/bin/cline")
    options = (*(row.option for row in FLAGS), "model")

    def launch(self, run: AgentRun) -> Launch:
        model = model_of(run)
        argv = [f"{PACK_PATH}/bin/cline", "--json", "--auto-approve", "true"]
        argv += ["-P", PROVIDER] if run.endpoint else []
        argv += ["-m", model] if model else []
        argv += flags(self.name, run.options, FLAGS)
        quiet = {"telemetryOptOut": True, "autoUpdateEnabled": False}
        files = [AgentFile.json(f"{HOME}/data/settings/global-settings.json", quiet)]
        if run.endpoint:
            settings = {"provider": PROVIDER, "apiKey": run.endpoint.key, "model": model}
            settings["baseUrl"] = f"{run.endpoint.url}/v1"
            entry = {"settings": settings, "updatedAt": "2000-01-01T00:00:00.000Z", "tokenSource": "manual"}
            providers = {"version": 1, "lastUsedProvider": PROVIDER, "modes": {}, "providers": {PROVIDER: entry}}
            files.append(AgentFile.json(f"{HOME}/data/settings/providers.json", providers))
        if run.mcp_servers:
            servers = {"mcpServers": {name: _mcp(row) for name, row in mcp_servers(run).items()}}
            files.append(AgentFile.json(f"{HOME}/data/settings/cline_mcp_settings.json", servers))
        return Launch([*argv, run.instruction], {"CLINE_DIR": HOME}, tuple(files))


def _mcp(server: dict[str, Any]) -> dict[str, Any]:
    return {**server, "type": "streamableHttp"} if server["type"] == "http" else server
