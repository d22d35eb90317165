"""Training samples from recordings: exact tokens, loss mask, log-probs, and the reward of the trial.

A sample is one branch of the tree of calls. A call is appended to an earlier one only if its prompt's token ids begin
with the earlier prompt and completion, id by id; if a chat template or a client rewrote the history, a new sample
begins. Nothing is tokenised here: a call without token ids makes a sample without tokens. `broken_promises` checks:

- `input_ids` is the prompt of the last call and its completion; mask, log-probs and ids have the same length.
- The mask is 1 on sampled tokens only, each sampled token in at most one sample; of repeated calls, at most one answer
  is trained.
- Every token with mask 1 has a log-prob: tokens sampled without one are not trained.

Results of trials are read as plain JSON, Harbor's included. A trial without a verdict has no reward, which is not 0;
`fault` and `termination_reason` give the cause.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pier.errors import UsageError
from pier.record import FILE_NAMES, RECORDING
from pier.record.reader import LIMIT, Recording, RecordingTooLarge, read
from pier.trajectory.calls import Generation, Kind, Node, read_calls
from pier.trajectory.lineage import Lineage, Thread
from pier.trajectory.model import file_content
from pier.tree import TreeError, find_files
from pier.trial.bounded import read_back_now
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Message, Request, Turn

log = logging.getLogger(__name__)

Split = Literal["retokenised", "compaction", "history_changed", "fork", "no_tokens"]
"""The reason why a sample does not continue the one before: its prompt's ids differ from the sampled ones; its history
was replaced by a summary, or changed; another branch trains the shared part; only one of the two has tokens."""
KINDS: tuple[Kind, ...] = ("main", "sub_agent", "side", "foreign")


@dataclass(frozen=True, slots=True)
class Exact:
    """The token ids of a call. `logprobs` is None unless there is one for each sampled token: tool parsers of servers
    may drop some."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...] | None

    @classmethod
    def of(cls, turn: Turn | None) -> Exact | None:
        """None unless both prompt and completion are known."""
        tokens = turn.tokens if turn else None
        if tokens is None or tokens.prompt_ids is None or tokens.completion_ids is None:
            return None
        complete = tokens.logprobs is not None and len(tokens.logprobs) == len(tokens.completion_ids)
        return cls(tokens.prompt_ids, tokens.completion_ids, tokens.logprobs if complete else None)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Span:
    """The range of `input_ids` that one call sampled."""

    call: int
    start: int
    end: int
    trained: bool
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch of the tree of calls. Without exact tokens, `input_ids`, `loss_mask` and `logprobs` are None."""

    number: int
    kind: Kind
    thread: int
    calls: tuple[int, ...]
    input_ids: tuple[int, ...] | None
    loss_mask: tuple[int, ...] | None
    logprobs: tuple[float | None, ...] | None
    """One for each id; None where the mask is 0."""
    spans: tuple[Span, ...]
    request: Request
    """The last call's request."""
    turns: tuple[Turn, ...]
    """The answers of all calls, in order."""
    owns: tuple[bool, ...]
    """Whether this sample trains each of them; otherwise an earlier branch does."""
    model: str
    dialect: str
    split: Split | None = None
    continues: int | None = None
    """The sample that this one continues or branches off from."""
    spawned_by: int | None = None
    """The call that started this sub-agent."""
    weights: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return self.input_ids is not None

    @property
    def prompt_length(self) -> int:
        """Number of ids before the first completion."""
        return self.spans[0].start if self.spans else len(self.input_ids or ())

    @property
    def trained(self) -> int:
        return sum(self.loss_mask or ())

    @property
    def stop(self) -> str:
        return self.turns[-1].stop

    def messages(self) -> list[dict[str, Any]]:
        """The conversation with its last answer, in the format of Chat Completions."""
        return _chat(self)["messages"]

    def tools(self) -> list[dict[str, Any]]:
        return _chat(self).get("tools") or []


