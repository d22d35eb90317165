"""Continue's command line as a pier agent, complete in one file.

    PYTHONPATH=examples/agents pier run -p examples/tasks/bug-fix --image host -a continue_cli:Continue \
        -m script:examples/scripts/bug-fix.yaml
"""

from __future__ import annotations

import json

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import AgentFlag, flags
from pier.agent.packed import PackedAgent, mcp_servers, model_of

HOME = f"{AGENT_LOGS}/continue"
ENTRY = f"{PACK_PATH}/node_modules/@continuedev/cli/dist/cn.js"
FLAGS = (AgentFlag("rule", "--rule"),)


class Continue(PackedAgent):
    """Uses Chat Completions and stores its sessions with the logs. Its model may end it with the tool `Exit`, whose exit
    code is always 1, so the exit code does not count."""

    name = "continue"
    dialect = "chat"
    pack = PackSpec("npm", "@continuedev/cli", "1.5.47")
    options = ("rule",)
    exit_code_counts = False

    def launch(self, run: AgentRun) -> Launch:
        argv = [f"{PACK_PATH}/bin/node", ENTRY, "--print", "--auto"]
        argv += ["--config", f"{HOME}/config.yaml", *flags(self.name, run.options, FLAGS), run.instruction]
        env = {"CONTINUE_GLOBAL_DIR": HOME, "CONTINUE_TELEMETRY_ENABLED": "0"}
        config = json.dumps(self._config(run), indent=2).encode()
        return Launch(argv, env, (AgentFile(f"{HOME}/config.yaml", config),))

    def _config(self, run: AgentRun) -> dict[str, object]:
        """Its configuration; JSON is YAML too."""
        model: dict[str, object] = {
            "name": "model",
            "provider": "openai",
            "model": model_of(run),
            "roles": ["chat"],
            "capabilities": ["tool_use"],
            "useResponsesApi": False,
        }
        if run.endpoint:
            model |= {"apiBase": f"{run.endpoint.url}/v1", "apiKey": run.endpoint.key}
        servers = [{"name": name, **server} for name, server in mcp_servers(run).items()]
        return {"name": "pier", "version": "1.0.0", "schema": "v1", "models": [model], "mcpServers": servers}
