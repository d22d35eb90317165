"""Goose, a native program. Speaks Chat Completions or Anthropic Messages; its files are in the agent's logs."""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, Launch, PackSpec
from pier.agent.options import EFFORTS, choice
from pier.agent.packed import CLIENT_TIMEOUT, SHARED_SKILLS, PackedAgent, model_of

HOME = f"{AGENT_LOGS}/goose"


class Goose(PackedAgent):
    """MCP servers are its extensions. It needs certificates even for plain HTTP."""

    name = "goose"
    skills = SHARED_SKILLS
    dialect = "chat"
    direct = True
    direct_hosts = ("api.openai.com",)
    pack = PackSpec(
        "npm", "@aaif/goose-binary-linux-{arch}", "1.52.0", program="@aaif/goose-binary-linux-{arch}/bin/goose"
    )
    options = ("max_turns", "reasoning_effort", "temperature", "max_tokens", "context_limit", "dialect", "model")

    def launch(self, run: AgentRun) -> Launch:
        argv = [f"{PACK_PATH}/bin/goose", "run", "--no-profile", "--with-builtin", "developer"]
        argv += ["--with-builtin", "skills"] if run.skills_dir else []
        argv += ["--output-format", "stream-json"]
        for server in run.mcp_servers:
            if server.command:
                argv += ["--with-extension", " ".join((server.command, *server.args))]
            else:
                argv += ["--with-streamable-http-extension", server.url or ""]
                if server.headers:
                    run.warn(f"goose does not support headers of MCP servers: {server.name}")
        return Launch([*argv, "--instructions", "-"], self._env(run), stdin=run.instruction.encode())

    def _env(self, run: AgentRun) -> dict[str, str]:
        env = {
            "GOOSE_PATH_ROOT": HOME,
            "GOOSE_MODE": "auto",
            "GOOSE_DISABLE_KEYRING": "1",
            "GOOSE_DISABLE_SESSION_NAMING": "true",
            "GOOSE_TELEMETRY_ENABLED": "false",
            "OPENAI_TIMEOUT": str(CLIENT_TIMEOUT),
            "SSL_CERT_FILE": f"{PACK_PATH}/ca.pem",
        }
        if model := model_of(run):
            env["GOOSE_MODEL"] = model
        if run.endpoint:
            dialect = choice(self.name, run.options, "dialect", ("chat", "anthropic"), default="chat")
            vendor = "ANTHROPIC" if dialect == "anthropic" else "OPENAI"
            env["GOOSE_PROVIDER"] = vendor.lower()
            env |= {f"{vendor}_HOST": run.endpoint.url, f"{vendor}_API_KEY": run.endpoint.key}
            if run.endpoint.context_window:
                env["GOOSE_CONTEXT_LIMIT"] = str(run.endpoint.context_window)
        if effort := choice(self.name, run.options, "reasoning_effort", EFFORTS):
            env["GOOSE_THINKING_EFFORT"] = effort
        for option in ("max_turns", "temperature", "max_tokens", "context_limit"):
            if run.options.get(option) is not None:
                env[f"GOOSE_{option.upper()}"] = str(run.options[option])
        return env
