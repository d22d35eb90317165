"""What Harbor has and pier does not, each with what to do instead."""

from __future__ import annotations

from pier.errors import UsageError

UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    (
        "--diff source_jobs",
        "comparing a plan with earlier jobs",
        "run the job and compare the two with `pier job show`",
    ),
    (
        "--n-concurrent-agents agents.n_concurrent agents.concurrency_group",
        "limits per agent",
        "limit trials with -n, and model calls with `concurrency` in providers.toml",
    ),
    ("--install-only install_only", "installing agents without running them", "pier agent pack NAME"),
    (
        "--resume-trajectory --load-trajectory agents.resume_trajectory agents.load_trajectory",
        "continuing a recorded session",
        "-m replay:FILE answers a new session from a recording",
    ),
    ("--skill --skills agents.skills", "additional skills", "name a directory of the image as skills_dir in task.toml"),
    (
        "--user-agent --user-model --uk --user-agent-kwarg --user-persona-path --user-prompt-template-path --bridge "
        "--bridge-prompt-path --bk --bridge-kwarg user_agent",
        "simulated users",
        "split the conversation into steps of the task",
    ),
    (
        "--stream --no-stream environment.stream",
        "streaming from sandboxes",
        "read the trial's directory while it runs",
    ),
    ("--override-tpu environment.override_tpu", "TPUs", "leave it out"),
    (
        "--extra-docker-compose environment.extra_docker_compose",
        "additional compose files",
        "write the services into the task's environment/docker-compose.yaml",
    ),
    ("environment.suppress_override_warnings", "silencing warnings about overrides", "leave it out"),
    (
        "--verifier --verifier-kwarg --verifier-import-path verifier.import_path verifier.kwargs",
        "verifiers written as Python classes",
        "write tests/test.sh, which may run Python",
    ),
    ("--repo datasets.repo", "a git repository as a registry", "pier run URL#DIRECTORY"),
    (
        "--registry-url datasets.registry_url datasets.ref tasks.name tasks.ref",
        "registries on the network",
        "download registry.json and use -d NAME --registry-path FILE",
    ),
    (
        "datasets.overwrite datasets.download_dir tasks.overwrite tasks.download_dir",
        "other download directories",
        "set PIER_HOME",
    ),
    ("--task-git-url --task-git-commit --task-path", "separate flags for a task in git", "-t URL@COMMIT#PATH"),
    ("extra_instruction_paths", "files of instructions as a key", "use extra_instructions or --extra-instruction-path"),
    (
        "--skip-model-parsing-and-provider-mapping --sm agents.skip_model_parsing",
        "model names without a provider",
        "write -m PROVIDER/MODEL, or give --base-url",
    ),
    ("--plugin --pk --plugin-kwarg plugins", "job plugins", "read the job's directory when it is done"),
    (
        "--upload --launch --use-static-ip --credential-mode --one-off-secret --stored-secret --no-secrets "
        "--registry-secret --public --private --share --share-user --user --org",
        "hosted services",
        "share the job's directory",
    ),
    (
        "--agent-include-logs --agent-exclude-logs --verifier-include-logs --verifier-exclude-logs "
        "agents.include_logs agents.exclude_logs verifier.include_logs verifier.exclude_logs",
        "filtering logs",
        "delete the files that you do not need when the job is done",
    ),
    (
        "--export-traces --export-push --export-sharegpt --export-episodes --export-repo "
        "--export-instruction-metadata --export-verifier-metadata",
        "exporting traces while running",
        "pier trajectory convert, when the job is done",
    ),
)
"""Flags and keys of Harbor that pier does not support: their names, what they ask for, and what to do instead."""


def unsupported(name: str) -> UsageError | None:
    """The error for a flag or key of Harbor that pier does not support; None for any other."""
    for names, feature, instead in UNSUPPORTED:
        if name in names.split():
            return UsageError(f"{name}: pier does not support {feature}", hint=instead, code="not-done")
    return None
