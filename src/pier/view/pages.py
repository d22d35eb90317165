"""Every page as plain data, by its URL path.

`Pages.get` returns a template's name and its data; the server renders it, `--json` prints it, and the export writes it.
Lists come from the index, everything else from the job's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import unquote

from pydantic_core import to_jsonable_python

from pier.errors import UsageError
from pier.figures import compare
from pier.job.report import comparison_sides, config_differences, side_data
from pier.job.view import LOG, rewards_by_task
from pier.review.read import heat_map, list_runs, read_job_analysis
from pier.tree import Tree
from pier.view import charts
from pier.view.files import file_stamp, read_text
from pier.view.index import Index, TrialListFilter
from pier.view.library import Library, NotFoundError
from pier.view.steps import StepReader, text_at, texts_of
from pier.view.trial import TrialPage, query_number

GRID_CELLS, TRIAL_ROWS = 240, 100
TEXT_CHUNK = 200_000
_SEARCH_TRIALS = 400
"""Maximum number of transcripts that one search adds to the full-text index."""
_TEXT_LIMIT = 20_000
_FIRST_OUTLINE, _WHOLE_OUTLINE = 400, 20_000
"""Longest outline, in steps, that is part of a page (of an exported page); the browser loads a longer one later."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its template, its data, and its location (job, trial, tab)."""

    template: str
    title: str
    data: dict[str, Any]
    job: str = ""
    trial: str = ""
    tab: str = ""


