"""The blame for a failed model call, determined from the provider's error, for all dialects.

- `agent`: the request itself is wrong (invalid, too large, against the content policy), so another model call by the
  same agent could succeed.
- `rate_limit`: the provider asks for a pause. The gateway waits and retries; the agent sees the error only if that
  takes too long.
- `quota`: money or an allowance is used up, and waiting does not help.
- `provider`: any other reason why there is no answer: no access, an unknown model, an outage, a broken answer.
- `gateway`: pier itself failed.

An agent must not be able to cause a `provider` fault, since such a trial gets no reward. Error texts may quote the
request, so only their beginnings are matched. A 403, 404 or 409 for a request that refers to something other than the
configured model (a stored file, another model) is the agent's fault.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Fault = Literal["agent", "rate_limit", "quota", "provider", "gateway"]

_TRANSIENT = frozenset({408, 409, 421, 425, 429, 499, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_NO_ACCESS = frozenset({401, 403, 404, 405, 407, 408, 409, 410, 421, 425, 499})
_STATUS_OF = {
    **dict.fromkeys(("rate_limit_error", "rate_limit_exceeded", "resource_exhausted"), 429),
    **dict.fromkeys(("overloaded_error", "overloaded", "engine_overloaded"), 529),
    **dict.fromkeys(("unavailable", "service_unavailable"), 503),
    **dict.fromkeys(("aborted", "conflict_error"), 409),
    **dict.fromkeys(("cancelled",), 499),
    **dict.fromkeys(("deadline_exceeded", "timeout_error"), 504),
    **dict.fromkeys(("api_error", "server_error", "internal", "internal_error", "internal_server_error"), 500),
    **dict.fromkeys(("authentication_error", "unauthenticated", "invalid_api_key"), 401),
    **dict.fromkeys(("permission_error", "permission_denied"), 403),
    **dict.fromkeys(("not_found_error", "not_found", "model_not_found"), 404),
    **dict.fromkeys(("request_too_large",), 413),
    **dict.fromkeys(("invalid_request_error", "invalid_argument", "invalid_prompt", "context_length_exceeded"), 400),
    **dict.fromkeys(("content_policy_violation", "content_filter", "failed_precondition"), 400),
}
"""Statuses for errors inside answers of status 200, by the error's type or code."""
_QUOTA_WORDS = frozenset(
    {
        *("insufficient_quota", "billing_error", "billing_hard_limit_reached", "billing_not_active"),
        *("exceeded_current_quota_error", "insufficient_balance", "insufficient_credits", "usage_limit_reached"),
    }
)
_QUOTA_TEXT = re.compile(
    r"your credit balance is too low|you have reached your specified (api|workspace) usage limits|insufficient balance",
    re.IGNORECASE,
)
_ACCESS_WORDS = frozenset(
    {"api_key_invalid", "model_not_found", "invalid_model", "unsupported_country_region_territory"}
)
_ACCESS_TEXT = re.compile(r"api key (not valid|expired)|user location is not supported|model not exist", re.IGNORECASE)
_PER_DAY = re.compile(r"per_?day", re.IGNORECASE)
_CHOICES = (
    *("previous_response_id", "conversation", "prompt", "cachedContent", "cached_content", "container", "mcp_servers"),
    *("models", "provider", "route", "preset"),
)
"""Top-level fields that refer to something stored at the provider, or select another model or host there."""
_STORED = frozenset({"file_id", "fileUri", "file_uri", "vector_store_ids"})


@dataclass(frozen=True, slots=True)
class Failure:
    """The classification of an error answer. `retryable`: a retry may help; `asked`: the pause that was requested."""

    fault: Fault
    status: int
    retryable: bool = False
    asked: float | None = None


