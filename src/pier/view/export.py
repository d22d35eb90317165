"""Writes pages as files that open without a server: a directory, or one file for a trial or a small job.

Pages use the server's templates and show every step. Before a page is rendered, secrets are removed from its data:
values of this machine's variables with secret-looking names, strings in well-known key formats, `Bearer` tokens, and
credentials in URLs. A report lists every redaction.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from pier.errors import UsageError
from pier.files import write, write_json
from pier.redact import REDACTED, Redactor
from pier.secret import is_never_secret, looks_random, secret_values, secrets_in_text
from pier.tree import Tree
from pier.view.index import Index, TrialListFilter
from pier.view.library import Library, NotFoundError
from pier.view.pages import Page, Pages
from pier.view.render import STATIC, Links, render
from pier.workspace.traces import Scrubbing

LIMIT = 60_000
"""Characters of one text in an export."""
SMALL = 40
"""Maximum number of trials in one file."""
_CAST_LIMIT = 8 << 20
_SCRIPTS = ("page.js", "steps.js", "notes.js", "live.js", "keys.js", "view.js")
_VIEWS = ("grid", "trials", "charts", "reviews", "config", "log")
_SAFE = re.compile(r"[A-Za-z0-9._+=@-]{1,120}")


@dataclass(slots=True)
class Cleaner:
    """Removes secrets from page data, and counts the redactions by page and kind."""

    environ: Mapping[str, str]
    home: str = ""
    removed: Counter[tuple[str, str]] = field(default_factory=Counter)
    before: int = 0
    """Number of places that were redacted when the trials were recorded."""
    _scrub: Scrubbing = field(init=False)

    def __post_init__(self) -> None:
        self._scrub = Scrubbing(Redactor(secret_values(self.environ, self.environ)), "variable of this machine")

    def page(self, path: str, data: dict[str, Any]) -> dict[str, Any]:
        cleaned = self._value(data)
        for kind, count in self._scrub.found.items():
            self.removed[path, kind] += count
        self._scrub.found.clear()
        return cleaned

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key) if isinstance(key, str) else key: self._value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._value(each) for each in value)
        return value

    def text(self, text: str) -> str:
        if len(text) < 8:
            return text
        self.before += text.count(REDACTED)
        text = self._scrub(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")
        for secret in {each for each in secrets_in_text(text) if not is_never_secret(each) and looks_random(each)}:
            self._scrub.found["credential in text"] += text.count(secret)
            text = text.replace(secret, REDACTED)
        if len(self.home) > 5 and self.home in text:
            self._scrub.found["home directory"] += text.count(self.home)
            text = text.replace(self.home, "~")
        return text

    def report(self) -> dict[str, Any]:
        totals: Counter[str] = Counter()
        for (_, kind), count in self.removed.items():
            totals[kind] += count
        rows = [{"page": page, "kind": kind, "count": count} for (page, kind), count in sorted(self.removed.items())]
        return {"totals": dict(totals), "recorded": self.before, "rows": rows}


def slug(name: str) -> str:
    """A safe file name for a name from a job."""
    if _SAFE.fullmatch(name) and name not in (".", ".."):
        return name
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]


class FileLinks(Links):
    """File addresses relative to the page that is being written, `here`. `only` is the page of the only trial."""

    is_static = True

    def __init__(self, only: str | None = None) -> None:
        self.here = "index.html"
        self._only = only

    def _to(self, target: str) -> str:
        return quote(os.path.relpath(target, PurePosixPath(self.here).parent))

    def home(self, **query: Any) -> str:
        return self._to(self._only or "index.html")

    def job(self, job: str, **query: Any) -> str:
        return self._to(self._only or job_file(job, query.get("view") or "grid"))

    def trial(self, job: str, trial: str, tab: str = "steps", **query: Any) -> str:
        return self._to(trial_file(job, trial, tab))

    def piece(self, job: str, trial: str, piece: str, **query: Any) -> str:
        return ""

    def asset(self, name: str) -> str:
        return self._to(f"static/{'view.bundle.js' if name == 'view.js' else name}")


def job_file(job: str, view: str) -> str:
    return f"jobs/{slug(job)}/{'index' if view == 'grid' else view}.html"


def trial_file(job: str, trial: str, tab: str) -> str:
    return f"jobs/{slug(job)}/{slug(trial)}/{'index' if tab == 'steps' else tab}.html"


class OneFileLinks(FileLinks):
    """Addresses in a one-file export: the page's path follows `#`."""

    def _to(self, target: str) -> str:
        return f"#/{quote(target)}"

    def asset(self, name: str) -> str:
        return ""


