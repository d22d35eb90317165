"""The forms that a secret takes in text, and a pattern that finds all of them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

WRAPPED_LEAST = 48
"""How long the lines of wrapped base64 are at least."""
_ESCAPES = 8
"""How many backslashes may escape a character: as many as three times JSON writes."""
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
"""Characters that stand for themselves in every encoding."""
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}


@dataclass(frozen=True, slots=True)
class Secret:
    """One secret: texts of which each of its forms has one, a pattern for all of them, and the size of the largest."""

    cores: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    longest: int

    def may_be_in(self, data: bytes) -> bool:
        for core in self.cores:  # noqa: SIM110 - any() takes twice the time
            if core in data:
                return True
        return False


def compile_secret(secret: str) -> Secret:
    """What finds a secret. The cores are looked for first, which is many times as fast as the pattern."""
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
    """A secret as hex and as UTF-16."""
    digits = secret.encode(errors="surrogatepass").hex().encode()
    return [digits, digits.upper(), *(secret.encode(f"utf-16-{end}", errors="surrogatepass") for end in ("le", "be"))]


_CHARACTERS = re.compile(r"(?=.)(\\*)([^\\]?)", re.DOTALL)


def _character(character: str, slashes: int = 0) -> tuple[str, int]:
    """A pattern for one character of a secret in any encoding, and the most bytes that it may take. The backslashes
    before it are matched together with those that escape it: no text can be divided between them in several ways."""
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
    """Patterns for a character, if there is one, after backslashes that may be escaped."""
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
    """What is the same in every base64 text that holds the secret, for each place where it may begin."""
    raw = secret.encode(errors="surrogatepass")
    for pad, skipped in enumerate((0, 2, 3)):
        encoded = base64.b64encode(b"\0" * pad + raw).decode().rstrip("=")
        partial = (pad + len(raw)) % 3 != 0
        yield encoded[skipped : len(encoded) - partial]


def forms_of(secret: str) -> Iterator[str]:
    """The forms in which a secret may be split over pieces."""
    once = json.dumps(secret)[1:-1]
    yield from (secret, quote(secret, safe=""), quote_plus(secret), once, json.dumps(once)[1:-1])
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield from (form.decode() for form in _others(secret)[:2])
    for form in _base64(secret):
        yield form
        yield form.replace("+", "-").replace("/", "_")
