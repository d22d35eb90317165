"""Named parts are found by name or by `module:Class`; a wrong name says which ones exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pier.errors import PierError, UsageError
from pier.plugin import find, load, names

BUILT_IN = {"path": "pathlib:Path", "join": "os.path:join"}


def test_built_in_parts_are_loaded_by_name() -> None:
    assert find("thing", "path", BUILT_IN).__name__ == "Path"
    assert find("thing", "json:loads", BUILT_IN)("1") == 1
    assert names("thing", BUILT_IN) == ["path", "join"]


def test_a_wrong_name_tells_the_known_and_the_nearest() -> None:
    with pytest.raises(UsageError, match="known: path, join") as caught:
        find("thing", "paht", BUILT_IN)
    assert caught.value.hint == "use 'path'"
    assert caught.value.explain().endswith("hint: use 'path'")


@pytest.mark.parametrize("reference", ["json", "json:", ":loads", "json:nothing", "no_such_module:x"])
def test_a_wrong_reference_is_a_usage_error(reference: str) -> None:
    with pytest.raises(UsageError):
        load(reference)


def test_an_error_carries_what_retry_policy_reads() -> None:
    error = PierError("broken", code="x", blame="provider", retryable=True)
    assert (error.code, error.blame, error.retryable, str(error)) == ("x", "provider", True, "broken")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pier.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'aiohttp', 'pydantic', 'rich', 'yaml', 'asyncio', 'jinja2'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "heavy: []" in done.stdout, done.stdout + done.stderr
    assert "pier image" in done.stdout or "image" in done.stdout
