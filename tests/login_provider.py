"""Providers of Claude Code's, Codex's and Gemini CLI's logins on loopback. They are as strict as the real ones: a
request with another route, header or token than the client itself sends is refused."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from aiohttp import web

from pier.gateway.logins import LOGINS
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Turn, stream_turn
from tests.gateway_fakes import HELLO, Behaviour, FakeProvider, fake_provider, says

CLAUDE_BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14"
USER_AGENTS = {
    "claude-code": "claude-cli/2.1.325 (external, cli)",
    "codex": "codex_exec/0.166.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.166.0)",
    "gemini-cli": "GeminiCLI/0.61.0/gemini-2.5-pro (linux; x64; terminal)",
}
ACCOUNT = "0d1f7c1e-account"


def jwt(**claims: Any) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'RS256', 'typ': 'JWT'})}.{part(claims)}.c2lnbmF0dXJl"


@dataclass
class LoginProvider:
    """What the providers know: the tokens that are good now."""

    fake: FakeProvider
    access: str = "access-token-number-0"
    refresh: str = "refresh-token-number-0"
    refreshes: list[dict[str, Any]] = field(default_factory=list)
    dead: bool = False
    """Whether refresh tokens are refused."""
    turn: Turn = HELLO
    answer: Behaviour | None = None
    """What answers good requests instead of `turn`."""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that lead to these providers."""
        names = {kind.provider.upper(): kind for kind in LOGINS}
        bases = {"OPENAI": f"{self.fake.url}/backend-api/codex"}
        found = {f"PIER_{name}_LOGIN_URL": bases.get(name, self.fake.url) for name in names}
        return found | {f"PIER_{name}_TOKEN_URL": f"{self.fake.url}/{name.lower()}/oauth/token" for name in names}

    def next_tokens(self) -> None:
        number = len(self.refreshes) + 1
        self.access, self.refresh = jwt(exp=time.time() + 3600, n=number), f"refresh-token-number-{number}"

    async def __call__(self, request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        if request.path.endswith("/oauth/token"):
            return self._token(request, raw)
        if request.headers.get("Authorization") != f"Bearer {self.access}" or "x-api-key" in request.headers:
            return web.json_response({"error": {"message": "invalid bearer token"}}, status=401)
        if request.path == "/v1/messages":
            betas = request.headers.get("anthropic-beta", "").split(",")
            good = "oauth-2025-04-20" in betas and request.query_string in ("", "beta=true")
        elif request.path == "/backend-api/codex/responses":
            good = request.headers.get("chatgpt-account-id") == ACCOUNT and json.loads(raw)["store"] is False
        elif request.path.startswith("/v1internal:"):
            return await self._code_assist(request, json.loads(raw))
        else:
            good = False
        if not good:
            return web.json_response({"error": {"message": f"not as the client asks: {request.path_qs}"}}, status=404)
        return await (self.answer or says(self.turn))(request, raw)

    def _token(self, request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        form = request.content_type == "application/x-www-form-urlencoded"
        asked = {name: values[0] for name, values in parse_qs(raw.decode()).items()} if form else json.loads(raw)
        self.refreshes.append({"path": request.path, **asked})
        wanted = {"grant_type", "refresh_token", "client_id", *(("client_secret",) if form else ())}
        if "anthropic" in request.path:
            wanted.add("scope")
        good = asked["grant_type"] == "refresh_token" and asked["refresh_token"] == self.refresh
        if self.dead or not good or set(asked) != wanted or form != ("google" in request.path):
            return web.json_response({"error": "invalid_grant", "error_description": "revoked"}, status=400)
        self.next_tokens()
        said: dict[str, Any] = {"access_token": self.access, "expires_in": 3600}
        if not form:
            said["refresh_token"] = self.refresh
        else:
            self.refresh = asked["refresh_token"]
        return web.json_response(said)

    async def _code_assist(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        method, gemini = request.path.partition(":")[2], DIALECTS["gemini"]
        if method == "loadCodeAssist":
            return web.json_response({"currentTier": {"id": "free-tier"}, "cloudaicompanionProject": "project-1"})
        if method == "countTokens":
            assert body["request"]["model"].startswith("models/")
            return web.json_response({"totalTokens": 4321})
        assert body["project"] == "project-1" and body["user_prompt_id"] and body["request"]["session_id"]
        inner = {name: value for name, value in body["request"].items() if name != "session_id"}
        route = gemini.match("POST", f"/v1beta/models/{body['model']}:{method}", {"alt": "sse"})
        assert route is not None
        asked = gemini.parse_request(inner, route)
        if method == "generateContent":
            return web.json_response({"response": gemini.render_response(self.turn, asked), "traceId": "trace-1"})
        assert request.query_string == "alt=sse"
        renderer = gemini.stream_renderer(asked, route)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for delta in stream_turn(self.turn, 5):
            for event in renderer.render(delta).split(b"\n\n"):
                if event.startswith(b"data: "):
                    wrapped = json.dumps({"response": json.loads(event[6:]), "traceId": "trace-1"})
                    await answer.write(f"data: {wrapped}\r\n\r\n".encode())
        await answer.write_eof()
        return answer


@asynccontextmanager
async def login_provider() -> AsyncIterator[LoginProvider]:
    async with fake_provider() as fake:
        found = LoginProvider(fake)
        fake.always = found
        yield found


def write_login(home: Path, client: str, access: str, refresh: str | None, expires_in: float = 3600) -> Path:
    """A login as the client itself writes it."""
    until = int((time.time() + expires_in) * 1000)
    if client == "claude-code":
        path = home / ".claude" / ".credentials.json"
        own = {"accessToken": access, "refreshToken": refresh, "expiresAt": until, "scopes": ["user:inference"]}
        value: dict[str, Any] = {"claudeAiOauth": {**own, "subscriptionType": "max"}, "mcpOAuth": {"x": 1}}
    elif client == "codex":
        path = home / ".codex" / "auth.json"
        tokens = {"access_token": access, "refresh_token": refresh, "account_id": ACCOUNT}
        value = {"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "last_refresh": "2026-01-01T00:00:00Z"}
        value["tokens"] = {"id_token": jwt(email="a@b.c"), **tokens}
    else:
        path = home / ".gemini" / "oauth_creds.json"
        value = {"access_token": access, "refresh_token": refresh, "expiry_date": until, "token_type": "Bearer"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    path.chmod(0o600)
    return path
