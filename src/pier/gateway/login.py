"""The user's logins, used by the gateway in place of an API key.

A login stays outside of every sandbox. It is read from the client's own file; an access token that is about to expire
is refreshed under the client's lock, and the result is written back in the client's format, so that the user's client
keeps working: a refresh token is valid only once. A login is sent only to its own provider, and serves only its own
client: providers sell subscriptions for their clients, not for other programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlencode

from multidict import CIMultiDict

from pier.errors import UsageError
from pier.files import write_json
from pier.wire.turn import DialectName
from pier.wire.values import json_object

if TYPE_CHECKING:
    from pier.gateway.logins import Unwrapper
    from pier.gateway.pool import Answer

_LOCK_TIMEOUT = 45.0
"""Seconds to wait for a lock; a refresh takes one."""
_STALE_LOCK_AGE = 60.0
"""Seconds after which a lock directory is regarded as left behind by a dead client."""
_POLL_INTERVAL = 0.1


@asynccontextmanager
async def lock_file(path: Path, title: str) -> AsyncIterator[None]:
    """Hold an exclusive `flock` on a file, which Codex uses."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await _wait(deadline, path, title)
        yield
    finally:
        os.close(fd)


@asynccontextmanager
async def lock_directory(path: Path, title: str) -> AsyncIterator[None]:
    """Hold a lock in the form of a directory, which Claude Code uses. A lock older than a minute is taken over."""
    deadline = time.monotonic() + _LOCK_TIMEOUT + _STALE_LOCK_AGE
    while True:
        try:
            path.mkdir(mode=0o700)
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE_LOCK_AGE:
                    path.rmdir()
                    continue
            await _wait(deadline, path, title)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


async def _wait(deadline: float, path: Path, title: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"another program is refreshing the login of {title} and holds {path}")
    await asyncio.sleep(_POLL_INTERVAL)


_REFRESH_MARGIN = 300.0
"""Seconds before its expiry at which a token is replaced."""
_REFRESH_TIMEOUT = 30.0
"""Seconds that a refresh may take."""
FILE_LIMIT = 1024 * 1024
"""Bytes of a login file, and of the answer to a refresh."""

LoginState = Literal["ready", "refreshable", "expired", "unreadable", "missing"]


class LoginRefused(Exception):
    """A login cannot be used. `retryable`: a retry may help."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


LoginRequest = tuple[str, CIMultiDict[str], bytes]
"""The address, headers and body of a POST."""
Send = Callable[[str, CIMultiDict[str], bytes], Awaitable["Answer"]]
"""Sends a `LoginRequest`. Its exceptions are passed on."""


@dataclass(frozen=True, slots=True)
class LoginTokens:
    """The tokens of a login file. `expires_at` is in seconds; None is unknown."""

    access: str
    refresh: str | None = None
    expires_at: float | None = None
    account: str | None = None

    def is_stale(self, margin: float = _REFRESH_MARGIN) -> bool:
        return self.expires_at is not None and self.expires_at - margin <= time.time()


@dataclass(frozen=True, slots=True)
class LoginStatus:
    """The state of one client's login. `source` is its file or variable."""

    client: str
    title: str
    provider: str
    state: LoginState
    source: str
    detail: str = ""
    expires_at: float | None = None
    account: str | None = None
    command: str = ""
    """The command to log in."""


