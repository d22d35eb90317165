"""Makes the pictures of the viewer in `docs/images`, from a job that scripted models run on small tasks.

    .venv/bin/python docs/screenshots.py [PICTURES [DEMO]]

DEMO is a directory that keeps the job, so that pictures of it can be made again.

Needs playwright and Debian's chromium (`.ci/bootstrap dev`, `.ci/bootstrap system`), and the packs of the agents.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PORT = 8197
PASSES = "grep -q hi /tmp/answer"
TASKS = {
    "merge-configs": PASSES,
    "rotate-logs": f"{PASSES} && test -e /tmp/checked",
    "retry-uploads": f"{PASSES} && test $(( $(od -An -N1 -tu1 /dev/urandom) % 3 )) -ne 0",
    "fix-timezone": f"{PASSES} && test $(( $(od -An -N1 -tu1 /dev/urandom) % 4 )) -eq 0",
    "shard-index": "false",
}
FIX_MONEY = """cp ledger/money.py /tmp/before.py
sed -i 's/int(fraction or "0")/int(fraction.ljust(2, "0"))/' ledger/money.py
diff -u /tmp/before.py ledger/money.py"""
FIX_BOOK = """python3 - <<'END'
from pathlib import Path
book = Path("ledger/book.py")
give, take = "self.accounts[target].deposit(cents)", "self.accounts[source].withdraw(cents)"
text = book.read_text().replace(give, "account = self.accounts[target]", 1)
book.write_text(text.replace(take, take + "\\n        account.deposit(cents)", 1))
END
python3 -m unittest discover -s tests 2>&1 | tail -n 4"""
CAREFUL = [
    {
        "text": "I will read the code and run the tests first.",
        "reasoning": "The task names two failing tests. I reproduce them before I change anything.",
        "shell": "cat ledger/money.py; python3 -m unittest discover -s tests 2>&1 | tail -n 6; touch /tmp/checked",
    },
    {
        "text": "`1.5` is read as one dollar and **five cents**: the fraction must be filled up on the right.",
        "reasoning": "One digit after the point means tenths.",
        "shell": FIX_MONEY,
    },
    {"text": "A transfer must look for its target, and take the money before it gives any.", "shell": FIX_BOOK},
    {"shell": "echo hi > /tmp/answer"},
    {"finish": "Both bugs are fixed and all tests pass."},
]
HASTY = [{"shell": "ls; echo hi > /tmp/answer"}, {"finish": "Done, I think."}]


def with_usage(turns: list[dict[str, object]], cost: float) -> list[dict[str, object]]:
    used = [{"input": 4200 + 900 * n, "cached": 800 * n, "output": 140 + 60 * n, "cost_usd": cost} for n in range(9)]
    return [{**turn, "usage": usage} for turn, usage in zip(turns, used, strict=False)]


def write_tasks(directory: Path) -> None:
    shutil.copytree(ROOT / "examples/tasks/bug-fix", directory / "bug-fix")
    for name, check in TASKS.items():
        task = directory / name
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "task.toml").write_text('schema_version = "1.1"\n[environment]\nnetwork_mode = "no-network"\n')
        (task / "instruction.md").write_text("Write hi to /tmp/answer.\n")
        (task / "tests/test.sh").write_text(f"#!/bin/bash\n{check}; echo $((! $?)) > /logs/verifier/reward.txt\n")
    broken = shutil.copytree(directory / "shard-index", directory / "broken-verifier")
    (broken / "tests/test.sh").write_text("#!/bin/bash\necho no reward\n")


def run_demo(base: Path) -> None:
    write_tasks(base / "tasks")
    (base / "careful.yaml").write_text(json.dumps({"turns": with_usage(CAREFUL, 0.0123)}))
    (base / "hasty.yaml").write_text(json.dumps({"turns": with_usage(HASTY, 0.002)}))
    models = [("codex", "careful"), ("claude-code", "careful"), ("codex", "hasty")]
    agents = [{"name": agent, "model_name": f"script:{model}.yaml"} for agent, model in models]
    job = {"job_name": "nightly", "n_attempts": 2, "agents": agents, "datasets": [{"path": "tasks"}]}
    (base / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "pier", "run", "-c", "job.json", "--image", "host", "-n", "4", "-q"]
    subprocess.run(command, cwd=base, check=False, stdout=subprocess.DEVNULL)


def is_shown(result: Path) -> bool:
    read = json.loads(result.read_text())
    return read["agent_info"]["name"] == "codex" and read["verifier_result"]["rewards"]["reward"] == 1


def take(base: Path, target: Path, trial: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pier", "view", "jobs", "--no-open", "--port", str(PORT)]
    server = subprocess.Popen(command, cwd=base, stdout=subprocess.DEVNULL)
    origin = f"http://127.0.0.1:{PORT}"
    try:
        for _ in range(300):
            try:
                urlopen(f"{origin}/jobs/nightly").read()
                break
            except OSError:
                time.sleep(0.2)
        shots = {
            "view-job": ("/jobs/nightly", "light", 1200, 620),
            "view-trial": (f"/jobs/nightly/{trial}#s4", "light", 1200, 700),
            "view-changes": (f"/jobs/nightly/{trial}/changes", "dark", 1200, 620),
            "view-charts": ("/jobs/nightly?view=charts", "light", 1200, 640),
        }
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            for name, (path, scheme, width, height) in shots.items():
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.goto(origin + path)
                page.wait_for_timeout(600)
                page.evaluate(
                    "for (const path of document.querySelectorAll('.path')) path.textContent = 'jobs/nightly'"
                )
                page.screenshot(path=target / f"{name}.png")
                context.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs/images")
    packs = ROOT / ".cache/packs"
    if packs.is_dir():
        os.environ.setdefault("PIER_PACKS", str(packs.resolve()))
    with tempfile.TemporaryDirectory(prefix="demo-") as made:
        base = Path(sys.argv[2] if len(sys.argv) > 2 else made)
        os.environ["PIER_HOME"] = f"{base}/home"
        if not (base / "jobs/nightly").is_dir():
            run_demo(base)
        found = [path.parent for path in (base / "jobs/nightly").glob("bug-fix__*/result.json") if is_shown(path)]
        take(base, target, found[0].name)


if __name__ == "__main__":
    main()
