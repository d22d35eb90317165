"""Reviews in the peers' own eyes: datacurve pier's models and viewer read critiques, its analysis models read analyses,
and the command line of its `critique run` is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from pier.cli.main import cli
from pier.cli.review import critique_run
from tests.contract.test_job_peers import python_of, run_peer
from tests.job_tasks import make_task, pier, trials_of

pytestmark = pytest.mark.parts
READ = """
import json, sys
from pathlib import Path
from pier.analyze.models import AnalyzeResult, JobAnalyzeResult
from pier.critique.models import CritiqueConfig, CritiqueItemResult, CritiqueJobResult
from pier.critique.runner import CritiqueRunner, CritiqueTrial, CritiquePaths
job, run = Path(sys.argv[1]), sys.argv[2]
place = job / ".critiques" / run
config = CritiqueConfig.model_validate_json((place / "config.json").read_text())
result = CritiqueJobResult.model_validate_json((place / "result.json").read_text())
reused = {}
for item in sorted(path for path in place.iterdir() if path.is_dir()):
    CritiqueItemResult.model_validate_json((item / "critique-metadata.json").read_text())
    CritiqueConfig.model_validate_json((item / "critique-config.json").read_text())
    cached = CritiqueRunner._load_cached_item_result(CritiquePaths(item))
    reused[item.name] = CritiqueRunner._should_reuse_cached_result(cached)
from starlette.testclient import TestClient
from pier.viewer.server import create_app
viewer = TestClient(create_app(job.parent))
api = f"/api/jobs/{job.name}/critiques"
trial = next(iter(reused))
print(json.dumps({
    "agent": config.agent.name, "finished": result.finished_at is not None, "reused": reused,
    "runs": viewer.get(api).json()["items"],
    "items": viewer.get(f"{api}/{run}/items").json()["items"],
    "heat": viewer.get(f"{api}/{run}/heatmap").json(),
    "detail": viewer.get(f"/api/jobs/{job.name}/trials/{trial}/critiques/{run}").json(),
    "analysis": AnalyzeResult.model_validate_json((job / trial / "analysis.json").read_text()).summary,
    "job": JobAnalyzeResult.model_validate_json((job / "analysis.json").read_text()).job_summary,
}))
"""

OPTIONS = """
import json
from typer.main import get_command
from pier.cli.critique import critique_app
command = get_command(critique_app)
run = command.commands["run"] if hasattr(command, "commands") else command
found = [option for option in run.params if option.opts[0][0] == "-" and "completion" not in option.opts[0]]
print(json.dumps([[option.opts + option.secondary_opts, option.is_flag] for option in found]))
"""

CRITIC = """#!/bin/bash
cd /logs/artifacts
[ -e /critique/input/job ] && echo '{"job_summary": "all of it"}' > job-analysis.json
echo '{"rating": "bad", "feedback": "no", "tags": ["one", "two"], "score": {"depth": 3}}' > critique-result.json
echo '{"summary": "it passed", "cause": "solved", "checks": {"reward_hacking": {"outcome": "pass", "explanation": "x"},
"task_specification": {"outcome": "fail", "explanation": "y"}}}' > analysis.json
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("peers")
    for name in ("one", "two"):
        make_task(base / "tasks" / name)
    (base / "critic.sh").write_text(CRITIC)
    (base / "prompt.md").write_text("Judge it.\n")
    flags = ["-a", "command", "--ak", "script=critic.sh"]
    pier("run", "tasks", "--job-name", "j", cwd=base)
    pier("critique", "run", "jobs/j", "-p", "prompt.md", *flags, "--name", "r", cwd=base)
    pier("analyze", "jobs/j", *flags, cwd=base)
    return base / "jobs" / "j"


def test_datacurves_models_and_viewer_read_our_reviews(job: Path) -> None:
    read: dict[str, Any] = run_peer(python_of("datacurve-pier"), READ, str(job), "r")
    names = [trial.name for trial in trials_of(job)]
    assert read["agent"] == "command" and read["finished"] and read["reused"] == dict.fromkeys(names, True)
    (run,) = read["runs"]
    assert (run["name"], run["status"], run["n_items"], run["n_completed_items"], run["n_failed_items"]) == (
        "r", "completed", 2, 2, 0)  # fmt: skip
    assert [(row["rating"], row["tags"], row["critique_values"]["score.depth"]) for row in read["items"]] == [
        ("bad", ["one", "two"], 3)
    ] * 2
    assert sum(cell["n_bad"] for row in read["heat"]["cells"].values() for cell in row.values()) > 0
    assert read["detail"]["critique_result"]["feedback"] == "no" and read["detail"]["status"] == "completed"
    assert (read["analysis"], read["job"]) == ("it passed", "all of it")


def test_every_option_of_datacurves_critique_run_is_accepted() -> None:
    theirs = run_peer(python_of("datacurve-pier"), OPTIONS)
    context = click.Context(critique_run, parent=click.Context(cli, info_name="pier"))
    ours = {name: param for param in critique_run.get_params(context) for name in (*param.opts, *param.secondary_opts)}
    for names, is_flag in theirs:
        for name in names:
            assert name in ours, name
            assert getattr(ours[name], "is_flag", False) == is_flag, name
    assert len(theirs) > 25
