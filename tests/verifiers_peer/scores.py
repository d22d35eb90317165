"""The same rewards and results by verifiers 0.3.1 and by pier: run by each one's Python, prints JSON."""

import asyncio
import inspect
import json
import sys

if sys.argv[1] == "pier":
    import pier.rollout as vf
    from pier.cli.rollout import _VF_EVAL, rollout
    from pier.rollout.results import Results, ResultsHeader, output_of
    from pier.rollout.state import RolloutTiming
else:
    import verifiers.legacy as vf
    from verifiers.legacy.scripts.eval import build_parser
    from verifiers.legacy.types import RolloutTiming
    from verifiers.legacy.utils.save_utils import GenerateOutputsBuilder, state_to_output


NAMES = """
    Error ModelError InvalidModelResponseError EmptyModelResponseError OverlongPromptError ToolError ToolParseError
    ToolCallError InfraError TunnelError SandboxError Messages SystemMessage UserMessage AssistantMessage ToolMessage
    ToolCall Response TrajectoryStep SamplingArgs Info TokenUsage RolloutTiming TimeSpan TimeSpans RewardFunc
    ClientConfig
""".split()
"""What environments use of the errors and types, which are in no `__all__`."""


def public(kind):
    return [name for name in dir(kind) if not name.startswith("_")]


def defaults(kind):
    given = inspect.signature(kind.__init__).parameters.values()
    return {each.name: repr(each.default) for each in given if each.default is not each.empty}


def flags():
    if sys.argv[1] == "pier":
        return [name for param in rollout.params for name in param.opts] + " ".join(_VF_EVAL).split()
    return [name for action in build_parser()._actions for name in action.option_strings]


def plain(completion, answer):
    return float(completion[-1]["content"] == answer)


async def by_state(state, info, **kwargs):
    return info["bonus"] + len(kwargs["prompt"])


def group(states, answers):
    return [float(index) for index, _ in enumerate(states)]


def row_column(level):
    return level


def state(number):
    row = {
        "prompt": [{"role": "user", "content": "q"}],
        "answer": "yes",
        "info": {"bonus": 0.5 * number},
        "example_id": 7,
        "level": 3.0,
    }
    made = vf.State(input=row)
    content = "yes" if number % 2 else "no"
    made.update(
        task=row,
        trajectory=[{"reward": None, "advantage": None, "response": {}}],
        completion=[{"role": "assistant", "content": content}],
        timing=RolloutTiming(),
        is_completed=True,
        is_truncated=False,
        stop_condition="agent_completed",
        error=None,
        tool_defs=[],
        reward=None,
        metrics=None,
    )
    return made


async def main():
    states = [state(number) for number in range(4)]
    rubric = vf.Rubric(funcs=[plain, by_state, group, row_column], weights=[1.0, 0.5, 0.25, 0.0])
    await rubric.score_group(states)
    alone = state(1)
    await vf.Rubric(funcs=[plain, by_state], weights=[2.0, 1.0]).score_rollout(alone)
    if sys.argv[1] == "pier":
        outputs = [output_of(each) for each in states]
        header = ResultsHeader("env", {}, "m", "", 1, 4, {}, 0.5, [])
        results = Results(header, path=None)
        results.outputs = outputs
    else:
        outputs = [state_to_output(each) for each in states]
        results = GenerateOutputsBuilder("env", {}, "m", None, 1, 4, [], {}, None)
        results.add_outputs(outputs)
    metadata = results.metadata() if sys.argv[1] == "pier" else results.build_metadata()
    found = {
        "rewards": [each["reward"] for each in states],
        "advantages": [each["advantage"] for each in states],
        "metrics": [each["metrics"] for each in states],
        "steps": [[step["reward"], step["advantage"]] for each in states for step in each["trajectory"]],
        "alone": [alone["reward"], alone["metrics"]],
        "keys": sorted(outputs[0]),
        "timing": sorted(outputs[0]["timing"]),
        "metadata": sorted(metadata),
        "pass": [metadata["pass_at_k"], metadata["pass_all_k"], metadata["avg_reward"], metadata["avg_metrics"]],
        "evaluate": list(inspect.signature(vf.Environment.evaluate).parameters),
        "generate": list(inspect.signature(vf.Environment.generate).parameters),
        "constructor": defaults(vf.CliAgentEnv),
        "flags": flags(),
        "names": sorted(vf.__all__) + [name for name in NAMES if hasattr(vf, name)],
        **{kind.__name__: public(kind) for kind in (vf.CliAgentEnv, vf.Rubric, vf.Parser, vf.JudgeRubric)},
    }
    json.dump(found, sys.stdout)


asyncio.run(main())
