"""Options that a user sets on an agent (`--ak name=value`, `kwargs` in a job file): as flags, and as hosts to allow.

The host of an endpoint in an agent's options or variables is allowed without another setting. Only settings that name
an endpoint count, not a link in a prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pier.errors import UsageError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class AgentFlag:
    """An option that becomes a flag of the agent's own command line."""

    option: str
    flag: str
    choices: tuple[str, ...] = ()


def flags(agent: str, options: Mapping[str, Any], table: Sequence[AgentFlag]) -> list[str]:
    """The flags of the options that are set: True is a flag without a value, False and None are left out."""
    argv: list[str] = []
    for row in table:
        value = options.get(row.option)
        if value is True:
            argv.append(row.flag)
        elif value is not None and value is not False:
            argv += [row.flag, choice(agent, options, row.option, row.choices)]
    return argv


def choice(agent: str, options: Mapping[str, Any], name: str, choices: Sequence[str] = (), default: str = "") -> str:
    """An option as text. `UsageError` if it is not one of `choices`."""
    value = options.get(name)
    text = default if value is None else str(value)
    if choices and text and text not in choices:
        message = f"{agent}: invalid value {text!r} for {name}: expected one of {', '.join(choices)}"
        raise UsageError(message, hint=f"--ak {name}={choices[0]}")
    return text


def words(options: Mapping[str, Any], name: str, default: Sequence[str] = ()) -> list[str]:
    """An option that is a list, or text separated by commas and blanks."""
    value = options.get(name)
    if value is None:
        return list(default)
    return value.replace(",", " ").split() if isinstance(value, str) else [str(item) for item in value]


def mapping(agent: str, options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An option that is a mapping, or JSON text of one."""
    value = options.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"{agent}: {name} is not JSON: {error}") from error
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{agent}: invalid value for {name}: expected a mapping")
    return dict(value or {})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; values of `over` take precedence."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # pyright: ignore[reportArgumentType]
    return result


def toml(value: Mapping[str, Any], prefix: str = "") -> str:
    """A mapping as TOML, without None values."""
    plain = {key: item for key, item in value.items() if not isinstance(item, Mapping)}
    lines = [f"{_quoted(key)} = {_toml_value(item)}" for key, item in plain.items() if item is not None]
    text = (f"[{prefix}]\n" if prefix and (lines or not value) else "") + "".join(f"{line}\n" for line in lines)
    for key, item in value.items():
        if isinstance(item, Mapping):
            text += toml(item, f"{prefix}.{_quoted(key)}" if prefix else _quoted(key))
    return text


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """A TOML string: JSON without escaped surrogate pairs, and with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


KEYS = ("api", "api_base", "api_url", "base_url", "baseurl", "openai_base_url", "url", "httpurl")
_SETTING = re.compile(r"""(?m)["']?\b(\w+)["']?\s*[:=]\s*["']?(https?://[^\s"',}\]]+)""")
_VARIABLE = re.compile(r"(BASE_URL|API_BASE|API_URL|ENDPOINT|(?<!TRUSTED)_HOST)$")
_HERE = ("127.0.0.1", "localhost", "::1")


def hosts_in(options: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of all endpoints in an agent's options and variables, as allowlist rules."""
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
        yield from (match[2] for match in _SETTING.finditer(value) if match[1].lower() in KEYS)


def _rule(url: str) -> str | None:
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or host in _HERE or "$" in url or "." not in host:
        return None
    return f"{host}:{port}" if port else host
