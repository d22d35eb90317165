"""Programs that raise a user's rights inside a sandbox: real `sudo`, and capabilities on files."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pier.image.model import Image
from pier.sandbox import SandboxSpec
from pier.sandbox.host import host_image
from pier.sandbox.local import LocalBackend
from tests.busybox import busybox_image

pytestmark = pytest.mark.plain

SUDO = Path("/usr/bin/sudo")
PLUGINS = Path("/usr/libexec/sudo")
RULES = "Defaults !use_pty\nroot ALL=(ALL:ALL) ALL\nuser ALL=(ALL:ALL) NOPASSWD: ALL\n"


@pytest.fixture
async def backend(backend: LocalBackend) -> LocalBackend:
    if not (await backend.capabilities()).users:
        pytest.skip("this user has one id only")
    return backend


@pytest.fixture
def sudo_image(tmp_path: Path) -> Image:
    """A busybox image with this machine's own sudo in it, its libraries, and rules for one user."""
    permit = next(Path("/usr/lib").glob("*/security/pam_permit.so"), None)
    if not SUDO.exists() or not (PLUGINS / "sudoers.so").exists() or permit is None:
        pytest.skip("sudo is not installed (apt-get install sudo)")
    image = busybox_image(tmp_path / "image")
    layer = image.layers[0]
    found = [SUDO, PLUGINS / "sudoers.so", permit]
    shown = subprocess.run(["ldd", *map(str, found)], capture_output=True, text=True, check=True).stdout
    libraries = [Path(path) for path in re.findall(r"(/\S+\.so\S*) \(0x", shown)]
    for path in {*found, *libraries}:
        target = layer / str(path).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o755)
    (layer / "usr/bin/sudo").chmod(0o4755)
    (layer / "etc/pam.d").mkdir()
    pam = "".join(f"{kind} required {permit}\n" for kind in ("auth", "account", "session"))
    for name, text, mode in (("sudoers", RULES, 0o440), ("pam.d/sudo", pam, 0o644), ("pam.d/other", pam, 0o644)):
        (layer / "etc" / name).write_text(text)
        (layer / "etc" / name).chmod(mode)
    return image


async def test_sudo_works_unless_privileges_are_forbidden(backend: LocalBackend, sudo_image: Image) -> None:
    async with await backend.start(SandboxSpec(sudo_image)) as sandbox:
        result = await sandbox.exec(
            "id -u; sudo -n id -u; sudo -n sh -c 'echo x > /etc/new; cat /etc/new'", user="user"
        )
        assert result.text.split() == ["1000", "0", "x"], result.error_text
        assert (await sandbox.exec("sudo -n -u user id -u")).text == "1000\n"
    async with await backend.start(SandboxSpec(sudo_image, no_new_privileges=True)) as sandbox:
        refused = await sandbox.exec("sudo -n id -u", user="user")
        assert not refused.ok and "no new privileges" in refused.error_text


async def test_sudo_gives_no_more_than_the_sandbox_s_root_has(backend: LocalBackend, sudo_image: Image) -> None:
    async with await backend.start(SandboxSpec(sudo_image)) as sandbox:
        of_root = (await sandbox.exec("grep CapEff /proc/self/status")).text
        assert (await sandbox.exec("sudo -n grep CapEff /proc/self/status", user="user")).text == of_root
        assert not (await sandbox.exec("sudo -n mount -t tmpfs none /srv", user="user")).ok


async def test_capabilities_of_files_count_unless_privileges_are_forbidden(backend: LocalBackend) -> None:
    setcap = shutil.which("setcap", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if setcap is None:
        pytest.skip("setcap is not installed (apt-get install libcap2-bin)")
    script = f"cp /bin/chown /var/tmp/chown && {setcap} cap_chown+ep /var/tmp/chown && touch /var/tmp/file"
    for forbidden in (False, True):
        async with await backend.start(SandboxSpec(host_image(), no_new_privileges=forbidden)) as sandbox:
            made = await sandbox.exec(script)
            assert made.ok, made.error_text
            assert not (await sandbox.exec("chown 1234 /var/tmp/file", user="1234")).ok
            result = await sandbox.exec("/var/tmp/chown 1234 /var/tmp/file", user="1234")
            assert result.ok is not forbidden, result.error_text
            owner = (await sandbox.exec("stat -c %u /var/tmp/file")).text
            assert owner == ("0\n" if forbidden else "1234\n")
