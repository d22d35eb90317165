"""Captured sessions and verified trials below `.pier/trials`: lists them, and exports them for sharing.

An archive contains regular files only. A link to a file of the same trial becomes a copy of it, other links are left
out. Secrets are removed, and `redactions.json` in the archive lists them by file and kind.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pier import __version__
from pier.errors import JobError, UsageError
from pier.job.view import TrialView
from pier.redact import REDACTED, Redactor
from pier.secret import FORMS
from pier.tree import Entry, Tree, TreeError
from pier.workspace.workspace import PIER, subdirectories

_MARK = REDACTED.encode()
_BLOCK = 4 * 1024 * 1024
_LONGEST_KEY = 16 * 1024
"""Maximum size of a private key."""

_FORMS = {kind: re.compile(form.encode(), re.DOTALL) for kind, form in FORMS.items()}


class Scrubbing:
    """Removes secrets from files and texts, and counts them in `found` by kind. `named` is the kind of the redactor's
    values."""

    def __init__(self, redactor: Redactor, named: str = "value of a secret variable") -> None:
        self._redactor, self._named = redactor, named
        self.found: Counter[str] = Counter()

    def __call__(self, data: bytes) -> bytes:
        if self._redactor:  # first, since a part of a known secret may match one of the forms
            before = data.count(_MARK)
            data = self._redactor.data(data)
            if more := data.count(_MARK) - before:
                self.found[self._named] += more
        for kind, form in _FORMS.items():
            data, count = form.subn(_MARK, data)
            if count:
                self.found[kind] += count
        return data

    def parts(self, stream: IO[bytes]) -> Iterator[bytes]:
        """The redacted content of a file in chunks, which end at line breaks but never inside a private key."""
        rest = b""
        while chunk := stream.read(_BLOCK):
            rest += chunk
            end = rest.rfind(b"\n") + 1
            begun = rest.rfind(b"-----BEGIN ", max(0, end - _LONGEST_KEY), end)
            if begun >= 0 and rest.find(b"-----END ", begun, end) < 0:
                end = begun
            if not end and len(rest) < 16 * _BLOCK:
                continue
            end = end or len(rest)
            yield self(rest[:end])
            rest = rest[end:]
        if rest:
            yield self(rest)


REPORT = "redactions.json"
_IN_MEMORY = 16 * 1024 * 1024


def traces_home(start: Path | None = None) -> Path:
    """The nearest `.pier/trials` at or above `start`. Symbolic links are skipped: a sandbox can create them in a
    mounted directory."""
    begin = (start or Path.cwd()).resolve()
    for directory in (begin, *begin.parents):
        if any(path.is_symlink() for path in (directory / PIER, directory / PIER / "trials")):
            continue
        if (directory / PIER / "trials").is_dir() or (directory / PIER / "workspace.json").is_file():
            return directory / PIER / "trials"
    raise UsageError(
        f"{begin} has no traces: there is no {PIER}/trials here or above",
        hint="pier capture saves one",
        code="no-traces",
    )


def list_traces(home: Path) -> list[TrialView]:
    """The trials, newest first. Other directories are skipped."""
    found: list[TrialView] = []
    for path in sorted(subdirectories(home), reverse=True):
        with suppress(JobError):
            found.append(TrialView.open(path))
    return found


def find_trace(home: Path, name: str | None) -> Path:
    """The trial with a name or a unique prefix of it; without `name` the newest."""
    names = sorted(path.name for path in subdirectories(home) if not path.name.startswith("."))
    if name is None:
        if not names:
            raise UsageError(f"there are no traces in {home}", hint="pier capture saves one", code="no-traces")
        return home / names[-1]
    matches = [name] if name in names else [each for each in names if each.startswith(name)]
    if len(matches) == 1:
        return home / matches[0]
    problem = f"{len(matches)} traces begin with {name!r}" if matches else f"unknown trace {name!r}"
    raise UsageError(f"{problem} in {home}", hint="pier traces lists them", code="no-trace")


@dataclass(slots=True)
class ExportReport:
    """The content of an archive, and its redactions."""

    output: Path
    trials: list[str]
    files: int = 0
    redacted: list[dict[str, Any]] = field(default_factory=list)
    """`file`, `kind` and `count` of removed secrets."""
    left_out: list[dict[str, str]] = field(default_factory=list)
    """`file` and `reason`."""

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in self.redacted:
            found[row["kind"]] += row["count"]
        return found

    def as_dict(self) -> dict[str, Any]:
        rows = {"trials": self.trials, "files": self.files, "redacted": self.redacted, "left_out": self.left_out}
        return {"pier": __version__, **rows}


def export(trials: Sequence[Path], output: Path, redactor: Redactor) -> ExportReport:
    """Pack trials into a tar.gz archive, which is written atomically."""
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent}: no such directory", hint="-o FILE in a directory that exists")
    report = ExportReport(output, [trial.name for trial in trials])
    fd, name = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
    try:
        with os.fdopen(fd, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for trial in trials:
                with Tree(trial) as tree:
                    _TrialPacker(archive, tree, trial.name, redactor, report).run()
            data = json.dumps(report.as_dict(), indent=2).encode() + b"\n"
            _add_file(archive, REPORT, io.BytesIO(data), len(data), time.time())
        Path(name).chmod(0o644)
        Path(name).replace(output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return report


@dataclass(slots=True)
class _TrialPacker:
    archive: tarfile.TarFile
    tree: Tree
    name: str
    redactor: Redactor
    report: ExportReport

    def run(self) -> None:
        for entry in self.tree.entries():
            path = f"{self.name}/{entry.path}"
            if entry.kind == "file":
                self._add(entry, entry.path)
            elif entry.kind == "link":
                self._add_target(entry)
            elif entry.kind == "other":
                self.report.left_out.append({"file": path, "reason": "not a regular file"})

    def _add_target(self, link: Entry) -> None:
        """Add the target of a link, if it is a file of this trial."""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), link.leads))
        is_inside = not link.leads.startswith("/") and not path.startswith("..") and path != "."
        target = self.tree.find(path) if is_inside else None
        if target is not None and target.kind == "file":
            self._add(target, link.path)
        else:
            self.report.left_out.append({"file": f"{self.name}/{link.path}", "reason": f"a link to {link.leads}"})

    def _add(self, entry: Entry, path: str) -> None:
        clean = Scrubbing(self.redactor)
        name = clean(f"{self.name}/{path}".encode(errors="surrogateescape")).decode(errors="surrogateescape")
        try:
            stream = self.tree.open(entry.path)
        except (OSError, TreeError) as error:
            self.report.left_out.append({"file": name, "reason": str(error)})
            return
        with stream, tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as copy:
            is_binary = b"\0" in stream.read(8192)
            stream.seek(0)
            for part in clean.parts(stream):
                copy.write(part)
            if clean.found and is_binary:
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(clean.found.items()))
                self.report.left_out.append({"file": name, "reason": f"a binary file with {kinds}"})
                return
            size = copy.tell()
            copy.seek(0)
            _add_file(self.archive, name, copy, size, os.fstat(stream.fileno()).st_mtime)
            self.report.files += 1
        for kind, count in sorted(clean.found.items()):
            self.report.redacted.append({"file": name, "kind": kind, "count": count})


def _add_file(archive: tarfile.TarFile, name: str, stream: IO[bytes], size: int, modified: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, int(modified)
    archive.addfile(info, stream)


def trace_rows(views: Iterable[TrialView]) -> list[dict[str, Any]]:
    """The rows of `pier traces`."""
    rows = []
    for view in views:
        used = view.result.agent_result if view.result else None
        tokens = (used.n_input_tokens, used.n_output_tokens) if used else (None, None)
        rows.append(
            {
                "id": view.directory.name,
                "task": view.task,
                "agent": view.agent,
                "model": view.model,
                "steps": used.n_agent_steps if used else None,
                "input_tokens": tokens[0],
                "output_tokens": tokens[1],
                "cost_usd": used.cost_usd if used else None,
                "rewards": view.result.rewards if view.result else None,
                "trajectory": bool(view.files.trajectories),
                "problem": view.problem or (view.error.exception_message if view.error else None),
            }
        )
    return rows
