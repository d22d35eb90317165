"""Models of one's own behind the gateway: a Python callable (`Policy`), or inference servers (`Replicas`).

A policy gets each request in canonical form and gives a turn with its exact tokens, or the turn's deltas as they are
sampled. It may be an async function; while a plain one runs, nothing else does. Its object may have more, all optional:

- `version`: the version of its weights, written down with every call; it may change from call to call.
- `vocab_size`: token ids outside of the vocabulary fail the call.
- `for_session(labels)`: called once for each session; the policy or provider that answers all its calls. This is how a
  policy keeps state for a rollout, or a rollout stays with one server.

Arguments of earlier tool calls are in a policy's request as they were sampled, whatever the agent made of them, so that
a prompt's tokens can go on from those of the turn before. Whatever a policy raises, a silence that is too long, and
tokens that cannot be right fail the call as a fault of the provider: such a rollout has neither reward nor samples.
`ModelFailed` fails a call with a status of choice, e.g. 400 for a request that the agent should not have made.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from pier.errors import PierError, ProviderError, UsageError
from pier.gateway.providers import Provider, at_address
from pier.wire.translate import Memory
from pier.wire.turn import Delta, Part, Request, Sampling, Text, Tokens, Turn

T = TypeVar("T")
PolicyAnswer = Turn | str | Awaitable[Turn | str] | AsyncIterator[Delta]


class Policy(Protocol):
    """A model as a Python callable: given a request, a turn (or just its text), plain or awaitable, or a stream of
    deltas."""

    def __call__(self, request: Request, /) -> PolicyAnswer: ...


class PolicyFailed(ProviderError):
    """A policy raised, was silent for too long, or gave an answer that cannot be right."""

    code = "policy_failed"


@dataclass
class Replicas:
    """Inference servers that serve the same model in Chat Completions and give token ids (vLLM, SGLang). Each session
    stays with one of them, for its prefix cache; new ones go to the server with the fewest. `version` may be set when
    the servers got new weights."""

    urls: Sequence[str]
    key: str | None = None
    version: str | None = None
    _sessions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.urls:
            raise UsageError("no address given: expected the address of at least one server")
        self._providers = [replace(at_address(url, key=self.key, name="policy"), tokens=True) for url in self.urls]
        self._sessions = dict.fromkeys(self.urls, 0)

    def for_session(self, labels: Mapping[str, str]) -> Provider:
        url, provider = min(zip(self.urls, self._providers, strict=True), key=lambda each: self._sessions[each[0]])
        self._sessions[url] += 1
        return provider


Upstream = str | Provider | Policy | Replicas
"""What answers a session's calls: an address or a provider's name, a provider, a callable, servers."""


def version_of(upstream: object) -> str | None:
    """The version of the weights behind `upstream`, as far as it says."""
    version = getattr(upstream, "version", None)
    return None if version is None or callable(version) else str(version)


def for_session(upstream: Upstream | None, labels: Mapping[str, str]) -> str | Provider | Policy | None:
    """What answers the calls of one session."""
    if isinstance(upstream, Replicas):
        return upstream.for_session(labels)
    choose = getattr(upstream, "for_session", None)
    try:
        return choose(labels) if choose is not None else upstream
    except PierError:
        raise
    except Exception as error:  # as in `guarded`
        raise PolicyFailed(f"the policy's for_session raised {type(error).__name__}: {error}") from error


def as_sampled(request: Request, memory: Memory) -> Request:
    """A request whose history has the arguments of tool calls as they were sampled."""
    messages = tuple(
        memory.as_sampled(message) if message.role == "assistant" else message for message in request.messages
    )
    return replace(request, messages=messages)


async def guarded(work: Awaitable[T], seconds: float | None) -> T:
    """Await a policy. Whatever it raises becomes a `ProviderError`, as does a silence of more than `seconds`."""
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            return await work
    except ProviderError:
        raise
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise PolicyFailed("the policy was cancelled") from None
    except (Exception, GeneratorExit) as error:  # attributes a policy's failures to the policy
        if clock.expired() and not isinstance(error, PierError):
            raise PolicyFailed(f"the policy was silent for {seconds:g} s") from None
        raise PolicyFailed(f"the policy raised {type(error).__name__}: {error}") from error


async def begin(policy: Policy, request: Request) -> object:
    """Call a policy: its answer, or the stream of one. To be called in `guarded`."""
    answer = policy(request)
    return await answer if inspect.isawaitable(answer) else answer


def checked(turn: object, policy: Policy, sampling: Sampling | None) -> Turn:
    """A policy's whole answer; `PolicyFailed` if it is not a turn, or its tokens cannot be right."""
    if isinstance(turn, str):
        return Turn((Text(turn),))
    if not isinstance(turn, Turn):
        raise PolicyFailed(f"the policy gave a {type(turn).__name__}: expected a Turn or a str")
    for part in turn.parts if isinstance(turn.parts, list | tuple) else (turn.parts,):
        if not isinstance(part, Part):
            raise PolicyFailed(f"the policy gave a turn with a {type(part).__name__}: expected parts such as Text")
    check_tokens(turn.tokens, policy, sampling)
    return turn


def check_tokens(tokens: Tokens | None, policy: Policy, sampling: Sampling | None) -> None:
    """`PolicyFailed` for tokens that no sample could be made of. `sampling` is what the session prescribes."""
    if tokens is None:
        return
    for some in (tokens.prompt_ids, tokens.completion_ids, tokens.logprobs):
        if not isinstance(some, list | tuple | None):
            raise PolicyFailed(f"the policy gave tokens as a {type(some).__name__}: expected a tuple of numbers")
    ids, likely = tokens.completion_ids, tokens.logprobs
    if likely is not None and len(likely) != len(ids or ()):
        raise PolicyFailed(f"the policy gave {len(ids or ())} token ids and {len(likely)} log-probs")
    for value in likely or ():
        if not isinstance(value, float | int) or not -math.inf < value <= 1e-6:
            raise PolicyFailed(f"the policy gave the log-prob {value!r}: expected a number <= 0 that is finite")
    size = getattr(policy, "vocab_size", None)
    for some in (tokens.prompt_ids or (), ids or ()):  # a prompt may be long, so no loop over sound ones
        if not some or (set(map(type, some)) == {int} and min(some) >= 0 and (size is None or max(some) < size)):
            continue
        wrong = next(each for each in some if type(each) is not int or not 0 <= each < (size or math.inf))
        expected = f"0 to {size - 1}" if size is not None else "an integer >= 0"
        raise PolicyFailed(f"the policy gave the token id {wrong!r}: expected {expected}")
    most = sampling.max_tokens if sampling else None
    if most is not None and len(ids or ()) > most:
        raise PolicyFailed(f"the policy gave {len(ids or ())} tokens: the session allows {most}")