@dataclass(slots=True)
class Export:
    """Writes the pages of one library."""

    library: Library
    cleaner: Cleaner
    n_pages: int = 0
    _pages: Pages = field(init=False)

    def write(self, target: Path) -> None:
        """Write to a directory that is new or empty, or to a file whose name ends in `.html`."""
        index = Index.open(self.library)
        try:
            index.refresh()
            self._pages = Pages(self.library, index, whole=True)
            if target.suffix.lower() in (".html", ".htm"):
                self._write_file(target)
            else:
                self._write_directory(target)
        finally:
            index.close()

    def _all_pages(self) -> Iterator[tuple[str, Page]]:
        """Every page with its file."""
        only = self.library.trial_name if self.library.kind in ("trial", "trajectory") else None
        if only is None:
            yield "index.html", self._pages.jobs({})
        for job in [row["name"] for row in self._pages.index.jobs()]:
            rows, _ = self._pages.index.trials(self._pages.index.job(job)["id"], TrialListFilter(), 0, 1_000_000)
            if only is None:
                for view in _VIEWS:
                    yield job_file(job, view), self._job_page(job, view, rows)
            for row in rows:
                if only in (None, row["name"]) and row["standing"] != "pending":
                    yield from self._trial_pages(job, row["name"])

    def _job_page(self, job: str, view: str, rows: list[dict[str, Any]]) -> Page:
        page = self._pages.job(job, {"view": view} if view != "grid" else {})
        if view == "trials":
            page.data.update(trials=rows, total=len(rows), n_pages=1)
        elif view == "grid":
            for number in range(2, page.data["n_pages"] + 1):
                page.data["rows"] += self._pages.job(job, {"page": str(number)}).data["rows"]
            page.data["n_pages"] = 1
        return page

    def _trial_pages(self, job: str, name: str) -> Iterator[tuple[str, Page]]:
        try:
            tabs = self._pages.open_trial(job, name).tabs()
        except NotFoundError:
            return
        for tab in tabs:
            page = self._pages.trial(job, name, tab, {})
            if self._only:
                page.data["head"]["neighbours"] = {}
            if tab == "terminal":
                self._embed_casts(job, name, page.data["content"]["casts"])
            yield trial_file(job, name, tab), page

    def _embed_casts(self, job: str, name: str, casts: list[dict[str, Any]]) -> None:
        """Put the terminal recordings into the page: a page on disk may not read another file."""
        with Tree(self.library.trial(job, name, known=True).directory.resolve()) as tree:
            for cast in casts:
                if (text := tree.read_text(cast["path"], _CAST_LIMIT)) is not None:
                    encoded = base64.b64encode(self.cleaner.text(text).encode()).decode()
                    cast["data"] = f"data:text/plain;base64,{encoded}"

    def _rendered(self, links: FileLinks, **more: Any) -> Iterator[tuple[str, Page, str]]:
        for path, page in self._all_pages():
            yield self._render(path, page, links, **more)
        report = Page("redactions.html", "Redactions", {"report": self.cleaner.report()})
        yield self._render("redactions.html", report, links, **more)

    def _render(self, path: str, page: Page, links: FileLinks, **more: Any) -> tuple[str, Page, str]:
        links.here = path
        self.n_pages += 1
        cleaned = Page(page.template, page.title, self.cleaner.page(path, page.data), page.job, page.trial, page.tab)
        return path, cleaned, render(cleaned, links, LIMIT=LIMIT, indexing=0, **more)

    def _write_directory(self, target: Path) -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists and is not an empty directory", hint="pier view export PATH -o NEW")
        policy = (
            "default-src 'none'; script-src 'self' file: 'wasm-unsafe-eval'; style-src 'self' file:; "
            "img-src data:; connect-src data:; base-uri 'none'; form-action 'none'"
        )
        for path, _, html in self._rendered(FileLinks(self._only), csp=policy):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            write(target / path, html, durable=False)
        if not (target / "index.html").exists():
            refresh = f'<!doctype html><meta http-equiv="refresh" content="0;url={quote(self._start())}">'
            write(target / "index.html", refresh, durable=False)
        assets = target / "static"
        assets.mkdir(exist_ok=True)
        write(assets / "view.bundle.js", bundle(), durable=False)
        for name in ("view.css", "asciinema-player.css", "asciinema-player.min.js", "asciinema-player.LICENSE"):
            write(assets / name, (STATIC / name).read_bytes(), durable=False)
        write_json(target / "redactions.json", self.cleaner.report(), durable=False)

    def _write_file(self, target: Path) -> None:
        jobs = self._pages.index.jobs()
        count = 1 if self.library.trial_name else sum(job["n_trials"] for job in jobs)
        if count > SMALL:
            raise UsageError(
                f"cannot write {count} trials to one file: expected at most {SMALL}",
                hint=f"pier view export PATH -o {target.with_suffix('')}",
            )
        templates, casts, html = list[str](), False, ""
        for path, page, html in self._rendered(OneFileLinks(self._only)):
            start, end = html.index('<header class="top">'), html.index("<dialog ")
            body = re.search(r"<body([^>]*)>", html)
            casts = casts or page.tab == "terminal"
            templates.append(f'<template data-path="{path}"{body[1] if body else ""}>{html[start:end]}</template>')
        dialog = html[html.index("<dialog ") : html.index("</dialog>") + 9]
        write(target, one_file(templates, dialog, self._start(), self.cleaner, casts))

    @property
    def _only(self) -> str | None:
        """The page of the trial, if the export holds one trial only."""
        return self._start() if self.library.kind in ("trial", "trajectory") else None

    def _start(self) -> str:
        parts = self.library.start.strip("/").split("/")
        if len(parts) == 3:
            return trial_file(parts[1], parts[2], "steps")
        return job_file(parts[1], "grid") if len(parts) == 2 else "index.html"