class Login(ABC):
    """The login of one client. Created by `find_login`; its file is read on first use."""

    client: ClassVar[str]
    title: ClassVar[str]
    provider: ClassVar[str]
    dialect: ClassVar[DialectName]
    command: ClassVar[str]
    key_name: ClassVar[str]
    user_agent: ClassVar[re.Pattern[str]]
    """Matches the User-Agent of the client."""
    url: ClassVar[str]
    token_url: ClassVar[str]
    client_id: ClassVar[str]
    refresh_form: ClassVar[bool] = False
    """Whether a refresh request is a form instead of JSON."""
    home: ClassVar[tuple[str, str, str]]
    """The variable with the client's directory, that directory below the user's home, and the login's file in it."""
    lock: ClassVar[str] = ".pier-refresh.lock"
    """The lock next to the login, which prevents concurrent refreshes by other programs, including the client."""
    locked = staticmethod(lock_file)

    def __init__(self, path: Path | None, environ: Mapping[str, str], token: str | None = None) -> None:
        self.path = path
        prefix = f"PIER_{self.provider.upper()}"
        self.base = (environ.get(f"{prefix}_LOGIN_URL") or self.url).rstrip("/")
        self._token_address = environ.get(f"{prefix}_TOKEN_URL") or self.token_url
        self._tokens = LoginTokens(token) if token else None
        self._renewing = asyncio.Lock()

    @property
    def source(self) -> str:
        return str(self.path) if self.path else "CLAUDE_CODE_OAUTH_TOKEN"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Tokens that must not be recorded or passed on."""
        known = self._tokens
        return tuple(filter(None, (known.access, known.refresh))) if known else ()

    @property
    def tokens(self) -> LoginTokens:
        """The tokens as last read or refreshed; `LoginRefused` if there are none."""
        if self._tokens is None:
            self._tokens = self._read()[1]
        return self._tokens

    def status(self) -> LoginStatus:
        """The state of the login on disk."""
        known = LoginStatus(self.client, self.title, self.provider, "ready", self.source, command=self.command)
        try:
            tokens = self._read()[1] if self.path else self.tokens
        except LoginRefused as error:
            return replace(known, state="unreadable", detail=str(error))
        known = replace(known, expires_at=tokens.expires_at, account=tokens.account)
        if not tokens.is_stale(0):
            return known
        return replace(known, state="refreshable" if tokens.refresh else "expired")

    def check(self) -> None:
        """Raise `UsageError` if the login cannot be used and a refresh would not help."""
        found = self.status()
        if found.state == "unreadable":
            raise UsageError(
                f"cannot use the login of {self.title}: {found.detail}", hint=self.command, code="login-unreadable"
            )
        if found.state == "expired":
            raise UsageError(
                f"the login of {self.title} in {self.source} has expired and cannot be refreshed",
                hint=f"{self.command}, or export {self.key_name}=...",
                code="login-expired",
            )

    def serves(self, user_agent: str) -> bool:
        """Whether a request comes from the login's client."""
        return self.user_agent.match(user_agent) is not None

    async def request(
        self, send: Send, path: str, headers: Mapping[str, str], data: bytes, model: str, refused: str | None = None
    ) -> LoginRequest:
        """The client's request in the provider's form, with a valid token. `refused` is a token that the provider
        refused."""
        async with self._renewing:
            if self.tokens.access == refused or self.tokens.is_stale():
                await self._renew(send)
            with_token = CIMultiDict(headers)
            with_token["Authorization"] = f"Bearer {self.tokens.access}"
            return await self._prepare(send, path, with_token, data, model)

    async def refusal(self, answer: Answer) -> str:
        """A message with the provider's reason for refusing a token."""
        status, reply = answer.status, json_object(await answer.read_short(FILE_LIMIT))
        return f"{self.provider} refused the login of {self.title} ({refusal_text(reply, status)})"

    @abstractmethod
    async def _prepare(
        self, send: Send, path: str, headers: CIMultiDict[str], data: bytes, model: str
    ) -> LoginRequest: ...

    def unwrapper(self, *, stream: bool) -> Unwrapper | None:
        """A converter of the provider's answer to the dialect; None if none is needed."""
        return None

    async def _renew(self, send: Send) -> None:
        if self.path is None:
            raise LoginRefused(f"the token in {self.source} was refused; make another: claude setup-token")
        try:
            async with self.locked(self.path.parent / self.lock, self.title):
                await self._read_or_refresh(send)
        except OSError as error:
            message = f"the login of {self.title} could not be refreshed: {error or type(error).__name__}"
            raise LoginRefused(message, retryable=True) from None

    async def _read_or_refresh(self, send: Send) -> None:
        document, tokens = self._read()
        if tokens.access != self.tokens.access and not tokens.is_stale():
            self._tokens = tokens
            return
        if not tokens.refresh:
            raise LoginRefused(f"the login of {self.title} has expired; run: {self.command}")
        if not os.access(self._target, os.W_OK) or not os.access(self._target.parent, os.W_OK):
            raise LoginRefused(
                f"the login of {self.title} has expired, and a refreshed one could not be saved: "
                f"{self.path} is read-only"
            )
        await _finish(self._refresh(send, document, tokens.refresh))

    @property
    def _target(self) -> Path:
        """The file itself, if its path is a link."""
        assert self.path is not None
        return self.path.resolve()

    def _read(self) -> tuple[dict[str, Any], LoginTokens]:
        assert self.path is not None
        try:
            with self.path.open("rb") as stream:
                document = json.loads(stream.read(FILE_LIMIT))
            return document, self._tokens_of(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoginRefused(f"{self.path} cannot be read: {type(error).__name__}: {error}") from None

    def _save(self, document: dict[str, Any], reply: Mapping[str, Any]) -> LoginTokens:
        """Write the refreshed login back, keeping all other content of the file."""
        target = self._target
        found = target.stat()
        self._update(document, reply)
        write_json(target, document, mode=found.st_mode & 0o777)
        if os.geteuid() == 0 and found.st_uid:
            os.chown(target, found.st_uid, found.st_gid)
        return self._tokens_of(document)

    async def _refresh(self, send: Send, document: dict[str, Any], refresh: str) -> None:
        body = {"grant_type": "refresh_token", "refresh_token": refresh, "client_id": self.client_id}
        body |= self._refresh_fields(document)
        kind = "application/x-www-form-urlencoded" if self.refresh_form else "application/json"
        data = (urlencode if self.refresh_form else json.dumps)(body).encode()
        async with asyncio.timeout(_REFRESH_TIMEOUT):
            answer = await send(self._token_address, CIMultiDict({"Content-Type": kind}), data)
            status, raw = answer.status, await answer.read_short(FILE_LIMIT)
        reply = json_object(raw)
        if status != 200 or not isinstance(reply.get("access_token"), str):
            why = refusal_text(reply, status)
            if status >= 500 or status in (408, 429):
                raise LoginRefused(f"the login of {self.title} could not be refreshed: {why}", retryable=True)
            raise LoginRefused(f"the login of {self.title} could not be refreshed ({why}); run: {self.command}")
        self._tokens = await asyncio.to_thread(self._save, document, reply)

    def _refresh_fields(self, document: dict[str, Any]) -> dict[str, str]:
        """Fields of a refresh request in addition to the common ones."""
        return {}

    @abstractmethod
    def _tokens_of(self, document: dict[str, Any]) -> LoginTokens: ...

    @abstractmethod
    def _update(self, document: dict[str, Any], reply: Mapping[str, Any]) -> None: ...


async def _finish(renewal: Coroutine[Any, Any, None]) -> None:
    """Complete a refresh even if it is cancelled, since its refresh token is used up."""
    task = asyncio.ensure_future(renewal)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()
        raise asyncio.CancelledError
    task.result()


def refusal_text(reply: Mapping[str, Any], status: int) -> str:
    """A provider's reason for a refusal, in one line."""
    error = reply.get("error")
    inner = error if isinstance(error, Mapping) else {}
    text = reply.get("error_description") or inner.get("message") or (error if isinstance(error, str) else "")
    return f"status {status}" + (f": {str(text)[:200]}" if text else "")
