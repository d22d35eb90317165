"""A SQLite index of jobs and trials, so that a list of a hundred thousand trials opens at once.

Job directories are the source of truth: the index can be deleted at any time and is rebuilt. A job is read again when
its files change, and only rows that differ are written. Numbers come from `pier.figures`. Transcripts are added to the
full-text index by the first search that needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pier.figures import Totals, confidence, describe, main_reward
from pier.home import pier_home
from pier.job.view import JobView, ResultGroup, TrialRow, rewards_by_task
from pier.view.charts import FAILURES, grid, standing_of
from pier.view.library import Library, NotFoundError

_VERSION = 2
_SCHEMA = """
CREATE TABLE jobs (id INTEGER PRIMARY KEY, name TEXT UNIQUE, stamp TEXT, state TEXT, created TEXT, n INTEGER,
    mean REAL, cost REAL, errors INTEGER, version INTEGER, data TEXT);
CREATE TABLE trials (job INTEGER, place INTEGER, name TEXT, task TEXT, dataset TEXT, agent TEXT, model TEXT,
    attempt INTEGER, standing TEXT, reward REAL, rewards TEXT, cost REAL, tokens_in INTEGER, tokens_cached INTEGER,
    tokens_out INTEGER, seconds REAL, blame TEXT, fault TEXT, message TEXT, PRIMARY KEY (job, place)) WITHOUT ROWID;
CREATE INDEX trial_names ON trials (job, name);
CREATE TABLE cells (job INTEGER, place INTEGER, task TEXT, dataset TEXT, agent TEXT, model TEXT, mean REAL, cost REAL,
    seconds REAL, errors INTEGER, data TEXT, PRIMARY KEY (job, place)) WITHOUT ROWID;
