"""The logins of Claude Code, Codex and Gemini CLI: their files, routes and headers, and their lookup."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from multidict import CIMultiDict

from pier.gateway.login import (
    FILE_LIMIT,
    Login,
    LoginRefused,
    LoginRequest,
    LoginState,
    LoginStatus,
    LoginTokens,
    Send,
    lock_directory,
    refusal_text,
)
from pier.wire.sse import Framer, data_of, events_of, sse
from pier.wire.values import json_object


class ClaudeLogin(Login):
    client, title, provider, dialect = "claude-code", "Claude Code", "anthropic", "anthropic"
    command, key_name = "claude auth login", "ANTHROPIC_API_KEY"
    user_agent = re.compile(r"claude-(cli|code)/")
    url = "https://api.anthropic.com"
    token_url = "https://platform.claude.com/v1/oauth/token"
    client_id = "9d1c250a-e61b-44d9-88ed-5944d1962f5e"
    home = ("CLAUDE_CONFIG_DIR", ".claude", ".credentials.json")
    lock, locked = ".oauth_refresh.lock", staticmethod(lock_directory)
    _BETA = "oauth-2025-04-20"

    async def _prepare(self, send: Send, path: str, headers: CIMultiDict[str], data: bytes, model: str) -> LoginRequest:
        betas = [beta for beta in headers.get("anthropic-beta", "").split(",") if beta]
        headers["anthropic-beta"] = ",".join(betas if self._BETA in betas else [*betas, self._BETA])
        return self.base + path, headers, data

    def _tokens_of(self, document: dict[str, Any]) -> LoginTokens:
        found = document["claudeAiOauth"]
        expires = found.get("expiresAt")
        return LoginTokens(
            _text(found["accessToken"]),
            found.get("refreshToken") or None,
            expires / 1000 if expires else None,
            found.get("subscriptionType"),
        )

    def _update(self, document: dict[str, Any], reply: Mapping[str, Any]) -> None:
        found, now = document["claudeAiOauth"], time.time()
        found["accessToken"] = reply["access_token"]
        found["refreshToken"] = reply.get("refresh_token") or found.get("refreshToken")
        found["expiresAt"] = int((now + float(reply.get("expires_in") or 3600)) * 1000)
        if reply.get("refresh_token_expires_in"):
            found["refreshTokenExpiresAt"] = int((now + float(reply["refresh_token_expires_in"])) * 1000)
        if reply.get("scope"):
            found["scopes"] = str(reply["scope"]).split()

    def _refresh_fields(self, document: dict[str, Any]) -> dict[str, str]:
        return {"scope": " ".join(document["claudeAiOauth"].get("scopes") or ["user:inference", "user:profile"])}


class CodexLogin(Login):
    """A login with ChatGPT. One with an API key is used like any other key."""

    client, title, provider, dialect = "codex", "Codex", "openai", "responses"
    command, key_name = "codex login", "OPENAI_API_KEY"
    user_agent = re.compile(r"codex[-_]")
    url = "https://chatgpt.com/backend-api/codex"
    token_url = "https://auth.openai.com/oauth/token"
    home, lock = ("CODEX_HOME", ".codex", "auth.json"), "auth.lock"
    client_id = "app_EMoamEEZ73f0CkXaXp7hrann"

    async def _prepare(self, send: Send, path: str, headers: CIMultiDict[str], data: bytes, model: str) -> LoginRequest:
        if self.tokens.account:
            headers["ChatGPT-Account-Id"] = self.tokens.account
        return self.base + path.removeprefix("/v1"), headers, data

    def _tokens_of(self, document: dict[str, Any]) -> LoginTokens:
        found = document["tokens"]
        access = _text(found["access_token"])
        claims = _claims(access)
        own = _claims(found.get("id_token")).get("https://api.openai.com/auth") or {}
        account = found.get("account_id") or own.get("chatgpt_account_id")
        return LoginTokens(access, found.get("refresh_token") or None, claims.get("exp"), account)

    def _update(self, document: dict[str, Any], reply: Mapping[str, Any]) -> None:
        for name in ("id_token", "access_token", "refresh_token"):
            if reply.get(name):
                document["tokens"][name] = reply[name]
        document["last_refresh"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Unwrapper:
    """Extracts answers of the Gemini API from those of Code Assist, also from streams."""

    def __init__(self, *, stream: bool) -> None:
        self._framer = Framer() if stream else None
        self._whole = b""

    @property
    def held(self) -> bool:
        """Whether bytes of an incomplete answer or event are held."""
        return bool(self._framer.rest if self._framer else self._whole)

    def feed(self, data: bytes) -> bytes:
        if self._framer is None:
            self._whole += data
            return b""
        return b"".join(self._event(event) for event in events_of(self._framer.feed(data)))

    def rest(self) -> bytes:
        if self._framer is not None:
            torn, self._framer = self._framer.rest, Framer()
            return torn
        whole, self._whole = self._whole, b""
        found = _response(whole)
        return whole if found is None else json.dumps(found, ensure_ascii=False).encode()

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        found = _response(data) if data is not None else None
        return event if found is None else sse(found)


def _response(data: bytes) -> dict[str, Any] | None:
    """The answer of the Gemini API in an answer or event; None if there is none, e.g. in an error."""
    value = json_object(data)
    inner = value.get("response")
    if not isinstance(inner, dict):
        return None
    return {**inner, **({"responseId": value["traceId"]} if value.get("traceId") else {})}


class GeminiLogin(Login):
    """A login with Google for Code Assist, which expects a request of the Gemini API inside `{"model", "project",
    "user_prompt_id", "request"}` and returns its answer, or each event of it, inside `{"response", "traceId"}`. Answers
    are unwrapped before they are recorded, so recordings and agents contain only the Gemini API."""

    client, title, provider, dialect = "gemini-cli", "Gemini CLI", "google", "gemini"
    command, key_name = "gemini (choose Login with Google)", "GEMINI_API_KEY"
    user_agent = re.compile(r"GeminiCLI")
    url = "https://cloudcode-pa.googleapis.com"
    token_url = "https://oauth2.googleapis.com/token"
    client_id = "681255809395-oo8ft2oprdrnp9e3aqf6av3hmdib135j.apps.googleusercontent.com"
    home = ("GEMINI_CLI_HOME", ".gemini", "oauth_creds.json")
    refresh_form = True
    _PUBLIC = "GOCSPX" + "-4uHgMPm-1o7Sk-geV6Cu5clXFsxl"
    """Google's client secret for the CLI, which is public since it is part of its source."""

    def __init__(self, path: Path | None, environ: Mapping[str, str], token: str | None = None) -> None:
        super().__init__(path, environ, token)
        self._chosen_project = environ.get("GOOGLE_CLOUD_PROJECT") or environ.get("GOOGLE_CLOUD_PROJECT_ID")
        self._project: str | None = None
        self._session = str(uuid4())

    async def _prepare(self, send: Send, path: str, headers: CIMultiDict[str], data: bytes, model: str) -> LoginRequest:
        self._project = self._project or await self._find_project(send)
        body = json.loads(data)
        if path.endswith(":countTokens"):
            wrapped = {"request": {"model": f"models/{model}", "contents": body.get("contents")}}
        else:
            request = {**body, "session_id": self._session}
            wrapped = {"model": model, "project": self._project, "user_prompt_id": str(uuid4()), "request": request}
        address = f"{self.base}/v1internal:{path.rpartition(':')[2]}"
        return address, headers, json.dumps(wrapped, ensure_ascii=False).encode()

    async def _find_project(self, send: Send) -> str:
        """The project for the account's requests."""
        metadata = {"ideType": "IDE_UNSPECIFIED", "platform": "PLATFORM_UNSPECIFIED", "pluginType": "GEMINI"}
        body: dict[str, Any] = {"metadata": metadata}
        if chosen := self._chosen_project:
            body = {"metadata": {**metadata, "duetProject": chosen}, "cloudaicompanionProject": chosen}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.tokens.access}"}
        address = f"{self.base}/v1internal:loadCodeAssist"
        answer = await send(address, CIMultiDict(headers), json.dumps(body).encode())
        status, reply = answer.status, json_object(await answer.read_short(FILE_LIMIT))
        project = reply.get("cloudaicompanionProject")
        project = project.get("id") if isinstance(project, Mapping) else project
        found = project if isinstance(project, str) and project else self._chosen_project
        if status == 200 and found:
            return found
        why = refusal_text(reply, status) if status != 200 else "the account is not set up yet"
        raise LoginRefused(f"Code Assist gave no project ({why}); run: {self.command}", retryable=status >= 500)

    def unwrapper(self, *, stream: bool) -> Unwrapper | None:
        return Unwrapper(stream=stream)

    def _tokens_of(self, document: dict[str, Any]) -> LoginTokens:
        expires = document.get("expiry_date")
        return LoginTokens(
            _text(document["access_token"]), document.get("refresh_token") or None, expires / 1000 if expires else None
        )

    def _update(self, document: dict[str, Any], reply: Mapping[str, Any]) -> None:
        for name in ("access_token", "refresh_token", "id_token", "scope", "token_type"):
            if reply.get(name):
                document[name] = reply[name]
        document["expiry_date"] = int((time.time() + float(reply.get("expires_in") or 3600)) * 1000)

    def _refresh_fields(self, document: dict[str, Any]) -> dict[str, str]:
        return {"client_secret": self._PUBLIC}


