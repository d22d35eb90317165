"""Custom models behind the gateway: a Python callable (`Policy`), or inference servers (`Replicas`).

A policy receives each request in canonical form and returns a turn with its exact tokens, or yields the turn's deltas
as they are sampled. It may be an async function; a plain one blocks the event loop. It may have optional attributes:

- `version`: the version of its weights, recorded with every call; it may change between calls.
- `vocab_size`: token ids outside of the vocabulary fail the call.
- `for_session(labels)`: called once for each session; returns the policy or provider that answers all its calls, so
  that a policy can keep state for a rollout, or a rollout uses only one server.

The arguments of earlier tool calls in a policy's request are those that were sampled, even if the agent changed their
format, so that a prompt's tokens extend those of the turn before. Any exception, too long a silence, and invalid tokens
fail the call as a fault of the provider: such a rollout has neither a reward nor samples. `ModelFailed` fails a call
with a chosen status, such as 400 for a request that the agent should not have made.
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
    """A model as a Python callable: returns a turn or its text, directly or as an awaitable, or a stream of deltas."""

    def __call__(self, request: Request, /) -> PolicyAnswer: ...


class PolicyFailed(ProviderError):
    """A policy raised an exception, was silent for too long, or returned an invalid answer."""

    code = "policy_failed"


@dataclass
class Replicas:
    """Inference servers for one model that speak Chat Completions and return token ids (vLLM, SGLang). Each session
    uses one server, for its prefix cache; a new session uses the one with the fewest. Set `version` when the servers
    have new weights."""

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
        url, provider = min(zip(self.urls, self._providers, strict=True), key=lambda pair: self._sessions[pair[0]])
        self._sessions[url] += 1
        return provider


Upstream = str | Provider | Policy | Replicas
"""The upstream of a session: an address or a provider's name, a provider, a callable, or servers."""


def version_of(upstream: object) -> str | None:
    """The version of the weights behind `upstream`; None if it is unknown."""
    version = getattr(upstream, "version", None)
    return None if version is None or callable(version) else str(version)


def for_session(upstream: Upstream | None, labels: Mapping[str, str]) -> str | Provider | Policy | None:
    """The upstream for one session, chosen by `upstream` itself if it has `for_session`."""
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
    """The request with the arguments of earlier tool calls as they were sampled."""
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
    """Call a policy and return its answer or stream. Must be awaited by `guarded`."""
    answer = policy(request)
    return await answer if inspect.isawaitable(answer) else answer


def checked(turn: object, policy: Policy, sampling: Sampling | None) -> Turn:
    """Return a policy's whole answer as a turn; `PolicyFailed` if it or its tokens are invalid."""
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
    """Raise `PolicyFailed` for tokens that cannot be used in a sample. `sampling` is prescribed by the session."""
    if tokens is None:
        return
    for values in (tokens.prompt_ids, tokens.completion_ids, tokens.logprobs):
        if not isinstance(values, list | tuple | None):
            raise PolicyFailed(f"the policy gave tokens as a {type(values).__name__}: expected a tuple of numbers")
    ids, logprobs = tokens.completion_ids, tokens.logprobs
    if logprobs is not None and len(logprobs) != len(ids or ()):
        raise PolicyFailed(f"the policy gave {len(ids or ())} token ids and {len(logprobs)} log-probs")
    for value in logprobs or ():
        if not isinstance(value, float | int) or not -math.inf < value <= 1e-6:
            raise PolicyFailed(f"the policy gave the log-prob {value!r}: expected a number <= 0 that is finite")
    size = getattr(policy, "vocab_size", None)
    for group in (tokens.prompt_ids or (), ids or ()):  # valid prompts, which may be long, are not looped over
        if not group or (set(map(type, group)) == {int} and min(group) >= 0 and (size is None or max(group) < size)):
            continue
        wrong = next(each for each in group if type(each) is not int or not 0 <= each < (size or math.inf))
        expected = f"0 to {size - 1}" if size is not None else "an integer >= 0"
        raise PolicyFailed(f"the policy gave the token id {wrong!r}: expected {expected}")
    most = sampling.max_tokens if sampling else None
    if most is not None and len(ids or ()) > most:
        raise PolicyFailed(f"the policy gave {len(ids or ())} tokens: the session allows {most}")
