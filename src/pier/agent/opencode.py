"""OpenCode, a native program. Speaks any of the four dialects, Chat Completions by default."""

from __future__ import annotations

from typing import Any

from pier.agent.contract import PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import AgentFlag, choice, flags, mapping, merged
from pier.agent.packed import PackedAgent, mcp_servers, model_of

PROVIDER = "pier"
SDKS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "gemini": ("@ai-sdk/google", "/v1beta"),
}
"""OpenCode's built-in client for each dialect, and the path of its base URL."""


class OpenCode(PackedAgent):
    """The option `opencode_config` overrides pier's own configuration."""

    name = "opencode"
    skills = "~/.config/opencode/skills"
    dialect = "chat"
    direct = True
    direct_hosts = ("api.openai.com", "api.anthropic.com", "openrouter.ai", "*.googleapis.com")
    pack = PackSpec("npm", "opencode-ai", "1.18.33", program="opencode-linux-{arch}/bin/opencode")
    options = ("opencode_config", "variant", "dialect", "disable_web_search", "model")
    logs = ((".local/share/opencode", "opencode"),)

    def launch(self, run: AgentRun) -> Launch:
        model = f"{PROVIDER}/{model_of(run)}" if run.endpoint else model_of(run)
        argv = [f"{PACK_PATH}/bin/opencode", "run", "--format", "json", "--thinking"]
        argv += ["--model", model] if model else []
        argv += flags(self.name, run.options, (AgentFlag("variant", "--variant"),))
        env = {
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_FAKE_VCS": "git",
        }
        config = AgentFile.json(f"{run.home}/.config/opencode/opencode.json", self._config(run, model))
        return Launch(argv, env, (config,), stdin=run.instruction.encode())

    def _config(self, run: AgentRun, model: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "permission": {"*": "allow"},
            "mcp": {name: _mcp(server) for name, server in mcp_servers(run).items()},
        }
        if run.options.get("disable_web_search"):
            config["permission"] |= {"webfetch": "deny", "websearch": "deny"}
        if run.endpoint:
            sdk, path = SDKS[choice(self.name, run.options, "dialect", tuple(SDKS), default="chat")]
            entry: dict[str, Any] = {"name": run.endpoint.model, "tool_call": True}
            if run.endpoint.context_window:
                output = run.endpoint.max_output_tokens or 32_000
                entry["limit"] = {"context": run.endpoint.context_window, "output": output}
            options = {"baseURL": run.endpoint.url + path, "apiKey": run.endpoint.key, "timeout": False}
            config["provider"] = {
                PROVIDER: {"npm": sdk, "name": PROVIDER, "options": options, "models": {run.endpoint.model: entry}}
            }
            config |= {"model": model, "small_model": model}
        return merged(config, mapping(self.name, run.options, "opencode_config"))


def _mcp(server: dict[str, Any]) -> dict[str, Any]:
    if server["type"] == "stdio":
        return {"type": "local", "command": [server["command"], *server["args"]], "enabled": True}
    return {**server, "type": "remote", "enabled": True}
