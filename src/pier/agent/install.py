"""Installs an agent inside its sandbox with the image's own npm or pip, for agents and images that no pack suits.

What is installed stands where a pack would be mounted, in the same shape, so that an agent is started the same way.
The image must have `npm` and `node`, or `python3` with `venv`; the agent's variables (`npm_config_registry`,
`PIP_INDEX_URL`) count while it is installed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from pier.agent.contract import PACK_PATH, PackSpec
from pier.errors import AgentError
from pier.sandbox.contract import OnOutput, Sandbox

VERSION = f"{PACK_PATH}/version.json"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

_NPM = """\
command -v npm >/dev/null || {{ echo "the image has no npm" >&2; exit 127; }}
cd {root}
echo '{{"name": "agent", "private": true}}' > package.json
npm install --no-audit --no-fund --no-save --no-package-lock --engine-strict=false --loglevel=error {what}
mkdir -p bin
{links}
"""

_PYPI = """\
command -v python3 >/dev/null || {{ echo "the image has no python3" >&2; exit 127; }}
python3 -m venv {root}/python >/dev/null 2>&1 || python3 -m venv --clear --without-pip {root}/python
pip="{root}/python/bin/python3 -m pip"
$pip --version >/dev/null 2>&1 || pip="python3 -m pip --python {root}/python/bin/python3"
$pip install --quiet --disable-pip-version-check --prefer-binary {what}
"""

_NPM_ARCH = 'case "$(uname -m)" in aarch64) arch=arm64;; *) arch=x64;; esac'


def script_of(spec: PackSpec) -> str:
    """The shell script that installs what `spec` names, and writes its version into `VERSION`."""
    head = f"set -e\n{_NPM_ARCH}\nmkdir -p {PACK_PATH}\n"
    tail = f"[ ! -e {_CERTIFICATES} ] || ln -sf {_CERTIFICATES} {PACK_PATH}/ca.pem\n"
    pinned = spec.version not in (None, "latest")
    if spec.source == "npm":
        what = _quoted(f"{spec.package}@{spec.version or 'latest'}")
        links = _link(spec.program) if spec.program else 'ln -sf "$(command -v node)" bin/node'
        body = _NPM.format(root=PACK_PATH, what=what, links=links)
        tail += f"cp {PACK_PATH}/node_modules/{_quoted(spec.package)}/package.json {VERSION}\n"
    else:
        wanted = f"{spec.package}=={spec.version}" if pinned else spec.package
        body = _PYPI.format(root=PACK_PATH, what=shlex.join((wanted, *spec.extras)))
        say = f"import importlib.metadata as m, json; print(json.dumps({{'version': m.version({spec.package!r})}}))"
        tail += f"{PACK_PATH}/python/bin/python3 -c {shlex.quote(say)} > {VERSION}\n"
    return head + body + tail


def _quoted(template: str) -> str:
    return shlex.quote(template).replace("{arch}", "'\"$arch\"'") if "{arch}" in template else shlex.quote(template)


def _link(program: str) -> str:
    """A link in `bin` to the native program; its path may have a star."""
    name = program.rpartition("/")[2]
    pattern = program.replace("{arch}", "$arch")
    return (
        f'for found in node_modules/{pattern}; do chmod 755 "$found"; ln -sf "../$found" bin/{shlex.quote(name)}; done'
    )


async def install(
    sandbox: Sandbox, spec: PackSpec, env: Mapping[str, str], seconds: float, on_output: OnOutput | None = None
) -> str:
    """Install an agent as the sandbox's root and give the version that came."""
    home = {"HOME": "/root", **env}
    done = await sandbox.exec(
        ["/bin/sh", "-c", script_of(spec)], cwd="/", env=home, user="root", timeout=seconds, on_output=on_output
    )
    if done.timed_out:
        message = f"installing {spec.package} in the sandbox took longer than {seconds:g} s"
        raise AgentError(message, code="agent_setup_timeout", blame="infra", retryable=True)
    if not done.ok:
        tail = done.error_text.strip()[-1000:] or done.text.strip()[-1000:]
        raise AgentError(
            f"installing {spec.package} in the sandbox failed: {tail}",
            code="agent_install",
            blame="infra",
            hint="leave out --install-in-sandbox, or use an image with what the agent's installer needs",
        )
    return str(json.loads(await sandbox.read_file(VERSION))["version"])
