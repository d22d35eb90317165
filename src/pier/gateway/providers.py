"""The providers of models: those of the environment and of `providers.toml`, and their lookup by model name.

A provider has an address, dialects, a key or a login, and headers. Keys are read when a session is created, are sent
only to the provider's address, and are never displayed. Without a key, a provider is used with the login of the user's
own client, if there is one.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from pier.errors import UsageError
from pier.gateway.login import Login
from pier.gateway.logins import LOGINS, find_login
from pier.home import pier_home
from pier.plugin import nearest
from pier.wire.dialects import DIALECTS, check_name
from pier.wire.headers import is_secret_name
from pier.wire.turn import DialectName

Auth = Literal["bearer", "x-api-key", "x-goog-api-key", "none"]
_VERSION = re.compile(r"/v\d\w*$")
_ADDRESS = re.compile(r"https?://[^/\s]+\S*$")


@dataclass(frozen=True, slots=True)
class Provider:
    """One upstream. `dialects` are those it supports; requests are translated to the first."""

    name: str
    url: str
    dialects: tuple[DialectName, ...]
    key: str | None = field(default=None, repr=False)
    key_name: str | None = None
    """The environment variable of the key, for error messages."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    auth: Auth | None = None
    requests_per_minute: int | None = None
    concurrency: int | None = None
    tokens: bool = False
    """Request token ids and log-probs in vLLM's format, and keep them in the recording."""
    usage: bool = True
    """Request token counts in streams of Chat Completions even if the agent does not."""
    login: Login | None = None
    """The user's login, used instead of a key."""

    def address(self, path: str) -> str:
        """The full address for a path (`/v1/messages`). A version at the end of the provider's address takes
        precedence."""
        base = self.url.rstrip("/")
        if _VERSION.search(base):
            path = re.sub(r"^/v1(beta)?(?=/)", "", path)
        return base + path

    def credentials(self, dialect: DialectName) -> dict[str, str]:
        """The headers with the credential, and this provider's other headers."""
        default = DIALECTS[dialect].key_header or "bearer"
        auth = self.auth or default
        if not self.key or auth == "none":
            return dict(self.headers)
        proof = {"Authorization": f"Bearer {self.key}"} if auth == "bearer" else {auth: self.key}
        return {**proof, **self.headers}

    @property
    def secrets(self) -> tuple[str, ...]:
        """All credentials, including those in headers, without a scheme such as `Bearer`."""
        tokens = (value.rpartition(" ")[2] for name, value in self.headers.items() if is_secret_name(name))
        return (*((self.key,) if self.key else ()), *(self.login.secrets if self.login else ()), *tokens)

    @property
    def credential(self) -> str:
        """A description of the credential for messages."""
        if self.login:
            return f"the login of {self.login.title} ({self.login.source})"
        if not self.key:
            return "no key"
        return f"the key in {self.key_name}" if self.key_name else "a key"

    def check(self) -> None:
        """Raise `UsageError` if the required key is missing, or the login used instead is invalid."""
        if self.login:
            self.login.check()
        elif self.key_name and not self.key:
            client = next((kind for kind in LOGINS if kind.key_name == self.key_name), None)
            also = f", or log in to {client.title}: {client.command}" if client else ""
            raise UsageError(
                f"missing API key for {self.name}",
                hint=f"export {self.key_name}=...{also}",
                code="provider-key-missing",
            )


@dataclass(frozen=True, slots=True)
class Target:
    """A model at a provider."""

    provider: Provider
    model: str


class _Entry(BaseModel):
    """`[NAME]` in `providers.toml`."""

    model_config = ConfigDict(extra="forbid")

    url: str
    dialects: list[Annotated[DialectName, AfterValidator(check_name)]] = Field(default=["chat"], min_length=1)
    key_env: str | None = None
    headers: dict[str, str] = {}
    auth: Auth | None = None
    requests_per_minute: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    tokens: bool = False
    usage: bool = True

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not _ADDRESS.match(url):
            raise ValueError(f"{url!r} is not an http or https address such as http://HOST:PORT/v1")
        return url


