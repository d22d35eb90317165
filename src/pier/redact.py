"""Removal of secrets from all stored data.

A `Redactor` is built from the secrets of a job (`pier.secret` classifies values). It finds each secret as plain text,
URL-quoted, escaped for JSON or HTML (also repeatedly), as hex or UTF-16, and inside base64, including wrapped base64.
Lines of a multi-line secret are also found one by one, since indentation separates them. A `StreamRedactor` also finds
a secret that is split over the chunks of a stream, or over the text fields of JSON lines.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.secret import WRAPPED_LEAST, Secret, compile_secret, forms_of, is_never_secret, looks_random
from pier.tree import Entry, Tree

REDACTED = "[REDACTED]"
_MARK = REDACTED.encode()
_CHUNK = 1024 * 1024
_LONGEST_LINE = 256 * 1024
"""Longer lines are not parsed as JSON."""
_LINE = 16
"""Shorter lines of a multi-line secret are not searched for one by one."""
_CACHED_TEXTS, _CACHED_SIZE = 4096, 256
_DEEPEST = 64
_WRAPPED_MOST = 128
"""Maximum length of the lines of wrapped base64."""
_WRAP = rb"(?:\r?\n|\\{1,8}(?:r\\{1,8})?n)[ \t]{0,16}"
_WRAPS = (re.compile(_WRAP), re.compile(_WRAP + rb"\+"))
_ENCODED = rb"[A-Za-z0-9+/_-]"
_LINE_OF_IT = rb"(?:%b{%d,}+|(?<=%b)%b*+)" % (_ENCODED, WRAPPED_LEAST, re.escape(_MARK), _ENCODED)
_WRAPPED = re.compile(rb"(?<!%b)(?:%b%b)+%b+" % (_ENCODED, _LINE_OF_IT, _WRAP, _ENCODED))
_WRAPPED_END = re.compile(rb"%b(?:%b\+?|\r)?\Z" % (_LINE_OF_IT, _WRAP))
"""Base64 in lines, as written by `base64` and MIME; in a diff, each line begins with a plus."""
_TOKEN_FIELDS = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "logprobsResult")
"""Fields that repeat a text token by token."""


class Redactor:
    """Replaces secrets in text, bytes, nested values and files. Without secrets it is false and changes nothing."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        candidates = list(secrets)
        lines = {line.strip() for secret in candidates if "\n" in secret for line in secret.splitlines()}
        candidates += [line for line in lines if len(line) >= _LINE and looks_random(line)]
        values = {secret for secret in candidates if not is_never_secret(secret)}
        self._secrets = [compile_secret(secret) for secret in sorted(values, key=lambda secret: (-len(secret), secret))]
        forms = {form for secret in values for form in forms_of(secret)}
        self._longest_form = max(map(len, forms), default=0)
        self._forms = defaultdict[str, list[str]](list)
        for form in forms:
            self._forms[form[:1]].append(form)
        self._cache: dict[str, int] = {}
        self._shortest = min(map(len, values), default=0)
        self.longest = max((secret.longest for secret in self._secrets), default=0)
        self.has_lines = any("\n" in secret for secret in values)
        """Whether a secret has several lines, such as a private key."""

    def __bool__(self) -> bool:
        return bool(self._secrets)

    def data(self, data: bytes) -> bytes:
        if not self._secrets:
            return data
        candidates = self._candidates(data)
        for secret in candidates:
            data = secret.pattern.sub(_MARK, data)

        def clean(block: re.Match[bytes]) -> bytes:
            for wrap in _WRAPS:
                joined = cleaned = wrap.sub(b"", block[0])
                for secret in candidates:
                    cleaned = secret.pattern.sub(_MARK, cleaned)
                if cleaned != joined:
                    return cleaned
            return block[0]

        return _WRAPPED.sub(clean, data) if candidates else data

    def _candidates(self, data: bytes) -> list[Secret]:
        """Return the secrets that may occur in `data`."""
        return [secret for secret in self._secrets if secret.may_be_in(data)] if len(data) >= self._shortest else []

    def text(self, text: str) -> str:
        """Return `text` without secrets, with surrogates escaped: file names need not be valid UTF-8."""
        data = text.encode(errors="backslashreplace")
        return text if text.isascii() and not self._secrets else self.data(data).decode()

    def value(self, value: Any) -> Any:
        """Remove secrets from all texts in nested lists and dicts, including keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of secrets in a text, in order and without overlaps."""
        data, spans = text.encode(errors="surrogatepass"), list[tuple[int, int]]()
        matches = (match.span() for secret in self._candidates(data) for match in secret.pattern.finditer(data))
        for start, end in sorted(matches):
            if spans and start < spans[-1][1]:
                start, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((start, end))
        return spans if text.isascii() else _in_characters(data, spans)

    def begun(self, text: str) -> int:
        """Return the number of characters at the end of a text that may be the beginning of a secret."""
        if (size := self._cache.get(text)) is None:
            size = min(len(text), self._longest_form)
            while size and not any(form.startswith(text[-size:]) for form in self._forms.get(text[-size], ())):
                size -= 1
            if len(self._cache) < _CACHED_TEXTS and len(text) < _CACHED_SIZE:
                self._cache[text] = size
        return size

    def tree(self, tree: Tree, *, mode: int | None = None) -> None:
        """Remove secrets from all files, names and link targets of an untrusted tree, without following links. `mode`
        becomes the mode of each file. A file that cannot be rewritten is removed, and its error is raised at the
        end."""
        if not self and mode is None:
            return
        failed: OSError | None = None
        to_rename: list[str] = []
        for entry in tree.entries(limit=sys.maxsize):
            try:
                self._clean_entry(tree, entry, mode)
            except OSError as error:
                failed = error
                tree.unlink(entry.path)
            name = entry.path.rpartition("/")[2]
            if self and self.text(name) != name:
                to_rename.append(entry.path)
        for entry_path in reversed(to_rename):
            with tree.reached(entry_path) as path:
                if os.path.lexists(path):
                    path.rename(_unused(path.with_name(self.text(path.name))))
        if failed is not None:
            raise failed

    def _clean_entry(self, tree: Tree, entry: Entry, mode: int | None) -> None:
        with tree.reached(entry.path) as path:
            if entry.kind == "link":
                if self and self.text(entry.leads) != entry.leads:
                    path.unlink()
                    path.symlink_to(self.text(entry.leads))
            elif entry.kind != "other":
                current = stat.S_IMODE(path.lstat().st_mode)
                readable = current | (stat.S_IRWXU if entry.kind == "directory" else stat.S_IRUSR)
                new = mode if mode is not None and entry.kind == "file" else readable
                if new != current:
                    path.chmod(new)
                if self and entry.kind == "file" and any(changed for _, changed in self._cleaned(tree, entry.path)):
                    tree.write(entry.path, (part for part, _ in self._cleaned(tree, entry.path)), new)

    def _cleaned(self, tree: Tree, path: str) -> Iterator[tuple[bytes, bool]]:
        """Yield the redacted content of a file in parts, each with whether anything was removed so far."""
        with tree.open(path) as stream:
            chunk = stream.read(_CHUNK)
            clean = StreamRedactor(self, lines=b"\0" not in chunk[:8192])
            while chunk:
                yield clean.feed(chunk), clean.found
                chunk = stream.read(_CHUNK)
            yield clean.close(), clean.found


