"""Run a job and read its results: python examples/python/run_a_job.py"""

import asyncio
import tempfile
from pathlib import Path

import pier

TASKS = Path(__file__).parents[1] / "tasks"


async def main() -> None:
    with tempfile.TemporaryDirectory() as jobs:
        job = pier.Job.of(TASKS / "hello", TASKS / "bug-fix", agent="oracle", image="host", jobs_dir=jobs)
        await job.run()
        for trial in job.trials:
            result = trial.result
            error = result.exception_info.exception_message if result.exception_info else "no error"
            print(f"{result.task_name}: reward {trial.reward}, {error}")
        print(f"{len(job.trials)} trials in {job.directory}")


if __name__ == "__main__":
    asyncio.run(main())
