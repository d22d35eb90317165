"""Each kind of real pack starts in roots that have nothing for it: a native program, node, and Python.

Packs as in `tests.agent_rig`; a program that tells its version has found its loader, libraries and files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.agent.contract import PACK_PATH
from pier.sandbox.contract import Backend, Mount, SandboxSpec
from tests.agent_rig import need_pack
from tests.contract.test_pack_roots import ROOTS, make_root

pytestmark = pytest.mark.parts
PYTHON = f"{PACK_PATH}/python/bin/python3"
KINDS = {
    "native": ("claude-code", [f"{PACK_PATH}/bin/claude", "--version"], "2."),
    "static": ("codex", [f"{PACK_PATH}/bin/codex", "--version"], "codex"),
    "rust": ("goose", [f"{PACK_PATH}/bin/goose", "--version"], "1."),
    "node": ("pi", [f"{PACK_PATH}/bin/node", "-p", "process.versions.node + ' ' + fetch.name"], "22."),
    "python": ("mini-swe-agent", [PYTHON, "-I", "-c", "import ssl, sqlite3, yaml, minisweagent; print('v', 1)"], "v 1"),
}
"""For each kind an agent, a command and a part of its output."""


@pytest.mark.parametrize("root", [pytest.param(ROOTS[0], marks=pytest.mark.plain), *ROOTS[1:]])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_program_of_a_real_pack_starts(kind: str, root: str, backend: Backend, tmp_path: Path) -> None:
    name, command, expected = KINDS[kind]
    pack = need_pack(name)
    users = (None, "12345") if (await backend.capabilities()).users else (None,)
    spec = SandboxSpec(make_root(root, tmp_path / "root"), mounts=(Mount(PACK_PATH, pack.path),))
    (tmp_path / "root" / "tmp").chmod(0o777)
    async with await backend.start(spec) as sandbox:
        for user in users:
            done = await sandbox.exec(command, env={"HOME": f"/tmp/{user}"}, user=user, cwd="/tmp", timeout=120)
            assert done.exit_code == 0 and expected in done.text, done.text + done.error_text
