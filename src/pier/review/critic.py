"""What makes the trial of an ordinary job a review: read-only mounts of what is reviewed, and the check of the output.

The critic sees the reviewed trial and its task below `INPUT`, and nothing else of this machine's jobs. Links in there
resolve inside the sandbox, which has no network. What the critic wrote is read out and checked on the host; if it does
not fit, the agent runs again in the same sandbox, within the same time and budget, with the reasons.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from pier.errors import AgentError, SandboxError
from pier.review.order import ReviewOrder, read_order, root_of
from pier.review.output import INPUT, OUTPUT_LIMIT, check_output
from pier.sandbox.contract import Mount, Sandbox
from pier.trial.spec import Accept, TrialSpec

_AGAIN = """\
{instruction}

You have done this once already, and what you wrote to {output} is not accepted:

{problems}

Correct this, and write the whole file again.
"""


def as_review(spec: TrialSpec) -> TrialSpec:
    """The spec of a trial whose task is a review."""
    order, root = read_order(spec.task), root_of(spec.task)
    places = order.places(root)
    mounts = tuple(Mount(f"{INPUT}/{name}", path, read_only=True) for name, path in places.items())
    sandbox = replace(
        spec.sandbox,
        mounts=(*spec.sandbox.mounts, *mounts),
        hidden=(*spec.sandbox.hidden, *_hidden(root), *places.values()),
    )
    accept = acceptance(order, places, spec.task.steps[0].instruction)
    return replace(spec, sandbox=sandbox, accept=accept)


def _hidden(root: Path) -> tuple[Path, ...]:
    """The reviewed job, and its neighbours unless they lie at the top of the machine."""
    return (root, root.parent) if len(root.parent.parts) > 2 else (root,)


def acceptance(order: ReviewOrder, places: dict[str, Path], instruction: str) -> Accept:
    """The check of what a critic wrote."""
    schema = order.schema_model()

    async def accept(sandbox: Sandbox, number: int) -> str | None:
        problems = await find_problems(sandbox)
        if not problems:
            return None
        if number >= order.asks:
            raise AgentError(
                f"the review is not accepted after {number + 1} runs of the agent: {'; '.join(problems)}",
                code="bad_review",
            )
        listed = "\n".join(f"- {problem}" for problem in problems)
        return _AGAIN.format(instruction=instruction.rstrip(), output=order.output, problems=listed)

    async def find_problems(sandbox: Sandbox) -> tuple[str, ...]:
        try:
            data = await sandbox.read_file(order.output, max_bytes=OUTPUT_LIMIT)
        except FileNotFoundError:
            return (f"there is no file {order.output}",)
        except SandboxError as error:
            if error.code not in ("not_regular", "too_large", "is_directory", "not_directory"):
                raise
            return (f"{order.output} is not a regular file of at most {OUTPUT_LIMIT >> 20} MB",)
        return (await asyncio.to_thread(check_output, data, schema, places)).problems

    return accept