@dataclass(slots=True)
class Counts:
    """Counts of model calls and their tokens."""

    generations: int = 0
    unanswered: int = 0
    retries: int = 0
    without_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    ids: int = 0
    """Ids of all samples, prompts included."""
    matched: int = 0
    """Calls whose prompt begins with the exact ids of the call that they continue."""
    other_kinds: dict[str, int] = field(default_factory=dict)
    splits: dict[str, int] = field(default_factory=dict)

    @property
    def delivered_fraction(self) -> float | None:
        """Share of sampled tokens that are trained."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else None

    @property
    def prefix_match_rate(self) -> float | None:
        """Share of the calls continuing another one whose prompt begins with the exact ids of that one."""
        both = self.matched + self.splits.get("retokenised", 0)
        return self.matched / both if both else None

    @property
    def trainable_share(self) -> float | None:
        """Share of all ids that are trained."""
        return self.trained_tokens / self.ids if self.ids else None

    def as_dict(self) -> dict[str, Any]:
        rates = ("delivered_fraction", "prefix_match_rate", "trainable_share")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    def add(self, other: Counts) -> None:
        for name in set(self.__dataclass_fields__) - {"other_kinds", "splits"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.other_kinds, other.other_kinds), (self.splits, other.splits)):
            for key, number in theirs.items():
                mine[key] = mine.get(key, 0) + number


def samples_of(
    recording: Path | Recording, kinds: Collection[str] = KINDS, most: int | None = LIMIT
) -> tuple[list[Sample], Counts]:
    """The samples of a recording (a file, a trial's directory, or already read) and the counts of its calls;
    `RecordingTooLarge` as `Reader` raises it."""
    found = read(recording, most) if isinstance(recording, Path) else recording
    return from_nodes((node for _, node in read_calls(found.generations())), kinds)


def read_samples(recording: Path, kinds: Collection[str]) -> tuple[list[Sample], Counts]:
    """The same in bounded memory. An agent may have removed its recording or made it too large: no samples then."""
    try:
        return read_back_now(samples_of, recording, kinds) if recording.is_file() else ([], Counts())
    except RecordingTooLarge as error:
        log.warning("%s; the rollout has no samples", error)
        return [], Counts()


def from_nodes(nodes: Iterable[Node], kinds: Collection[str] = KINDS) -> tuple[list[Sample], Counts]:
    """The same for calls in the order of their requests."""
    lineage = Lineage()
    for node in nodes:
        lineage.add(node)
    return from_threads(lineage.threads(), kinds)


class SampleBuilder:
    """Makes the samples of one session in memory. Pass `add` to the session as `on_generation`."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)

    def samples(self, kinds: Collection[str] = KINDS) -> tuple[list[Sample], Counts]:
        """The samples of the calls so far, and their counts."""
        return from_nodes(sorted((each.node for each in self.generations), key=lambda node: node.number), kinds)


def from_threads(threads: list[Thread], kinds: Collection[str] = KINDS) -> tuple[list[Sample], Counts]:
    """The same for calls that were sorted into threads."""
    counts = Counts()
    samples: list[Sample] = []
    for place, thread in enumerate(threads):
        for node in thread.nodes:
            _count(node, kinds, counts)
        work = [node for node in thread.nodes if node.kind != "retry" and node.turn is not None]
        # A thread contains its side calls, such as summaries and titles.
        for kind in KINDS:
            nodes = [node for node in work if _kind(node) == kind and kind in kinds]
            samples += _branches(nodes, kind, place, start=len(samples))
    counts.trained_tokens = sum(sample.trained for sample in samples)
    counts.ids = sum(len(sample.input_ids or ()) for sample in samples)
    # A call shared by several branches counts once.
    counts.matched = len({pair for sample in samples if sample.exact for pair in pairwise(sample.calls)})
    for sample in samples:
        if sample.split:
            counts.splits[sample.split] = counts.splits.get(sample.split, 0) + 1
    return samples, counts


def broken_promises(samples: Iterable[Sample]) -> Iterator[str]:
    """Describe each violated invariant of this module."""
    trained: set[int] = set()
    for sample in samples:
        name, ids = f"sample {sample.number}", sample.input_ids
        for span in sample.spans:
            if span.trained and span.call in trained:
                yield f"{name}: the tokens of call {span.call} are trained twice"
            if span.trained:
                trained.add(span.call)
        if ids is None:
            continue
        mask, last = sample.loss_mask or (), Exact.of(sample.turns[-1])
        if len(mask) != len(ids) or (sample.logprobs is not None and len(sample.logprobs) != len(ids)):
            yield f"{name}: ids, mask and log-probs differ in length"
            continue
        if last is None or ids != last.ids:
            yield f"{name}: its ids are not the prompt and the completion of its last call"
        sampled = {i for span in sample.spans if span.trained for i in range(span.start, span.end)}
        if {i for i, bit in enumerate(mask) if bit} != sampled:
            yield f"{name}: the mask is not 1 on exactly the sampled tokens that it trains"
        if sampled and (sample.logprobs is None or any(sample.logprobs[i] is None for i in sampled)):
            yield f"{name}: a trained token has no log-prob"


def _kind(node: Node) -> Kind:
    return "main" if node.kind == "compaction" else node.kind


def _count(node: Node, kinds: Collection[str], counts: Counts) -> None:
    counts.generations += 1
    if node.kind == "retry":
        counts.retries += 1
    elif node.turn is None:
        counts.unanswered += 1
    elif _kind(node) not in kinds:
        counts.other_kinds[_kind(node)] = counts.other_kinds.get(_kind(node), 0) + 1
    elif exact := Exact.of(node.turn):
        counts.sampled_tokens += len(exact.completion)
    else:
        counts.without_tokens += 1


def _branches(nodes: list[Node], kind: Kind, thread: int, start: int) -> list[Sample]:
    """Make a sample for each call that no other call continues exactly."""
    inside = {id(node): node for node in nodes}
    before: dict[int, Node] = {}
    splits: dict[int, tuple[Split, Node]] = {}
    for node in nodes:
        parent = inside.get(id(node.parent))
        if parent is None:
            continue
        why = _why_apart(parent, node)
        if why is None:
            before[id(node)] = parent
        else:
            splits[id(node)] = (why, parent)
    followed = {id(parent) for parent in before.values()}
    samples: list[Sample] = []
    trained: dict[int, int] = {}
    for leaf in (node for node in nodes if id(node) not in followed):
        path = [leaf]
        while (parent := before.get(id(path[0]))) is not None:
            path.insert(0, parent)
        number = start + len(samples) + 1
        shared = [trained[id(node)] for node in path if id(node) in trained]
        why, origin = splits.get(id(path[0]), (None, None))
        continues = trained.get(id(origin)) if origin else None
        if shared:
            why, continues = "fork", shared[-1]
        samples.append(replace(_sample(path, kind, thread, number, trained), split=why, continues=continues))
        for node in path:
            trained.setdefault(id(node), number)
    return samples


def _why_apart(parent: Node, node: Node) -> Split | None:
    """The reason why a call cannot be appended to its parent; None if it continues it exactly."""
    if node.kind == "compaction":
        return "compaction"
    before, after = Exact.of(parent.turn), Exact.of(node.turn)
    if before and after:
        ids = before.ids
        return None if after.prompt[: len(ids)] == ids else "retokenised"
    if before or after:
        return "no_tokens"
    return None if node.begins_like(parent) else "history_changed"


def _sample(path: list[Node], kind: Kind, thread: int, number: int, trained: dict[int, int]) -> Sample:
    last = path[-1]
    assert last.turn is not None
    turns = tuple(node.turn for node in path if node.turn is not None)
    spawned = path[0].spawned_by
    sample = Sample(
        number=number,
        kind=kind,
        thread=thread,
        calls=tuple(node.number for node in path),
        input_ids=None,
        loss_mask=None,
        logprobs=None,
        spans=(),
        request=last.request,
        turns=turns,
        owns=tuple(id(node) not in trained for node in path),
        model=last.turn.model or last.request.model,
        dialect=last.request.dialect or "",
        spawned_by=spawned[0].number if spawned else None,
        weights=tuple(dict.fromkeys(turn.tokens.weights for turn in turns if turn.tokens and turn.tokens.weights)),
        flags=_flags(path),
    )
    exact = [Exact.of(turn) for turn in turns]
    return _with_tokens(sample, path, [each for each in exact if each]) if exact[-1] else sample


def _with_tokens(sample: Sample, path: list[Node], exact: list[Exact]) -> Sample:
    ids = exact[-1].ids
    mask, logprobs = [0] * len(ids), list[float | None]([None] * len(ids))
    any_logprobs = any(tokens.logprobs is not None for tokens in exact)
    spans: list[Span] = []
    for node, tokens, owned in zip(path, exact, sample.owns, strict=True):
        start, end = len(tokens.prompt), len(tokens.prompt) + len(tokens.completion)
        counts = owned and tokens.logprobs is not None and end > start
        if counts:
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = tokens.logprobs or ()
        spans.append(Span(node.number, start, end, counts, node.request.sampling.temperature))
    missing = ("logprobs_missing",) if any(tokens.logprobs is None for tokens in exact) else ()
    return replace(
        sample,
        input_ids=ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs) if any_logprobs else None,
        spans=tuple(spans),
        flags=(*sample.flags, *missing),
    )