CREATE TABLE maps (path TEXT PRIMARY KEY, stamp TEXT, map TEXT, outline TEXT);
CREATE TABLE read_texts (job TEXT, trial TEXT, stamp TEXT, PRIMARY KEY (job, trial)) WITHOUT ROWID;
CREATE VIRTUAL TABLE texts USING fts5(text, job UNINDEXED, trial UNINDEXED, step UNINDEXED);
"""
_TRIAL = (
    "job, place, name, task, dataset, agent, model, attempt, standing, reward, rewards, cost, tokens_in, "
    "tokens_cached, tokens_out, seconds, blame, fault, message"
)
_CELL = "job, place, task, dataset, agent, model, mean, cost, seconds, errors, data"
_TRIAL_SORTS = {name: name for name in ("name", "task", "agent", "model", "attempt", "reward", "cost")}
_TRIAL_SORTS |= {"time": "seconds", "tokens": "tokens_in + coalesce(tokens_out, 0)", "status": "standing"}
_JOB_SORTS = {"name": "name", "state": "state", "created": "created", "trials": "n", "mean": "mean", "cost": "cost"}
_CELL_SORTS = {"mean": "avg(mean)", "cost": "sum(cost)", "time": "avg(seconds)", "errors": "sum(errors)"}

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TrialListFilter:
    """Filter and sort order of a trial list; a leading `-` in `sort` reverses the order."""

    query: str = ""
    standing: str = ""
    blame: str = ""
    task: str = ""
    agent: str = ""
    model: str = ""
    sort: str = ""

    def where(self) -> tuple[str, list[Any]]:
        clauses, values = ["job = ?"], list[Any]()
        if self.query:
            clauses.append("(name LIKE ? ESCAPE '\\' OR task LIKE ? ESCAPE '\\' OR message LIKE ? ESCAPE '\\')")
            values += [_like(self.query)] * 3
        if self.standing == "failures":
            clauses.append(f"standing IN ({', '.join('?' * len(FAILURES))})")
            values += FAILURES
        elif self.standing:
            clauses.append("standing = ?")
            values.append(self.standing)
        for column in ("blame", "task", "agent", "model"):
            if value := getattr(self, column):
                clauses.append(f"coalesce({column}, '-') = ?")
                values.append(value)
        return " AND ".join(clauses), values


def _like(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _order_by(columns: Mapping[str, str], sort: str, tie: str) -> str:
    """The ORDER BY terms for a `sort` parameter, rows without a value last; `tie` alone if it names no column."""
    column = columns.get(sort.lstrip("-"))
    return f"{column} IS NULL, {column} {'DESC' if sort[0] == '-' else 'ASC'}, {tie}" if column else tie


@dataclass(slots=True)
class Index:
    """The index of one library. Thread-safe; one thread refreshes at a time."""

    library: Library
    path: Path
    version: int = 0
    """Incremented by each refresh that found a change."""
    _refreshing: threading.Lock = field(default_factory=threading.Lock)
    _keeper: sqlite3.Connection | None = None
    """An idle connection, held so that SQLite keeps its write-ahead log between transactions."""
    _place: tempfile.TemporaryDirectory[str] | None = None
    _closed: bool = False

    @classmethod
    def open(cls, library: Library) -> Index:
        """Open the index in pier's home, or in a temporary directory if the home is read-only."""
        name = hashlib.sha256(f"{library.root}\0{library.names}\0{library.trial_name}".encode()).hexdigest()[:16]
        try:
            directory = pier_home() / "view"
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            index = cls(library, directory / f"{name}.sqlite")
            index._prepare()
        except (OSError, sqlite3.OperationalError):
            place = tempfile.TemporaryDirectory(prefix="pier-view-")
            index = cls(library, Path(place.name) / f"{name}.sqlite", _place=place)
            index._prepare()
        return index

    def close(self) -> None:
        """Close the index; a refresh in another thread stops after its current job."""
        self._closed = True
        with self._refreshing:
            if self._keeper is not None:
                self._keeper.close()
            if self._place is not None:
                self._place.cleanup()

    def _prepare(self) -> None:
        try:
            with self.connect() as db:
                known = db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError:
            known = -1
        if known != _VERSION:
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            with self.connect() as db:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        self._keeper = sqlite3.connect(self.path, check_same_thread=False)
        self._keeper.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """A connection, in one transaction."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA synchronous = OFF")
            yield db

    def refresh(self, progress: Progress = lambda _: None) -> bool:
        """Read all jobs that changed since the last refresh, and return whether any did. `progress` is called with the
        number of trials read so far."""
        with self._refreshing:
            return self._refresh(progress)

    def _refresh(self, progress: Progress) -> bool:
        names = self.library.job_names()
        with self.connect() as db:
            known = {row["name"]: row for row in db.execute("SELECT id, name, stamp, state FROM jobs")}
        changed, count = False, 0
        for name in names:
            if self._closed:
                break
            row = known.get(name)
            stamp = self.library.stamp(name, deep=row is None or row["state"] not in ("done", "broken"))
            if row is not None and row["stamp"] == stamp:
                continue
            try:
                view = self.library.job(name)
            except NotFoundError:
                continue
            if view.state == "empty" and self.library.file is None:
                continue
            count += self._write(name, stamp, view)
            changed = True
            progress(count)
        for name in known.keys() - set(names):
            changed = True
            with self.connect() as db:
                for table, column in (("jobs", "id"), ("trials", "job"), ("cells", "job")):
                    db.execute(f"DELETE FROM {table} WHERE {column} = ?", (known[name]["id"],))
                for table in ("texts", "read_texts"):
                    db.execute(f"DELETE FROM {table} WHERE job = ?", (name,))
        self.version += changed
        return changed

    def _write(self, name: str, stamp: str, view: JobView) -> int:
        rows = list(self._rows(view))
        data = job_data(name, view, rows)
        if not view.is_ours:
            stamp = self.library.stamp(name, deep=view.state not in ("done", "broken"))
        values = (stamp, view.state, view.created_at, data["n_trials"], data["mean"], data["cost"]["known"])
        with self.connect() as db:
            db.execute(
                "INSERT INTO jobs (name, version) VALUES (?, 0) ON CONFLICT (name) DO UPDATE SET version = version + 1",
                (name,),
            )
            (job,) = db.execute("SELECT id FROM jobs WHERE name = ?", (name,)).fetchone()
            db.execute(
                "UPDATE jobs SET stamp = ?, state = ?, created = ?, n = ?, mean = ?, cost = ?, errors = ?, data = ? "
                "WHERE id = ?",
                (*values, sum(data["errors"].values()), json.dumps(data), job),
            )
            _replace(db, "trials", _TRIAL, job, [_trial_values(job, place, row) for place, row in enumerate(rows)])
            cells = [(job, place, *_cell_values(cell)) for place, cell in enumerate(grid(rows))]
            _replace(db, "cells", _CELL, job, cells)
        return len(rows)

    def _rows(self, view: JobView) -> Iterable[TrialRow]:
        if self.library.file is not None:
            name = self.library.trial_name or ""
            return [TrialRow(name, name, "", "unknown", None, 1, "done")]
        if self.library.only:
            return [row for row in view.trials if row.name == self.library.trial_name]
        return view.trials

    def jobs(self, query: str = "", sort: str = "") -> list[dict[str, Any]]:
        """All jobs whose names contain `query`, newest first by default."""
        order = _order_by(_JOB_SORTS, sort or "-created", "name")
        with self.connect() as db:
            rows = db.execute(f"SELECT data FROM jobs WHERE name LIKE ? ESCAPE '\\' ORDER BY {order}", (_like(query),))
            return [json.loads(row["data"]) for row in rows]

    def job(self, name: str) -> dict[str, Any]:
        """The numbers of a job; `NotFoundError` if it is not in the index."""
        with self.connect() as db:
            row = db.execute("SELECT id, version, data FROM jobs WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise NotFoundError(f"{self.library.root} has no job {name}")
        return {**json.loads(row["data"]), "id": row["id"], "version": row["version"]}

    def trials(self, job: int, chosen: TrialListFilter, start: int, count: int) -> tuple[list[dict[str, Any]], int]:
        """A page of the trials of a job that match a filter, and their total number."""
        where, values = chosen.where()
        order = _order_by(_TRIAL_SORTS, chosen.sort, "place")
        with self.connect() as db:
            (total,) = db.execute(f"SELECT count(*) FROM trials WHERE {where}", (job, *values)).fetchone()
            rows = db.execute(
                f"SELECT {_TRIAL} FROM trials WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                (job, *values, count, start),
            )
            return [_trial_data(row) for row in rows], total

    def trial(self, job: int, name: str) -> dict[str, Any] | None:
        with self.connect() as db:
            row = db.execute(f"SELECT {_TRIAL} FROM trials WHERE job = ? AND name = ?", (job, name)).fetchone()
        return _trial_data(row) if row else None

    def neighbours(self, job: int, place: int) -> dict[str, str | None]:
        """The trials around a place, by `previous`, `next`, `previous_failed` and `next_failed`."""
        failed = f"AND standing IN ({', '.join(repr(each) for each in FAILURES)})"
        found: dict[str, str | None] = {}
        with self.connect() as db:
            for label, more in (("", ""), ("_failed", failed)):
                for name, sign, order in (("previous", "<", "DESC"), ("next", ">", "ASC")):
                    row = db.execute(
                        f"SELECT name FROM trials WHERE job = ? AND place {sign} ? {more} "
                        f"ORDER BY place {order} LIMIT 1",
                        (job, place),
                    ).fetchone()
                    found[name + label] = row["name"] if row else None
        return found

    def cells(
        self, job: int, query: str, sort: str, start: int, count: int
    ) -> tuple[list[tuple[str, str, list[dict[str, Any]]]], int]:
        """A page of grid rows (a task, its dataset, and a cell for each agent that ran it), and their total number."""
        order = _order_by(_CELL_SORTS, sort, "task")
        with self.connect() as db:
            values = (job, _like(query))
            groups = "FROM cells WHERE job = ? AND task LIKE ? ESCAPE '\\' GROUP BY task, dataset"
            (total,) = db.execute(f"SELECT count(*) FROM (SELECT 1 {groups})", values).fetchone()
            tasks = db.execute(
                f"SELECT task, dataset {groups} ORDER BY {order} LIMIT ? OFFSET ?", (*values, count, start)
            ).fetchall()
            found: dict[tuple[str, str], list[dict[str, Any]]] = {(row["task"], row["dataset"]): [] for row in tasks}
            names = [*{task for task, _ in found}]
            marks = ", ".join("?" * len(names))
            cells = f"SELECT task, dataset, data FROM cells WHERE job = ? AND task IN ({marks})"
            for row in db.execute(cells, (job, *names)):
                if (row["task"], row["dataset"]) in found:
                    found[row["task"], row["dataset"]].append(json.loads(row["data"]))
        return [(task, dataset, cells) for (task, dataset), cells in found.items()], total

    def columns(self, job: int, names: Sequence[str]) -> list[tuple[Any, ...]]:
        """The values of some columns for all trials of a job, for charts."""
        with self.connect() as db:
            rows = db.execute(f"SELECT {', '.join(names)} FROM trials WHERE job = ?", (job,))
            return [tuple(row) for row in rows]

    def trial_map(self, path: Path, stamp: str) -> tuple[str | None, str | None]:
        """The cached map and outline of a trajectory file."""
        with self.connect() as db:
            found = db.execute("SELECT map, outline FROM maps WHERE path = ? AND stamp = ?", (str(path), stamp))
            return found.fetchone() or (None, None)

    def keep_map(self, path: Path, stamp: str, found: str, outline: str | None) -> None:
        with self.connect() as db:
            db.execute("INSERT OR REPLACE INTO maps VALUES (?, ?, ?, ?)", (str(path), stamp, found, outline))

    def texts_stamps(self, job: str) -> dict[str, str]:
        """The trials of a job in the full-text index, with the stamps of their trajectories."""
        with self.connect() as db:
            return dict(tuple(row) for row in db.execute("SELECT trial, stamp FROM read_texts WHERE job = ?", (job,)))

    def keep_texts(self, job: str, trial: str, stamp: str, texts: Iterable[tuple[int, str]]) -> None:
        """Replace the texts of a trial in the full-text index."""
        with self.connect() as db:
            if db.execute("SELECT 1 FROM read_texts WHERE job = ? AND trial = ?", (job, trial)).fetchone():
                db.execute("DELETE FROM texts WHERE job = ? AND trial = ?", (job, trial))
            db.execute("INSERT OR REPLACE INTO read_texts VALUES (?, ?, ?)", (job, trial, stamp))
            db.executemany("INSERT INTO texts VALUES (?, ?, ?, ?)", ((text, job, trial, step) for step, text in texts))

    def search(self, query: str, job: str | None, count: int = 200) -> list[dict[str, Any]]:
        """The steps that contain all words of a query, best match first: job, trial, step, and an excerpt."""
        words = " ".join('"' + word.replace('"', '""') + '"' for word in query.split())
        if not words:
            return []
        more, values = (" AND job = ?", [job]) if job else ("", [])
        with self.connect() as db, contextlib.suppress(sqlite3.OperationalError):
            rows = db.execute(
                "SELECT job, trial, step, snippet(texts, 0, '\ue000', '\ue001', '…', 32) AS text FROM texts "
                f"WHERE texts MATCH ?{more} ORDER BY rank LIMIT ?",
                (words, *values, count),
            )
            return [dict(row) for row in rows]
        return []


def _replace(db: sqlite3.Connection, table: str, columns: str, job: int, rows: list[tuple[Any, ...]]) -> None:
    """Replace the rows of a job in a table, writing only those that differ."""
    known = {row["place"]: tuple(row) for row in db.execute(f"SELECT {columns} FROM {table} WHERE job = ?", (job,))}
    marks = ", ".join("?" * len(columns.split(", ")))
    differing = [row for row in rows if known.get(row[1]) != row]
    db.executemany(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", differing)
    if len(known) > len(rows):
        db.execute(f"DELETE FROM {table} WHERE job = ? AND place >= ?", (job, len(rows)))


def _trial_values(job: int, place: int, row: TrialRow) -> tuple[Any, ...]:
    outcome = row.outcome
    fault = outcome.fault if outcome else None
    rewards = outcome.rewards if outcome else None
    tokens = outcome.tokens if outcome else (None, None, None)
    message = fault.message[:500] if fault else row.problem
    about = (row.name, row.task, row.dataset, row.agent, row.model, row.attempt, standing_of(row))
    verdict = (main_reward(rewards), json.dumps(rewards) if rewards is not None else None)
    used = (outcome.cost if outcome else None, *tokens, outcome.seconds if outcome else None)
    return (job, place, *about, *verdict, *used, *((fault.blame, fault.type) if fault else (None, None)), message)


def _cell_values(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    columns = (cell[key] for key in ("task", "dataset", "agent", "model", "mean", "cost", "seconds"))
    return (*columns, sum(cell["errors"].values()), json.dumps(cell))


def _trial_data(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    found.pop("job")
    return {**found, "rewards": json.loads(found["rewards"]) if found["rewards"] else None}


def job_data(name: str, view: JobView, rows: Sequence[TrialRow]) -> dict[str, Any]:
    """The numbers of a job, for its page and the list of jobs."""
    totals = view.totals if len(rows) == len(view.trials) else Totals.of(row.outcome for row in rows)
    interval = confidence([values for values in rewards_by_task(rows).values() if values])
    return {
        "name": name,
        "directory": str(view.directory),
        "state": view.state,
        "created_at": view.created_at,
        "finished_at": view.finished_at,
        "owner": str(view.owner) if view.owner else None,
        "problems": list(view.problems),
        "n_trials": max(view.n_planned, len(rows)),
        "n_done": totals.done,
        "n_verdicts": totals.verdicts,
        "n_running": sum(row.state == "running" for row in rows),
        "n_retries": view.n_retries,
        "n_tasks": len({row.task for row in rows}),
        "mean": totals.mean.value,
        "interval": asdict(interval) if interval else None,
        **_usage(totals),
        "trial_seconds": totals.seconds,
        "groups": [_group_data(group) for group in view.groups],
    }


def _group_data(group: ResultGroup) -> dict[str, Any]:
    mean, interval = group.summary.main
    return {
        "key": group.key,
        "agent": group.agent,
        "model": group.model,
        "dataset": group.dataset,
        "n_done": group.totals.done,
        **describe(group.summary),
        "main_mean": mean,
        "main_interval": asdict(interval) if interval else None,
        **_usage(group.totals),
        "seconds": group.totals.seconds_per_trial,
    }


def _usage(totals: Totals) -> dict[str, Any]:
    """Cost, tokens, and errors by blame."""
    cost = {"known": totals.cost.known, "unknown": totals.cost.unknown, "text": str(totals.cost)}
    cost["per_trial"] = totals.cost_per_trial
    return {"cost": cost, "tokens": asdict(totals.tokens), "errors": dict(totals.errors)}
