"""A model call independent of any dialect: request, answer, and the answer's stream.

Every dialect is parsed into these values and rendered from them, so that any client can use any model. Promises:

- `ToolCall.arguments` is the text the model sampled, never re-serialised.
- `Usage.input_tokens` includes cached tokens and `output_tokens` includes reasoning, in every dialect; None is unknown.
- A stream is `TurnStart`, then per part `PartStart`, `PartDelta`*, `PartEnd` with consecutive indexes and no two parts
  open at once, then `TurnEnd`; or it ends early in a `StreamError`. `Ping` and `Tokens` may come anywhere between.
- Parts and fields that only one dialect has are kept as `Opaque` or in `extra`: they survive a round trip through that
  dialect and are dropped, with an `Edit`, in a translation to another.
- A cost is reported by the provider or computed from the price table, or unknown; never estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pier.errors import ProviderError

Json = Mapping[str, Any]
DialectName = str
"""A name in `pier.wire.dialects.DIALECTS`."""
Role = Literal["system", "user", "assistant"]
StopReason = Literal["end", "length", "tool_use", "stop_sequence", "refusal", "pause", "context", "other"]
ErrorKind = Literal[
    "invalid_request",
    "authentication",
    "permission",
    "not_found",
    "too_large",
    "rate_limit",
    "server",
    "overloaded",
    "timeout",
    "context_length",
    "budget",
]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The model's text for refusing to answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts. `signature` is the provider's proof or ciphertext and is valid only in the dialect `origin`."""

    text: str
    signature: str | None = None
    origin: str | None = None
    redacted: bool = False
    """Whether the provider sent only the ciphertext."""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a sound or a document: inline as base64 `data`, at a `url`, or stored at the provider as `file_id`."""

    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    name: str | None = None

    @property
    def is_image(self) -> bool:
        return self.media_type is None or self.media_type.startswith("image/")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as sampled. `custom` calls carry free text in `arguments`, all others the text of a JSON object."""

    id: str
    name: str
    arguments: str
    custom: bool = False
    namespace: str | None = None
    signature: str | None = None
    """Gemini's thought signature, which it attaches to calls."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    parts: tuple[Text | Media | Opaque, ...]
    is_error: bool = False
    name: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Opaque:
    """A part that only `dialect` has, as on the wire."""

    dialect: str
    value: Json


Part = Text | Refusal | Reasoning | Media | ToolCall | ToolResult | Opaque


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool on offer. `hosted` tools run at the provider and exist only in the dialect that `raw` is written in."""

    name: str
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None
    kind: Literal["function", "custom", "hosted"] = "function"
    namespace: str | None = None
    raw: Json | None = None
    """The tool as on the wire, if the fields above are incomplete (hosted and custom tools)."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "any", "none", "tool"]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Requests JSON, of the given schema if any."""

    schema: Json | None = None
    name: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Requested sampling parameters. None leaves the choice to the model."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    effort: str | None = None
    """Reasoning effort by name: `none`, `minimal`, `low`, `medium`, `high`, ..."""
    thinking_budget: int | None = None
    """Reasoning budget in tokens; 0 disables reasoning, -1 leaves it to the model."""
    logprobs: bool = False
    top_logprobs: int | None = None

    def given(self) -> dict[str, Any]:
        """The parameters that are set, by name."""
        names = self.__dataclass_fields__
        return {name: value for name in names if (value := getattr(self, name)) not in (None, (), False)}

    def overridden_by(self, other: Sampling | None) -> Sampling:
        """These parameters with those that `other` sets."""
        return replace(self, **other.given()) if other else self


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `extra` holds fields of the body that only `dialect` has."""

    model: str
    messages: tuple[Message, ...]
    system: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tools: bool | None = None
    sampling: Sampling = Sampling()
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_usage: bool = True
    """Whether a streamed answer ends with its usage; only chat clients can disable it."""
    dialect: DialectName | None = None
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; None is unknown. Input includes cache reads and writes, output includes reasoning."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None
    """The cost that the provider reported."""

    @property
    def total_tokens(self) -> int | None:
        if self.input_tokens is None and self.output_tokens is None:
            return None
        return (self.input_tokens or 0) + (self.output_tokens or 0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Exact tokens, if the upstream returns them. As a delta of a stream each field holds only new tokens."""

    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    weights: str | None = None
    """The version of the weights that sampled them, if the upstream reports it."""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "completion_ids", "logprobs"):  # a policy may keep appending to its list
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `model` is the one that answered; `native_stop` is the upstream's term for `stop`."""

    parts: tuple[Part, ...]
    stop: StopReason = "end"
    usage: Usage = Usage()
    id: str | None = None
    model: str | None = None
    native_stop: str | None = None
    stop_sequence: str | None = None
    tokens: Tokens | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


@dataclass(frozen=True, slots=True)
class TurnStart:
    id: str | None = None
    model: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class PartStart:
    """A part begins. Deltas add to its text or arguments, which are usually empty at first."""

    index: int
    part: Part


@dataclass(frozen=True, slots=True)
class PartDelta:
    """More text, reasoning or arguments, and the signature when it arrives."""

    index: int
    text: str = ""
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class PartEnd:
    index: int


@dataclass(frozen=True, slots=True)
class TurnEnd:
    stop: StopReason
    usage: Usage = Usage()
    native_stop: str | None = None
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class StreamError:
    """The upstream failed after the stream began, or closed it without a proper end."""

    message: str
    kind: ErrorKind = "server"
    status: int = 502