def _flags(path: list[Node]) -> tuple[str, ...]:
    stops = {node.turn.stop for node in path if node.turn}
    flags = {
        "truncated": bool(stops & {"length", "context"}),
        "refused_by_model": "refusal" in stops,
        "several_models": len({node.request.model for node in path}) > 1,
    }
    return tuple(name for name, holds in flags.items() if holds)


def _chat(sample: Sample) -> dict[str, Any]:
    answer = Message("assistant", sample.turns[-1].parts)
    request = replace(sample.request, messages=(*sample.request.messages, answer))
    return DIALECTS["chat"].render_request(request)


NOT_THE_AGENTS = frozenset({"infra", "provider", "task", "user"})
"""The blames of rollouts that do not count."""


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """The trial and step of a session, and its recording."""

    recording: Path | None
    rollout: str
    group: str
    task: str | None = None
    task_digest: str | None = None
    step: str | None = None
    attempt: int | None = None
    agent: str | None = None
    agent_version: str | None = None
    rewards: Mapping[str, float] | None = None
    termination_reason: str = "unknown"
    """`completed`; the limit that was reached (`max_turns`, `max_tokens`, ...); `timeout`; else the code of the trial's
    error; `unknown` without a result."""
    fault: str | None = None
    """The blame (infra, provider, task or user) if the run does not count."""
    notes: tuple[str, ...] = ()
    """Kinds of the verifier's integrity notes."""

    @property
    def reward(self) -> float | None:
        """The reward named `reward`, or the only one."""
        known = dict(self.rewards or {})
        if "reward" in known or len(known) != 1:
            return known.get("reward")
        return next(iter(known.values()))

    @property
    def is_earned(self) -> bool:
        return self.reward is not None and self.fault is None


