"""The clients that `evaluate(client, model)` accepts:

- None: the model's name selects the provider (`openai/gpt-5`, `script:PATH`, a provider of `providers.toml`),
- an address or the name of a provider,
- `ClientConfig`: an address, and the environment variable with the key,
- a client object with `base_url` and `api_key` (`AsyncOpenAI`, `AsyncAnthropic`): the gateway calls its server, so
  answers are streamed if the agent streams,
- any other object with `chat.completions.create`, which is called without streaming,
- a policy: a callable that takes a canonical request and returns a turn.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from pier.errors import UsageError
from pier.gateway.providers import Provider
from pier.gateway.session import Policy
from pier.wire.dialects import DIALECTS
from pier.wire.turn import DialectName, Request, Turn

_DIALECTS: dict[str, DialectName] = {
    "openai_chat_completions": "chat",
    "openai_chat_completions_token": "chat",
    "openai_responses": "responses",
    "anthropic_messages": "anthropic",
}


class ClientConfig(BaseModel):
    """The address of a model, and the environment variable with its key. `openai_chat_completions_token` requests token
    ids and log-probs from the server (vLLM, SGLang). Groups of rollouts rotate over the servers of `endpoint_configs`.
    """

    model_config = ConfigDict(extra="ignore")

    client_type: str = "openai_chat_completions"
    api_key_var: str = "OPENAI_API_KEY"
    api_base_url: str = "https://api.openai.com/v1"
    extra_headers: dict[str, str] = Field(default_factory=dict)
    endpoint_configs: list[ClientConfig] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The settings of a gateway session that a client stands for."""

    upstream: str | Provider | Policy | None = None
    base_url: str = ""
    tokens: bool = False


def sources_of(client: Any) -> list[ModelSource]:
    """The model sources of a client, usually one; `UsageError` if the client is of an unknown kind."""
    if isinstance(client, ClientConfig):
        configs = client.endpoint_configs or [client]
        return [_of_config(each, client.client_type) for each in configs]
    if client is None:
        return [ModelSource()]
    if isinstance(client, str):
        return [ModelSource(client, client if "://" in client else "")]
    if isinstance(client, Provider):
        return [ModelSource(client, client.url, client.tokens)]
    if hasattr(client, "api_base_url") and hasattr(client, "api_key_var"):
        return sources_of(ClientConfig.model_validate(client, from_attributes=True))
    if (provider := _of_object(client)) is not None:
        return [ModelSource(provider, provider.url)]
    create = getattr(getattr(getattr(client, "chat", None), "completions", None), "create", None)
    if create is not None:
        return [ModelSource(_policy_of(create))]
    if callable(client):
        return [ModelSource(cast(Policy, client))]
    raise UsageError(
        f"invalid client {type(client).__name__}: expected a ClientConfig, a client object or a policy",
        hint="vf.ClientConfig(api_base_url='http://127.0.0.1:8000/v1')",
    )


def _of_config(config: ClientConfig, kind: str) -> ModelSource:
    if kind not in _DIALECTS:
        raise UsageError(f"invalid value {kind!r} for client_type: expected one of {', '.join(_DIALECTS)}")
    provider = Provider(
        name="client",
        url=config.api_base_url,
        dialects=(_DIALECTS[kind],),
        key=os.environ.get(config.api_key_var),
        headers=config.extra_headers,
    )
    return ModelSource(provider, config.api_base_url, kind.endswith("_token"))


def _of_object(client: Any) -> Provider | None:
    """The server of a client object; None if the object has no address and key."""
    url, key = getattr(client, "base_url", None), getattr(client, "api_key", None)
    if not url or not isinstance(key, str) or "://" not in str(url):
        return None
    dialect = "anthropic" if not hasattr(client, "chat") and hasattr(client, "messages") else "chat"
    return Provider("client", str(url), (dialect,), key)


def _policy_of(create: Callable[..., Any]) -> Policy:
    """A policy that calls a client object in this process."""

    async def call(request: Request) -> Turn:
        answer = create(**DIALECTS["chat"].render_request(replace(request, stream=False)))
        if inspect.isawaitable(answer):
            answer = await answer
        return DIALECTS["chat"].parse_response(answer if isinstance(answer, dict) else answer.model_dump())

    return call
