"""Google's Code Assist: the Gemini API in wrapped form, which is what a login of Gemini CLI is for.

A request is the Gemini API's inside `{"model", "project", "user_prompt_id", "request"}`, and an answer comes inside
`{"response", "traceId"}`, in streams in every event. Both are unwrapped before they are recorded, so that recordings
and agents see the Gemini API alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from pier.wire.sse import Framer, data_of, events_of, sse

_VERSION = "v1internal"
_METADATA = {"ideType": "IDE_UNSPECIFIED", "platform": "PLATFORM_UNSPECIFIED", "pluginType": "GEMINI"}


class CodeAssist:
    """One account's way to call it. `project` is what requests are made for; None until it is known."""

    def __init__(self, base: str, wanted: str | None) -> None:
        self._base = f"{base}/{_VERSION}"
        self._wanted = wanted
        self._session = str(uuid4())
        self.project: str | None = None

    def address(self, path: str) -> str:
        """The address for a path of the Gemini API (`/v1beta/models/NAME:METHOD`)."""
        return f"{self._base}:{path.rpartition(':')[2]}"

    def project_request(self) -> tuple[str, bytes]:
        """The call that names the account's project: its address and body."""
        body: dict[str, Any] = {"metadata": dict(_METADATA)}
        if self._wanted:
            body["cloudaicompanionProject"] = self._wanted
            body["metadata"]["duetProject"] = self._wanted
        return f"{self._base}:loadCodeAssist", json.dumps(body).encode()

    def found(self, said: Mapping[str, Any]) -> bool:
        """Take the project from the answer to that call; whether there is one."""
        project = said.get("cloudaicompanionProject")
        if isinstance(project, Mapping):
            project = project.get("id")
        self.project = project if isinstance(project, str) and project else self._wanted
        return self.project is not None

    def wrap(self, path: str, data: bytes, model: str) -> bytes:
        """A body of the Gemini API as Code Assist wants it."""
        body = json.loads(data)
        if ":countTokens" in path:
            return json.dumps({"request": {"model": f"models/{model}", "contents": body.get("contents")}}).encode()
        request = {**body, "session_id": self._session}
        wrapped = {"model": model, "project": self.project, "user_prompt_id": str(uuid4()), "request": request}
        return json.dumps(wrapped, ensure_ascii=False).encode()


class Unwrapper:
    """Takes the answers out of what Code Assist sends, as it comes."""

    def __init__(self, *, stream: bool) -> None:
        self._framer = Framer() if stream else None
        self._whole = b""

    @property
    def held(self) -> bool:
        """Whether bytes wait for those that follow them."""
        return self._framer.torn if self._framer else bool(self._whole)

    def feed(self, data: bytes) -> bytes:
        if self._framer is None:
            self._whole += data
            return b""
        return b"".join(self._event(event) for event in events_of(self._framer.feed(data)))

    def rest(self) -> bytes:
        """What is left at the end of the answer."""
        if self._framer is not None:
            torn = self._framer.rest
            self._framer = Framer()
            return torn
        whole, self._whole = self._whole, b""
        found = _response(whole)
        return whole if found is None else json.dumps(found, ensure_ascii=False).encode()

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        found = _response(data) if data is not None else None
        return event if found is None else sse(found)


def _response(data: bytes) -> dict[str, Any] | None:
    """The answer of the Gemini API in a piece; None if there is none, e.g. in an error."""
    try:
        value = json.loads(data)
    except ValueError:
        return None
    inner = value.get("response") if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        return None
    return {**inner, **({"responseId": value["traceId"]} if value.get("traceId") else {})}
