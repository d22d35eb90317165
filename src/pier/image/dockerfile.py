"""Reads Dockerfiles: lines, continuations, comments, parser directives, flags and here-documents.

An instruction gets its name, its flags, its text and its line; its meaning is left to the builder. Words are split at
blanks, quotes, escapes and `$variables` as Docker splits them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

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


INSTRUCTIONS = frozenset(
    {
        "ADD",
        "ARG",
        "CMD",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "FROM",
        "HEALTHCHECK",
        "LABEL",
        "MAINTAINER",
        "ONBUILD",
        "RUN",
        "SHELL",
        "STOPSIGNAL",
        "USER",
        "VOLUME",
        "WORKDIR",
    }
)
_FLAGS = {
    "FROM": {"platform"},
    "RUN": {"mount", "network"},
    "COPY": {"from", "chown", "chmod", "link"},
    "ADD": {"chown", "chmod", "link", "checksum"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*$")
_HEREDOC = re.compile(r"(\d*)<<(-?)([^<]*)$")
_SPACED_HEREDOC = re.compile(r"<<-?\s+['\"]?\w")
_FLAG = re.compile(r"--([a-z-]+)(?:=(.*))?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document: its name as written after `<<`, and its text."""

    name: str
    text: str
    expands: bool = True
    stripped: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `text` is what follows its flags, on one line."""

    name: str
    text: str
    line: int
    flags: tuple[tuple[str, str], ...] = ()
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str:
        """The last value of a flag, empty if it was not given."""
        return next((value for key, value in reversed(self.flags) if key == name), "")

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.flags if key == name]

    @property
    def exec_form(self) -> list[str] | None:
        """The words of a JSON array, None if the text is not one."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None

    def __str__(self) -> str:
        flags = "".join(f"--{key}={value} " if value else f"--{key} " for key, value in self.flags)
        return f"{self.name} {flags}{self.text}"


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A parsed Dockerfile."""

    path: str
    instructions: tuple[Instruction, ...]
    escape: str = "\\"
    directives: dict[str, str] = field(default_factory=dict)

    def error(self, instruction: Instruction, why: str, *, hint: str | None = None) -> ImageError:
        """An error at an instruction's place."""
        return _error(self.path, instruction.line, why, hint)


def read(path: Path) -> Dockerfile:
    """Parse the file at `path`; `ImageError` with code `dockerfile`, with file and line, if that fails."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise ImageError(f"no Dockerfile found at {path}", code="dockerfile", blame="task") from None
    except UnicodeDecodeError as error:
        raise ImageError(f"{path} is not UTF-8 text: {error}", code="dockerfile", blame="task") from None
    return parse(text, str(path))


def parse(text: str, path: str = "Dockerfile") -> Dockerfile:
    """Parse the text of a Dockerfile."""
    lines = text.replace("\r\n", "\n").split("\n")
    directives = _directives(lines, path)
    escape = directives.get("escape", "\\")
    reader = _Reader(lines, path, escape)
    instructions = tuple(reader.read())
    if not instructions:
        raise ImageError(f"{path} has no instruction", code="dockerfile", blame="task")
    return Dockerfile(path, instructions, escape, directives)


def _directives(lines: list[str], path: str) -> dict[str, str]:
    """The `# name=value` lines at the very top."""
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.match(line.strip())
        name = match[1].lower() if match else ""
        if match is None or name not in ("syntax", "escape", "check"):
            break
        if name in found:
            raise _error(path, number, f"the directive {name} is given twice")
        found[name] = match[2]
    if found.get("escape", "\\") not in ("\\", "`"):
        raise _error(path, 1, f"the escape character {found['escape']!r} is neither \\ nor `")
    return found


class _Reader:
    def __init__(self, lines: list[str], path: str, escape: str) -> None:
        self._lines = lines
        self._path = path
        self._escape = escape
        mark = re.escape(escape)
        self._continued = re.compile(rf"(?:(?<!{mark})|^){mark}[ \t]*$")
        self._at = 0
        self._before = ""

    def read(self) -> list[Instruction]:
        found: list[Instruction] = []
        while self._at < len(self._lines):
            start = self._at + 1
            text = self._logical_line()
            if text:
                found.append(self._instruction(text, start))
                self._before = text
        return found

    def _logical_line(self) -> str:
        """The next instruction on one line; comments and empty lines inside it are passed over."""
        text, more = "", False
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if not line.strip() or line.lstrip().startswith("#"):
                if more:
                    continue
                return ""
            cut = self._continued.search(line)
            text += line[: cut.start()] if cut else line
            if not cut:
                break
            more = True
        return text.strip()

    def _instruction(self, text: str, line: int) -> Instruction:
        name, _, rest = re.sub(r"\s+", " ", text, count=1).partition(" ")
        name = name.upper()
        if name not in INSTRUCTIONS:
            spaced = _SPACED_HEREDOC.search(self._before)
            hint = "write <<EOF without a space: Dockerfiles know no other here-documents" if spaced else None
            raise _error(self._path, line, f"{name} is not an instruction", hint)
        if name == "ONBUILD":
            raise _error(self._path, line, "ONBUILD is not supported", "move its instruction to the Dockerfile below")
        rest = rest.strip()
        if not rest and name != "MAINTAINER":
            raise _error(self._path, line, f"{name} needs an argument")
        flags, rest = self._flags(name, rest, line)
        made = Instruction(name, rest, line, tuple(flags))
        return self._with_heredocs(made) if name in ("RUN", "COPY", "ADD") else made

    def _flags(self, name: str, rest: str, line: int) -> tuple[list[tuple[str, str]], str]:
        flags: list[tuple[str, str]] = []
        known = _FLAGS.get(name, set())
        while known and rest.startswith("--"):
            word = split(rest, self._escape)[0]
            match = _FLAG.match(word)
            if match is None:
                break
            if match[1] not in known:
                raise _error(self._path, line, f"{name} --{match[1]} is not supported")
            flags.append((match[1], match[2] or ""))
            rest = rest[len(word) :].strip()
        if not rest:
            raise _error(self._path, line, f"{name} needs an argument after its flags")
        return flags, rest

    def _with_heredocs(self, made: Instruction) -> Instruction:
        if made.exec_form is not None or "<<" not in made.text:
            return made
        found: list[Heredoc] = []
        for word in split(made.text, self._escape):
            match = _HEREDOC.match(word)
            name = match[3] if match else ""
            if match is None or not re.fullmatch(r"""(['"]?)[A-Za-z0-9_][A-Za-z0-9_.-]*\1""", name):
                continue
            plain = expand(name, {}, self._escape)
            text = self._heredoc_text(plain, strip=bool(match[2]), line=made.line)
            found.append(Heredoc(plain, text, expands=plain == name, stripped=bool(match[2])))
        return replace(made, heredocs=tuple(found))

    def _heredoc_text(self, name: str, *, strip: bool, line: int) -> str:
        out = ""
        while self._at < len(self._lines):
            row = self._lines[self._at]
            self._at += 1
            row = row.lstrip("\t") if strip else row
            if row == name:
                return out
            out += f"{row}\n"
        raise _error(self._path, line, f"the here-document {name} has no end")


def _error(path: str, line: int, why: str, hint: str | None = None) -> ImageError:
    return ImageError(f"{path}:{line}: {why}", code="dockerfile", blame="task", hint=hint)