def bundle() -> str:
    """All modules as one script: browsers load no modules from disk."""
    lines = [line for name in _SCRIPTS for line in (STATIC / name).read_text().splitlines()]
    kept = [line.removeprefix("export ") for line in lines if not line.startswith("import ")]
    return '"use strict";\n(() => {\n' + "\n".join(kept) + "\n})();\n"


def one_file(templates: list[str], dialog: str, start: str, cleaner: Cleaner, casts: bool) -> str:
    """One document with every page in a template; a script shows the one that the address names."""
    styles = [(STATIC / "view.css").read_text()]
    scripts = [(STATIC / "router.js").read_text() + bundle()]
    if casts:
        styles.append((STATIC / "asciinema-player.css").read_text())
        scripts.insert(0, (STATIC / "asciinema-player.min.js").read_text())
    hashes = [f"'sha256-{_digest(text)}'" for text in (*scripts, *styles)]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes[: len(scripts)])} 'wasm-unsafe-eval'; "
        f"style-src {' '.join(hashes[len(scripts) :])}; img-src data:; connect-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="robots" content="noindex">'
        '<link rel="icon" href="data:,"><title>pier</title>'
    )
    head += "".join(f"<style>{text}</style>" for text in styles)
    body = f'</head><body data-static="1" data-start="{start}"><div id="page"></div>{dialog}{"".join(templates)}'
    return head + body + "".join(f"<script>{text}</script>" for text in scripts) + "</body></html>\n"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