def classify(
    status: int, body: object, headers: Mapping[str, str] | None = None, request: bytes | None = None
) -> Failure:
    """Classify an error answer by its status (200 for an error inside an answer), its decoded body and the request."""
    error = error_in(body) or {}
    words = {word.lower() for word in _words(error)}
    text = error.get("message")
    text = text.lstrip() if isinstance(text, str) else ""
    status = status if status >= 400 else _status_inside(error, words)
    asked = retry_after(headers or {}) or _retry_delay(error)
    if status == 402 or words & _QUOTA_WORDS or (status == 400 and _QUOTA_TEXT.match(text)):
        return Failure("quota", status)
    if status == 429:
        daily = any(_PER_DAY.search(word) for word in words)
        return Failure("quota", status) if daily else Failure("rate_limit", status, True, asked)
    if words & _ACCESS_WORDS or _ACCESS_TEXT.match(text):
        return Failure("provider", status)
    if status in (403, 404, 409) and (_is_moderation(error) or _is_elsewhere(error, request)):
        return Failure("agent", status)
    if status >= 500 or status in _NO_ACCESS:
        return Failure("provider", status, status in _TRANSIENT, asked)
    return Failure("agent", status)


def fault_of(status: int, message: str = "") -> Fault:
    """The blame for a failure of which only the status and message are known."""
    return classify(max(status, 400), {"error": {"message": message}}).fault


def error_in(value: object) -> Mapping[str, Any] | None:
    """The error in a decoded answer or event of any dialect; None if there is none."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        return None
    if value.get("type") == "response.failed" or value.get("status") == "failed":
        inner = value.get("response")
        value = inner if isinstance(inner, Mapping) else value
        error = value.get("error")
        return error if isinstance(error, Mapping) else {"message": "the provider's answer failed"}
    error = value.get("error")
    if isinstance(error, Mapping):
        return error
    if isinstance(error, str) and error:
        return {**value, "message": error}
    return value if value.get("type") == "error" or value.get("object") == "error" else None


def _words(error: Mapping[str, Any]) -> Iterator[str]:
    """The provider's identifiers in an error (types, codes, reasons, quotas), without its text."""
    for key in ("type", "code", "status"):
        if isinstance(word := error.get(key), str):
            yield word
    for detail in _tables(error.get("details")):
        if isinstance(reason := detail.get("reason"), str):
            yield reason
        for violation in _tables(detail.get("violations")):
            if isinstance(name := violation.get("quotaId"), str):
                yield name


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    return (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else iter(())


def _status_inside(error: Mapping[str, Any], words: set[str]) -> int:
    for key in ("code", "status_code", "status"):
        code = error.get(key)
        if isinstance(code, str) and code.isdigit():
            code = int(code)
        if isinstance(code, int) and 400 <= code < 600:
            return code
    return next((status for word, status in _STATUS_OF.items() if word in words), 502)


def _retry_delay(error: Mapping[str, Any]) -> float | None:
    """The pause in the details of a Google error: `{"retryDelay": "23s"}`."""
    for detail in _tables(error.get("details")):
        delay = detail.get("retryDelay")
        if isinstance(delay, str) and re.fullmatch(r"\d{1,6}(\.\d+)?s", delay):
            return float(delay[:-1])
    return None


def _is_moderation(error: Mapping[str, Any]) -> bool:
    metadata = error.get("metadata")
    return isinstance(metadata, Mapping) and bool({"flagged_input", "reasons"} & set(metadata))


def _is_elsewhere(error: Mapping[str, Any], request: bytes | None) -> bool:
    """Whether an error may concern something other than the model that the request refers to."""
    parameter = error.get("param")
    if isinstance(parameter, str) and parameter and parameter != "model":
        return True
    if request is None:
        return False
    try:
        body = json.loads(request)
        return any(body.get(name) for name in _CHOICES) or _refers_to_stored(body)
    except (ValueError, RecursionError):
        return True


def _refers_to_stored(value: object) -> bool:
    """Whether a part or a tool refers to a file or item at the provider; arguments of tool calls are ignored."""
    if isinstance(value, list):
        return any(_refers_to_stored(inner) for inner in value)
    if not isinstance(value, dict):
        return False
    if value.get("type") == "item_reference":
        return True
    return any(
        (key in _STORED and isinstance(inner, str | list)) or _refers_to_stored(inner)
        for key, inner in value.items()
        if key != "args" and not (key == "input" and value.get("type") == "tool_use")
    )


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """The requested pause in seconds: `Retry-After`, or `retry-after-ms` of OpenAI and Anthropic."""
    try:
        if milliseconds := headers.get("retry-after-ms"):
            return max(0.0, float(milliseconds) / 1000)
        text = headers.get("Retry-After")
        if not text:
            return None
        if text.strip().replace(".", "", 1).isdigit():
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - (time.time() if now is None else now))
    except (ValueError, TypeError):
        return None
