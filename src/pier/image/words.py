"""Words of a Dockerfile: splitting at blanks, quotes, escapes and `$variables`, as Docker reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pier.errors import ImageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-]")
_OPERATOR = re.compile(r":?[-+?]|##?|%%?|//?")


def split(text: str, escape: str = "\\") -> list[str]:
    """Split at blanks outside of quotes; quotes and escapes stay in the words."""
    words: list[str] = []
    word, quote, position = "", "", 0
    while position < len(text):
        char = text[position]
        if char == escape and quote != "'" and position + 1 < len(text):
            word += text[position : position + 2]
            position += 2
            continue
        if quote:
            quote = "" if char == quote else quote
            word += char
        elif char in "'\"":
            quote = char
            word += char
        elif char.isspace():
            if word:
                words.append(word)
            word = ""
        else:
            word += char
        position += 1
    return [*words, word] if word else words


def expand(text: str, values: Mapping[str, str], escape: str = "\\", *, keep_quotes: bool = False) -> str:
    """Replace variables and take quotes and escapes away. A variable without a value is empty."""
    return _Expansion(text, values, escape, keep_quotes).run()


class _Expansion:
    def __init__(self, text: str, values: Mapping[str, str], escape: str, keep_quotes: bool) -> None:
        self._text = text
        self._values = values
        self._escape = escape
        self._keep_quotes = keep_quotes
        self._at = 0

    def run(self) -> str:
        out = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "'" and not self._keep_quotes:
                out += self._single()
            elif char == '"' and not self._keep_quotes:
                out += self._double()
            else:
                out += self._plain(quoted=self._keep_quotes)
        return out

    def _single(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise _wrong(self._text, "a single quote is not closed")
        out = self._text[self._at + 1 : end]
        self._at = end + 1
        return out

    def _double(self) -> str:
        self._at += 1
        out = ""
        while self._at < len(self._text):
            if self._text[self._at] == '"':
                self._at += 1
                return out
            out += self._plain(quoted=True)
        raise _wrong(self._text, "a double quote is not closed")

    def _plain(self, *, quoted: bool) -> str:
        char = self._text[self._at]
        if char == "$":
            return self._variable()
        self._at += 1
        if char != self._escape or self._at >= len(self._text):
            return char
        following = self._text[self._at]
        self._at += 1
        if quoted and following not in ('"', "$", self._escape):
            return char + following
        return following

    def _variable(self) -> str:
        self._at += 1
        if self._text[self._at : self._at + 1] == "{":
            return self._braced()
        name = _NAME.match(self._text, self._at)
        if name is None:
            return "$"
        self._at = name.end()
        return self._values.get(name[0], "")

    def _braced(self) -> str:
        name = _NAME.match(self._text, self._at + 1)
        if name is None:
            raise _wrong(self._text, "${ is not followed by a name")
        value = self._values.get(name[0])
        self._at = name.end()
        operator = _OPERATOR.match(self._text, self._at)
        if operator is None:
            if self._text[self._at : self._at + 1] != "}":
                raise _wrong(self._text, f"${{{name[0]} is not closed or has an unknown modifier")
            self._at += 1
            return value or ""
        start = self._at = operator.end()
        word = expand(self._until_brace(start), self._values, self._escape)
        return _apply(operator[0], name[0], value, word)

    def _until_brace(self, start: int) -> str:
        depth = 1
        while self._at < len(self._text):
            char = self._text[self._at]
            depth += (char == "{") - (char == "}")
            self._at += 2 if char == self._escape else 1
            if depth == 0:
                return self._text[start : self._at - 1]
        raise _wrong(self._text, "${ is not closed")


def _apply(operator: str, name: str, value: str | None, word: str) -> str:
    is_set = value is not None and (value != "" or not operator.startswith(":"))
    kind = operator[-1]
    if kind == "-":
        return (value or "") if is_set else word
    if kind == "+":
        return word if is_set else ""
    if kind == "?":
        if not is_set:
            raise ImageError(f"{name}: {word or 'is not set'}", code="dockerfile", blame="task")
        return value or ""
    if kind == "/":
        pattern, _, other = word.partition("/")
        return re.sub(_glob(pattern), lambda _: other, value or "", count=0 if operator == "//" else 1)
    return _trim(value or "", word, operator)


def _trim(value: str, pattern: str, operator: str) -> str:
    """`#` and `%`: the shortest (or, doubled, the longest) match taken off the front or the end."""
    lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
    matches = re.compile(_glob(pattern))
    for length in lengths:
        if operator[0] == "#" and matches.fullmatch(value[:length]):
            return value[length:]
        if operator[0] == "%" and matches.fullmatch(value[len(value) - length :]):
            return value[: len(value) - length]
    return value


def _glob(pattern: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)


def _wrong(text: str, why: str) -> ImageError:
    return ImageError(f"{text!r}: {why}", code="dockerfile", blame="task")
