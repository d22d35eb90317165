"""Which hosts an agent must reach beyond the gateway, read from its configuration.

A URL that a user puts into an agent's configuration or variables is meant to be called, so it is allowed without
another word. Only settings that name an endpoint count; a link in a prompt opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

KEYS = ("api", "api_base", "api_url", "base_url", "baseurl", "openai_base_url", "url", "httpurl")
_SETTING = re.compile(r"""(?m)["']?\b(\w+)["']?\s*[:=]\s*["']?(https?://[^\s"',}\]]+)""")
_VARIABLE = re.compile(r"(BASE_URL|API_BASE|API_URL|ENDPOINT|(?<!TRUSTED)_HOST)$")
_HERE = ("127.0.0.1", "localhost", "::1")


def hosts_in(options: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of all endpoints in an agent's options and variables, as rules of an allowlist, each once."""
    urls = [*_urls(options), *(value for name, value in env.items() if _VARIABLE.search(name))]
    return tuple(dict.fromkeys(rule for rule in map(_rule, urls) if rule))


def _urls(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _urls(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _urls(item, key)
    elif isinstance(value, str):
        if key.lower() in KEYS:
            yield value
        yield from (found[2] for found in _SETTING.finditer(value) if found[1].lower() in KEYS)


def _rule(url: str) -> str | None:
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or host in _HERE or "$" in url or "." not in host:
        return None
    return f"{host}:{port}" if port else host
