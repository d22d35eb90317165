"""Claude Code, a native program. Speaks Anthropic Messages; keeps its sessions in the agent's logs."""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, Launch, PackSpec
from pier.agent.options import AgentFlag, flags, words
from pier.agent.packed import CLIENT_TIMEOUT, PackedAgent, mcp_file, model_of

CONFIG = f"{AGENT_LOGS}/sessions"
MCP = f"{AGENT_LOGS}/mcp.json"

FLAGS = (
    AgentFlag("max_turns", "--max-turns"),
    AgentFlag("reasoning_effort", "--effort", ("low", "medium", "high", "xhigh", "max")),
    AgentFlag("thinking", "--thinking", ("enabled", "adaptive", "disabled")),
    AgentFlag("thinking_display", "--thinking-display", ("summarized", "omitted")),
    AgentFlag("max_budget_usd", "--max-budget-usd"),
    AgentFlag("fallback_model", "--fallback-model"),
    AgentFlag("append_system_prompt", "--append-system-prompt"),
)


class ClaudeCode(PackedAgent):
    """Plan mode is disallowed by default: there is no user to approve a plan."""

    name = "claude-code"
    skills = f"{CONFIG}/skills"
    dialect = "anthropic"
    direct = True
    direct_hosts = ("api.anthropic.com",)
    pack = PackSpec(
        "npm", "@anthropic-ai/claude-code", "2.1.325", program="@anthropic-ai/claude-code-linux-{arch}/claude"
    )
    options = (
        *(row.option for row in FLAGS),
        "allowed_tools",
        "disallowed_tools",
        "disable_web_search",
        "permission_mode",
        "max_thinking_tokens",
        "model",
    )

    def launch(self, run: AgentRun) -> Launch:
        model = model_of(run)
        denied = words(run.options, "disallowed_tools", ["EnterPlanMode"])
        denied += ["WebSearch", "WebFetch"] if run.options.get("disable_web_search") else []
        allowed = words(run.options, "allowed_tools")
        argv = [f"{PACK_PATH}/bin/claude", "--print", "--verbose", "--output-format", "stream-json"]
        argv += ["--permission-mode", str(run.options.get("permission_mode") or "bypassPermissions")]
        argv += ["--model", model] if model else []
        argv += flags(self.name, run.options, FLAGS)
        argv += ["--allowedTools", ",".join(allowed)] if allowed else []
        argv += ["--disallowedTools", ",".join(denied)] if denied else []
        argv += ["--mcp-config", MCP] if run.mcp_servers else []
        env = {
            "CLAUDE_CONFIG_DIR": CONFIG,
            "IS_SANDBOX": "1",
            "ENABLE_BACKGROUND_TASKS": "1",
            "FORCE_AUTO_BACKGROUND_TASKS": "1",
            "API_TIMEOUT_MS": str(CLIENT_TIMEOUT * 1000),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        if run.endpoint:
            env |= {"ANTHROPIC_BASE_URL": run.endpoint.url, "ANTHROPIC_API_KEY": run.endpoint.key}
        if model:
            kinds = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
            env |= dict.fromkeys(kinds, model)
        if run.options.get("max_thinking_tokens") is not None:
            env["MAX_THINKING_TOKENS"] = str(run.options["max_thinking_tokens"])
        return Launch(argv, env, mcp_file(run, MCP), stdin=run.instruction.encode())
