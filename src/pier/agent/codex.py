"""OpenAI Codex, a static program. Speaks the Responses API; its sessions are kept in the agent's logs."""

from __future__ import annotations

import tomllib
from typing import Any

from pier.agent.contract import PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import EFFORTS, choice, merged, toml
from pier.agent.packed import CLIENT_TIMEOUT, PackedAgent, model_of
from pier.errors import UsageError
from pier.task.model import McpServerTable

PROVIDER = "pier"


class Codex(PackedAgent):
    """The option `config_toml` overrides pier's own settings."""

    name = "codex"
    skills = "~/.codex/skills"
    dialect = "responses"
    logs = ((".codex/sessions", "sessions"),)
    direct = True
    direct_hosts = ("api.openai.com", "chatgpt.com")
    pack = PackSpec("npm", "@openai/codex", "0.166.0", program="@openai/codex-linux-{arch}/vendor/*/bin/codex")
    options = (
        "reasoning_effort",
        "reasoning_summary",
        "config_toml",
        "command_model_name",
        "web_search",
        "disable_web_search",
        "model",
    )

    def launch(self, run: AgentRun) -> Launch:
        model = str(run.options.get("command_model_name") or model_of(run))
        argv = [f"{PACK_PATH}/bin/codex", "exec", "--dangerously-bypass-approvals-and-sandbox"]
        argv += ["--skip-git-repo-check", "--json", *(["--model", model] if model else []), "-"]
        home = f"{run.home.rstrip('/')}/.codex"
        env = {"CODEX_HOME": home} | ({"PIER_MODEL_KEY": run.endpoint.key} if run.endpoint else {})
        config = AgentFile(f"{home}/config.toml", toml(self._config(run)).encode())
        return Launch(argv, env, (config,), stdin=run.instruction.encode())

    def _config(self, run: AgentRun) -> dict[str, Any]:
        effort = choice(self.name, run.options, "reasoning_effort", EFFORTS, default="high")
        summary = choice(self.name, run.options, "reasoning_summary", ("auto", "concise", "detailed", "none"), "auto")
        web = "live" if run.options.get("web_search") and not run.options.get("disable_web_search") else "disabled"
        config: dict[str, Any] = {
            "check_for_update_on_startup": False,
            "model_reasoning_effort": effort,
            "model_reasoning_summary": summary,
            "web_search": web,
            "analytics": {"enabled": False},
            "features": {"plugins": False, "apps": False},
            "mcp_servers": {server.name: _mcp(server) for server in run.mcp_servers},
        }
        if run.endpoint:
            provider = {
                "name": PROVIDER,
                "base_url": f"{run.endpoint.url}/v1",
                "env_key": "PIER_MODEL_KEY",
                "wire_api": "responses",
                "stream_idle_timeout_ms": CLIENT_TIMEOUT * 1000,
            }
            config |= {"model_provider": PROVIDER, "model_providers": {PROVIDER: provider}}
            if run.endpoint.context_window:
                config["model_context_window"] = run.endpoint.context_window
        try:
            own = tomllib.loads(str(run.options.get("config_toml") or ""))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"codex: config_toml is not TOML: {error}") from error
        return merged(config, own)


def _mcp(server: McpServerTable) -> dict[str, Any]:
    if server.command:
        return {"command": server.command, "args": list(server.args)}
    return {"url": server.url, **({"http_headers": dict(server.headers)} if server.headers else {})}
