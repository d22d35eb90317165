"""Kimi Code on the pack's node. Speaks any of the four dialects, Chat Completions by default."""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import EFFORTS, choice
from pier.agent.packed import PackedAgent, mcp_file, model_of

HOME = f"{AGENT_LOGS}/kimi"
ENTRY = f"{PACK_PATH}/node_modules/@moonshot-ai/kimi-code/dist/main.mjs"
TYPES = {
    "chat": ("openai", "/v1"),
    "anthropic": ("anthropic", ""),
    "responses": ("openai_responses", "/v1"),
    "gemini": ("google-genai", ""),
}


class Kimi(PackedAgent):
    name = "kimi"
    skills = f"{HOME}/skills"
    dialect = "chat"
    pack = PackSpec("npm", "@moonshot-ai/kimi-code", "2.1.0")
    options = ("reasoning_effort", "dialect", "model")

    def launch(self, run: AgentRun) -> Launch:
        argv = [f"{PACK_PATH}/bin/node", ENTRY, "--output-format", "stream-json", "--prompt", run.instruction]
        env = {"KIMI_CODE_HOME": HOME, "KIMI_CODE_NO_AUTO_UPDATE": "1"}
        if model := model_of(run):
            env["KIMI_MODEL_NAME"] = model
        if run.endpoint:
            kind, path = TYPES[choice(self.name, run.options, "dialect", tuple(TYPES), default="chat")]
            env |= {
                "KIMI_MODEL_API_KEY": run.endpoint.key,
                "KIMI_MODEL_BASE_URL": run.endpoint.url + path,
                "KIMI_MODEL_PROVIDER_TYPE": kind,
            }
            if run.endpoint.context_window:
                env["KIMI_MODEL_MAX_CONTEXT_SIZE"] = str(run.endpoint.context_window)
        if effort := choice(self.name, run.options, "reasoning_effort", EFFORTS):
            env["KIMI_MODEL_THINKING_EFFORT"] = effort
        config = AgentFile(f"{HOME}/config.toml", b"telemetry = false\n")
        return Launch(argv, env, (config, *mcp_file(run, f"{HOME}/mcp.json")))
