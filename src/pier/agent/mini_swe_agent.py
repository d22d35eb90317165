"""mini-swe-agent on the pack's Python. The model's provider determines the dialect, as in its own adapters."""

from __future__ import annotations

from typing import Any

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentFile, AgentRun, Launch, PackSpec
from pier.agent.options import EFFORTS, choice, merged
from pier.agent.packed import CLIENT_TIMEOUT, PackedAgent, bare, model_of
from pier.errors import UsageError

HOME = f"{AGENT_LOGS}/mini-swe-agent"
TRAJECTORY = f"{AGENT_LOGS}/mini-swe-agent.trajectory.json"


class MiniSweAgent(PackedAgent):
    """The option `config_yaml` overrides pier's own configuration, which overrides the agent's `mini.yaml`."""

    name = "mini-swe-agent"
    dialect = "chat"
    takes_mcp = False
    direct = True
    direct_hosts = ("api.openai.com", "api.anthropic.com", "openrouter.ai", "*.googleapis.com")
    pack = PackSpec("pypi", "mini-swe-agent", "2.4.6", extras=("mcp",))
    options = (
        "config_yaml",
        "reasoning_effort",
        "set_cache_control",
        "max_tokens",
        "max_turns",
        "cost_limit",
        "model_class",
        "model",
    )

    def launch(self, run: AgentRun) -> Launch:
        import yaml

        config = yaml.safe_dump(self._config(run), sort_keys=False).encode()
        argv = [f"{PACK_PATH}/python/bin/python3", "-I", "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately"]
        argv += ["-c", "mini.yaml", "-c", f"{HOME}/pier.yaml", "--output", TRAJECTORY]
        env = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": HOME,
            # The gateway retries transient faults; ten attempts after the end of a budget would take seven minutes.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        if run.endpoint:
            keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY")
            env |= dict.fromkeys(keys, run.endpoint.key)
        return Launch(argv, env, (AgentFile(f"{HOME}/pier.yaml", config),))

    def _config(self, run: AgentRun) -> dict[str, Any]:
        options = run.options
        settings: dict[str, Any] = {"timeout": CLIENT_TIMEOUT, "drop_params": True}
        if effort := choice(self.name, options, "reasoning_effort", EFFORTS):
            settings["reasoning_effort"] = effort
        if options.get("max_tokens"):
            settings["max_tokens"] = int(options["max_tokens"])
        model = self._model(run, settings)
        model |= {name: options[name] for name in ("set_cache_control", "model_class") if options.get(name)}
        agent: dict[str, Any] = {"cost_limit": float(options.get("cost_limit") or 0)}
        if options.get("max_turns"):
            agent["step_limit"] = int(options["max_turns"])
        config = {"run": {"task": run.instruction}, "agent": agent, "model": model}
        return merged(config, _user_config(options.get("config_yaml")))

    def _model(self, run: AgentRun, settings: dict[str, Any]) -> dict[str, Any]:
        """The model's settings: Responses for OpenAI's models, Messages for Anthropic's, else Chat Completions."""
        name = model_of(run)
        model: dict[str, Any] = {"model_name": name, "model_kwargs": settings}
        if name.startswith("openai/"):
            model["model_class"] = "litellm_response"
        if run.endpoint is None:
            return model
        if name.startswith("anthropic/"):
            settings["api_base"] = run.endpoint.url
        else:
            settings["api_base"] = f"{run.endpoint.url}/v1"
            model["model_name"] = f"openai/{bare(name) if name.startswith('openai/') else name}"
        return model


def _user_config(text: Any) -> dict[str, Any]:
    import yaml

    if not text:
        return {}
    try:
        config = yaml.safe_load(text) if isinstance(text, str) else text
    except yaml.YAMLError as error:
        raise UsageError(f"mini-swe-agent: config_yaml is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise UsageError("mini-swe-agent: invalid value for config_yaml: expected a mapping")
    return config