@dataclass(frozen=True, slots=True)
class Ping:
    """A keep-alive of the upstream."""


Delta = TurnStart | PartStart | PartDelta | PartEnd | TurnEnd | StreamError | Ping | Tokens


class ModelFailed(ProviderError):
    """Raised by a policy or script to fail a call with a status, as a provider would."""

    code = "model_failed"

    def __init__(self, message: str, *, status: int = 500, kind: ErrorKind = "server") -> None:
        super().__init__(message)
        self.status = status
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class Edit:
    """A change that the gateway made in a request: the action, its object and the reason."""

    action: Literal["removed", "refused", "changed"]
    what: str
    why: str


class TurnBuilder:
    """Assembles deltas into a turn. `turn` returns the turn so far; `ended` is true once it is complete."""

    def __init__(self) -> None:
        self._start = TurnStart()
        self._parts: list[Part] = []
        self._texts: list[list[str]] = []
        self._signatures: list[str | None] = []
        self._tokens: list[Tokens] = []
        self.end: TurnEnd | None = None
        self.error: StreamError | None = None

    @property
    def ended(self) -> bool:
        return self.end is not None

    def add(self, delta: Delta) -> None:
        match delta:
            case TurnStart():
                self._start = delta
            case PartStart(part=part):
                self._parts.append(part)
                self._texts.append([])
                self._signatures.append(None)
            case PartDelta(index=index, text=text, signature=signature):
                self._texts[index].append(text)
                self._signatures[index] = signature or self._signatures[index]
            case TurnEnd():
                self.end = delta
            case StreamError():
                self.error = delta
            case Tokens():
                self._tokens.append(delta)
            case PartEnd() | Ping():
                pass

    def extend(self, deltas: Iterable[Delta]) -> TurnBuilder:
        for delta in deltas:
            self.add(delta)
        return self

    def turn(self) -> Turn:
        parts = zip(self._parts, self._texts, self._signatures, strict=True)
        end = self.end or TurnEnd("other", self._start.usage or Usage())
        return Turn(
            parts=tuple(_grown(part, "".join(texts), signature) for part, texts, signature in parts),
            stop=end.stop,
            usage=end.usage,
            id=self._start.id,
            model=self._start.model,
            native_stop=end.native_stop,
            stop_sequence=end.stop_sequence,
            tokens=joined(self._tokens),
        )


def _grown(part: Part, text: str, signature: str | None) -> Part:
    match part:
        case Text() | Refusal():
            return replace(part, text=part.text + text)
        case Reasoning():
            return replace(part, text=part.text + text, signature=signature or part.signature)
        case ToolCall():
            return replace(part, arguments=part.arguments + text, signature=signature or part.signature)
        case _:
            return part


def joined(pieces: list[Tokens]) -> Tokens | None:
    """Join the tokens of a stream's deltas."""
    if not pieces:
        return None
    prompt = next((piece.prompt_ids for piece in pieces if piece.prompt_ids is not None), None)
    ids = [token for piece in pieces for token in piece.completion_ids or ()]
    logprobs = [value for piece in pieces for value in piece.logprobs or ()]
    has_ids = any(piece.completion_ids is not None for piece in pieces)
    has_logprobs = any(piece.logprobs is not None for piece in pieces)
    weights = next((piece.weights for piece in reversed(pieces) if piece.weights is not None), None)
    return Tokens(prompt, tuple(ids) if has_ids else None, tuple(logprobs) if has_logprobs else None, weights)


def stream_turn(turn: Turn, chunk: int = 64) -> Iterator[Delta]:
    """A whole turn as deltas, with texts in pieces of `chunk` characters."""
    yield TurnStart(turn.id, turn.model, replace(turn.usage, output_tokens=None, reasoning_tokens=None, cost_usd=None))
    for index, part in enumerate(turn.parts):
        match part:
            case Text(text=text) | Refusal(text=text):
                start, signature = replace(part, text=""), None
            case Reasoning(text=text, signature=signature):
                start = part if part.redacted else replace(part, text="", signature=None)
                signature = None if part.redacted else signature
            case ToolCall(arguments=text, signature=signature):
                start = replace(part, arguments="", signature=None)
            case _:
                start, text, signature = part, "", None
        yield PartStart(index, start)
        for offset in range(0, len(text), chunk):
            yield PartDelta(index, text[offset : offset + chunk])
        if signature:
            yield PartDelta(index, signature=signature)
        yield PartEnd(index)
    if turn.tokens:
        yield turn.tokens
    yield TurnEnd(turn.stop, turn.usage, turn.native_stop, turn.stop_sequence)


_PRICED = ("google", "anthropic", "openai", "openrouter")
"""Providers that have the same name in the price table."""


def is_priced(model: str, provider: str) -> bool:
    """Whether the price table has this model, or the provider reports costs itself."""
    return provider == "openrouter" or cost_of(Usage(1, 1), model, provider) is not None


def cost_of(usage: Usage | None, model: str | None, provider: str) -> float | None:
    """US dollars, or None if unknown."""
    if usage is None:
        return None
    if usage.cost_usd is not None:
        return usage.cost_usd
    if model is None or usage.input_tokens is None or usage.output_tokens is None or provider not in _PRICED:
        return None
    import genai_prices

    counts = genai_prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        return float(genai_prices.calc_price(counts, model, provider_id=provider).total_price)
    except (LookupError, ValueError):
        return None
