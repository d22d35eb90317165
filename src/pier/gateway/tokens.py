"""Asks an upstream for more than the agent did (token ids, log-probs, usage) and takes it out of the answer again.

The recording keeps what the upstream sent; the agent receives what it asked for. Chat Completions only: that is where
servers such as vLLM give token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pier.gateway.body import Body, dump


@dataclass(frozen=True, slots=True)
class Extras:
    """What was asked for on top, so must be taken out."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage

    def strip(self, value: Any) -> Any:
        """An answer, or an event of one, as the agent should see it; None if nothing of it is left."""
        if not isinstance(value, dict):
            return value
        kept = dict(value)
        if self.token_ids:
            kept.pop("prompt_token_ids", None)
            kept.pop("prompt_logprobs", None)
        if self.usage:
            kept.pop("usage", None)
            if "choices" in kept and not kept["choices"]:
                return None
        if isinstance(kept.get("choices"), list):
            kept["choices"] = [self._strip_choice(choice) for choice in kept["choices"]]
        return kept

    def _strip_choice(self, choice: Any) -> Any:
        drop = {*(("token_ids",) if self.token_ids else ()), *(("logprobs",) if self.logprobs else ())}
        return {name: part for name, part in choice.items() if name not in drop} if isinstance(choice, dict) else choice

    def strip_event(self, event: bytes, value: Any) -> bytes:
        """The same for an event as bytes, whose decoded data is `value` (None: no JSON in it)."""
        if value is None:
            return event
        kept = self.strip(value)
        if kept is None:
            return b""
        return event if kept == value else b"data: " + dump(kept) + b"\n\n"


def ask(body: Body, *, tokens: bool, usage: bool) -> tuple[Body, Extras]:
    """A Chat Completions body that asks for what is wanted, and what that adds to the answer."""
    value, changes = body.value, {}
    extras = Extras(
        token_ids=tokens and not value.get("return_token_ids"),
        logprobs=tokens and not value.get("logprobs"),
        usage=usage and bool(value.get("stream")) and not (value.get("stream_options") or {}).get("include_usage"),
    )
    if extras.token_ids:
        changes["return_token_ids"] = True
    if extras.logprobs:
        changes["logprobs"] = True
    if extras.usage:
        changes["stream_options"] = {**(value.get("stream_options") or {}), "include_usage": True}
    return (body.with_fields(**changes) if changes else body), extras