def origins(place: Path) -> Iterator[SampleOrigin]:
    """All recordings at `place`: a recording, or the directory of a trial, a job or several jobs. Retried trials are
    left out."""
    if place.is_file():
        yield _origin(place, _trial_of(place))
        return
    place = place.resolve()
    found = sorted(path for name in FILE_NAMES for path in find_files(place, name))
    counting = [path for path in found if ".retries" not in path.relative_to(place).parts and _is_piers(path)]
    if not counting:
        raise UsageError(f"no recording found below {place}", hint="give a job's or a trial's directory")
    for path in counting:
        yield _origin(path, _trial_of(path))


def _is_piers(recording: Path) -> bool:
    """Whether a recording has a path that pier writes to, rather than one among the files of an agent."""
    trial = _trial_of(recording)
    if trial is not None and recording.name != RECORDING:
        return False
    inside = recording.relative_to(trial).parts[:-1] if trial is not None else ("agent",)
    return inside in ((), ("agent",)) or (len(inside) == 3 and (inside[0], inside[2]) == ("steps", "agent"))


def _trial_of(recording: Path) -> Path | None:
    """The trial's directory of a recording: the outermost with a result, since an agent may have written one too."""
    for folder in reversed(recording.parents):
        is_job = (folder / "journal.jsonl").exists()
        if not is_job and (folder / "result.json").is_file() and "trial_name" in _json(folder / "result.json"):
            return folder
    return None


def _origin(recording: Path, trial: Path | None) -> SampleOrigin:
    if trial is None:
        name = recording.parent.name or recording.stem
        return SampleOrigin(recording, name, name)
    inside = recording.relative_to(trial).parts
    step = inside[1] if inside[0] == "steps" and len(inside) > 2 else None
    return origin_of(_json(trial / "result.json"), step, trial.name, recording)


def origin_of(result: Mapping[str, Any], step: str | None, trial: str, recording: Path | None = None) -> SampleOrigin:
    """The origin of the samples of a trial, or of one of its steps, from its `result.json`."""
    agent, known = result.get("agent_info") or {}, result.get("pier") or {}
    model = ((result.get("config") or {}).get("agent") or {}).get("model_name")
    outcome = next((each for each in result.get("step_results") or () if each.get("step_name") == step), result)
    error = outcome.get("exception_info") or {}
    task, digest = result.get("task_name"), known.get("task_digest") or result.get("task_checksum")
    return SampleOrigin(
        recording=recording,
        rollout=str(result.get("trial_name") or trial) + (f"/{step}" if step else ""),
        group=group_id(task, digest, step, agent.get("name"), model),
        task=task,
        task_digest=digest,
        step=step,
        attempt=known.get("attempt"),
        agent=agent.get("name"),
        agent_version=agent.get("version"),
        rewards=_rewards(outcome) or _rewards(result),
        termination_reason=_termination(outcome, error),
        fault=error.get("blame") if error.get("blame") in NOT_THE_AGENTS else None,
        notes=tuple(note.get("kind", "") for note in (outcome.get("integrity") or {}).get("notes") or ()),
    )


def group_id(task: str | None, digest: str | None, *more: str | None) -> str:
    """The id of a group: its task's name and digest (names are not unique), and more such as agent and model."""
    short = (digest or "").rpartition(":")[2][:12]
    return "::".join(str(part) for part in (f"{task}@{short}" if task and short else task, *more) if part)


def _rewards(outcome: Mapping[str, Any]) -> Mapping[str, float] | None:
    return (outcome.get("verifier_result") or {}).get("rewards")


def _termination(outcome: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    """The reason why the agent ended. A fault that is not the agent's comes first: such a trial has no verdict."""
    code = error.get("code") or error.get("exception_type") or "error"
    used = (outcome.get("agent_result") or {}).get("metadata") or {}
    if error.get("blame") in NOT_THE_AGENTS:
        return str(code)
    if reason := used.get("stop_reason"):
        return str(reason)
    if str(used.get("ended") or "").startswith("budget"):
        return "budget"
    if not error:
        return "completed"
    return "timeout" if code in ("agent_timeout", "AgentTimeoutError") else str(code)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(file_content(path))
    except (OSError, TreeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