_BUILT_IN: tuple[tuple[str, str, tuple[DialectName, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("anthropic", "https://api.anthropic.com", ("anthropic",), ("ANTHROPIC_API_KEY",), ("ANTHROPIC_BASE_URL",)),
    ("openai", "https://api.openai.com", ("responses", "chat"), ("OPENAI_API_KEY",), ("OPENAI_BASE_URL",)),
    (
        "google",
        "https://generativelanguage.googleapis.com",
        ("gemini",),
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        ("GEMINI_BASE_URL", "GOOGLE_GEMINI_BASE_URL"),
    ),
    ("openrouter", "https://openrouter.ai/api", ("chat",), ("OPENROUTER_API_KEY",), ("OPENROUTER_BASE_URL",)),
)
_FORMATS: Mapping[str, DialectName] = {
    "openai_chat_completions": "chat",
    "openai_responses": "responses",
    "anthropic_messages": "anthropic",
    "google_generate_content": "gemini",
}
"""Dialects by Harbor's names for them."""
_ALIASES = {"gemini": "google"}
_FAMILIES = ((r"claude", "anthropic"), (r"gpt-|o\d|codex|chatgpt", "openai"), (r"gemini", "google"))


class Directory:
    """All configured providers."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self._providers = dict(providers)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, config: Path | None = None) -> Directory:
        """Load built-in providers with keys and addresses of the environment, and those of the file, which override."""
        env = os.environ if environ is None else environ
        found = {}
        for name, url, dialects, keys, urls in _BUILT_IN:
            key = next((env[variable] for variable in keys if env.get(variable)), None)
            own = next((env[variable] for variable in urls if env.get(variable)), None)
            if own and name == "openai":
                dialects = ("chat", "responses")
            found[name] = Provider(name, own or url, dialects, key, None if own else keys[0])
            if not key and not own:
                found[name] = _with_login(found[name], env)
        path = config or pier_home() / "providers.toml"
        return cls({**found, **_read(path, env)})

    def get(self, name: str) -> Provider:
        name = _ALIASES.get(name, name)
        if name in self._providers:
            return self._providers[name]
        near = nearest(name, self._providers)
        raise UsageError(
            f"unknown provider {name!r}; known: {', '.join(self._providers)}",
            hint=f"write {near}/MODEL"
            if near
            else "add it to providers.toml, or give its address: pier run --base-url, pier gateway serve --upstream",
            code="provider-unknown",
        )

    def connected(
        self,
        model: str,
        environ: Mapping[str, str] | None = None,
        *,
        base_url: str | None = None,
        model_api_key_name: str | None = None,
        model_api_format: str | None = None,
    ) -> Target:
        """The target for `model`, with another address, the key in another variable, or another format. With an
        address, an unknown provider is a custom one that uses the name `model`."""
        env = os.environ if environ is None else environ
        try:
            found = self.target(model)
        except UsageError:
            if base_url is None:
                raise
            found = Target(at_address(base_url), model)
        provider = found.provider
        if base_url:
            dialects = ("chat", "responses") if provider.name == "openai" else provider.dialects
            provider = replace(provider, url=base_url, dialects=dialects, key_name=None, login=None)
        if model_api_key_name:
            key = env.get(model_api_key_name)
            provider = replace(provider, key=key, key_name=model_api_key_name, login=None)
        if model_api_format:
            provider = replace(provider, dialects=(_FORMATS[model_api_format],))
        return Target(provider, found.model)

    def target(self, model: str, upstream: str | None = None) -> Target:
        """The target for `model`, which is `PROVIDER/MODEL`, a name with a known prefix (`claude-...`), or any name at
        `upstream`, an address or the name of a provider."""
        if upstream and "://" in upstream:
            return Target(at_address(upstream, key=os.environ.get("PIER_UPSTREAM_KEY")), model)
        if upstream:
            return Target(self.get(upstream), model.removeprefix(f"{upstream}/"))
        maker, slash, rest = model.partition("/")
        if slash and (_ALIASES.get(maker, maker) in self._providers):
            return Target(self.get(maker), rest)
        for pattern, name in _FAMILIES:
            if re.match(pattern, model):
                return Target(self._providers[name], model)
        if slash:
            self.get(maker)
        raise UsageError(
            f"no known provider serves the model {model!r}",
            hint=f"name a provider: openrouter/{model}, or its address: --base-url, or gateway serve --upstream",
            code="model-unknown",
        )


def _with_login(provider: Provider, env: Mapping[str, str]) -> Provider:
    """The provider with the login or key of the user's own client for it."""
    kind = next((kind for kind in LOGINS if kind.provider == provider.name), None)
    found = find_login(kind, env) if kind else None
    if isinstance(found, Login):
        return replace(provider, url=found.base, dialects=(found.dialect,), login=found)
    return replace(provider, key=found) if found else provider


def key_variables() -> frozenset[str]:
    """Variables with the keys of built-in providers, which the gateway uses and no sandbox needs."""
    return frozenset(name for row in _BUILT_IN for name in row[3])


def at_address(url: str, *, key: str | None = None, name: str = "custom") -> Provider:
    """A provider at any compatible address. It uses Chat Completions unless the address has a prefix:
    `anthropic+http://127.0.0.1:8000`, `chat,responses+https://models.example/v1`."""
    spoken, plus, rest = url.partition("+")
    if not plus or "://" in spoken:
        spoken, rest = "chat", url
    dialects = tuple(spoken.split(","))
    if not _ADDRESS.match(rest):
        raise UsageError(f"{rest!r} is not an http or https address", hint="write http://HOST:PORT/v1")
    if unknown := set(dialects) - set(DIALECTS):
        raise UsageError(f"unknown dialect {sorted(unknown)[0]!r}", hint=f"use {', '.join(sorted(DIALECTS))}")
    return Provider(name, rest, dialects, key)


def _read(path: Path, env: Mapping[str, str]) -> dict[str, Provider]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", hint=f"correct {path}") from None
    found = {}
    for name, table in tables.items():
        try:
            entry = _Entry.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in (name, *first["loc"]))
            raise UsageError(
                f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}", hint=f"correct {path}"
            ) from None
        facts = entry.model_dump(exclude={"key_env"})
        key = env.get(entry.key_env) if entry.key_env else None
        found[name] = Provider(
            name=name, key=key, key_name=entry.key_env, **{**facts, "dialects": tuple(entry.dialects)}
        )
    return found
