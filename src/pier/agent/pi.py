"""pi on the pack's node. Speaks any of the four dialects, Chat Completions by default."""

from __future__ import annotations

from typing import Any

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import AgentFlag, choice, flags
from pier.agent.packed import PackedAgent, model_of

HOME = f"{AGENT_LOGS}/pi"
ENTRY = f"{PACK_PATH}/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
PROVIDER = "pier"
APIS = {
    "chat": ("openai-completions", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "responses": ("openai-responses", "/v1"),
    "gemini": ("google-generative-ai", "/v1beta"),
}
LEVELS = ("off", "minimal", "low", "medium", "high", "xhigh", "max")
FLAGS = (AgentFlag("thinking", "--thinking", LEVELS), AgentFlag("reasoning_effort", "--thinking", LEVELS))


class Pi(PackedAgent):
    """It does not support MCP. It exits with 0 when its model fails, which only the wire shows."""

    name = "pi"
    skills = f"{HOME}/skills"
    dialect = "chat"
    takes_mcp = False
    pack = PackSpec("npm", "@earendil-works/pi-coding-agent", "0.87.1")
    options = ("thinking", "reasoning_effort", "dialect", "model")

    def launch(self, run: AgentRun) -> Launch:
        argv = [f"{PACK_PATH}/bin/node", ENTRY, "--print", "--mode", "json"]
        argv += ["--provider", PROVIDER] if run.endpoint else []
        argv += ["--model", model_of(run)] if model_of(run) else []
        argv += flags(self.name, run.options, FLAGS)
        env = {"PI_CODING_AGENT_DIR": HOME, "PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
        files = (AgentFile.json(f"{HOME}/models.json", self._models(run)),) if run.endpoint else ()
        return Launch([*argv, run.instruction], env, files)

    def _models(self, run: AgentRun) -> dict[str, Any]:
        endpoint = run.endpoint
        assert endpoint is not None
        api, path = APIS[choice(self.name, run.options, "dialect", tuple(APIS), default="chat")]
        model = {
            "id": endpoint.model,
            "reasoning": bool(run.options.get("thinking") or run.options.get("reasoning_effort")),
            "contextWindow": endpoint.context_window or 200_000,
            "maxTokens": endpoint.max_output_tokens or 32_000,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {"baseUrl": endpoint.url + path, "api": api, "apiKey": endpoint.key, "models": [model]}
        return {"providers": {PROVIDER: provider}}
