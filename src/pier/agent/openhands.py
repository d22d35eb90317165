"""OpenHands' command line on the pack's Python. Speaks Chat Completions, unary."""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, Launch, PackSpec
from pier.agent.packed import CLIENT_TIMEOUT, SHARED_SKILLS, PackedAgent, mcp_file, model_of

HOME = f"{AGENT_LOGS}/openhands"


class OpenHands(PackedAgent):
    """It clones a public repository of extensions before its first call; git is configured to fail at once."""

    name = "openhands"
    skills = SHARED_SKILLS
    dialect = "chat"
    direct = True
    direct_hosts = ("api.openai.com",)
    pack = PackSpec("pypi", "openhands", "1.16.0", pythons=("3.12", "3.13"))
    options = ("max_iterations", "reasoning_effort", "model")

    def launch(self, run: AgentRun) -> Launch:
        argv = [f"{PACK_PATH}/python/bin/python3", "-I", "-c", "from openhands_cli.entrypoint import main; main()"]
        argv += ["--headless", "--override-with-envs", "--json", "--always-approve", "--task", run.instruction]
        env = {
            "OPENHANDS_PERSISTENCE_DIR": HOME,
            "OPENHANDS_CONVERSATIONS_DIR": f"{HOME}/conversations",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LLM_TIMEOUT": str(CLIENT_TIMEOUT),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "url.file:///nonexistent/.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://github.com/OpenHands/",
        }
        model = model_of(run)
        if run.endpoint:
            env |= {"LLM_API_KEY": run.endpoint.key, "LLM_BASE_URL": f"{run.endpoint.url}/v1"}
            model = f"openai/{model}"
        if model:
            env["LLM_MODEL"] = model
        if run.options.get("max_iterations"):
            env["MAX_ITERATIONS"] = str(run.options["max_iterations"])
        if run.options.get("reasoning_effort"):
            env["LLM_REASONING_EFFORT"] = str(run.options["reasoning_effort"])
        return Launch(argv, env, mcp_file(run, f"{HOME}/mcp.json"))