def _unused(path: Path) -> Path:
    more = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain((path,), more) if not os.path.lexists(each))


def _in_characters(data: bytes, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert spans of bytes to spans of characters."""
    places, last, count = list[int](), 0, 0
    for place in itertools.chain.from_iterable(spans):
        count += len(data[last:place].decode(errors="surrogatepass"))
        last = place
        places.append(count)
    return list(zip(places[::2], places[1::2], strict=True))


@dataclass(slots=True)
class _Piece:
    """A text in a JSON line, and the dict or list that contains it."""

    line: _Line
    text: str
    parent: Any
    key: object

    def set(self, text: str) -> None:
        self.text = self.parent[self.key] = text
        self.line.changed = True


@dataclass(slots=True)
class _Line:
    """A line that may depend on later ones. `waits` counts the pieces in which a secret may have begun."""

    raw: bytes
    before: bytes = b""
    value: Any = None
    after: bytes = b""
    changed: bool = False
    waits: int = 0

    def render(self) -> bytes:
        if not self.changed:
            return self.raw
        value = json.dumps(without_tokens(self.value), separators=(",", ":")).encode()
        return self.before + (value[1:-1] if isinstance(self.value, list) else value) + self.after


_Texts = dict[tuple[object, ...], list[_Piece]]
"""The texts of a line by their place in the JSON value."""


@dataclass(slots=True)
class StreamRedactor:
    """Removes secrets from a stream of bytes. Holds back the end of the data in which a secret may begin.

    With `lines`, each line that contains a JSON object (server-sent events, logs of agents) is parsed: texts at the
    same place of consecutive lines, at most half a mebibyte apart, are searched as one text. A line from which a secret
    was removed also loses its token ids and log-probs, since these repeat the text; with `drop_tokens`, every line
    does.
    """

    redactor: Redactor
    lines: bool = True
    drop_tokens: bool = False
    is_whole: bool = False
    """Treat all bytes as one JSON value and return everything at the end."""
    found: bool = False
    """Whether anything was removed."""
    _held: bytes = b""
    _rest: bytes = b""
    _waiting: list[_Line] = field(default_factory=list)
    _waiting_size: int = 0
    _open: _Texts = field(default_factory=dict)

    def feed(self, data: bytes) -> bytes:
        if self.is_whole:
            self._rest += data
            return b""
        data, self._held = self._held + data, b""
        if self.lines and not self.redactor.has_lines and not self._ends_wrapped(data):
            return self._read(data)
        clean = self._cut(data)
        keep = min(len(clean), self._reach)
        self._held = clean[len(clean) - keep :]
        return self._read(clean[: len(clean) - keep])

    @property
    def _reach(self) -> int:
        """Maximum distance from the end of a secret to the start of its line of base64."""
        return self.redactor.longest + _WRAPPED_MOST

    def _ends_wrapped(self, data: bytes) -> bool:
        """Whether the data ends in wrapped base64 that the next line may continue."""
        end = self._rest[-_WRAPPED_MOST:] + data[-_WRAPPED_MOST:]
        return bool(self.redactor) and _WRAPPED_END.search(end) is not None

    def close(self) -> bytes:
        """Return the remaining data at the end of the stream."""
        out = b"" if self.is_whole else self._read(self._held)
        if self._rest:
            self._take(self._cut(self._rest))
        out += b"".join(line.render() for line in self._waiting)
        self._held, self._rest, self._waiting, self._open, self._waiting_size = b"", b"", [], {}, 0
        return out

    def _cut(self, data: bytes) -> bytes:
        clean = self.redactor.data(data)
        self.found = self.found or clean != data
        return clean

    def _read(self, data: bytes) -> bytes:
        if not self.lines:
            return data
        seen = max(0, len(self._rest) - self._reach)  # secrets that end in `data` begin after this
        clean, head = self._cut(self._rest[seen:] + data), self._rest[:seen]
        *whole, self._rest = clean.splitlines(keepends=True) or [b""]
        if whole:
            whole[0] = head + whole[0]
        else:
            self._rest = head + self._rest
        if self._rest.endswith(b"\n"):
            whole, self._rest = [*whole, self._rest], b""
        elif len(self._rest) > _LONGEST_LINE:
            cut = max(0, len(self._rest) - self.redactor.longest + 1)
            whole, self._rest = [*whole, self._rest[:cut]], self._rest[cut:]
        for line in whole:
            self._take(line)
        self._waiting_size += sum(map(len, whole))
        if self._waiting_size > _CHUNK:
            self._give_up()
        waits = (index for index, line in enumerate(self._waiting) if line.waits)
        ready = next(waits, len(self._waiting)) if self._open else len(self._waiting)
        out = b"".join(line.render() for line in self._waiting[:ready])
        self._waiting_size -= sum(len(line.raw) for line in self._waiting[:ready])
        del self._waiting[:ready]
        return out

    def _give_up(self) -> None:
        """Stop joining texts that begin in a line more than half a mebibyte back."""
        after, late = self._waiting_size, set[int]()
        for line in self._waiting:
            after -= len(line.raw)
            if after <= _CHUNK // 2:
                break
            late.add(id(line))
        for place, pieces in list(self._open.items()) if late else ():
            if id(pieces[0].line) in late:
                for each in self._open.pop(place):
                    each.line.waits -= 1

    def _take(self, raw: bytes) -> None:
        line = _Line(raw)
        self._waiting.append(line)
        start, end = raw.find(b"{"), raw.rfind(b"}") + 1
        marked, escaped = self.drop_tokens or _MARK in raw, b"\\" in raw
        if start < 0 or end <= start or not (marked or escaped or self._open or self._begins(raw)):
            return
        texts: _Texts = {}
        try:
            line.value = _parse(raw[start:end])
            _find_texts(line, line.value, (), 0, texts)
        except (ValueError, RecursionError):
            return
        line.before, line.after = raw[:start], raw[end:]
        if marked:
            line.changed = without_tokens(line.value) != line.value
        for place, pieces in texts.items():
            if escaped or len(pieces) > 1 or self.redactor.begun(pieces[0].text) or place in self._open:
                self._join(place, pieces)

    def _begins(self, raw: bytes) -> bool:
        """Whether a secret may begin in a text of a JSON line without escapes. Avoids parsing most lines."""
        parts = raw.decode(errors="replace").split('"')
        values = (text for text, after in zip(parts[1::2], parts[2::2], strict=False) if after[:1] != ":")
        return any(map(self.redactor.begun, values))

    def _join(self, place: tuple[object, ...], pieces: list[_Piece]) -> None:
        """Search the texts of a line together with earlier ones at the same place."""
        if place in self._open:
            before = self._open.pop(place)
            for each in before:
                each.line.waits -= 1
            pieces = before + pieces
        text = "".join([each.text for each in pieces]) if len(pieces) > 1 else pieces[0].text
        if spans := self.redactor.spans(text):
            self.found = True
            _replace(pieces, spans)
            text = "".join([each.text for each in pieces])
        if (begun := self.redactor.begun(text)) == 0:
            return
        kept = list[_Piece]()
        while begun > 0:
            kept.insert(0, pieces.pop())
            begun -= len(kept[0].text)
        for each in kept:
            each.line.waits += 1
        self._open[place] = kept


_DECODE = json.JSONDecoder().decode


def _parse(data: bytes) -> Any:
    """Parse a JSON object, or several separated by commas as a list."""
    text = data.decode(errors="surrogatepass")
    try:
        return _DECODE(text)
    except ValueError:
        return _DECODE(f"[{text}]")


def _replace(pieces: list[_Piece], spans: list[tuple[int, int]]) -> None:
    """Replace spans of the joined text of the pieces. The mark goes into the piece in which a span begins."""
    left, at = deque(spans), 0
    for piece in pieces:
        text, begin, at = piece.text, at, at + len(piece.text)
        out, done = "", begin
        while left and left[0][0] < at:
            start, end = left[0]
            if start >= begin:
                out += text[done - begin : start - begin] + REDACTED
            done = min(end, at)
            if end > at:
                break
            left.popleft()
        if done > begin:
            piece.set(out + text[done - begin :])


_SCALAR = (str, int, type(None))


def _find_texts(line: _Line, value: Any, place: tuple[object, ...], depth: int, found: _Texts) -> None:
    """Collect all texts of a JSON value by place; positions in lists are ignored. Raises `ValueError` for a value that
    is nested too deeply."""
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    is_dict = isinstance(value, dict)
    if is_dict:
        kind, index, output = value.get("type"), value.get("index"), value.get("output_index")
        is_plain = isinstance(kind, _SCALAR) and isinstance(index, _SCALAR) and isinstance(output, _SCALAR)
        place = (place, kind, index, output) if is_plain else (place,)
    for key, each in value.items() if is_dict else enumerate(value):
        if isinstance(each, str):
            found.setdefault((place, key) if is_dict else place, []).append(_Piece(line, each, value, key))
        elif isinstance(each, (dict, list)):
            _find_texts(line, each, (place, key) if is_dict else place, depth + 1, found)


def without_tokens(value: Any) -> Any:
    """Return a JSON value without token ids and log-probs."""
    if isinstance(value, dict):
        return {key: without_tokens(each) for key, each in value.items() if key not in _TOKEN_FIELDS}
    return [without_tokens(each) for each in value] if isinstance(value, list) else value
