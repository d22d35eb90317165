"""GitHub Copilot's command line, offline, with any model. Speaks Chat Completions by default."""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, Launch, PackSpec
from pier.agent.options import AgentFlag, choice, flags
from pier.agent.packed import PackedAgent, mcp_file, model_of

HOME = f"{AGENT_LOGS}/copilot"
FLAGS = (AgentFlag("reasoning_effort", "--effort", ("low", "medium", "high", "xhigh", "max")),)


class Copilot(PackedAgent):
    """It unpacks itself into a cache on its first start, and needs certificates even for plain HTTP."""

    name = "copilot"
    skills = f"{HOME}/skills"
    dialect = "chat"
    pack = PackSpec("npm", "@github/copilot", "1.0.102", program="@github/copilot-linux-{arch}/copilot")
    options = ("reasoning_effort", "dialect", "disable_web_search", "model")

    def launch(self, run: AgentRun) -> Launch:
        argv = [f"{PACK_PATH}/bin/copilot", "--allow-all-tools", "--output-format", "json"]
        argv += flags(self.name, run.options, FLAGS)
        argv += ["--deny-tool", "web_fetch"] if run.options.get("disable_web_search") else []
        env = {
            "COPILOT_HOME": HOME,
            "COPILOT_CACHE_HOME": "/tmp/copilot-cache",
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
            "SSL_CERT_FILE": f"{PACK_PATH}/ca.pem",
        }
        if model := model_of(run):
            env["COPILOT_MODEL"] = model
        if run.endpoint:
            env["COPILOT_PROVIDER_API_KEY"] = run.endpoint.key
            dialect = choice(self.name, run.options, "dialect", ("chat", "anthropic", "responses"), default="chat")
            path = "" if dialect == "anthropic" else "/v1"
            env["COPILOT_PROVIDER_BASE_URL"] = run.endpoint.url + path
            if dialect == "anthropic":
                env["COPILOT_PROVIDER_TYPE"] = "anthropic"
            if dialect == "responses":
                env["COPILOT_PROVIDER_WIRE_API"] = "responses"
        files = mcp_file(run, f"{HOME}/mcp-config.json", tools=["*"])
        return Launch([*argv, "--prompt", run.instruction], env, files)