@dataclass(slots=True)
class Pages:
    """The pages of one library."""

    library: Library
    index: Index
    whole: bool = False
    """Whether the page of a trial has all of its steps, as in an export."""
    reader: StepReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = StepReader(self.index)

    def get(self, path: str, query: Mapping[str, str], several: Mapping[str, list[str]] | None = None) -> Page:
        """The page at a path; `NotFoundError` if there is none. `several` has the values of repeated parameters."""
        parts = [unquote(part) for part in path.strip("/").split("/") if part]
        match parts:
            case []:
                return self.jobs(query)
            case ["compare"]:
                return self.compare((several or {}).get("job", []))
            case ["search"]:
                return self.search(query)
            case ["jobs", job]:
                return self.job(job, query)
            case ["jobs", job, trial]:
                return self.trial(job, trial, "steps", query)
            case ["jobs", job, trial, "steps", "more" | "outline" | "find" | "text" as piece]:
                return self.piece(job, trial, piece, query)
            case ["jobs", job, trial, tab]:
                return self.trial(job, trial, tab, query)
        raise NotFoundError(f"there is no page {path}")

    def jobs(self, query: Mapping[str, str]) -> Page:
        rows = self.index.jobs(query.get("q", ""), query.get("sort", ""))
        return Page("jobs.html", "Jobs", {"root": str(self.library.root), "jobs": rows, "query": dict(query)})

    def job(self, name: str, query: Mapping[str, str]) -> Page:
        job = self.index.job(name)
        view = query.get("view", "grid")
        builders = {"grid": self._grid, "trials": self._trials, "charts": self._charts}
        if view in builders:
            content = builders[view](job, query)
        elif view == "config":
            content = {"config": self.library.job(name).config}
        elif view == "reviews":
            content = self._reviews(name)
        elif view == "log":
            with Tree(self.library.job(name).directory.resolve()) as tree:
                content = {"log": read_text(tree, LOG)}
        else:
            raise NotFoundError(f"a job has no view {view}")
        return Page("job.html", name, {"job": job, "view": view, "query": dict(query), **content}, job=name)

    def _reviews(self, name: str) -> dict[str, Any]:
        root = self.library.root / name
        runs = [
            {"name": run.name, "agent": run.agent, "model": run.model, "n_items": run.n_items, **asdict(heat_map(run))}
            for run in list_runs(root)
        ]
        return {"runs": runs, "analysis": to_jsonable_python(read_job_analysis(root))}

    def _grid(self, job: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        page = query_number(query.get("page"), 1) or 1
        columns = list(dict.fromkeys((group["agent"], group["model"]) for group in job["groups"]))
        size = max(25, min(100, GRID_CELLS // max(1, len(columns))))
        rows, total = self.index.cells(job["id"], query.get("q", ""), query.get("sort", ""), (page - 1) * size, size)
        datasets = {group["dataset"] for group in job["groups"]}
        lines = []
        for task, dataset, cells in rows:
            by_column = {(cell["agent"], cell["model"]): cell for cell in cells}
            ordered = [by_column.get(column) for column in columns]
            lines.append({"task": task, "dataset": dataset if len(datasets) > 1 else "", "cells": ordered})
        return {"columns": columns, "rows": lines, **_paging(page, size, total)}

    def _trials(self, job: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        names = ("standing", "blame", "task", "agent", "model", "sort")
        chosen = TrialListFilter(query=query.get("q", ""), **{name: query.get(name, "") for name in names})
        page = query_number(query.get("page"), 1) or 1
        rows, total = self.index.trials(job["id"], chosen, (page - 1) * TRIAL_ROWS, TRIAL_ROWS)
        return {"trials": rows, "filter": asdict(chosen), **_paging(page, TRIAL_ROWS, total)}

    def _charts(self, job: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        rows = self.index.columns(job["id"], ("reward", "cost", "seconds", "tokens_in", "tokens_out"))
        reward, cost, seconds, read, written = zip(*rows, strict=True) if rows else ((),) * 5
        tokens = [a + (b or 0) for a, b in zip(read, written, strict=True) if a is not None]
        return {
            "scatter": charts.cost_against_score(job["groups"]),
            "bars": {
                "reward": charts.bars([value for value in reward if value is not None], "main reward"),
                "time": charts.bars([value for value in seconds if value is not None], "seconds per trial"),
                "cost": charts.bars([value for value in cost if value], "cost per trial ($)"),
                "tokens": charts.bars(tokens, "tokens per trial"),
            },
        }

    def compare(self, names: list[str]) -> Page:
        jobs = [row["name"] for row in self.index.jobs()]
        data: dict[str, Any] = {"names": names, "jobs": jobs, "sides": [], "others": []}
        if names:
            views = [self.library.job(name) for name in names]
            try:
                first, *rest = comparison_sides(views)
            except UsageError as error:
                return Page("compare.html", "Compare", {**data, "problem": str(error)})
            rewards = rewards_by_task(first.trials)
            data["sides"] = [side_data(side) for side in (first, *rest)]
            data["others"] = [asdict(compare(rewards, rewards_by_task(side.trials))) for side in rest]
            data["tasks"] = _task_rows(data["others"])
            data["configuration"] = config_differences(views)
        return Page("compare.html", "Compare", data)

    def search(self, query: Mapping[str, str]) -> Page:
        """Full-text search in transcripts. Each search first indexes up to `_SEARCH_TRIALS` new transcripts."""
        words, job = query.get("q", "").strip(), query.get("job", "")
        jobs = [row["name"] for row in self.index.jobs()]
        data: dict[str, Any] = {"q": words, "job": job, "jobs": jobs, "found": []}
        if words:
            data |= self._read_texts([job] if job else jobs)
            data["found"] = self.index.search(words, job or None)
        return Page("search.html", "Search", data, job=job)

    def _read_texts(self, jobs: list[str]) -> dict[str, int]:
        """Add transcripts to the full-text index; the number of indexed transcripts and of all."""
        read, total, budget = 0, 0, _SEARCH_TRIALS
        for job in jobs:
            rows, _ = self.index.trials(self.index.job(job)["id"], TrialListFilter(), 0, 1_000_000)
            stamps = self.index.texts_stamps(job)
            for row in rows:
                if row["standing"] == "pending":
                    continue
                total += 1
                known = stamps.get(row["name"])
                if known is not None and row["standing"] != "running":
                    read += 1
                elif budget > 0:
                    budget -= 1
                    read += 1
                    self._read_trial(job, row["name"], known)
        return {"n_read": read, "n_transcripts": total}

    def _read_trial(self, job: str, name: str, known: str | None) -> None:
        try:
            parts = self.reader.parts(self.library.trial(job, name, known=True))
        except NotFoundError:
            parts = []
        stamp = " ".join(file_stamp(part.path) for part in parts)
        if stamp == known:
            return
        texts: list[tuple[int, str]] = []
        for part in parts:
            try:
                with self.reader.open(part) as trajectory:
                    for number, step in enumerate(trajectory.steps(0, len(trajectory)), 1):
                        texts.append((number, "\n".join(text[:_TEXT_LIMIT] for text in texts_of(step) if text)))
            except ValueError:
                continue
        self.index.keep_texts(job, name, stamp, texts)

    def open_trial(self, job: str, name: str) -> TrialPage:
        row = self.index.trial(self.index.job(job)["id"], name)
        if row is None:
            raise NotFoundError(f"{job} has no trial {name}")
        view = self.library.trial(job, name, known=row["standing"] != "pending")
        return TrialPage(self.index, self.reader, job, view, row, self.whole)

    def trial(self, job: str, name: str, tab: str, query: Mapping[str, str]) -> Page:
        trial = self.open_trial(job, name)
        content = trial.tab(tab, query)
        data = {"head": trial.head(), "tabs": trial.tabs(), "tab": tab, "content": content, "query": dict(query)}
        if tab == "steps":
            most = _WHOLE_OUTLINE if self.whole else _FIRST_OUTLINE
            data["outline"] = trial.outline(query) if 0 < content["total"] <= most else None
        return Page("trial.html", name, data, job=job, trial=name, tab=tab)

    def piece(self, job: str, name: str, piece: str, query: Mapping[str, str]) -> Page:
        """A part of the steps tab that the browser loads later."""
        trial = self.open_trial(job, name)
        if piece == "more":
            template, data = "steps.html", {"head": {"job": job, "name": name}, "content": trial.tab_steps(query)}
        elif piece == "outline":
            template, data = "outline.html", {"outline": trial.outline(query), "query": dict(query)}
        elif piece == "find":
            template, data = "found.html", {**trial.find(query), "where": dict(query)}
        else:
            template, data = "text.html", self._text_piece(trial, query)
        return Page(template, name, data, job=job, trial=name, tab="steps")

    def _text_piece(self, trial: TrialPage, query: Mapping[str, str]) -> dict[str, Any]:
        """The next chunk of one text of a step."""
        part, place = trial.part(query), query.get("place", "")
        start, number = query_number(query.get("from"), 0), query_number(query.get("step"), 1)
        try:
            if part is None:
                raise ValueError("the trial has no trajectory")
            with trial.reader.open(part, query.get("sub", "")) as trajectory:
                if not 1 <= number <= len(trajectory):
                    raise ValueError(f"there is no step {number}")
                text = text_at(trajectory.step(number - 1), place)
        except ValueError as error:
            raise NotFoundError(str(error)) from error
        shown = text[start : start + TEXT_CHUNK]
        where = {**query, "from": str(start + len(shown))}
        return {"text": shown, "place": place, "left": len(text) - start - len(shown), "where": where}


def _paging(page: int, size: int, total: int) -> dict[str, int]:
    return {"page_number": page, "n_pages": max(1, -(-total // size)), "total": total}


def _task_rows(others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per task, largest difference first: the mean of the first side, and the mean and difference of each
    other."""
    rows: dict[str, dict[str, Any]] = {}
    for place, other in enumerate(others):
        for each in other["tasks"]:
            row = rows.setdefault(
                each["task"], {"task": each["task"], "first": each["first"], "others": [None] * len(others)}
            )
            row["others"][place] = {key: each[key] for key in ("second", "difference", "interval")}
    return sorted(
        rows.values(), key=lambda row: -max((abs(o["difference"] or 0) for o in row["others"] if o), default=0)
    )
