"""The page of one trial: its head, which every tab shows, and the content of each tab as plain data.

Results come from `TrialView`, calls from `pier.record`, steps from `pier.trajectory`. Files are opened through `Tree`,
which follows no link. If data is missing, the page gives the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from pier.errors import PierError
from pier.figures import main_reward
from pier.job.view import CONFIG, LOCK, RESULT, TRIAL_LOG, TrialView, step_places
from pier.record.reader import call_times
from pier.review.read import critiques_of, read_analysis
from pier.trajectory.paged import PagedTrajectory
from pier.tree import Tree, TreeError
from pier.trial.bounded import read_back_now
from pier.trial.diff import CHANGES
from pier.view.cards import diff_files, edits_of, loose_subs, mark_side_calls, step_card, sub_agents
from pier.view.files import (
    JSON_LIMIT,
    PICTURES,
    REPORT_LIMIT,
    file_row,
    files_below,
    json_lines,
    read_lines,
    read_tests,
    read_text,
)
from pier.view.index import Index
from pier.view.library import NotFoundError
from pier.view.notes import read_notes
from pier.view.steps import StepReader, TrajectoryPart, read_calls, step_name

PAGE_STEPS, PAGE_BYTES = 50, 3 << 20
_DIFF_BYTES = 2_500_000
TAB_NAMES = {
    "steps": "Steps",
    "verifier": "Verifier",
    "changes": "Changes",
    "artifacts": "Artifacts",
    "calls": "Model calls",
    "logs": "Logs",
    "network": "Network",
    "integrity": "Integrity",
    "terminal": "Terminal",
    "reviews": "Reviews",
    "config": "Configuration",
    "notes": "Notes",
    "file": "File",
}


@dataclass(frozen=True, slots=True)
class TrialPage:
    """A trial opened for a page."""

    index: Index
    reader: StepReader
    job: str
    view: TrialView
    row: Mapping[str, Any]
    whole: bool = False
    """Whether the steps tab has all steps, including those of sub-agents, as in an export."""

    @property
    def directory(self) -> Path:
        return self.view.directory

    def head(self) -> dict[str, Any]:
        """The data shown on every tab."""
        view, row = self.view, self.row
        result, outcome = view.result, view.outcome
        info, used = (result.pier, result.agent_result) if result else (None, None)
        steps = used.n_agent_steps if used else None
        return {
            "job": self.job,
            "name": view.name,
            "task": view.task,
            "agent": view.agent if view.agent != "unknown" else row["agent"],
            "agent_version": result.agent_info.version if result else None,
            "model": view.model,
            "attempt": view.attempt or (info.attempt if info else None),
            "state": view.state,
            "standing": row["standing"],
            "problem": view.problem,
            "directory": str(view.directory),
            "reward": main_reward(outcome.rewards) if outcome else None,
            "rewards": outcome.rewards if outcome else None,
            "error": _error(view),
            "cost": outcome.cost if outcome else None,
            "tokens": list(outcome.tokens) if outcome else [None, None, None],
            "seconds": outcome.seconds if outcome else None,
            "started_at": result.started_at.isoformat() if result and result.started_at else None,
            "phases": dict(view.phases),
            "warnings": list(info.warnings) if info else [],
            "backend": info.backend if info else result.environment_type if result else None,
            "image": info.image if info else None,
            "peak_context": used.peak_context_tokens if used else None,
            "n_agent_steps": steps if steps is not None or not result else result.n_agent_steps,
            "integrity_notes": sum(len(each["notes"]) for each in self._integrity()),
            "neighbours": self.index.neighbours(self.index.job(self.job)["id"], row["place"]),
            "notes": self._notes(),
        }

    def _notes(self) -> list[dict[str, Any]]:
        return [asdict(note) for note in read_notes(self.directory)]

    def tab_notes(self, _: Mapping[str, str]) -> dict[str, Any]:
        return {"list": self._notes()}

    def tab_integrity(self, _: Mapping[str, str]) -> dict[str, Any]:
        return {"parts": self._integrity()}

    def tab_terminal(self, _: Mapping[str, str]) -> dict[str, Any]:
        return {"casts": self._casts()}

    def tabs(self) -> list[str]:
        """The names of the tabs with content."""
        if self.index.library.file is not None:
            return ["steps", "changes", "notes"]
        if not self.directory.is_dir():
            return ["steps"]
        files = self.view.files
        with self.tree() as tree:
            entries = [entry for place in step_places(tree) for entry in tree.listed(place.rstrip("/"))]
        names = {entry.path.rpartition("/")[2] for entry in entries}
        shown = {
            "steps": True,
            "verifier": "verifier" in names or self.view.result is not None,
            "changes": True,
            "artifacts": "artifacts" in names,
            "calls": bool(files.recordings),
            "logs": bool(files.logs),
            "network": "network.jsonl" in names,
            "integrity": bool(self._integrity()),
            "terminal": bool(self._casts()),
            "reviews": any(self.tab_reviews({}).values()),
            "config": True,
            "notes": True,
        }
        return [name for name, is_shown in shown.items() if is_shown]

    def tab(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The content of a tab; `NotFoundError` if the name is unknown."""
        if name not in TAB_NAMES:
            raise NotFoundError(f"a trial has no tab {name}")
        return getattr(self, f"tab_{name}")(query)

    def tree(self) -> Tree:
        try:
            return Tree(self.directory.resolve())
        except OSError as error:
            raise NotFoundError(f"{self.directory}: {error.strerror}") from error

    # Steps

    def parts(self) -> list[TrajectoryPart]:
        return self.reader.parts(self.view)

    def part(self, query: Mapping[str, str]) -> TrajectoryPart | None:
        """The trajectory named by the query, else the first."""
        parts = self.parts()
        return next((part for part in parts if part.name == query.get("part", "")), parts[0] if parts else None)

    def tab_steps(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of steps: it starts at index `from`, or contains step number `step`."""
        parts = self.parts()
        part, sub = self.part(query), query.get("sub", "")
        base = {"parts": [each.name for each in parts], "part": part.name if part else "", "sub": sub, "cards": []}
        base |= {"total": 0, "from": 0, "to": 0, "subs": [], "loose": [], "side_calls": []}
        if part is None:
            return {**base, "missing": self._reason_for_no_steps()}
        try:
            with self.reader.open(part, sub) as trajectory:
                return {**base, **self._page(part, trajectory, sub, query)}
        except ValueError as error:
            return {**base, "missing": f"The trajectory cannot be read: {error}"}

    def _page(
        self, part: TrajectoryPart, trajectory: PagedTrajectory, sub: str, query: Mapping[str, str]
    ) -> dict[str, Any]:
        total = len(trajectory)
        start, selected = query_number(query.get("from"), 0), query_number(query.get("step"), 0)
        if selected:
            start = max(0, min(selected, total) - 1 - PAGE_STEPS // 4)
        start = min(start, total)
        stop = total if self.whole else _page_end(trajectory, start, query_number(query.get("to"), total))
        agent, final = trajectory.agent, trajectory.final_metrics
        subs = sub_agents(trajectory, sub)
        if self.whole:
            for each, inner in zip(subs, trajectory.subs, strict=True):
                each["cards"] = self._page(part, inner, each["place"], {})["cards"]
        times, cards = self._times(part), list[dict[str, Any]]()
        previous = trajectory.step(start - 1).timestamp if start else None
        for index in range(start, stop):
            step = trajectory.step(index)
            cards.append(step_card(step, index, previous, subs, times))
            previous = step.timestamp
        last = mark_side_calls(trajectory, cards, start)
        return {
            "source": part.source,
            "agent": agent.model_dump(exclude={"tool_definitions", "extra"}) if agent else None,
            "tools": _tools(agent.tool_definitions if agent else None),
            "final": final.model_dump(exclude_none=True) if final else None,
            "subs": subs,
            "loose": loose_subs(subs, cards) if self.whole else [],
            "side_calls": last if stop == total else [],
            "total": total,
            "from": start,
            "to": stop,
            "step": selected,
            "cards": cards,
        }

    def _times(self, part: TrajectoryPart) -> Mapping[int, tuple[float, float]]:
        files = self.view.files.recordings if self.index.library.file is None else ()
        path = next((path for path in files if step_name(self.view, path) == part.name), None)
        try:
            return call_times(path) if path else {}
        except (OSError, TreeError):
            return {}

    def _reason_for_no_steps(self) -> str:
        view = self.view
        if view.state == "pending":
            return "This trial has not started yet."
        if view.state == "running":
            return "The agent has made no model call yet. Steps appear here as they are recorded."
        if view.agent in ("oracle", "nop", "command", "kept-state"):
            return f"The agent {view.agent} made no model calls, so there is no trajectory."
        if view.state != "done":
            return "The trial ended before the agent's first model call, so there is no trajectory."
        if (error := view.error) is not None:
            return f"No model call was recorded: the trial ended with {error.exception_type}."
        return "There is no trajectory and no recording of model calls."

    def outline(self, query: Mapping[str, str]) -> dict[str, Any]:
        part = self.part(query)
        rows = self.reader.outline(part, query.get("sub", "")) if part else []
        return {
            "part": part.name if part else "",
            "sub": query.get("sub", ""),
            "rows": rows,
            "tool_counts": Counter(tool for row in rows for tool in row["tools"]).most_common(12),
        }

    def find(self, query: Mapping[str, str]) -> dict[str, Any]:
        part, text = self.part(query), query.get("q", "").strip()
        found = self.reader.search(part, text, query.get("sub", "")) if part and text else []
        return {"query": text, "found": [{"step": number, "text": excerpt} for number, excerpt in found]}

    # Grading

    def tab_verifier(self, _: Mapping[str, str]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        results = {step.step_name: step for step in (self.view.result.step_results or ())} if self.view.result else {}
        with self.tree() as tree:
            for place in step_places(tree):
                name, folder = place.removeprefix("steps/").rstrip("/"), f"{place}verifier"
                entries = [entry for entry in tree.listed(folder) if entry.kind == "file"]
                step = results.get(name)
                verdict = step.verifier_result.rewards if step and step.verifier_result else None
                if not entries and verdict is None and name:
                    continue
                found.append(
                    {
                        "name": name,
                        "rewards": verdict if name else (self.view.outcome.rewards if self.view.outcome else None),
                        "tests": read_tests(tree, folder),
                        "output": read_text(tree, f"{folder}/test-stdout.txt"),
                        "errors": read_text(tree, f"{folder}/test-stderr.txt"),
                        "details": tree.read_json(f"{folder}/reward.json", REPORT_LIMIT)
                        or tree.read_json(f"{folder}/reward-details.json", REPORT_LIMIT),
                        "files": [file_row(entry) for entry in entries],
                    }
                )
        return {"parts": found}

    def _integrity(self) -> list[dict[str, Any]]:
        result = self.view.result
        if result is None:
            return []
        parts = [("", result.integrity), *((step.step_name, step.integrity) for step in result.step_results or ())]
        return [{"name": name, **each.model_dump()} for name, each in parts if each is not None]

    # Files

    def tab_changes(self, _: Mapping[str, str]) -> dict[str, Any]:
        patches, edits = list[dict[str, Any]](), list[dict[str, Any]]()
        if self.index.library.file is None:
            with self.tree() as tree:
                names = [f"{place}{CHANGES}" for place in step_places(tree)]
                artifacts = (entry.path for entry in files_below(tree, "artifacts"))
                names += [path for path in artifacts if path.endswith((".diff", ".patch"))]
                for name in names:
                    if (text := read_text(tree, name, tail=False, limit=_DIFF_BYTES)) is not None:
                        files = diff_files(text.pop("text"))
                        patches.append({**text, "files": files})
        for part in self.parts():
            try:
                with self.reader.open(part) as trajectory:
                    edits += [{**each, "part": part.name} for each in edits_of(trajectory)]
            except ValueError:
                continue
        notes = [note for each in self._integrity() for note in each["notes"] if note["path"]]
        is_ours = self.view.result is not None and self.view.result.pier is not None
        return {"patches": patches, "edits": edits, "noted": notes, "is_ours": is_ours}

    def tab_artifacts(self, _: Mapping[str, str]) -> dict[str, Any]:
        with self.tree() as tree:
            files = [file_row(entry) for entry in files_below(tree, "artifacts")]
            manifests = [tree.read_json(f"{at}artifacts/manifest.json", REPORT_LIMIT) for at in step_places(tree)]
            for each in files:
                kind = Path(each["path"]).suffix.lower()
                if kind in PICTURES:
                    each["picture"] = True
                elif each["size"] <= 20_000:
                    each["preview"] = (read_text(tree, each["path"]) or {}).get("text")
        rows = [row for manifest in manifests if isinstance(manifest, list) for row in manifest]
        return {"files": files, "manifest": rows}

    def tab_logs(self, query: Mapping[str, str]) -> dict[str, Any]:
        names = [str(path.relative_to(self.directory)) for path in self.view.files.logs]
        with self.tree() as tree:
            entries = [entry for name in names if (entry := tree.find(name)) is not None]
            shown = query.get("file") or (TRIAL_LOG if TRIAL_LOG in names else "".join(names[:1]))
            log = read_text(tree, shown) if shown in names else None
        return {"files": [file_row(entry) for entry in entries], "file": shown, "log": log}

    def tab_network(self, _: Mapping[str, str]) -> dict[str, Any]:
        with self.tree() as tree:
            rows = [row for place in step_places(tree) for row in json_lines(tree, f"{place}network.jsonl")]
        info = self.view.result.pier if self.view.result else None
        keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("time", "allowed")]
        return {"rows": rows, "columns": keys, "refused": dict(info.network_refused) if info else {}}

    def tab_config(self, _: Mapping[str, str]) -> dict[str, Any]:
        with self.tree() as tree:
            names = [name for name in (CONFIG, LOCK, RESULT) if tree.find(name)]
            return {"files": {name: tree.read_json(name, JSON_LIMIT) for name in names}}

    def _casts(self) -> list[dict[str, Any]]:
        if self.index.library.file is not None:
            return []
        with self.tree() as tree:
            folders = [f"{place}{name}" for place in step_places(tree) for name in ("agent", "verifier")]
            entries = [entry for folder in folders for entry in tree.listed(folder)]
        return [file_row(entry) for entry in entries if entry.kind == "file" and entry.path.endswith(".cast")]

    def tab_reviews(self, _: Mapping[str, str]) -> dict[str, Any]:
        if self.index.library.file is not None:
            return {"critiques": [], "analysis": None}
        critiques, analysis = critiques_of(self.directory.parent, self.view.name), read_analysis(self.directory)
        found = {"critiques": to_jsonable_python(critiques), "analysis": to_jsonable_python(analysis)}
        for review in (*found["critiques"], found["analysis"]):
            for finding in review["findings"] if review else ():
                for proof in finding["evidence"]:
                    proof |= _place_of(proof["file"] or "")
        return found

    def tab_file(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Lines of a file of the trial, around the line named by the query."""
        path = query.get("path", "")
        try:
            with self.tree() as tree:
                return read_lines(tree, path, query_number(query.get("line"), 1))
        except (OSError, TreeError) as error:
            raise NotFoundError(f"{self.view.name} has no file {path}") from error

    # Calls

    def tab_calls(self, query: Mapping[str, str]) -> dict[str, Any]:
        paths = {step_name(self.view, path): path for path in self.view.files.recordings}
        part = query.get("part", "") if query.get("part", "") in paths else next(iter(paths), "")
        found = {"parts": list(paths), "part": part, "calls": [], "call": None}
        if not paths:
            return found
        try:
            return found | read_back_now(read_calls, paths[part], query_number(query.get("call"), 0))
        except (OSError, TreeError, PierError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {**found, "problem": str(error)}


def _place_of(file: str) -> dict[str, str]:
    """The place of evidence: the `path` of a file in the trial, and the `part` (step) that the file belongs to."""
    top, _, path = file.partition("/")
    if top != "trial":
        return {"path": "", "part": ""}
    parts = path.split("/")
    return {"path": path, "part": parts[1] if parts[0] == "steps" and len(parts) > 2 else ""}


def _page_end(trajectory: PagedTrajectory, start: int, most: int) -> int:
    """The end of a page: the limit of steps or of bytes, with at least one step."""
    stop, size = start, 0
    spans = trajectory.map.spans
    while stop < min(len(trajectory), most, start + PAGE_STEPS) and (stop == start or size < PAGE_BYTES):
        size += spans[2 * stop + 1] - spans[2 * stop]
        stop += 1
    return stop


def _error(view: TrialView) -> dict[str, Any] | None:
    error, fault = view.error, view.outcome.fault if view.outcome else None
    if error is not None:
        about = (error.exception_type, error.exception_message, error.exception_traceback, error.phase, error.hint)
    elif fault is not None:
        about = (fault.type, fault.message, "", None, None)
    else:
        return None
    blame = (error.blame if error else None) or (fault.blame if fault else None)
    return dict(zip(("type", "message", "trace", "phase", "hint"), about, strict=True)) | {"blame": blame}


def _tools(definitions: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in definitions or ():
        function = each.get("function") if isinstance(each.get("function"), dict) else each
        if isinstance(function, dict):
            about = {"name": str(function.get("name")), "description": str(function.get("description") or "")}
            found.append({**about, "parameters": function.get("parameters")})
    return found


def query_number(text: str | None, default: int) -> int:
    """A number from a query; the default if it is missing or invalid."""
    return int(text) if text and text.isdecimal() and len(text) < 10 else default
