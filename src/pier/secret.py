"""Classification of secret values, and the encodings of a secret in text.

A value is secret if the name of its variable looks like it (`API_KEY`, `DB_PASSWORD`), or if the user passed it to a
trial (`--ae`, `--ve`, `--env-file`, a task's `${NAME}`) and it looks random. The password of a URL, URL parameters with
such names, the word after `Bearer`, and the value of a flag with such a name are secret too. Short values, numbers,
words, and names of models and files are never secret, whatever the name of their variable: they occur in ordinary text,
and removing them would damage it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

SHORTEST = 8
"""A shorter value is never secret."""

HIDDEN = "****"
TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_AFTER_SCHEME = re.compile(rf"(?:[A-Za-z]{{1,12}} )?{TEMPLATE.pattern}", re.DOTALL)
"""A template, optionally after the scheme of a header: `Bearer ${TOKEN}`."""

_NAME = re.compile(
    r"KEY|SECRET|TOKEN(?!S)|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!IZ))|COOKIE|BEARER|(?:^|_)PASS(?:$|_)|_PWD$",
    re.IGNORECASE,
)
_NUMBER_SIZE = 16
"""A number of fewer digits is never secret."""
_WORD_SIZE = 20
_COMMON = re.compile(
    r"(?:my|db|test|root|admin|user|mysql|postgres|your|dummy|fake|super|top|not|the)?"
    r"(?:passwor[dt]|secrets?|token|apikey|key|credentials?)(?:here)?|"
    r"postgres(?:ql)?|mysql(?:root)?|mariadb|mongodb|rabbitmq|minioadmin|wordpress|change(?:me|it|this)|letmein|"
    r"welcome|qwerty(?:uiop)?|abcdefgh|iloveyou|insecure|admin(?:admin|istrator)?|root(?:root)?|guest|username|"
    r"default|localhost|example|placeholder|redacted|undefined|disabled|enabled|anonymous|unknown|dummy|"
    r"production|development|staging|testing"
)
_MODEL = re.compile(
    r"(?:[\w.-]+/)*(?:gpt|chatgpt|codex|claude|gemini|gemma|o\d|llama|qwen|mi[sx]tral|deepseek|grok|kimi|glm|phi)"
    r"(?![a-z])[\w.:-]*",
    re.IGNORECASE,
)
_HOST = re.compile(r"(?:[a-z0-9_-]+\.)+[a-z]{2,}\.?(?::\d+)?|[\d.]+(?::\d+)?|[a-z][a-z-]*:\d+")
_FILE = re.compile(
    r"[A-Za-z][\w-]*(?:\.[\w-]+)*\.(?:txt|csv|tsv|jsonl?|ya?ml|toml|ini|cfg|conf|md|html?|xml|log|db|sqlite3?|sql|py|"
    r"ipynb|sh|[cm]?[jt]s|pem|key|crt|pub|zip|tar|gz|parquet|pkl|pdf|png|jpe?g)"
)
_PATH = re.compile(r"(?:~|\.{1,2})?/|[A-Za-z]:\\")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>\\]+")
_BEARER = re.compile(r"\b(?:bearer|basic|token)\s+([^\s\"',;]+)", re.IGNORECASE)
_FLAG = re.compile(r"(?:^|[\s\"'])--?([A-Za-z][\w-]*)(?:=|\s+)[\"']?([^\s\"']+)")
_PASSPHRASE = re.compile(r"[A-Za-z]+(?:[-_][A-Za-z]+){3,}")
_CONSONANTS = re.compile(r"[^aeiouy]{6}")

FORMS: dict[str, str] = {
    "private key": r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----(?:[^-]|-(?!----BEGIN )){0,16384}?"
    r"-----END [A-Z ]{0,20}PRIVATE KEY-----",
    "Anthropic key": r"\bsk-ant-[A-Za-z0-9_-]{16,}",
    "OpenAI key": r"\bsk-(?!ant-)(?:[a-z]{2,10}-)?[A-Za-z0-9_-]{20,}",
    "API key": r"\b(?:pk|rk)-(?:[a-z]+-){0,3}[A-Za-z0-9_-]{20,}",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "Google key": r"\b(?:AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z._-]{20,}|GOCSPX-[0-9A-Za-z_-]{20,})",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "package registry token": r"\b(?:npm_[A-Za-z0-9]{36}|pypi-AgE[A-Za-z0-9_-]{50,})",
    "JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "bearer token": r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{20,}=*",
    "password in a URL": r"(?<=://)[^/?#@\s\"'\\]{1,200}:[^/?#@\s\"'\\]{1,200}(?=@)",
}
"""Patterns of well-known secrets, by their names in reports."""


def looks_secret(name: str) -> bool:
    """Whether a variable, header or parameter of this name probably holds a secret."""
    return _NAME.search(name) is not None


def is_never_secret(value: str) -> bool:
    """Whether a value is too short or too common to be removed from text."""
    letters = re.sub(r"[^a-z]", "", value.lower())
    return (
        len(value) < SHORTEST
        or len(set(value)) <= 2
        or (_COMMON.fullmatch(letters) is not None and len(re.sub(r"\D", "", value)) < _NUMBER_SIZE)
        or (value.isdigit() and len(value) < _NUMBER_SIZE)
        or (value.isalpha() and value.isascii() and not _is_random(value))
        or _MODEL.fullmatch(value) is not None
        or (_FILE.fullmatch(value) is not None and not looks_random(value))
        or (_PATH.match(value) is not None and not looks_random(value))
        or (_URL.fullmatch(value) is not None and not looks_random(value))
    )


def looks_random(value: str) -> bool:
    """Whether part of a value looks machine-generated: mixed letters and digits, long numbers, odd letter sequences."""
    return any(_is_random(chunk) for chunk in re.findall(r"[A-Za-z0-9]+", value)) or (
        _PASSPHRASE.fullmatch(value) is not None
    )


def _is_random(chunk: str) -> bool:
    if chunk.isdigit():
        return len(chunk) > 4 and not re.fullmatch(r"(?:19|20)\d{6}", chunk)
    if chunk.isalpha():
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", chunk)
        odd = len(chunk) >= SHORTEST and (len(chunk) < 3 * len(words) or _CONSONANTS.search(chunk.lower()) is not None)
        return odd or any(len(word) > _WORD_SIZE for word in words)
    return len(chunk) >= 5 and not re.fullmatch(r"[A-Za-z]+\d{1,4}|\d{1,4}[A-Za-z]{1,4}", chunk)


def is_secret(name: str, value: str, *, given: bool = False) -> bool:
    """Whether the value of a variable is secret. `given` means that the user passed it to a trial."""
    if is_never_secret(value):
        return False
    if looks_secret(name):
        return True
    settled = _HOST.fullmatch(value) or _URL.fullmatch(value) or _PATH.match(value) or value.startswith("-")
    return given and not settled and looks_random(value)


def secrets_in_text(text: str) -> Iterator[str]:
    """Yield the secrets inside a text: in URLs, after `Bearer`, and after flags such as `--api-key`."""
    for found in _URL.findall(text):
        yield from _in_url(found)
    yield from (found[1] for found in _BEARER.finditer(text))
    yield from (found[2] for found in _FLAG.finditer(text) if looks_secret(found[1]))


def _in_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    userinfo, at, _ = parts.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    found = [password] if colon else [user] if at and looks_random(user) else []
    for part in re.split("[&;]", f"{parts.query}&{parts.fragment}"):
        name, equals, value = part.partition("=")
        if equals and (looks_secret(name) or name.lower() in ("sig", "signature", "pass", "pwd", "code")):
            found.append(value)
    for value in found:
        yield value
        yield unquote(value)


def secret_values(env: Mapping[str, str], environ: Mapping[str, str], *, given: bool = False) -> Iterator[str]:
    """Yield the secrets in the variables of `env`, after filling templates. Values from templates count as passed by
    the user."""
    for name, value in env.items():
        match = _AFTER_SCHEME.fullmatch(value)
        real = environ.get(match[1], match[2] or "") if match else value
        if (
            looks_secret(name)
            or (match and looks_secret(match[1]))
            or is_secret(name, real, given=given or match is not None)
        ):
            yield real
        yield from secrets_in_text(real)


def secrets_in(value: Any, environ: Mapping[str, str], name: str = "", *, given: bool = False) -> Iterator[str]:
    """Yield the secrets in a configuration, after filling templates. Its tables `env` and `headers` count as passed by
    the user."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from secrets_in(each, environ, str(key), given=given or name in ("env", "headers"))
    elif isinstance(value, list):
        for before, each in zip([None, *value], value, strict=False):
            flag = before if isinstance(before, str) and before.startswith("-") else ""
            yield from secrets_in(each, environ, flag or name, given=given)
    elif isinstance(value, str):
        yield from filter(None, secret_values({name: value}, environ, given=given))


