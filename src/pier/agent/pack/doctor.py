"""What this machine offers for building packs, and whether the packs that it has are whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pier.agent.contract import PackSpec
from pier.agent.pack import build, runtime
from pier.agent.pack.store import PackStore
from pier.errors import AgentError
from pier.sandbox.contract import Finding


def examine() -> list[Finding]:
    """One finding for each thing that building or using packs depends on."""
    return [_npm(), _python(), _loader(), _certificates(), _room(), *_packs()]


def _npm() -> Finding:
    npm = shutil.which("npm")
    return Finding(
        "npm", npm is not None, npm or "missing; needed to build packs from npm", "" if npm else "install npm"
    )


def _python() -> Finding:
    try:
        python = build.find_python(PackSpec("pypi", "").pythons)
    except AgentError as error:
        return Finding("python", False, error.message, error.hint or "")
    return Finding("python", True, f"{python.minor} at {python.program}")


def _loader() -> Finding:
    fine = Path(runtime.MACHINE_LOADER).exists()
    fix = "" if fine else "build packs on Debian or Ubuntu and set PIER_PACKS"
    return Finding("loader", fine, runtime.MACHINE_LOADER if fine else "this machine has no glibc loader", fix)


def _certificates() -> Finding:
    found = next((path for path in runtime.CA_BUNDLES if Path(path).is_file()), None)
    return Finding(
        "certificates", found is not None, found or "no CA bundle", "" if found else "install ca-certificates"
    )


def _room() -> Finding:
    root = PackStore().root
    place = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(place).free
    fine = free > 2_000_000_000 and os.access(place, os.W_OK)
    return Finding("store", fine, f"{root}, {free // 1_000_000_000} GB free", "" if fine else "set PIER_PACKS")


def _packs() -> list[Finding]:
    store = PackStore()
    found = []
    for pack in store.all():
        whole = store.verify(pack)
        detail = f"{pack.version} {'is whole' if whole else 'has changed since it was built'}"
        found.append(Finding(pack.package, whole, detail, "" if whole else "pier agent rm, then pier agent pack"))
    return found
