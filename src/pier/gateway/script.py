"""A model that follows a script, a YAML or JSON file of turns, for demos and tests with any agent and no provider.

Turns contain actions (`shell`, `write`, `edit`, `finish`, ...), which become calls of the agent's tools, or text in the
format of an agent without tools. Side calls (titles, quota probes, routers) get a short answer and do not use up a
turn. An unchanged request, which is a retry, gets the same turn again. `docs/reference/scripts.md` has the format.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from pier.errors import UsageError
from pier.gateway.actions import Action, ScriptedCall, ScriptedEdit, ScriptModel, Write, perform, text_form
from pier.wire.turn import ModelFailed, Part, Reasoning, Request, StopReason, Text, ToolCall, ToolResult, Turn, Usage
from pier.wire.values import kind_of_status

_SIDE = re.compile(
    r"\btitle|summar[iy]|\bquota\b|topic|short name|branch name|few words|four words|4 words|next speaker|"
    r"compact|condense",
    re.IGNORECASE,
)
_FORBIDS_TOOLS = re.compile(r"text only|do not call any tools|do not use any tools", re.IGNORECASE)
_FEW_TOKENS = 32


def side_answer(request: Request, plain: str) -> str | None:
    """The answer to a side call; None for any other call.

    Side calls offer no tools, and ask for JSON of a schema, for a few tokens, or for a title, a summary and the like.
    Claude Code offers tools when it asks for a summary, but forbids their use.
    """
    last = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
    if request.tools and _FORBIDS_TOOLS.search(last) and _SIDE.search(last):
        return plain
    if request.tools or text_form(request):
        return None
    if request.response_format is not None and request.response_format.schema is not None:
        return json.dumps(example(request.response_format.schema))
    if request.sampling.max_tokens is not None and request.sampling.max_tokens <= _FEW_TOKENS:
        return plain
    return plain if _SIDE.search("\n".join([*request.system, last[:2000], last[-2000:]])) else None


def example(schema: Any) -> Any:
    """A minimal value for a JSON schema."""
    if not isinstance(schema, Mapping):
        return {}
    if "const" in schema:
        return schema["const"]
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match str(kind).lower():
        case "string":
            return "scripted"
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return False
        case "array":
            return [example(schema.get("items"))] if schema.get("minItems") else []
        case "null":
            return None
        case _:
            properties = schema.get("properties") or {}
            return {name: example(properties.get(name)) for name in schema.get("required") or properties}


_REPEATS = 8
"""Number of calls after the end of the script that get an answer; further ones fail."""


class FailSpec(ScriptModel):
    status: int = Field(default=500, ge=400, le=599)
    message: str = "the script says that this call fails"


class UsageSpec(ScriptModel):
    input: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    cost_usd: float | None = None


class ActionSpec(ScriptModel):
    """One action; exactly one field is set."""

    shell: str | None = None
    write: Write | None = None
    edit: ScriptedEdit | None = None
    call: ScriptedCall | None = None

    def actions(self) -> list[Action]:
        return [action for action in (self.shell, self.write, self.edit, self.call) if action is not None]


class TurnSpec(ActionSpec):
    """One answer of the model."""

    text: str | None = None
    reasoning: str | None = None
    actions_: list[ActionSpec] = Field(default_factory=list, alias="actions")
    finish: str | None = None
    error: FailSpec | None = None
    delay: float = Field(default=0.0, ge=0)
    usage: UsageSpec | None = None
    stop: Literal["length", "refusal"] | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> TurnSpec:
        contents = (self.text, self.reasoning, self.finish, self.error)
        if not self.all_actions() and all(item is None for item in contents):
            raise ValueError("a turn needs text, reasoning, an action, finish or error")
        if self.finish is not None and (self.text is not None or self.all_actions()):
            raise ValueError("finish must be a separate turn")
        return self

    def all_actions(self) -> list[Action]:
        return [*self.actions(), *(action for spec in self.actions_ for action in spec.actions())]


class WhenSpec(ScriptModel):
    """Conditions for the calls that a lane answers; all that are set must hold."""

    model: str | None = None
    system: str | None = None
    message: str | None = None
    tool: str | None = None


class LaneSpec(ScriptModel):
    when: WhenSpec
    turns: list[TurnSpec] = Field(min_length=1)


class ScriptFile(ScriptModel):
    turns: list[TurnSpec] = Field(min_length=1)
    lanes: list[LaneSpec] = Field(default_factory=list)
    side: str | None = "Scripted session"
    """The answer to side calls; null disables their detection."""


@dataclass
class _Lane:
    """Turns in order, and the number of those used."""

    name: str
    turns: list[TurnSpec]
    when: WhenSpec | None = None
    used: int = 0
    repeats: int = 0
    last: tuple[bytes, Turn] | None = None

    def takes(self, request: Request) -> bool:
        when = self.when or WhenSpec()
        users = (message.text for message in request.messages if message.role == "user" and message.text)
        checks = (
            when.model is None or fnmatchcase(request.model, when.model),
            when.system is None or re.search(when.system, "\n".join(request.system)) is not None,
            when.message is None or re.search(when.message, next(users, "")) is not None,
            when.tool is None or any(fnmatchcase(tool.name, when.tool) for tool in request.tools),
        )
        return all(checks)


class Script:
    """A policy that plays a script once, for one session."""

    def __init__(self, file: ScriptFile, name: str = "script") -> None:
        self.name = name
        self._side = file.side
        lanes = [_Lane(f"lane{index}", lane.turns, lane.when) for index, lane in enumerate(file.lanes, 1)]
        self._lanes = [*lanes, _Lane("main", file.turns)]

    @classmethod
    def load(cls, path: Path) -> Script:
        """Read a script; raise `UsageError` with the places of mistakes."""
        try:
            value = yaml.safe_load(path.read_text())
        except OSError as error:
            raise UsageError(f"cannot read the script {path}: {error.strerror}", code="script") from error
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is neither YAML nor JSON: {error}", code="script") from error
        return cls.parse(value, str(path))

    @classmethod
    def parse(cls, value: Any, name: str = "script") -> Script:
        """A script from its parsed file: a mapping, or just its list of turns."""
        if isinstance(value, list):
            value = {"turns": value}
        try:
            return cls(ScriptFile.model_validate(value), name)
        except ValidationError as error:
            places = "; ".join(
                f"{'.'.join(str(step) for step in item['loc']) or 'file'}: {item['msg']}" for item in error.errors()
            )
            raise UsageError(
                f"{name} is not a script: {places}", hint="see docs/reference/scripts.md", code="script"
            ) from error

    async def __call__(self, request: Request) -> Turn:
        answer = side_answer(request, self._side) if self._side is not None else None
        if answer is not None:
            return _turn(request, (Text(answer),), "end", None, None)
        lane = next(lane for lane in self._lanes if lane.takes(request))
        digest = _digest(request)
        if lane.last is not None and lane.last[0] == digest:
            return lane.last[1]
        if lane.used >= len(lane.turns):
            return self._after_end(lane, request)
        number, spec = lane.used, lane.turns[lane.used]
        if text_form(request) == "blocks" and spec.error is None:
            spec = _all_edits(lane.turns[number:])
            lane.used = len(lane.turns) - 1
        lane.used += 1
        if spec.delay:
            await asyncio.sleep(spec.delay)
        if spec.error:
            lane.last = None
            status = spec.error.status
            raise ModelFailed(spec.error.message, status=status, kind=kind_of_status(status))
        turn = _play(spec, request, f"{lane.name}_{number + 1}")
        lane.last = (digest, turn)
        return turn

    def _after_end(self, lane: _Lane, request: Request) -> Turn:
        """The answer to calls after the last turn: that turn if it is `finish`, else that the script is over."""
        lane.repeats += 1
        last = lane.turns[-1]
        over = f"The script {self.name} is over: it has {len(lane.turns)} turns, and the agent asked for another."
        if lane.repeats > _REPEATS:
            raise ModelFailed(over, status=400, kind="invalid_request")
        spec = last if last.finish is not None else TurnSpec(finish=over)
        return _play(spec, request, f"{lane.name}_{len(lane.turns) + lane.repeats}")


def _all_edits(turns: list[TurnSpec]) -> TurnSpec:
    """All remaining edits in one turn, for agents such as aider, which make one call and accept only edits."""
    edits = [action for turn in turns for action in turn.all_actions() if isinstance(action, Write | ScriptedEdit)]
    texts = [text for turn in turns if (text := turn.text or turn.finish)]
    specs = [ActionSpec(write=item) if isinstance(item, Write) else ActionSpec(edit=item) for item in edits]
    text = "\n\n".join(texts) or (None if specs else "There is nothing to edit.")
    return TurnSpec(text=text, actions=specs)


def _play(spec: TurnSpec, request: Request, label: str) -> Turn:
    parts: list[Part] = [Reasoning(spec.reasoning)] if spec.reasoning else []
    performed = perform(request, spec.text or spec.finish or "", spec.all_actions(), spec.finish is not None, label)
    parts.extend(performed)
    has_calls = any(isinstance(part, ToolCall) for part in performed)
    stop: StopReason = spec.stop or ("tool_use" if has_calls else "end")
    return _turn(request, tuple(parts), stop, spec.usage, f"script_{label}")


def _turn(
    request: Request, parts: tuple[Part, ...], stop: StopReason, usage: UsageSpec | None, id_: str | None
) -> Turn:
    spec = usage or UsageSpec()
    prompt = sum(map(len, request.system)) + sum(_count_characters(message.parts) for message in request.messages)
    prompt += sum(len(tool.description or "") + len(json.dumps(tool.schema or {})) for tool in request.tools)
    counts = Usage(
        input_tokens=spec.input if spec.input is not None else prompt // 4 + 1,
        output_tokens=spec.output if spec.output is not None else _count_characters(parts) // 4 + 1,
        cached_tokens=spec.cached,
        reasoning_tokens=spec.reasoning,
        cost_usd=spec.cost_usd,
    )
    return Turn(parts, stop, counts, id_, request.model)


def _count_characters(parts: Iterable[Part]) -> int:
    """Number of characters in a message, for estimating tokens."""
    size = 0
    for part in parts:
        match part:
            case Text(text=text) | Reasoning(text=text) | ToolCall(arguments=text):
                size += len(text)
            case ToolResult(parts=inner):
                size += _count_characters(inner)
            case _:
                pass
    return size


def _digest(request: Request) -> bytes:
    text = repr((request.model, request.system, request.messages))
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
