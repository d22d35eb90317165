"""Removes secrets from everything that is kept.

One `Redactor` is made from the secrets of a job (`pier.secret` says which values are). It finds each of them as it
stands, quoted for a URL, escaped for JSON or HTML (also several times over), as hex or UTF-16, and inside base64, also
if that is broken into lines; and each line of one that has several, which an indentation would tear apart. A
`StreamRedactor` also finds a secret that is split over the pieces of a stream, or over the text fields of JSON lines.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import sys
from collections import deque
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
"""A longer line is not read as JSON."""
_LONG = 256
"""All beginnings of a longer secret would take much memory."""
_LINE = 16
"""A shorter line of a secret that has several is not looked for without the others."""
_MOST_KNOWN = 4096
_DEEPEST = 64
_PART = 4
"""How much of a core is looked up in short texts."""
_WRAPPED_MOST = 128
"""How long the lines of wrapped base64 may be."""
_WRAP = rb"(?:\r?\n|\\{1,8}(?:r\\{1,8})?n)[ \t]{0,16}"
_WRAPS = (re.compile(_WRAP), re.compile(_WRAP + rb"\+"))
_ENCODED = rb"[A-Za-z0-9+/_-]"
_LINE_OF_IT = rb"(?:%b{%d,}+|(?<=%b)%b*+)" % (_ENCODED, WRAPPED_LEAST, re.escape(_MARK), _ENCODED)
_WRAPPED = re.compile(rb"(?<!%b)(?:%b%b)+%b+" % (_ENCODED, _LINE_OF_IT, _WRAP, _ENCODED))
_WRAPPED_END = re.compile(rb"%b(?:%b\+?|\r)?\Z" % (_LINE_OF_IT, _WRAP))
"""Base64 in lines, as `base64` and MIME write it; in a diff, each begins with one more plus."""
_TOKEN_FIELDS = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "logprobsResult")
"""Fields that spell a text once more, token by token."""


class Redactor:
    """Replaces secrets in text, bytes, nested values and files. Without secrets it does nothing and is false."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        given = list(secrets)
        lines = {line.strip() for secret in given if "\n" in secret for line in secret.splitlines()}
        random = {line for line in lines if len(line) >= _LINE and looks_random(line)}
        wanted = {secret for secret in (*given, *random) if not is_never_secret(secret)}
        self._secrets = [compile_secret(secret) for secret in sorted(wanted, key=lambda secret: (-len(secret), secret))]
        forms = {form for secret in wanted for form in forms_of(secret)}
        self._begins = {form[:size] for form in forms for size in range(1, min(len(form), _LONG + 1))}
        self._long = [form for form in forms if len(form) > _LONG]
        self._known: dict[str, int] = {}
        self._shortest = min(map(len, wanted), default=0)
        self._parts = _parts(self._secrets)
        self._cores = sum(len(secret.cores) for secret in self._secrets)
        self.longest = max((secret.longest for secret in self._secrets), default=0)
        self.has_lines = any("\n" in secret for secret in wanted)
        """Whether a secret has several lines, as private keys do."""

    def __bool__(self) -> bool:
        return bool(self._secrets)

    def data(self, data: bytes) -> bytes:
        if not self._secrets:
            return data
        near = self._near(data)
        for secret in near:
            data = secret.pattern.sub(_MARK, data)

        def clean(block: re.Match[bytes]) -> bytes:
            for wrap in _WRAPS:
                joined = cleaned = wrap.sub(b"", block[0])
                for secret in near:
                    cleaned = secret.pattern.sub(_MARK, cleaned)
                if cleaned != joined:
                    return cleaned
            return block[0]

        return _WRAPPED.sub(clean, data) if near else data

    def _near(self, data: bytes) -> list[Secret]:
        """The secrets that may be in `data`. In a short text it takes less time to look up each part of the text than
        to look for each core."""
        if len(data) < self._shortest:
            return []
        if len(data) > self._cores:
            return [secret for secret in self._secrets if secret.may_be_in(data)]
        found = set(self._parts.get(0, {}).get(b"", ()))
        for size, parts in self._parts.items():
            for part in parts.keys() & {data[at : at + size] for at in range(len(data) - size + 1)}:
                found.update(parts[part])
        return [secret for number in sorted(found) if (secret := self._secrets[number]).may_be_in(data)]

    def text(self, text: str) -> str:
        """`text` without secrets, and without what cannot be written as UTF-8: names of files need not be text."""
        data = text.encode(errors="backslashreplace")
        return text if text.isascii() and not self._secrets else self.data(data).decode()

    def value(self, value: Any) -> Any:
        """The same for all texts in lists and dicts, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where secrets stand in a text, in order and without overlaps."""
        if len(text) * 4 < self._shortest:
            return []
        data, spans = text.encode(errors="surrogatepass"), list[tuple[int, int]]()
        if not (near := self._near(data)):
            return spans
        found = (found.span() for secret in near for found in secret.pattern.finditer(data))
        for start, end in sorted(found):
            if spans and start < spans[-1][1]:
                start, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((start, end))
        return spans if text.isascii() else _in_characters(data, spans)

    def begun(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a secret."""
        known = self._known.get(text)
        if known is None:
            known = max(
                (size for size in range(min(len(text), _LONG), 0, -1) if text[-size:] in self._begins), default=0
            )
            known = max((known, *(_overlap(text, form) for form in self._long if len(text) > _LONG)))
            if len(self._known) < _MOST_KNOWN and len(text) < _LONG:
                self._known[text] = known
        return known

    def tree(self, tree: Tree, *, mode: int | None = None) -> None:
        """Remove secrets from all files, names and links of a tree that came out of a sandbox: no link is followed.
        `mode` becomes the mode of each file. A file that cannot be rewritten is removed, and its error is raised in
        the end."""
        if not self and mode is None:
            return
        failed: OSError | None = None
        named: list[str] = []
        for entry in tree.entries(limit=sys.maxsize):
            try:
                self._clean_entry(tree, entry, mode)
            except OSError as error:
                failed = error
                tree.unlink(entry.path)
            name = entry.path.rpartition("/")[2]
            if self and self.text(name) != name:
                named.append(entry.path)
        for place in reversed(named):
            with tree.reached(place) as path:
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
                found = stat.S_IMODE(path.lstat().st_mode)
                readable = found | (stat.S_IRWXU if entry.kind == "directory" else stat.S_IRUSR)
                wanted = mode if mode is not None and entry.kind == "file" else readable
                if wanted != found:
                    path.chmod(wanted)
                if self and entry.kind == "file" and any(changed for _, changed in self._cleaned(tree, entry.path)):
                    tree.write(entry.path, (part for part, _ in self._cleaned(tree, entry.path)), wanted)

    def _cleaned(self, tree: Tree, path: str) -> Iterator[tuple[bytes, bool]]:
        """A file's content in parts, and whether something was removed so far."""
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


def _parts(secrets: list[Secret]) -> dict[int, dict[bytes, list[int]]]:
    """One part of each core, by their sizes, and which secrets have it."""
    found: dict[int, dict[bytes, list[int]]] = {}
    for number, secret in enumerate(secrets):
        for core in secret.cores:
            part = core[:_PART]
            found.setdefault(len(part), {}).setdefault(part, []).append(number)
    return found


def _overlap(text: str, form: str) -> int:
    """How many characters, more than `_LONG`, at the end of a text a form begins with."""
    at = text.find(form[:_LONG], max(0, len(text) - len(form) + 1))
    while at >= 0 and not form.startswith(text[at:]):
        at = text.find(form[:_LONG], at + 1)
    return len(text) - at if at >= 0 else 0


def _in_characters(data: bytes, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of a text's bytes as spans of its characters."""
    places, last, count = list[int](), 0, 0
    for place in itertools.chain.from_iterable(spans):
        count += len(data[last:place].decode(errors="surrogatepass"))
        last = place
        places.append(count)
    return list(zip(places[::2], places[1::2], strict=True))


@dataclass(slots=True)
class _Piece:
    """A text in a JSON line, and the dict or list that it stands in."""

    line: _Line
    text: str
    parent: Any
    key: object

    def set(self, text: str) -> None:
        self.text = self.parent[self.key] = text
        self.line.changed = True


@dataclass(slots=True)
class _Line:
    """A line that may have to wait for the next ones. `waits` counts the pieces in which a secret may have begun."""

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
"""The texts of a line at each place."""


@dataclass(slots=True)
class StreamRedactor:
    """Removes secrets from bytes that come in pieces. Of the end, as much is held back as a secret may begin in.

    With `lines`, each line with a JSON object in it (as server-sent events and logs of agents have) is read: texts at
    the same place of following lines, at most half a mebibyte apart, are one text that may hold a secret. A line in
    which something was removed loses its token ids and log-probs as well, since these spell the same text; with
    `drop_tokens`, every line does.
    """

    redactor: Redactor
    lines: bool = True
    drop_tokens: bool = False
    is_whole: bool = False
    """The bytes are one JSON value, however many lines it has; nothing comes out before the end."""
    found: bool = False
    """Whether something was removed."""
    _held: bytes = b""
    _rest: bytes = b""
    _waiting: list[_Line] = field(default_factory=list)
    _waits: int = 0
    """Their size."""
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
        """How far before its end a secret may begin, with the start of the line of base64 that it stands in."""
        return self.redactor.longest + _WRAPPED_MOST

    def _ends_wrapped(self, data: bytes) -> bool:
        """Whether the next line may go on with base64 that began in this one."""
        end = self._rest[-_WRAPPED_MOST:] + data[-_WRAPPED_MOST:]
        return bool(self.redactor) and _WRAPPED_END.search(end) is not None

    def close(self) -> bytes:
        """What is left, at the end."""
        out = b"" if self.is_whole else self._read(self._held)
        if self._rest:
            self._take(self._cut(self._rest))
        out += b"".join(line.render() for line in self._waiting)
        self._held, self._rest, self._waiting, self._open, self._waits = b"", b"", [], {}, 0
        return out

    def _cut(self, data: bytes) -> bytes:
        clean = self.redactor.data(data)
        self.found = self.found or clean != data
        return clean

    def _read(self, data: bytes) -> bytes:
        if not self.lines:
            return data
        seen = max(0, len(self._rest) - self._reach)  # no secret that ends in `data` begins before
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
        self._waits += sum(map(len, whole))
        if self._waits > _CHUNK:
            self._give_up()
        waits = (place for place, line in enumerate(self._waiting) if line.waits)
        ready = next(waits, len(self._waiting)) if self._open else len(self._waiting)
        out = b"".join(line.render() for line in self._waiting[:ready])
        self._waits -= sum(len(line.raw) for line in self._waiting[:ready])
        del self._waiting[:ready]
        return out

    def _give_up(self) -> None:
        """Join no more texts that begin in a line that is more than half a mebibyte back."""
        after, late = self._waits, set[int]()
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
        """Whether a secret may have begun in a text of a JSON line without escapes. This spares reading most lines."""
        parts = raw.decode(errors="replace").split('"')
        values = (text for text, after in zip(parts[1::2], parts[2::2], strict=False) if after[:1] != ":")
        return any(map(self.redactor.begun, values))

    def _join(self, place: tuple[object, ...], pieces: list[_Piece]) -> None:
        """Look at the texts of a line together with what came before them at the same place."""
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
    """A JSON object, or several with commas between them as a list."""
    text = data.decode(errors="surrogatepass")
    try:
        return _DECODE(text)
    except ValueError:
        return _DECODE(f"[{text}]")


def _replace(pieces: list[_Piece], spans: list[tuple[int, int]]) -> None:
    """Replace parts of the text that the pieces make up. The mark stands in the piece in which a part begins."""
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
    """Add all texts of a JSON value by where they are, but for their places in lists. A value that is nested too deep
    is a `ValueError`."""
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
    """A JSON value without token ids and log-probs."""
    if isinstance(value, dict):
        return {key: without_tokens(each) for key, each in value.items() if key not in _TOKEN_FIELDS}
    return [without_tokens(each) for each in value] if isinstance(value, list) else value