LOGINS: tuple[type[Login], ...] = (ClaudeLogin, CodexLogin, GeminiLogin)


def login_path(kind: type[Login], environ: Mapping[str, str]) -> Path | None:
    """The path of a client's login; None without a home directory."""
    variable, folder, name = kind.home
    if own := environ.get(variable):
        # Gemini CLI's variable replaces the home directory, those of the others name the directory itself
        return Path(own, folder, name) if kind is GeminiLogin else Path(own, name)
    return Path(environ["HOME"], folder, name) if environ.get("HOME") else None


def find_login(kind: type[Login], environ: Mapping[str, str]) -> Login | str | None:
    """A client's login, or the API key in its place; None if there is neither, or with `PIER_LOGINS=off`."""
    if environ.get("PIER_LOGINS") == "off":
        return None
    if kind is ClaudeLogin and (token := environ.get("CLAUDE_CODE_OAUTH_TOKEN")):
        return ClaudeLogin(None, environ, token)
    path = login_path(kind, environ)
    if path is None or not os.path.isfile(path):  # noqa: PTH113 - false if the home is not accessible
        return None
    try:
        document = json.loads(path.read_bytes()[:FILE_LIMIT])
    except (OSError, ValueError):
        document = None
    if kind is CodexLogin and isinstance(document, dict) and not document.get("tokens"):
        key = document.get("OPENAI_API_KEY")
        return key if isinstance(key, str) and key else None
    if kind is ClaudeLogin and isinstance(document, dict) and "claudeAiOauth" not in document:
        return None  # the file holds only logins of MCP servers
    return kind(path, environ)


def login_statuses(environ: Mapping[str, str]) -> list[LoginStatus]:
    """The state of each client's login, including missing ones."""
    rows = []
    for kind in LOGINS:
        found, path = find_login(kind, environ), login_path(kind, environ)
        if isinstance(found, Login):
            rows.append(found.status())
            continue
        state: LoginState = "ready" if found else "missing"
        source = str(path) if path else "no home directory"
        detail = "an API key" if found else ""
        rows.append(LoginStatus(kind.client, kind.title, kind.provider, state, source, detail, command=kind.command))
    return rows


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it has no access token")
    return value


def _claims(token: Any) -> dict[str, Any]:
    """The claims of a JWT; empty if it is not one. The signature is not checked, since the provider does that."""
    try:
        part = token.split(".")[1]
        value = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (AttributeError, IndexError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