def env_on_disk(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return `env` for writing to disk: templates stay, secret literals become templates or are hidden."""
    return {name: value_on_disk(name, value, environ, given=True) for name, value in env.items()}


def value_on_disk(name: str, value: str, environ: Mapping[str, str], *, given: bool = False) -> str:
    """Return one value for writing to disk."""
    if not value or _AFTER_SCHEME.fullmatch(value) or not (looks_secret(name) or is_secret(name, value, given=given)):
        return value
    return f"${{{name}}}" if environ.get(name) == value else HIDDEN


WRAPPED_LEAST = 48
"""Minimum length of the lines of wrapped base64."""
_ESCAPES = 8
"""Maximum number of backslashes before an escaped character: JSON encoded three times."""
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
"""Characters that no text encoding escapes."""
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}


@dataclass(frozen=True, slots=True)
class Secret:
    """A compiled secret: a pattern that matches all its encodings, and the length of the longest. Every encoding
    contains one of the `cores`."""

    cores: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    longest: int

    def may_be_in(self, data: bytes) -> bool:
        for core in self.cores:  # noqa: SIM110 - any() takes twice the time
            if core in data:
                return True
        return False


def compile_secret(secret: str) -> Secret:
    """Compile a secret for matching. Searching for the cores first is many times faster than the pattern alone."""
    escaped = [_character(found[2], len(found[1])) for found in _CHARACTERS.finditer(secret)]
    patterns = ["".join(pattern for pattern, _ in escaped)]
    longest = sum(size for _, size in escaped)
    cores = [max(_PLAIN.findall(secret), key=len, default="")]
    for form in _base64(secret):
        escaped = [_character(character) for character in form]
        swapped = ({"+": "-|", "/": "_|"}.get(character, "") for character in form)
        patterns.append("".join(f"(?:{swap}{pattern})" for swap, (pattern, _) in zip(swapped, escaped, strict=True)))
        longest = max(longest, sum(size for _, size in escaped))
        half = min(len(form) // 2, WRAPPED_LEAST // 2)  # a line ends in one of two halves at most
        halves = (form[:half], form[half : 2 * half])
        cores += [max(re.findall(r"[A-Za-z0-9]+", part), key=len, default="") for part in halves]
    others = _others(secret)
    longest = max(longest, *map(len, others))
    pattern = b"|".join(("|".join(patterns).encode(), *map(re.escape, others)))
    sure = {*(core.encode() for core in cores), *others[:2], others[2][:-1], others[3][1:]}  # ASCII has one UTF-16 core
    return Secret(tuple(sure), re.compile(pattern), longest)


def _others(secret: str) -> list[bytes]:
    """Return a secret as hex and as UTF-16."""
    digits = secret.encode(errors="surrogatepass").hex().encode()
    return [digits, digits.upper(), *(secret.encode(f"utf-16-{end}", errors="surrogatepass") for end in ("le", "be"))]


_CHARACTERS = re.compile(r"(?=.)(\\*)([^\\]?)", re.DOTALL)


def _character(character: str, slashes: int = 0) -> tuple[str, int]:
    """Return a pattern for one character of a secret in any encoding, and its maximum size in bytes. The backslashes
    before it are matched together with those that escape it, so that a text has only one match (no backtracking)."""
    if slashes:
        after, size = _character(character) if character else ("", 0)
        coded = rf"(?:\\{{1,{_ESCAPES}}}+u(?i:005c)){{{slashes}}}|(?:%(?:25)?(?i:5c)){{{slashes}}}"
        found = [rf"(?:{coded}){after}", *_as_escaped(character, slashes)]
        return f"(?:{'|'.join(found)})", (_ESCAPES + 5) * slashes + size
    if _PLAIN.fullmatch(character):
        return re.escape(character), 1
    raw = character.encode(errors="surrogatepass")
    units = character.encode("utf-16-be", errors="surrogatepass")
    size = max(_ESCAPES + len(raw), (_ESCAPES + 5) * len(units) // 2, 5 * len(raw))
    return f"(?:{'|'.join(_as_escaped(character, 0))})", size


def _as_escaped(character: str, slashes: int) -> Iterator[str]:
    """Yield patterns for an optional character after backslashes, which may be escaped themselves."""
    before = rf"\\{{{slashes},{(_ESCAPES + 1) * slashes}}}+" if slashes else ""
    if not character or _PLAIN.fullmatch(character):
        yield before + re.escape(character)
        return
    most = (_ESCAPES + 1) * slashes + _ESCAPES
    escape = rf"\\{{{slashes + 1},{most}}}+"
    units = character.encode("utf-16-be", errors="surrogatepass").hex()
    first, *others = (f"u(?i:{units[i : i + 4]})" for i in range(0, len(units), 4))
    yield rf"\\{{{slashes},{most}}}+{re.escape(character)}"
    yield escape + first + "".join(rf"\\{{1,{_ESCAPES}}}+{other}" for other in others)
    yield before + "".join(f"%(?:25)?(?i:{byte:02x})" for byte in character.encode(errors="surrogatepass"))
    if (entity := _ENTITIES.get(character)) is not None:
        yield f"{before}(?:{re.escape(entity)}|&#0?{ord(character)};)"
    if short := {"\n": "n", "\t": "t", "\r": "r"}.get(character):
        yield escape + short
    elif character == " ":
        yield before + r"\+"


def _base64(secret: str) -> Iterator[str]:
    """Yield the base64 characters that depend on the secret alone, for each alignment to groups of three bytes."""
    raw = secret.encode(errors="surrogatepass")
    for pad, skipped in enumerate((0, 2, 3)):
        encoded = base64.b64encode(b"\0" * pad + raw).decode().rstrip("=")
        partial = (pad + len(raw)) % 3 != 0
        yield encoded[skipped : len(encoded) - partial]


def forms_of(secret: str) -> Iterator[str]:
    """Yield the encodings of a secret that may be split over the chunks of a stream."""
    once = json.dumps(secret)[1:-1]
    yield from (secret, quote(secret, safe=""), quote_plus(secret), once, json.dumps(once)[1:-1])
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield from (form.decode() for form in _others(secret)[:2])
    for form in _base64(secret):
        yield form
        yield form.replace("+", "-").replace("/", "_")
